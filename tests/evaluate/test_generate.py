"""Generation equals a plain loop for any batch; stops, limits, hostile prompts."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import LLAMA, byte_tokenizer, random_params, tiny_of
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm, generate
from ffn_heterogeneity.models.config import LayerConfig
from ffn_heterogeneity.models.decoding import layers_apart
from ffn_heterogeneity.models.generate import CHUNK, Generation, Generator, Sampling
from ffn_heterogeneity.models.sampling import nucleus

pytestmark = pytest.mark.usefixtures("compiled_quickly")

BYTES = dataclasses.replace(LLAMA, layers=(LayerConfig(12),) * 2, max_position=64, eos_id=None)
PROMPTS = [[0, 5, 9], [0, 40, 41, 42, 43, 44, 45], [7], [0, 200, 100, 17, 3]]


def programs():
    """Numbers of compiled programs for prompts and for tokens."""
    return generate._prefill._cache_size(), generate._decode._cache_size()


@pytest.fixture(scope="module")
def generator():
    return Generator(BYTES, random_params(BYTES), byte_tokenizer(), batch_size=4)


def greedy_loop(config, params, prompt, count) -> list[int]:
    """Generation token by token that computes the whole row each time."""

    @jax.jit
    def likeliest(params, row, last):
        hidden = causal_lm.forward(config, params, {"tokens": row})["hidden"]
        return causal_lm.logits(config, params, hidden[0, last]).argmax()

    row, place, tokens = np.zeros((1, 48), np.int32), len(prompt), []
    row[0, :place] = prompt
    for _ in range(count):
        tokens.append(int(likeliest(params, row, place - 1)))
        row[0, place] = tokens[-1]
        place += 1
    return tokens


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_greedy_equals_a_plain_loop(name, generator):
    """More tokens than a chunk, prompts of unequal length, more prompts than a batch."""
    config, made = BYTES, generator
    if name == "gemma3":
        config = dataclasses.replace(tiny_of("gemma3", layers=7), eos_id=None)
        made = Generator(config, random_params(config), batch_size=4)
    params = random_params(config)
    prompts = [[t % config.vocab_size for t in p] for p in [*PROMPTS, [0, 1, 2]]]
    generations = made(prompts, Sampling(max_new_tokens=CHUNK + 4), progress=None)
    for prompt, one in zip(prompts, generations, strict=True):
        assert one.tokens == greedy_loop(config, params, prompt, CHUNK + 4), prompt
        assert one.finish == "length"


def test_draws_depend_on_the_seed_and_the_row_alone(generator):
    warm = Sampling(max_new_tokens=12, temperature=1.0, seed=3)
    together = generator(PROMPTS, warm, progress=None)
    again = generator([*PROMPTS, *PROMPTS[:2]], warm, progress=None)
    assert together == again[:4]
    # The same prompt in another row has other draws.
    assert again[4] != again[0]
    other = generator(PROMPTS, dataclasses.replace(warm, seed=4), progress=None)
    assert all(a.tokens != b.tokens for a, b in zip(together, other, strict=True))
    # A cold or a narrow draw is the likeliest token.
    greedy = generator(PROMPTS, Sampling(max_new_tokens=12), progress=None)
    for settings in ({"temperature": 1e-4}, {"temperature": 1.0, "top_p": 1e-6}):
        sampling = Sampling(max_new_tokens=12, **settings)
        assert generator(PROMPTS, sampling, progress=None) == greedy
    # Each prompt may have its own.
    mixed = generator(PROMPTS, [warm, Sampling(max_new_tokens=12)] * 2, progress=None)
    assert mixed == [together[0], greedy[1], together[2], greedy[3]]


def test_draws_follow_the_model(generator):
    """First tokens of 512 rows, against the probabilities, by a chi-square bound."""
    count, temperature = 512, 2.0
    wide = Generator(BYTES, generator.params, batch_size=64)
    sampling = Sampling(max_new_tokens=1, temperature=temperature)
    generations = wide([PROMPTS[0]] * count, sampling, progress=None)
    forward = jax.jit(causal_lm.forward, static_argnums=0)
    hidden = forward(BYTES, generator.params, {"tokens": np.array([PROMPTS[0]])})["hidden"]
    logits = np.asarray(causal_lm.logits(BYTES, generator.params, hidden[0, -1]), np.float64)
    p = np.exp(logits / temperature - (logits / temperature).max())
    p /= p.sum()
    seen = np.bincount([one.tokens[0] for one in generations], minlength=BYTES.vocab_size)
    order = np.argsort(-p)
    groups = [group for group in np.array_split(order, 8) if p[group].sum() * count > 5]
    chi2 = sum((seen[g].sum() - count * p[g].sum()) ** 2 / (count * p[g].sum()) for g in groups)
    assert chi2 < 30, chi2  # 8 groups: beyond the 99.98% quantile


def test_the_nucleus_against_a_plain_rule():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 40)).astype(np.float32) * 3
    for top_p in (1e-6, 0.3, 0.9, 0.999):
        filtered = np.asarray(nucleus(logits, np.float32(top_p)))
        for row, filtered_row in zip(logits.astype(np.float64), filtered, strict=True):
            p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            wanted, mass = set(), 0.0
            for token in np.argsort(-p):
                if mass >= top_p:
                    break
                wanted.add(int(token))
                mass += p[token]
            assert set(np.flatnonzero(np.isfinite(filtered_row))) == wanted
    assert np.isfinite(np.asarray(nucleus(logits, np.float32(1.0)))).all()


def test_the_least_nucleus_is_the_likeliest_token():
    """Also where `top_p` is 0 in float32."""
    kept = nucleus(np.log([[0.2, 0.5, 0.3]]), np.float32(1e-50))
    np.testing.assert_array_equal(np.isfinite(kept), [[False, True, False]])


def test_a_single_prompt_is_one_row(generator, monkeypatch):
    model = Model(BYTES, generator.params, byte_tokenizer(), "")
    widths, prefill = [], generate._prefill

    def recorded(config, options, length, params, tokens, *rest):
        widths.append(len(tokens))
        return prefill(config, options, length, params, tokens, *rest)

    monkeypatch.setattr(generate, "_prefill", recorded)
    fh.generate(model, "one", 2)
    three = fh.generate(model, ["one", "two", "three"], 2)
    assert widths == [1, 4] and len(three) == 3


def test_stop_strings_and_eos_end_a_text(generator):
    complete = generator(PROMPTS, Sampling(max_new_tokens=CHUNK + 8), progress=None)
    text = complete[0].text
    stop = text[3:5]
    stopping = Sampling(max_new_tokens=CHUNK + 8, stop=("never-there", stop))
    stopped = generator(PROMPTS, stopping, progress=None)
    assert stopped[0].finish == "stop" and stopped[0].text == text[: text.find(stop)]
    assert stopped[0].tokens == complete[0].tokens[: len(stopped[0].tokens)]
    for one, full in zip(stopped[1:], complete[1:], strict=True):
        assert one == full or (one.finish == "stop" and full.text.startswith(one.text))
    # It may begin or end with a special token, which decoded text does not show.
    tokens, tokenizer = complete[0].tokens, byte_tokenizer()
    new = (i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    place = next(i for i in new if tokenizer.decode(tokens[i + 1]).isascii())
    name = tokenizer.convert_ids_to_tokens(tokens[place])
    tokenizer.add_special_tokens({"additional_special_tokens": [name]})
    made = Generator(BYTES, generator.params, tokenizer, batch_size=1)
    mixed = Sampling(max_new_tokens=CHUNK + 8, stop=(name + tokenizer.decode(tokens[place + 1]),))
    (stopped,) = made(PROMPTS[:1], mixed, progress=None)
    assert stopped.finish == "stop" and stopped.text == tokenizer.decode(tokens[:place])
    # An eos that is no special token of the tokenizer is not text either.
    made = Generator(BYTES, generator.params, byte_tokenizer(), batch_size=1)
    ended = Sampling(max_new_tokens=CHUNK + 8, eos=(tokens[place],))
    (one,) = made(PROMPTS[:1], ended, progress=None)
    assert one.finish == "eos" and one.tokens == tokens[: place + 1]
    assert one.text == byte_tokenizer().decode(tokens[:place])
    # A stop string that never comes costs nothing but its search.
    never = Sampling(max_new_tokens=CHUNK + 8, stop=("never-there",))
    assert generator(PROMPTS, never, progress=None) == complete
    # eos: that of the model ends the computation too.
    new = ((i, k) for i, row in enumerate(complete) for k in range(1, len(row.tokens)))
    row, place = next((i, k) for i, k in new if complete[i].tokens[k] not in complete[i].tokens[:k])
    eos = complete[row].tokens[place]
    ended = dataclasses.replace(BYTES, eos_id=(eos, 257))
    for made, sampling in (
        (Generator(ended, generator.params, byte_tokenizer(), batch_size=4), Sampling(CHUNK + 8)),
        (generator, Sampling(CHUNK + 8, eos=(eos,))),
    ):
        one = made(PROMPTS, sampling, progress=None)[row]
        assert one.tokens == complete[row].tokens[: place + 1] and one.finish == "eos"
        # All text before it is kept, also if it ends in the middle of a chunk.
        assert one.text == made.tokenizer.decode(one.tokens[:-1], skip_special_tokens=True)
        assert len(one.text) >= 1


def test_one_program_a_size(generator):
    """A size that no other test here uses needs one program each, for any settings."""
    prompts, before = [[0, 3, 1], [0, 4]], programs()
    for temperature in (0.0, 0.5, 0.7):
        for count in (33, 40):
            generator(prompts, Sampling(count, temperature, top_p=0.9), progress=None)
    assert programs() == (before[0] + 1, before[1] + 1)
    buckets = {1: 16, 16: 16, 17: 24, 24: 24, 25: 32, 33: 48, 49: 64, 100: 128}
    assert {n: generate.bucket(n) for n in buckets} == buckets


def test_batches_of_unlike_length_share_the_program_of_tokens(generator):
    """Prompts of two buckets: two programs for prompts, one for tokens."""
    prompts = [[0] * 20, [0] * 18, [0, 3], [0, 4]]
    made = Generator(BYTES, generator.params, batch_size=2)
    before = programs()
    batched = made(prompts, Sampling(max_new_tokens=30), progress=None)
    assert programs() == (before[0] + 2, before[1] + 1)
    alone = [made([prompt], Sampling(max_new_tokens=30), progress=None)[0] for prompt in prompts]
    assert [one.tokens for one in batched] == [one.tokens for one in alone]


def test_layers_are_taken_apart_without_a_copy():
    # A multiple of 64 bytes a layer, as in every real model: rows that XLA can read in place.
    wide = dataclasses.replace(BYTES, d_model=64, head_dim=16, n_heads=4, n_kv_heads=2)
    stacked = jax.device_put(random_params(wide))
    apart = layers_apart(stacked)
    assert len(apart["stack"]) == 2
    for i in range(2):
        for name in ("gate", "up", "down"):
            stack = stacked["stack"]["segment_0"]["slot_0"]["ffn"][name]["kernel"]
            kernel = apart["stack"][f"segment_{i}"]["slot_0"]["ffn"][name]["kernel"]
            assert (np.asarray(kernel) == np.asarray(stack)[i : i + 1]).all()
            step = stack.nbytes // stack.shape[0]
            assert kernel.unsafe_buffer_pointer() == stack.unsafe_buffer_pointer() + i * step


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "prompt 1 is empty"),
        ([258], {}, "prompt 1: token id 258 is outside the vocabulary of 258"),
        ([0] * 60, {"max_new_tokens": 5}, "prompt 1 has 60 tokens, and with max_new_tokens=5"),
        ([0], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([0], {"max_new_tokens": 2.5}, "max_new_tokens=2.5: expected a whole number"),
        ([0], {"temperature": -1.0}, "temperature=-1.0"),
        ([0], {"temperature": float("nan")}, "temperature=nan"),
        ([0], {"top_p": 0.0}, "top_p=0.0 must be a number in"),
        ([0], {"stop": ("",)}, "an empty stop string"),
    ],
)
def test_prompts_and_settings_that_cannot_be(generator, prompt, sampling, message):
    with pytest.raises(ValueError, match=message):
        generator([[0], prompt], Sampling(**{"max_new_tokens": 8, **sampling}), progress=None)


def test_a_long_prompt_can_lose_its_beginning(generator):
    long = [0, *range(2, 80)]
    one = generator([long], Sampling(max_new_tokens=8), truncate=True, progress=None)[0]
    shortened = generator([[0, *long[-55:]]], Sampling(max_new_tokens=8), progress=None)[0]
    assert one == shortened and isinstance(one, Generation)
    wordless = Generator(BYTES, generator.params)
    refused("stop strings need a tokenizer", wordless, [[0]], Sampling(stop=("a",)), progress=None)
    refused("2 prompts, but 1 samplings", generator, [[0], [1]], [Sampling()], progress=None)
    assert generator([], progress=None) == []
