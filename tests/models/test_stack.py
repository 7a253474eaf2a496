"""The shared stack: segmentation, restacking, scans, probes, strict leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import refused

from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.causal_lm import RunOptions
from ffn_heterogeneity.models.config import (
    ConfigError,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    config_from_dict,
    config_to_dict,
)
from ffn_heterogeneity.models.stack import (
    Segment,
    check_stack,
    restack,
    segmentation,
    tree_segments,
    unstack,
)
from ffn_heterogeneity.models.unused import check_leaves
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.displacement import DISPLACEMENT
from ffn_heterogeneity.tree import flatten, unflatten

# Nothing here is large.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

LOCAL = LayerConfig(24, window=4, rope=RopeConfig(theta=100.0))
GLOBAL = LayerConfig(24)
OWN = {"vocab_size": 37, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
OWN |= {"qk_norm": True, "post_norms": True, "norm_offset": 1.0, "activation": "gelu_tanh"}
CONFIG = ModelConfig("gemma3", layers=(LOCAL, LOCAL, GLOBAL) * 2 + (LOCAL,), **OWN)
TOKENS = np.random.default_rng(0).integers(0, 37, (2, 13))


# One compilation per call instead of one per operation.
compute = jax.jit(causal_lm.forward, static_argnums=0, static_argnames=("options", "probes"))


@pytest.fixture(scope="module")
def params():
    return causal_lm.init(CONFIG, jax.random.key(0))


def test_published_patterns():
    gemma3 = ["l"] * 5 + ["g"]
    assert segmentation(gemma3 * 4 + ["l"] * 2) == (Segment(0, 6, 4), Segment(24, 1, 2))
    assert segmentation(["l", "g"] * 13) == (Segment(0, 2, 13),)
    assert segmentation(["a"] * 30) == (Segment(0, 1, 30),)
    assert segmentation([1, 2, 3]) == (Segment(0, 1, 1), Segment(1, 1, 1), Segment(2, 1, 1))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=24))
@settings(max_examples=200, deadline=None)
def test_segments_cover_every_layer_once_with_its_own_signature(signatures):
    covered = {}
    for segment in segmentation(signatures):
        for repeat in range(segment.repeats):
            for slot in range(segment.slots):
                index = segment.layer(slot, repeat)
                assert index not in covered
                covered[index] = signatures[segment.layer(slot)]
    assert [covered[i] for i in range(len(signatures))] == signatures


def test_restack_and_unstack_are_exact_inverses(params):
    assert tree_segments(params["stack"]) == (Segment(0, 3, 2), Segment(6, 1, 1))
    layers = unstack(params)
    assert len(layers["layers"]) == 7
    again = restack(CONFIG, layers)
    assert flatten(again).keys() == flatten(params).keys()
    jax.tree.map(np.testing.assert_array_equal, again, params)
    # Slot p of repeat j is layer start + j * P + p.
    np.testing.assert_array_equal(
        layers["layers"][5]["ffn"]["up"]["kernel"],
        params["stack"]["segment_0"]["slot_2"]["ffn"]["up"]["kernel"][1],
    )


def test_layers_of_different_width_are_segments_of_their_own(params):
    layers = unstack(params)
    kernels = layers["layers"][3]["ffn"]
    kernels["up"]["kernel"] = kernels["up"]["kernel"][:, :20]
    kernels["gate"]["kernel"] = kernels["gate"]["kernel"][:, :20]
    kernels["down"]["kernel"] = kernels["down"]["kernel"][:20]
    config = CONFIG.with_widths([24, 24, 24, 20, 24, 24, 24])
    tree = restack(config, layers)
    # The first three layers repeat nothing; the last three are local, global, local.
    assert sum(s.slots * s.repeats for s in check_stack(config, tree["stack"])) == 7
    hidden = compute(config, tree, {"tokens": TOKENS})["hidden"]
    assert np.isfinite(hidden).all()


def test_a_tree_stacked_for_another_config_is_refused(params):
    config = dataclasses.replace(CONFIG, layers=(LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL, LOCAL))
    with pytest.raises(ValueError, match="layer 4 is stacked with layer 1"):
        causal_lm.forward(config, params, {"tokens": TOKENS})
    with pytest.raises(ValueError, match="holds 7 layers, the config 6"):
        causal_lm.forward(
            dataclasses.replace(CONFIG, layers=CONFIG.layers[:6]), params, {"tokens": TOKENS}
        )


def value_and_gradient(params, options):
    def loss(params):
        out = causal_lm.forward(CONFIG, params, {"tokens": TOKENS}, options=options)
        # Squares: a sum of both signs would lose digits.
        return jnp.sum(jnp.sin(causal_lm.logits(CONFIG, params, out["hidden"])) ** 2)

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def plainly(params):
    return value_and_gradient(params, RunOptions())


@pytest.mark.parametrize(
    "options",
    [
        RunOptions(remat="dots"),
        pytest.param(RunOptions(remat="full"), marks=pytest.mark.slow),
        pytest.param(RunOptions(remat="attention_output"), marks=pytest.mark.slow),
        pytest.param(RunOptions(unroll=True), marks=pytest.mark.slow),
        RunOptions(attention="plain"),
    ],
)
def test_how_it_is_computed_changes_nothing(params, plainly, options):
    value, gradient = plainly
    other_value, other_gradient = value_and_gradient(params, options)
    np.testing.assert_allclose(other_value, value, rtol=1e-6)
    for path, leaf in flatten(gradient).items():
        difference = np.linalg.norm(flatten(other_gradient)[path] - leaf)
        assert difference <= 1e-5 * np.linalg.norm(leaf), path


def test_full_remat_saves_memory():
    config = dataclasses.replace(CONFIG, layers=(GLOBAL,) * 16)
    shapes = causal_lm.abstract_params(config)
    batch = {"tokens": jax.ShapeDtypeStruct((4, 128), jnp.int32)}

    def temporary(remat):
        def loss(params, batch):
            out = causal_lm.forward(config, params, batch, options=RunOptions(remat=remat))
            return jnp.sum(out["hidden"])

        compiled = jax.jit(jax.grad(loss)).lower(shapes, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary("full") < 0.5 * temporary("none")


def test_unread_leaves_are_refused(params):
    check_leaves(CONFIG, params)
    tree = unflatten({**flatten(params)})
    tree["stack"]["segment_0"]["slot_1"]["ffn"]["up"]["lora_z"] = jnp.ones((2, 3, 3))
    refused("segment_0/slot_1/ffn/up/lora_z", check_leaves, CONFIG, tree)
    tied = {**params, "head": {"kernel": jnp.ones((16, 37))}}
    refused("head/kernel", check_leaves, CONFIG, tied)


def test_missing_and_misshapen_leaves_are_named(params):
    tree = unflatten({**flatten(params)})
    del tree["stack"]["segment_0"]["slot_0"]["ffn"]["up"]["kernel"]
    refused("missing parameter ffn/up/kernel", causal_lm.forward, CONFIG, tree, {"tokens": TOKENS})
    tree["stack"]["segment_0"]["slot_0"]["ffn"]["up"]["kernel"] = jnp.ones((2, 16, 23))
    with pytest.raises(ValueError, match=r"ffn/up/kernel has shape \(16, 23\)"):
        causal_lm.forward(CONFIG, tree, {"tokens": TOKENS})


def test_probes_see_every_layer_in_order(params):
    """The displacement probe equals one computed layer by layer in numpy."""
    states = []
    for depth in range(8):
        config = dataclasses.replace(CONFIG, layers=CONFIG.layers[:depth] or CONFIG.layers[:1])
        layers = unstack(params)
        layers["layers"] = layers["layers"][: max(depth, 1)]
        grab = Probe("state", lambda seen, batch, _: (seen.block_input, seen.block_output))
        tree = restack(config, layers)
        out = compute(config, tree, {"tokens": TOKENS}, probes=(grab,))["probes"]["state"]
        states.append(np.asarray(out[0][0] if depth == 0 else out[1][-1], np.float64))
    expected = []
    for before, after in zip(states[:-1], states[1:], strict=True):
        cos = (before * after).sum(-1) / np.linalg.norm(before, axis=-1)
        expected.append(((1 - cos / np.linalg.norm(after, axis=-1)) / 2).sum())
    probes = compute(CONFIG, params, {"tokens": TOKENS}, probes=(DISPLACEMENT,))["probes"]
    seen = probes["displacement"]
    np.testing.assert_allclose(seen["all"]["sum"], expected, rtol=1e-5)
    assert seen["all"]["count"].tolist() == [26] * 7
    assert seen["last"]["count"].tolist() == [2] * 7


def test_per_layer_inputs_reach_their_layer(params):
    echo = Probe("echo", lambda seen, batch, mine: mine * 2)
    out = compute(
        CONFIG, params, {"tokens": TOKENS}, probes=(echo,), per_layer={"echo": jnp.arange(7.0)}
    )
    assert out["probes"]["echo"].tolist() == [0, 2, 4, 6, 8, 10, 12]


def test_attention_weights_come_when_needed_and_sum_to_one(params):
    need = frozenset({"attention_weights"})
    weights = Probe("weights", lambda seen, batch, _: seen.attention_weights, need)
    out = compute(CONFIG, params, {"tokens": TOKENS}, probes=(weights,))
    values = np.asarray(out["probes"]["weights"])
    assert values.shape == (7, 2, 2, 2, 13, 13)
    np.testing.assert_allclose(values.sum(-1), 1.0, rtol=1e-5)
    assert (values[0][..., 12, :9] == 0).all(), "layer 0 has a window of 4"
    assert (values[2][..., 12, :] > 0).all(), "layer 2 sees everything before"


def test_dropout_is_seeded_and_scaled(params):
    @jax.jit
    def run(key, rate):
        return causal_lm.forward(
            CONFIG, params, {"tokens": TOKENS}, dropout=(jax.random.key(key), rate)
        )["hidden"]

    plain = compute(CONFIG, params, {"tokens": TOKENS})["hidden"]
    np.testing.assert_allclose(run(0, 0.0), plain, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(run(1, 0.3), run(1, 0.3))
    assert np.abs(run(1, 0.3) - run(2, 0.3)).max() > 1e-2


def test_config_round_trip_and_refusals():
    rope = RopeConfig(theta=5e5, llama3=(8.0, 1.0, 4.0, 8192))
    config = dataclasses.replace(CONFIG, layers=(LayerConfig(8, rope=rope),), eos_id=(1, 106))
    assert config_from_dict(config_to_dict(config)) == config
    with pytest.raises(ConfigError, match="n_heads=4 must be a multiple of n_kv_heads=3"):
        dataclasses.replace(CONFIG, n_kv_heads=3)
    with pytest.raises(ConfigError, match="layer 1: ffn_width=0"):
        CONFIG.with_widths([24, 0, 24, 24, 24, 24, 24])
    with pytest.raises(ConfigError, match="activation='swish'"):
        dataclasses.replace(CONFIG, activation="swish")


def test_paths_round_trip():
    tree = {"a": {"b": 1}, "layers": [{"c": 2}, {"c": 3}]}
    assert flatten(tree) == {"a/b": 1, "layers/0/c": 2, "layers/1/c": 3}
    assert unflatten(flatten(tree)) == tree
    refused("a/b", unflatten, {"a": 1, "a/b": 2})
