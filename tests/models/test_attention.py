"""Attention: a float64 oracle, causality by gradient, packed documents, rotary scaling."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ffn_heterogeneity.models import attention, causal_lm
from ffn_heterogeneity.models import blocked as blocks
from ffn_heterogeneity.models.attention import (
    Mask,
    attention_mask,
    blocked_attention,
    plain_attention,
    with_kernel,
)
from ffn_heterogeneity.models.block import Block
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig, RopeConfig
from ffn_heterogeneity.models.linear import scaled
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.rotary import apply_rotary, inverse_frequencies, rotary_tables
from ffn_heterogeneity.models.stack import layer_leaves
from ffn_heterogeneity.parallel.partition import abstract_mesh, run_shardings

# Nothing here is large.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

OWN = {"vocab_size": 31, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
CONFIG = ModelConfig("llama", layers=(LayerConfig(24),) * 2, **OWN)


# One compilation per call instead of one per operation.
compute = jax.jit(causal_lm.forward, static_argnums=0)


def oracle(q, k, v, scale, softcap, window, segments):
    """Query by query in float64, from the definition."""
    b, t, n, h = q.shape
    out = np.zeros((b, t, n, h))
    for i in range(b):
        for head in range(n):
            kv = head // (n // k.shape[2])
            for pos in range(t):
                near = range(0 if window is None else max(0, pos - window + 1), pos + 1)
                seen = [s for s in near if segments[i, s] == segments[i, pos]]
                scores = k[i, seen, kv] @ q[i, pos, head] * scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                out[i, pos, head] = weights / weights.sum() @ v[i, seen, kv]
    return out


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 9, 70])
def test_both_forms_equal_the_oracle(softcap, window):
    rng = np.random.default_rng(0)
    b, t, n, kv_heads, h = 2, 150, 4, 2, 8
    q, k, v = (rng.normal(size=(b, t, heads, h)) * 2 for heads in (n, kv_heads, kv_heads))
    segments = np.stack([np.repeat([1, 2, 0], [60, 65, 25]), np.ones(t, int)])
    expected = oracle(q, k, v, 0.3, softcap, window, segments)
    with jax.enable_x64(True):
        positions = jnp.arange(t)[None]
        mask = attention_mask(positions, positions, window, segments, segments)
        arguments = (jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), mask)
        plain, _ = plain_attention(*arguments, scale=0.3, softcap=softcap)
        blocked = blocked_attention(*arguments, scale=0.3, softcap=softcap)
        assert np.abs(plain - expected).max() < 1e-12
        assert np.abs(blocked - expected).max() < 1e-12


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("window", "with_bias"), [(None, False), (50, False), (None, True)])
@pytest.mark.parametrize("block", [128, 16])  # of 384 rows, the second in loops of parts
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_both_forms_agree(softcap, window, with_bias, block, causal, monkeypatch):
    """The blocked form's backward pass against autodiff of the plain form, in float64."""
    monkeypatch.setattr(blocks, "MIN_BLOCK", block)
    assert blocks.blocks_of(384, None)[0][2] == (3 if block == 16 else 1)
    rng, size = np.random.default_rng(1), 384
    q, k, v = (rng.normal(size=(2, size, heads, 8)) for heads in (4, 2, 2))
    segments = np.stack([np.repeat([1, 2, 0], [120, 130, 134]), np.ones(size, int)])
    with jax.enable_x64(True):
        positions = jnp.arange(size)[None]
        mask = attention_mask(positions, positions, window, segments, segments, causal)
        assert mask.visible[0, 100, 110] == (not causal) and not mask.visible[0, 119, 120]
        arguments = [jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)]
        apart = size - 1 + np.arange(size)[None] - np.arange(size)[:, None]
        if with_bias:
            arguments.append(jnp.asarray(rng.normal(size=(4, 2 * size - 1))))

        def plain(q, k, v, line=None):
            bias = None if line is None else line[:, apart][None]
            out, _ = plain_attention(q, k, v, mask, scale=0.4, softcap=softcap, bias=bias)
            return jnp.sum(jnp.sin(out))

        def blocked(q, k, v, line=None):
            out = blocked_attention(q, k, v, mask, scale=0.4, softcap=softcap, bias=line)
            return jnp.sum(jnp.sin(out))

        places = range(len(arguments))
        first = jax.jit(jax.grad(plain, argnums=places))(*arguments)
        second = jax.jit(jax.grad(blocked, argnums=places))(*arguments)
        for a, b in zip(first, second, strict=True):
            assert np.abs(a - b).max() <= 1e-12 * np.abs(a).max()


