"""Norms, partial rotation, parallel branches, clipping against float64 formulas; their surgery."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import batch_of, mask_neurons, random_params, tiny_of

from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.attention import Mask
from ffn_heterogeneity.models.block import Block
from ffn_heterogeneity.models.config import ConfigError, RopeConfig
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.norms import Norm
from ffn_heterogeneity.models.rotary import apply_rotary, inverse_frequencies, rotary_tables
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.unused import check_leaves
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
NEOX, OLMO = tiny_of("gpt_neox", layers=3), tiny_of("olmo", layers=3)


def norm_oracle(x, kind, eps, scale=1.0, bias=0.0):
    """The formula in the docstring of `Norm`, in float64."""
    x = np.asarray(x, np.float64)
    if kind != "rms":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale + bias


def test_what_a_gpt_neox_config_cannot_say_is_refused():
    config = dataclasses.replace(NEOX, ffn_bias=False)
    with pytest.raises(ConfigError, match="ffn_bias=False cannot be written"):
        families.family_by_name("gpt_neox").to_hf(config)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["rms", "layer", "layer_without_parameters"])
def test_norms_equal_their_formulas(kind, offset):
    config = dataclasses.replace(NEOX, norm_kind=kind, norm_offset=offset, norm_eps=1e-3)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 5, 16)).astype(np.float32) + 3
    x[0, 0] = 0  # all equal: only eps is left
    x[0, 1] = 7
    x[0, 2] *= 1e4
    leaves = {name: rng.normal(size=16).astype(np.float32) for name in ("scale", "bias")}
    expected = {
        "rms": norm_oracle(x, kind, 1e-3, offset + leaves["scale"]),
        "layer": norm_oracle(x, kind, 1e-3, offset + leaves["scale"], leaves["bias"]),
        "layer_without_parameters": norm_oracle(x, kind, 1e-3),
    }[kind]
    names = {"rms": ("scale",), "layer": ("scale", "bias"), "layer_without_parameters": ()}[kind]
    params = {name: leaves[name] for name in names}
    outputs = Norm(config).apply({"params": params}, jnp.asarray(x))
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-4)
    half = Norm(config).apply({"params": params}, jnp.asarray(x, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    # The mean is computed in float32 even then: a row of equal numbers gives exactly the bias.
    if kind != "rms":
        bias = np.zeros(16) if kind == "layer_without_parameters" else leaves["bias"]
        np.testing.assert_array_equal(np.asarray(half[0, 1]), bias.astype(jnp.bfloat16))
    initial = causal_lm.init(config, jax.random.key(0)).get("final_norm", {})
    assert set(initial) == set(names)
    for name, leaf in initial.items():
        np.testing.assert_array_equal(leaf, 1 - offset if name == "scale" else 0)


def test_a_part_of_each_head_is_rotated():
    rope, rng = RopeConfig(theta=100.0, fraction=0.25), np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 3, 16)).astype(np.float32)
    positions = jnp.asarray([[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 9, 40]])
    assert inverse_frequencies(rope, 16).tolist() == [1.0, pytest.approx(0.1)]
    rotated = np.asarray(apply_rotary(jnp.asarray(x), rotary_tables(rope, 16, positions)))
    np.testing.assert_array_equal(rotated[..., 4:], x[..., 4:])
    for pair, frequency in ((0, 1.0), (1, 0.1)):
        turned = (x[..., pair] + 1j * x[..., pair + 2]).astype(np.complex128)
        turned *= np.exp(1j * frequency * np.asarray(positions, np.float64))[..., None]
        np.testing.assert_allclose(rotated[..., pair], turned.real, atol=1e-5)
        np.testing.assert_allclose(rotated[..., pair + 2], turned.imag, atol=1e-5)


def block_oracle(config, layer: dict, x):
    """One block on rows of one token, where attention is the value's projection; float64."""
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(layer).items()}

    def linear(name, y):
        return y @ leaves[f"{name}/kernel"] + leaves.get(f"{name}/bias", 0.0)

    def norm(name, y):
        scale, bias = (leaves.get(f"{name}/{leaf}", default) for leaf, default in NEUTRAL)
        return norm_oracle(y, config.norm_kind, config.norm_eps, scale, bias)

    value = linear("attention/v", norm("attention_norm", x))
    if config.qkv_clip is not None:
        value = np.clip(value, -config.qkv_clip, config.qkv_clip)
    value = value.reshape(len(x), config.n_kv_heads, config.head_dim)
    value = value.repeat(config.n_heads // config.n_kv_heads, axis=1).reshape(len(x), -1)
    middle = x + linear("attention/out", value)
    y = norm("ffn_norm", x if config.parallel_residual else middle)
    up = linear("ffn/up", y)
    if "ffn/gate/kernel" in leaves:
        gate = linear("ffn/gate", y)
        state = gate / (1 + np.exp(-gate)) * up
    else:
        state = up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
    return middle + linear("ffn/down", state)


NEUTRAL = (("scale", 1.0), ("bias", 0.0))
BLOCKS = {
    "parallel": NEOX,
    "sequential": dataclasses.replace(NEOX, parallel_residual=False),
    "without_parameters": OLMO,
    "clipped": dataclasses.replace(OLMO, qkv_clip=0.25),
    "qwen2": tiny_of("qwen2", layers=3),
    "qwen3": tiny_of("qwen3", layers=3),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_one_token_equals_its_formula(name):
    config = BLOCKS[name]
    layer = unstack(random_params(config))["layers"][1]
    x = np.random.default_rng(2).normal(size=(9, config.d_model)).astype(np.float32)
    tables = rotary_tables(config.layers[1].rope, config.head_dim, jnp.full((9, 1), 5))

    @jax.jit
    def run(layer, x):
        block = Block(config, config.layers[1])
        return block.apply(
            {"params": layer}, x[:, None], tables, Mask(jnp.ones((9, 1, 1), bool), causal=True)
        )[0]

    actual = np.asarray(run(layer, x))[:, 0]
    expected = block_oracle(config, layer, x.astype(np.float64))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    for other in BLOCKS:
        if other != name and BLOCKS[other].family == config.family:
            assert np.abs(block_oracle(BLOCKS[other], layer, x) - actual).max() > 1e-2


def test_initial_trees_hold_what_is_read_and_nothing_else():
    params = causal_lm.init(NEOX, jax.random.key(0))
    check_leaves(NEOX, params)
    for path, leaf in flatten(params).items():
        if path.endswith("bias"):
            assert not np.any(leaf), path
        elif "norm" in path:
            assert np.all(np.asarray(leaf) == 1), path
    assert not [path for path in flatten(causal_lm.abstract_params(OLMO)) if "norm" in path]


def test_no_bias_and_no_norm_decays():
    leaves = declared(NEOX, causal_lm.abstract_params(NEOX))
    assert {path for path in leaves if path.endswith("bias")} > {"final_norm/bias"}
    for path, leaf in leaves.items():
        assert leaf.decays == path.endswith(("kernel", "embedding")), path


def test_removing_neurons_of_a_plain_ffn_with_biases_equals_masking():
    options = causal_lm.RunOptions(compute_dtype=jnp.float64)
    tokens = batch_of(NEOX.vocab_size)["tokens"]

    def logits(config, params):
        hidden = causal_lm.forward(config, params, {"tokens": tokens}, options=options)["hidden"]
        return causal_lm.logits(config, params, hidden)

    with jax.enable_x64(True):
        params = random_params(NEOX, dtype=np.float64)
        config, smaller, removed, _ = reduce_model(NEOX, params, RemovalPlan("entropy", ratio=0.4))
        run = jax.jit(logits, static_argnums=0)
        pruned = run(config, restack(config, smaller))
        masked = run(NEOX, restack(NEOX, mask_neurons(params, removed)))
        full = run(NEOX, params)
    assert config.ffn_widths == (8, 8, 8)
    assert np.abs(pruned - masked).max() <= 1e-9
    assert np.abs(pruned - full).max() > 1e-3


def test_nucl_reads_the_kernels_of_plain_ffns_and_never_their_biases():
    params = random_params(NEOX)
    term = nucl_term(TermContext("nucl"), "ent", ("ffn_out", "ffn_in_linear"))
    value, gradient = jax.jit(jax.value_and_grad(lambda p: term.function(p).total))(params)
    expected = 0.0
    for layer in unstack(params)["layers"]:
        rows = [layer["ffn"]["down"]["kernel"], layer["ffn"]["up"]["kernel"].T]
        for kernel in rows:
            r = np.abs(kernel.astype(np.float64))
            r /= r.sum(1, keepdims=True)
            expected -= (r * np.log(r)).sum()
    assert float(value) == pytest.approx(expected, rel=1e-5)
    acted = {path for path, leaf in flatten(gradient).items() if np.any(leaf)}
    at = "stack/segment_0/slot_0/ffn"
    assert acted == {f"{at}/down/kernel", f"{at}/up/kernel"}
    with pytest.raises(ValueError, match="a plain FFN has no gate"):
        nucl_term(TermContext("nucl"), "ent", ("ffn_in_gated",)).function(params)
