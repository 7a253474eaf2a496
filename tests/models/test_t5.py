"""T5 against transformers: 1.0, 1.1 and the encoder alone, on tiny random weights."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import random_params, tiny_of, written_again
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.heads import with_head
from ffn_heterogeneity.heads.classification import Classification
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import loads_in, save_pretrained
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.models.decoding import forward_cached, make_cache
from ffn_heterogeneity.models.families.t5_names import names
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.models.relative import distance_rows
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
KINDS = ("relu", "gated-gelu", "encoder")
LONG = 300  # distances beyond 128 and beyond two rows of a logarithmic width


@pytest.mark.parametrize("tied", [True, False])
def test_an_encoder_alone_says_what_loads_it(tmp_path, tied):
    config = dataclasses.replace(tiny_of("t5", 4).encoder(), tied=tied)
    save_pretrained(config, random_params(config), tmp_path / "m")
    assert "AutoModelForTextEncoding" in loads_in(tmp_path / "m")


@pytest.fixture(scope="module", params=KINDS)
def pair(request, torch, tmp_path_factory):
    """(PyTorch's model, its directory) of one kind."""
    from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration

    old, alone = request.param == "relu", request.param == "encoder"
    sizes = {"vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 28, "num_heads": 4}
    sizes |= {"num_layers": 3, "num_decoder_layers": 2, "decoder_start_token_id": 0}
    ffn = "gated-gelu" if alone else request.param
    config = T5Config(**sizes, feed_forward_proj=ffn, tie_word_embeddings=old)
    torch.manual_seed(0)
    model = (T5EncoderModel if alone else T5ForConditionalGeneration)(config).eval()
    if not (old or alone):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    place = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(place)
    return model, place


def rows(seed=0, length=LONG):
    """(encoder ids, their mask with padding on the right, decoder ids)."""
    rng = np.random.default_rng(seed)
    ids, mask = rng.integers(2, 61, (2, length)), np.ones((2, length), int)
    mask[1, length // 2 :] = 0
    return ids, mask, rng.integers(2, 61, (2, 9))


def batch_of(ids, mask, answer) -> dict:
    names = ("encoder_tokens", "encoder_segment_ids", "tokens")
    return dict(zip(names, (x.astype(np.int32) for x in (ids, mask, answer)), strict=True))


@pytest.mark.parametrize("family", ["T5", "SwitchTransformers"])
def test_new_models_begin_as_torchs_do(torch, family, tmp_path):
    """Spread of every leaf. Ours alone: routers 0.02, and 1 / sqrt(inputs) in experts' second
    kernels, where transformers has 1 and 1 / sqrt(d_model)."""
    import transformers

    sizes = {"vocab_size": 600, "d_model": 48, "d_kv": 16, "d_ff": 192, "num_heads": 4}
    sizes |= {"num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0}
    if family != "T5":
        sizes |= {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    peer = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    peer.save_pretrained(tmp_path)
    theirs = fh.load_model(tmp_path)
    ours = flatten(unstack(causal_lm.init(theirs.config, jax.random.key(0))))
    for path, leaf in flatten(unstack(theirs.params)).items():
        spread, size = np.std(leaf), np.size(leaf)
        if "/router/" in path:
            spread = 0.02
        elif "/down/" in path and leaf.ndim == 3:
            spread *= (48 / 192) ** 0.5
        # Four standard errors of both estimates.
        assert np.std(ours[path]) == pytest.approx(spread, rel=4 / size**0.5), path
    head = HeadConfig.of("classification", vars(Classification(pooling="last", outputs=9)))
    made = with_head(theirs.config, {}, head, jax.random.key(0))[1]["task_head"]
    for name in ("dense", "out"):  # T5's class: 1 / sqrt(d_model)
        kernel = made[name]["kernel"]
        assert np.std(kernel) == pytest.approx(48**-0.5, rel=4 / kernel.size**0.5)


def test_logits_and_gradients_equal_torch(torch, pair):
    model, place = pair
    ids, mask, answer = rows()
    given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    ours = fh.load_model(place)
    alone = ours.config.kind == "encoder"
    weight = np.random.default_rng(1).normal(size=(2, LONG if alone else 9, 24 if alone else 61))
    weight = (weight * (mask[..., None] if alone else 1)).astype(np.float32)
    if alone:
        expected = model(**given).last_hidden_state
    else:
        expected = model(**given, decoder_input_ids=torch.tensor(answer)).logits
    model.zero_grad()
    (expected * torch.tensor(weight)).sum().backward()

    @jax.jit
    @jax.value_and_grad
    def run(params, batch):
        hidden = causal_lm.forward(ours.config, params, batch)["hidden"]
        values = hidden if alone else causal_lm.logits(ours.config, params, hidden)
        return jnp.sum(values * weight), values

    batch = batch_of(ids, mask, answer)
    if alone:
        batch = {"tokens": batch["encoder_tokens"], "segment_ids": batch["encoder_segment_ids"]}
    run = jax.jit(jax.value_and_grad(run.__wrapped__.__wrapped__, has_aux=True))
    (_, values), slopes = run(ours.params, batch)
    real = mask[..., None] > 0 if alone else True
    expected = np.where(real, expected.detach().numpy(), 0)
    np.testing.assert_allclose(np.where(real, values, 0), expected, atol=1e-4)
    theirs = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    checked = 0
    for path, name in names(ours.config).items():
        slope = np.asarray(flatten(unstack(slopes))[path])
        slope = slope.T if path.endswith("/kernel") else slope
        want = theirs[name].numpy()
        assert np.linalg.norm(slope - want) <= 1e-4 * np.linalg.norm(want), path
        assert np.linalg.norm(want) > 0
        checked += 1
    assert checked == len(flatten(unstack(ours.params)))


def test_files_come_back_bit_by_bit(torch, pair, tmp_path):
    """Written, read, and read by transformers with the same outputs."""
    model, place = pair
    ours = written_again(place, tmp_path / "again")
    ids, mask, answer = (torch.tensor(x) for x in rows(length=20))
    again = type(model).from_pretrained(tmp_path / "again").eval()
    more = {} if ours.config.kind == "encoder" else {"decoder_input_ids": answer}
    with torch.no_grad():
        one, other = (x(input_ids=ids, attention_mask=mask, **more)[0] for x in (model, again))
    assert torch.equal(one, other)
    tensors = [load_file(x / "model.safetensors") for x in (place, tmp_path / "again")]
    for name, tensor in tensors[1].items():
        np.testing.assert_array_equal(tensor, tensors[0][name])


def test_states_of_the_encoder(torch, pair):
    """Alone, and as a part of both; ids suffice."""
    model, place = pair
    ids, mask, _ = rows(length=20)
    with torch.no_grad():
        encoder = model.get_encoder()
        given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        theirs = encoder(**given, output_hidden_states=True).hidden_states
    states, real = fh.hidden_states(fh.load_model(place), ids, mask=mask)
    assert np.array_equal(real, mask > 0) and states.shape == (2, 4, 20, 24)
    expected = torch.stack(theirs, 1).numpy()
    np.testing.assert_allclose(
        states[real[:, None].repeat(4, 1)], expected[real[:, None].repeat(4, 1)], atol=1e-4
    )


def test_greedy_tokens_equal_torchs(torch, pair):
    """Prompts of unequal lengths; the encoder alone writes nothing."""
    model, place = pair
    ours = fh.load_model(place)
    if ours.config.kind == "encoder":
        refused("generation needs a decoder", Generator, ours.config, ours.params)
        return
    ids, mask, _ = rows(length=30)
    given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    how = {"max_new_tokens": 40, "do_sample": False, "num_beams": 1}
    theirs = model.generate(**given, **how).numpy()[:, 1:]
    prompts = [row[real > 0] for row, real in zip(ids, mask, strict=True)]
    for size in (1, 2):  # alone, and padded
        generator = Generator(ours.config, ours.params, batch_size=size)
        answers = generator(prompts, Sampling(40), progress=None)
        for answer, other in zip(answers, theirs.tolist(), strict=True):
            other = other[: other.index(1)] if 1 in other else other
            assert list(answer.tokens) == other
    assert len({*theirs.ravel().tolist()}) > 2


def test_a_cached_decoder_is_the_decoder(pair):
    """Token by token, with the encoder's keys and values computed once."""
    _, place = pair
    model = fh.load_model(place)
    config = model.config
    if config.kind == "encoder":
        return
    ids, mask, _ = rows(length=20)
    answer = np.random.default_rng(2).integers(2, 61, (2, 150))
    batch = batch_of(ids, mask, answer)
    whole = causal_lm.forward(config, model.params, batch)
    memory = whole["encoder_hidden"], jnp.asarray(mask > 0)
    cache = make_cache(config, model.params["stack"], 2, 150, memory=memory)
    step = jax.jit(forward_cached, static_argnums=0, static_argnames="fresh")
    pads, states = jnp.zeros(2, jnp.int32), []
    for t in range(150):
        token = batch["tokens"][:, t : t + 1]
        made, cache = step(config, model.params, token, pads, cache, t, fresh=t == 0)
        states.append(made)
    np.testing.assert_allclose(np.concatenate(states, 1), whole["hidden"], atol=2e-4)


@pytest.mark.parametrize(("rows_", "far"), [(32, 128), (16, 128), (16, 40), (8, 9)])
def test_rows_of_distances_are_the_published_ones(torch, rows_, far):
    from transformers.models.t5.modeling_t5 import T5Attention

    apart = torch.arange(far + 1)
    theirs = T5Attention._relative_position_bucket(-apart, False, rows_, far)
    np.testing.assert_array_equal(distance_rows(rows_, far), theirs.numpy())
    assert distance_rows(rows_, far)[-1] == rows_ - 1


def test_what_sees_what():
    """The decoder's rows see no later token, the encoder's all but padding."""
    config = tiny_of("t5", 4)
    params = random_params(config)
    ids, mask, answer = (x % 29 for x in rows(length=12))
    batch = batch_of(ids, mask, answer)
    seen = Probe("inputs", lambda seen, *_: seen.block_output, kind="example")

    def run(params, batch):
        return causal_lm.forward(config, params, batch, probes=(seen,))

    made = jax.jit(run)(params, batch)
    assert {k: v.shape[:3] for k, v in made["probes"]["inputs"].items()} == {
        "encoder": (2, 2, 12),
        "decoder": (2, 2, 9),
    }
    later = batch | {"tokens": batch["tokens"].copy()}
    later["tokens"][:, 5] = 3 + (later["tokens"][:, 5] == 3)
    moved = np.any(np.asarray(made["hidden"] != jax.jit(run)(params, later)["hidden"]), axis=(0, 2))
    assert list(moved) == [False] * 5 + [True] * 4
    first = batch | {"encoder_tokens": batch["encoder_tokens"].copy()}
    first["encoder_tokens"][:, 5] = 3 + (first["encoder_tokens"][:, 5] == 3)
    other = jax.jit(run)(params, first)
    assert np.all(np.any(np.asarray(made["encoder_hidden"] != other["encoder_hidden"])[0], axis=-1))
    assert np.all(np.any(np.asarray(made["hidden"] != other["hidden"]), axis=-1))
    hidden = batch | {"encoder_tokens": np.where(mask > 0, ids, 7).astype(np.int32)}
    again = jax.jit(run)(params, hidden)
    assert np.array_equal(made["hidden"], again["hidden"])


def test_probes_sum_over_both_stacks_and_know_their_ends():
    config = tiny_of("t5", 4)
    last = Probe("last", lambda seen, batch, _: seen.is_last * jnp.sum(batch["tokens"]))
    norm = Probe("norm", lambda seen, *_: seen.final_norm(seen.block_output), kind="example")
    params, batch = random_params(config), batch_of(*(x % 29 for x in rows(length=12)))
    made = jax.jit(lambda p, b: causal_lm.forward(config, p, b, probes=(last, norm)))(params, batch)
    sums = [int(batch[x].sum()) for x in ("encoder_tokens", "tokens")]
    assert made["probes"]["last"].tolist() == [0, sums[0], 0, sums[1]]
    ends = made["probes"]["norm"]
    np.testing.assert_allclose(ends["encoder"][-1], made["encoder_hidden"], rtol=1e-5)
    scaled = ends["decoder"][-1] * config.output_multiplier
    np.testing.assert_allclose(scaled, made["hidden"], rtol=1e-5)


def test_attention_to_the_first_token_knows_the_bias():
    """The probes of the whole weights and of the first key's alone agree, with the bias."""
    weights = Probe(
        "weights",
        lambda seen, *_: seen.attention_weights[..., 0],
        needs=frozenset({"attention_weights"}),
        kind="example",
    )
    sinks = Probe(
        "sinks",
        lambda seen, *_: seen.sink_weights,
        needs=frozenset({"sink_weights"}),
        kind="example",
    )
    config = tiny_of("t5", 4)
    params, batch = random_params(config), batch_of(*(x % 29 for x in rows(length=12)))
    (one, other) = (
        causal_lm.forward(config, params, batch, probes=(probe,))["probes"][probe.name]
        for probe in (weights, sinks)
    )
    for stack in ("encoder", "decoder"):
        whole = np.asarray(one[stack]).reshape(2, 2, 4, -1)  # [L, B, N, T]
        np.testing.assert_allclose(whole.swapaxes(2, 3), other[stack], rtol=1e-5)


def test_removal_in_both_stacks_is_masking(tmp_path):
    """Neurons removed from chosen layers of each stack, against zero outgoing weights."""
    config = tiny_of("t5", 4)
    params = random_params(config)
    batch = batch_of(*(x % 29 for x in rows(length=12)))
    model = Model(config, params, None, "tiny")
    pruned, report = fh.prune(model, "random", ratio=0.25, layers="1,2")
    masked = unstack(jax.tree.map(np.array, params))
    for i, gone in enumerate(report["removed"]):
        masked["layers"][i]["ffn"]["down"]["kernel"][gone] = 0
    assert [len(gone) for gone in report["removed"]] == [0, 3, 3, 0]
    expected = causal_lm.forward(config, fh.models.stack.restack(config, masked), batch)
    made = causal_lm.forward(pruned.config, pruned.params, batch)
    for name in ("hidden", "encoder_hidden"):
        np.testing.assert_allclose(made[name], expected[name], atol=1e-6)


def test_lora_is_in_both_stacks_and_folds():
    config = tiny_of("t5", 4)
    model = Model(config, random_params(config), None, "tiny")
    adapted, _ = fh.surgery.SURGERIES["lora"](model, {"rank": 2}, key=jax.random.key(0))
    flat = flatten(adapted.params)
    draw = np.random.default_rng(0).normal
    for path in [path for path in flat if path.endswith("lora_b")]:
        flat[path] = draw(0, 0.1, flat[path].shape).astype(np.float32)
    adapted = dataclasses.replace(adapted, params=fh.tree.unflatten(flat))
    places = {path.split("/")[3] for path in flat if path.endswith("lora_b")}
    assert places == {"attention", "cross_attention", "ffn"}
    folded, _ = fh.surgery.SURGERIES["fold"](adapted, {})
    batch = batch_of(*(x % 29 for x in rows(length=12)))
    hidden = [
        causal_lm.forward(x.config, x.params, batch)["hidden"] for x in (adapted, folded, model)
    ]
    np.testing.assert_allclose(hidden[0], hidden[1], rtol=1e-4, atol=1e-5)
    assert np.abs(hidden[0] - hidden[2]).max() > 0.01


def test_damaged_files_and_configs_are_rejected(pair, tmp_path):
    model, place = pair
    config = json.loads((place / "config.json").read_text())
    tensors = load_file(place / "model.safetensors")
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(config))
    save_file({k: v for k, v in tensors.items() if k != table}, copy / "model.safetensors")
    refused("SelfAttention.relative_attention_bias", fh.load_model, copy, error=CheckpointError)
    for key, value, message in (
        ("decoder_start_token_id", None, "decoder_start_token_id is null"),
        ("feed_forward_proj", "gated-tanh", "feed_forward_proj='gated-tanh'"),
        ("relative_attention_num_buckets", 30, "relative_buckets=30"),
        ("num_layers", 10**6, "at most 10,000"),
    ):
        (copy / "config.json").write_text(json.dumps(config | {key: value}))
        refused(message, fh.load_model, copy, error=CheckpointError)
    if config["is_encoder_decoder"]:
        ours = fh.load_model(place)
        refused(
            "needs encoder_tokens",
            causal_lm.forward,
            ours.config,
            ours.params,
            {"tokens": np.ones((1, 2), int)},
        )