@pytest.mark.parametrize(("queries", "keys"), [(300, 70), (40, 500)])
def test_other_keys_in_blocks(queries, keys):
    """Attention on another text: outputs and gradients of both forms, in float64."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.normal(size=(2, t, n, 8)) for t, n in ((queries, 4), (keys, 2), (keys, 2)))
    real = np.arange(keys) < np.array([keys, keys // 2])[:, None]
    with jax.enable_x64(True):
        mask = Mask(jnp.asarray(real)[:, None], both_ways=True)

        def total(form, *arguments):
            out = form(*arguments, mask, scale=0.4)
            return jnp.sum(jnp.sin(out if form is blocked_attention else out[0]))

        first, second = (
            jax.value_and_grad(total, (1, 2, 3))(form, *map(jnp.asarray, (q, k, v)))
            for form in (plain_attention, blocked_attention)
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), *(first, second)
        )
        assert not np.any(np.asarray(second[1][1])[1, keys // 2 :])


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("window", "with_bias"), [(None, False), (40, False), (None, True)])
@pytest.mark.parametrize("causal", [True, False])
def test_sink_weights_are_the_first_column_of_the_probabilities(softcap, window, with_bias, causal):
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 150, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    segments = np.stack([np.repeat([1, 2], [100, 50]), np.ones(150, int)])
    positions = jnp.arange(150)[None]
    mask = attention_mask(positions, positions, window, segments, segments, causal)
    line = jnp.asarray(rng.normal(size=(4, 299)), jnp.float32) if with_bias else None
    weights = plain_attention(q, k, v, mask, scale=0.4, softcap=softcap, bias=line)[1]
    expected = weights[..., 0].transpose(0, 3, 1, 2).reshape(2, 150, 4)
    sinks = attention.sink_weights(q, k, v, mask, scale=0.4, softcap=softcap, bias=line)
    np.testing.assert_allclose(sinks, expected, rtol=1e-5, atol=1e-7)


def test_long_rows_keep_one_part_of_their_logits_in_memory():
    """A soft-capped layer of Gemma-2 2B at T = 4,096; unrolled blocks need 1,164 MiB per row."""
    q, k = (jax.ShapeDtypeStruct((1, 4096, heads, 256), jnp.bfloat16) for heads in (8, 4))
    mask = jax.ShapeDtypeStruct((1, 4096, 4096), jnp.bool_)

    def total(q, k, v, mask):
        mask = attention.Mask(mask, causal=True)
        return jnp.sum(blocked_attention(q, k, v, mask, scale=0.06, softcap=50.0), dtype="float32")

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, k, mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 450 * 2**20


def test_bfloat16_gradients_are_as_near_to_the_truth_as_autodiffs():
    """Both forms round their operands to bfloat16; neither may lose more than that."""
    rng = np.random.default_rng(2)
    exact = [rng.normal(size=(1, 200, heads, 32)) for heads in (4, 2, 2)]
    cotangent = rng.normal(size=(1, 200, 4, 32))
    positions = jnp.arange(200)[None]
    mask = attention_mask(positions, positions, None, None, None)
    forms = {
        "plain": lambda q, k, v: plain_attention(q, k, v, mask, scale=0.125, softcap=5.0)[0],
        "blocked": lambda q, k, v: blocked_attention(q, k, v, mask, scale=0.125, softcap=5.0),
    }

    def gradients(form, dtype):
        arguments = [jnp.asarray(x, dtype) for x in exact]
        run = jax.jit(lambda arguments, c: jax.vjp(forms[form], *arguments)[1](c))
        slopes = run(arguments, jnp.asarray(cotangent, dtype))
        return [np.asarray(gradient, np.float64) for gradient in slopes]

    with jax.enable_x64(True):
        truth = gradients("plain", jnp.float64)
    for name, *slopes in zip(
        "qkv", truth, *(gradients(form, jnp.bfloat16) for form in forms), strict=True
    ):
        size = np.linalg.norm(slopes[0])
        plain, blocked = (np.linalg.norm(g - slopes[0]) / size for g in slopes[1:])
        assert blocked < max(1.2 * plain, 2**-8), (name, plain, blocked)


def test_dots_policy_keeps_what_the_backward_of_attention_reads():
    """No second softmax under "dots": the backward pass rebuilds weights, never their maximum."""
    params = causal_lm.init(CONFIG, jax.random.key(0))
    tokens = jnp.ones((1, 16), jnp.int32)

    def maxima(remat):
        options = causal_lm.RunOptions(remat=remat)

        def loss(params):
            return jnp.sum(
                causal_lm.forward(CONFIG, params, {"tokens": tokens}, options=options)["hidden"]
            )

        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("reduce_max")

    assert maxima("dots") == maxima("none") == 1
    assert maxima("full") == 2


def test_queries_and_keys_may_differ_in_number():
    """The last 3 queries against all keys, as a cache would ask, equal the full rows."""
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 20, heads, 8))) for heads in (4, 2, 2))
    positions = jnp.arange(20)[None]
    full, _ = plain_attention(q, k, v, attention_mask(positions, positions, 6), scale=0.4)
    mask = attention_mask(positions[:, 17:], positions, 6)
    last, _ = plain_attention(q[:, 17:], k, v, mask, scale=0.4)
    np.testing.assert_allclose(last, full[:, 17:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_causality_by_gradient(window, packed):
    """d hidden[t] / d embedding[s] is 0 exactly where t does not see s, through both layers."""
    config = dataclasses.replace(CONFIG, layers=(LayerConfig(24, window=window),) * 2)
    params = causal_lm.init(config, jax.random.key(0))
    length, batch = 9, {"tokens": jnp.arange(9)[None]}
    document = np.repeat([1, 2], [4, 5]) if packed else np.ones(9, np.int32)
    if packed:
        batch["segment_ids"] = jnp.asarray(document)[None]
        batch["positions"] = jnp.concatenate([jnp.arange(4), jnp.arange(5)])[None]

    def hidden(table):
        tree = {**params, "embed": {"embedding": table}}
        return compute(config, tree, batch)["hidden"]

    jacobian = jax.jacobian(lambda table: hidden(table)[0].sum(-1))(params["embed"]["embedding"])
    reaches = np.abs(jacobian[:, :length]).sum(-1) > 0
    # Two layers of window w reach back 2 (w - 1).
    far = length if window is None else 2 * (window - 1)
    for t in range(length):
        for s in range(length):
            seen = 0 <= t - s <= far and document[t] == document[s]
            assert reaches[t, s] == seen, (t, s)


def test_packed_documents_do_not_see_each_other():
    params = causal_lm.init(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 31, 6), rng.integers(0, 31, 5)
    packed = {
        "tokens": np.concatenate([first, second, [0, 0]])[None],
        "segment_ids": np.repeat([1, 2, 0], [6, 5, 2])[None],
        "positions": np.concatenate([np.arange(6), np.arange(5), np.arange(2)])[None],
    }
    together = compute(CONFIG, params, packed)["hidden"][0]
    for tokens, rows in ((first, slice(0, 6)), (second, slice(6, 11))):
        alone = compute(CONFIG, params, {"tokens": tokens[None]})["hidden"][0]
        np.testing.assert_allclose(together[rows], alone, rtol=1e-5, atol=1e-6)


def test_rotary_is_a_rotation_by_position_times_frequency():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 5, 1, 8))
    tables = rotary_tables(RopeConfig(theta=50.0), 8, jnp.asarray([[0, 1, 7, 100, 3]]))
    y = np.asarray(apply_rotary(jnp.asarray(x, jnp.float32), tables))
    for i, position in enumerate((0, 1, 7, 100, 3)):
        for pair in range(4):
            z = complex(x[0, i, 0, pair], x[0, i, 0, pair + 4])
            z *= complex(math.cos(a := position * 50.0 ** (-2 * pair / 8)), math.sin(a))
            np.testing.assert_allclose(y[0, i, 0, [pair, pair + 4]], [z.real, z.imag], atol=2e-5)


def test_llama3_scaling_slows_only_long_wavelengths():
    rope = RopeConfig(theta=500_000.0, llama3=(8.0, 1.0, 4.0, 8192))
    plain = inverse_frequencies(RopeConfig(theta=500_000.0), 128)
    scaled = inverse_frequencies(rope, 128)
    wavelength = 2 * np.pi / plain
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength >= 2048) & (wavelength <= 8192)
    assert between.any() and (scaled[between] < plain[between]).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_blocked_attention_refuses_what_it_would_get_wrong(compiled):
    """A mask not known to be causal, of ours or a bare array, and keys of another row; the plain
    form takes both."""
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 300, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    x, positions = jnp.ones((2, 300, 16)), jnp.arange(300)[None]
    tables = rotary_tables(RopeConfig(), 8, positions)
    mask = attention_mask(positions, positions, None)
    params = {"params": next(layer_leaves(causal_lm.init(CONFIG, jax.random.key(0))))[1]}

    def refused(function, *arguments, match):
        with pytest.raises(ValueError, match=match):
            (jax.jit(function) if compiled else function)(*arguments)

    everything = jnp.ones((2, 300, 300), bool)
    blocked = functools.partial(blocked_attention, scale=0.3)
    layer = functools.partial(Block(CONFIG, LayerConfig(24)).apply, params)
    for mask in (everything, Mask(everything)):
        refused(blocked, q, k, v, mask, match="not known to hide them: use attention='plain'")
        refused(layer, x, tables, mask, match="not known to hide them: use attention='plain'")
    few = attention_mask(positions[:, 297:], positions, None)
    refused(blocked, q[:, 297:], k, v, few, match="3 queries and 300 keys: use attention='plain'")
    out, weights = plain_attention(q, k, v, Mask(everything), scale=0.3)
    assert (weights > 0).all() and weights.shape == (2, 2, 2, 300, 300)
    expected = oracle_of_everything(q, k, v, 0.3)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def oracle_of_everything(q, k, v, scale):
    """float64, every query seeing every key."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    weights = np.exp(np.einsum("btnh,bsnh->bnts", q, k) * scale)
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def test_kernel_choice_is_static_and_says_no_clearly():
    half, capped = (
        RunOptions(compute_dtype=jnp.bfloat16),
        dataclasses.replace(CONFIG, attention_softcap=50.0),
    )
    for config, platform, length, in_order, expected in (
        (CONFIG, None, 256, True, "xla"),
        (CONFIG, "gpu", 300, False, "cudnn"),
        (CONFIG, "gpu", 301, False, "xla"),
        (CONFIG, "gpu", 1, False, "cudnn"),
        (capped, "gpu", 256, True, "xla"),
        (dataclasses.replace(CONFIG, head_dim=136), "gpu", 256, True, "xla"),
        (capped, "tpu", 256, True, "splash"),
        (CONFIG, "tpu", 300, True, "xla"),
        (CONFIG, "tpu", 256, False, "xla"),
    ):
        options = dataclasses.replace(half, platform=platform)
        assert with_kernel(options, config, length, in_order).attention == expected
    # cuDNN's partitioning needs whole key heads on each device.
    cut = dataclasses.replace(half, platform="gpu", **run_shardings(abstract_mesh(1, 1, 8)))
    assert CONFIG.n_kv_heads % 8 and with_kernel(cut, CONFIG, 256).attention == "xla"
    with pytest.raises(ValueError, match="mesh.tensor does not divide"):
        with_kernel(dataclasses.replace(cut, attention="cudnn"), CONFIG, 256)
    for name, config, length, message in (
        ("cudnn", capped, 256, "no soft-cap"),
        ("splash", CONFIG, 300, "length a multiple of 128, got 300"),
        ("flash", CONFIG, 256, "flash"),
    ):
        with pytest.raises(ValueError, match=message):
            with_kernel(RunOptions(attention=name), config, length)


def test_the_scale_is_not_rounded_to_half_precision():
    """1/12, Gemma 2 27B's, is 0.2% too large in bfloat16, in the same direction for all logits."""
    x = jnp.arange(1, 513, dtype=jnp.bfloat16)
    wanted = (np.asarray(x, np.float32) / 12).astype(jnp.bfloat16)
    np.testing.assert_array_equal(scaled(x, 1 / 12), wanted)
    assert (x * jnp.asarray(1 / 12, jnp.bfloat16) != wanted).any()
