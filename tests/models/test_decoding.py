"""Decoding with a cache equals the forward pass of the whole row, with padding and windows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import LLAMA, our_logits, random_params, tiny_of

from ffn_heterogeneity.models import causal_lm, generate
from ffn_heterogeneity.models.causal_lm import RunOptions
from ffn_heterogeneity.models.config import LayerConfig
from ffn_heterogeneity.models.decoding import cache_length, forward_cached, layers_apart, make_cache
from ffn_heterogeneity.models.sampling import Sampling
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")

OPTIONS = RunOptions()
# Gemma 2 and 3: windows of 3, so that rings turn several times; a Llama of unequal widths;
# partial rotation, branches side by side, norms without parameters, clipped and normed heads.
MODELS = {
    "gemma2": tiny_of("gemma2"),
    "gemma3": tiny_of("gemma3", layers=8),
    "gpt2": tiny_of("gpt2", layers=3),
    "gpt_neox": tiny_of("gpt_neox", layers=3),
    "olmo": dataclasses.replace(tiny_of("olmo", layers=3), qkv_clip=0.3),
    "qwen2": tiny_of("qwen2", layers=3),
    "qwen3": tiny_of("qwen3", layers=3),
    "mixtral": tiny_of("mixtral", layers=3),
    "qwen3_moe": tiny_of("qwen3_moe", layers=3),
    # Post-norm, then pre-norm (Mix-LN), no rotary embedding.
    "learned": dataclasses.replace(
        LLAMA,
        positions="learned",
        embedding_norm=True,
        layers=(LayerConfig(24, rope=None, norm_placement="post"), LayerConfig(24, rope=None)),
    ),
    "llama": dataclasses.replace(
        LLAMA, vocab_size=29, layers=(LayerConfig(24),) * 2 + (LayerConfig(8),)
    ),
}


def decoded_logits(config, params, prompts: np.ndarray, pads: np.ndarray, following: np.ndarray):
    """Logits [B, N + 1, V] after the prompt and after each token of `following` [B, N]."""

    @jax.jit
    def prefill(params, tokens, pads):
        cache = make_cache(config, params["stack"], *length_of(tokens), OPTIONS)
        hidden, cache = forward_cached(config, params, tokens, pads, cache, fresh=True)
        return causal_lm.logits(config, params, hidden[:, -1]), cache

    def length_of(tokens):
        return tokens.shape[0], tokens.shape[1] + following.shape[1]

    @jax.jit
    def step(params, token, pads, cache, column):
        hidden, cache = forward_cached(config, params, token, pads, cache, column)
        return causal_lm.logits(config, params, hidden[:, -1]), cache

    logits, cache = prefill(params, prompts, pads)
    all_logits = [logits]
    for i in range(following.shape[1]):
        column = jnp.int32(prompts.shape[1] + i)
        logits, cache = step(params, following[:, i : i + 1], pads, cache, column)
        all_logits.append(logits)
    assert step._cache_size() == 1
    return np.stack(all_logits, 1), cache


@pytest.mark.parametrize("name", MODELS)
def test_decoding_equals_the_whole_row(name):
    config = MODELS[name]
    params = random_params(config)
    rng = np.random.default_rng(0)
    lengths, new = [5, 2, 7], 6
    width = max(lengths)
    rows = [rng.integers(0, 29, n + new) for n in lengths]
    # The ids in the padding must not matter: here they are real tokens.
    prompts = rng.integers(0, 29, (3, width)).astype(np.int32)
    for row, ids, n in zip(prompts, rows, lengths, strict=True):
        row[width - n :] = ids[:n]
    following = np.stack([ids[n:] for ids, n in zip(rows, lengths, strict=True)]).astype(np.int32)
    pads = np.array([width - n for n in lengths], np.int32)
    decoded, cache = decoded_logits(config, params, prompts, pads, following)
    for b, (ids, n) in enumerate(zip(rows, lengths, strict=True)):
        # One length for all: a token does not depend on later ones.
        row = np.pad(ids, (0, width + new - len(ids)))
        expected = our_logits(config, params, row[None])[0, n - 1 : len(ids)]
        assert np.max(np.abs(decoded[b] - expected)) <= 1e-5 * np.max(np.abs(expected)), (name, b)
    # Layers with a window keep only the window.
    assert cache_length(cache) == width + new
    slots = [slot for segment in cache.values() for slot in segment.values()]
    places = {n for x in slots for n in (x["keys"].shape[-1], x["values"].shape[-2])}
    assert places == ({3, width + new} if "gemma" in name else {width + new})


def test_several_tokens_on_top_of_a_full_cache_and_not_of_a_window():
    rng = np.random.default_rng(1)
    config = MODELS["llama"]
    params = random_params(config)
    tokens = rng.integers(0, 29, (2, 9)).astype(np.int32)
    pads = np.array([0, 2], np.int32)

    def run(params, tokens):
        cache = make_cache(config, params["stack"], 2, 12)
        first, cache = forward_cached(config, params, tokens[:, :5], pads, cache, fresh=True)
        second, _ = forward_cached(config, params, tokens[:, 5:], pads, cache, 5)
        return causal_lm.logits(config, params, second)

    decoded = jax.jit(run)(params, tokens)
    for b, pad in enumerate(pads):
        expected = our_logits(config, params, tokens[b : b + 1, pad:])[0, 5 - pad :]
        np.testing.assert_allclose(decoded[b], expected, atol=1e-5 * np.abs(expected).max())
    gemma = MODELS["gemma2"]
    params = random_params(gemma)
    with pytest.raises(ValueError, match="4 new tokens at once on top of a window"):
        cache = make_cache(gemma, params["stack"], 2, 12)
        forward_cached(gemma, params, tokens[:, 5:], pads, cache, 5)


@pytest.mark.parametrize("apart", [False, True])
def test_the_cache_is_updated_in_place(apart):
    """A donated cache of 8 MB is not copied: the step's temporaries are far smaller."""
    config = dataclasses.replace(LLAMA, n_kv_heads=4, head_dim=16, n_heads=4)
    params = layers_apart(random_params(config)) if apart else causal_lm.abstract_params(config)
    rows, length = 4, 2048
    cache = jax.eval_shape(lambda: make_cache(config, params["stack"], rows, length))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    def step(params, token, pads, cache, column):
        return forward_cached(config, params, token, pads, cache, column)

    compiled = (
        jax.jit(step, donate_argnums=3)
        .lower(
            params,
            jax.ShapeDtypeStruct((rows, 1), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            cache,
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2, (memory.temp_size_in_bytes, size)


def test_a_decoder_deeper_than_its_encoder_has_its_own_caches(monkeypatch):
    """With stacked layers, too; each as the same layers one by one."""
    config = dataclasses.replace(tiny_of("t5", 4), eos_id=None, vocab_size=32)
    first, last = config.layers[0], config.layers[-1]
    wide = dataclasses.replace(first, ffn_width=first.ffn_width + 8)
    for encoder, decoder in (((first,) * 2, 4), ((first, wide, first), 3)):
        layers = (*encoder, *(last,) * decoder)
        deeper = dataclasses.replace(config, layers=layers, n_encoder_layers=len(encoder))
        params, prompts = random_params(deeper), [[5, 9, 2], [4]]
        answers = []
        for change in (layers_apart, lambda params: params):
            monkeypatch.setattr(generate, "layers_apart", change)
            made = generate.Generator(deeper, params)
            answers.append([x.tokens for x in made(prompts, Sampling(8), progress=None)])
        assert answers[0] == answers[1]


def test_a_router_is_not_rounded_for_generation():
    """So that its choices are those of the forward pass."""
    params = random_params(MODELS["mixtral"], dtype=np.float32)
    cast = flatten(generate._computable(params, jnp.bfloat16))
    dtypes = {path: str(leaf.dtype) for path, leaf in cast.items() if path.endswith("/kernel")}
    assert {*dtypes.values()} == {"float32", "bfloat16"}
    assert all((dtype == "float32") == ("/router/" in path) for path, dtype in dtypes.items())
