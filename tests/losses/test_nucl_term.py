"""The NUCL term: its gradients, metrics and cost."""

import re

import jax
import jax.numpy as jnp
import nucl_oracle as oracle
import numpy as np
import pytest
from tiny_runs import refused

from ffn_heterogeneity.losses.nucl import (
    TARGETS,
    VARIANTS,
    compute_nucl,
    layer_statistics,
    nucl,
    nucl_term,
)
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.stack import layer_leaves, restack, unstack
from ffn_heterogeneity.tree import flatten, unflatten

# Nothing here is large.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

# Slots of two widths and a remainder: segments of [24, 40] x 2 and one layer of 24.
WIDTHS = (24, 40, 24, 40, 24)

CONTEXT = TermContext("nucl", "alpha")


def model(widths=WIDTHS, kind="gated"):
    config = ModelConfig(
        family="llama",
        vocab_size=11,
        d_model=16,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        layers=tuple(LayerConfig(ffn_width=m, ffn_kind=kind) for m in widths),
        ffn_bias=True,
    )
    return config, causal_lm.init(config, jax.random.key(0))


def kernels(params, place):
    return [np.asarray(leaves["kernel"]) for _, leaves in layer_leaves(params, place)]


def moved(term, params):
    """Paths of the leaves with a gradient of the term that is not 0."""
    gradient = jax.jit(jax.grad(lambda p: term.function(p).total))(params)
    assert all(np.isfinite(leaf).all() for leaf in flatten(gradient).values())
    return {path for path, leaf in flatten(gradient).items() if np.any(leaf)}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("target", ["ffn_out", "ffn_in_gated"])
def test_the_control_moves_weights_as_far_and_hardly_changes_the_penalty(variant, target):
    _, params = model((64, 64))
    penalty, control = (
        nucl_term(CONTEXT, variant, (target,), control=flag).function for flag in (False, True)
    )
    assert control(params).total == penalty(params).total
    gradients = [jax.jit(jax.grad(lambda p, f=f: f(p).total))(params) for f in (penalty, control)]
    ours, theirs = (np.stack(kernels(one, TARGETS[target])) for one in gradients)
    np.testing.assert_allclose(np.abs(ours), np.abs(theirs), rtol=1e-6)
    along = -2 if target == "ffn_in_gated" else -1
    for one in (ours, theirs):  # as many of either sign in each row
        assert np.array_equal((one > 0).sum(along), (ours > 0).sum(along))
    assert 0.4 < np.mean(np.sign(ours) == np.sign(theirs)) < 0.6
    # Along the control's gradient the penalty falls at less than 10% of its rate.
    assert np.sum(ours * theirs) < 0.1 * np.sum(ours * ours)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_gradient_is_not_zero_on_exactly_the_targets(target, stacked):
    _, params = model()
    params = params if stacked else unstack(params)
    term = nucl_term(CONTEXT, "mstd", (target,))
    paths = set(flatten(params))
    expected = {path for path in paths if path.endswith(f"{TARGETS[target]}/kernel")}
    assert len(expected) == (3 if stacked else 5)
    assert moved(term, params) == expected
    (pattern,) = term.targets
    assert {path for path in paths if re.search(pattern, path)} == expected
    assert {path for path in paths if re.fullmatch(pattern, path)} == expected
    assert term.on == "params" and term.weight == "alpha"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stacked", [True, False])
def test_total_and_metrics_of_several_targets(variant, stacked):
    _, params = model()
    params = params if stacked else unstack(params)
    value = jax.jit(nucl_term(CONTEXT, variant, tuple(TARGETS)).function)(params)
    total = 0.0
    for target, place in TARGETS.items():
        matrices = kernels(params, place)
        if target.startswith("ffn_in"):
            matrices = [matrix.T for matrix in matrices]
        rows = [oracle.rows(matrix, variant) for matrix in matrices]
        total += sum(row.sum() for row in rows)
        np.testing.assert_allclose(
            value.metrics[f"{variant}/{target}/layer_mean"], [r.mean() for r in rows], rtol=1e-5
        )
        np.testing.assert_allclose(
            value.metrics[f"{variant}/{target}/mean"], np.concatenate(rows).mean(), rtol=1e-5
        )
    np.testing.assert_allclose(value.total, total, rtol=1e-5)
    assert value.denominator == 1 and value.total.dtype == jnp.float32
    assert set(value.metrics) == {
        f"{variant}/{target}/{what}" for target in TARGETS for what in ("layer_mean", "mean")
    }


def test_axis_outputs_takes_one_distribution_per_input():
    _, params = model()
    targets = ("ffn_in_linear", "ffn_in_gated")
    value = nucl_term(CONTEXT, "gini", targets, axis="outputs").function(params)
    expected = sum(
        oracle.rows(matrix, "gini").sum()
        for place in ("ffn/up", "ffn/gate")
        for matrix in kernels(params, place)
    )
    np.testing.assert_allclose(value.total, expected, rtol=1e-5)


@pytest.mark.parametrize("stacked", [True, False])
def test_chosen_layers_only(stacked):
    _, params = model()
    chosen = (1, 4)
    tree = params if stacked else unstack(params)
    term = nucl_term(CONTEXT, "mstd", layers=chosen)
    value = term.function(tree)
    rows = [oracle.rows(matrix, "mstd") for matrix in kernels(params, "ffn/down")]
    np.testing.assert_allclose(value.total, sum(rows[i].sum() for i in chosen), rtol=1e-5)
    mean = np.concatenate([rows[i] for i in chosen]).mean()
    np.testing.assert_allclose(value.metrics["mstd/ffn_out/mean"], mean, rtol=1e-5)
    layer_mean = value.metrics["mstd/ffn_out/layer_mean"]
    np.testing.assert_allclose(layer_mean, [row.mean() for row in rows], rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: term.function(p).total))(tree)
    for index, leaves in layer_leaves(gradient, "ffn/down"):
        assert np.any(leaves["kernel"]) == (index in chosen), index
    if not stacked:
        matched = [path for path in flatten(tree) if re.search(term.targets[0], path)]
        assert matched == [f"layers/{i}/ffn/down/kernel" for i in chosen]


def masked(params):
    """The tree with a mask on every down kernel that removes a third of the weights."""
    rng, leaves = np.random.default_rng(0), flatten(params)
    for path in [path for path in leaves if path.endswith("ffn/down/kernel")]:
        mask = (rng.random(leaves[path].shape) < 0.7).astype(np.float32)
        leaves[path.replace("kernel", "mask")] = jnp.asarray(mask)
    return unflatten(leaves)


@pytest.mark.parametrize("stacked", [True, False])
def test_reads_the_effective_kernel(stacked):
    config, params = model()
    params = masked(unstack(params))
    tree = restack(config, params) if stacked else params
    value = jax.jit(nucl_term(CONTEXT, "ent").function)(tree)
    expected = [
        oracle.rows(np.asarray(leaves["kernel"]) * np.asarray(leaves["mask"]), "ent")
        for _, leaves in layer_leaves(params, "ffn/down")
    ]
    np.testing.assert_allclose(value.total, sum(row.sum() for row in expected), rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda p: nucl_term(CONTEXT, "ent").function(p).total))(tree)
    for (_, leaves), (_, slopes) in zip(
        layer_leaves(tree, "ffn/down"), layer_leaves(gradient, "ffn/down"), strict=True
    ):
        effective = np.asarray(leaves["kernel"]) * np.asarray(leaves["mask"])
        exact = oracle.gradient(effective, "ent") * np.asarray(leaves["mask"])
        assert oracle.gap(slopes["kernel"], exact) < 1e-5


def test_a_stack_with_adapters_is_never_copied_whole():
    kernel = jnp.ones((16, 512, 256))
    term = nucl_term(CONTEXT, "mstd")

    def total(kernel, mask):
        down = {"kernel": kernel, "mask": mask}
        return term.function({"stack": {"segment_0": {"slot_0": {"ffn": {"down": down}}}}}).total

    compiled = jax.jit(jax.grad(total)).lower(kernel, kernel).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * kernel.nbytes


def test_one_compilation_for_any_alpha():
    _, params = model()
    term, traces = nucl_term(CONTEXT, "mstd"), []

    @jax.jit
    def step(params, hyper):
        traces.append(1)
        gradient = jax.grad(lambda p: hyper["alpha"] * term.function(p).total)(params)
        return jax.tree.map(lambda p, g: p - hyper["learning_rate"] * g, params, gradient)

    for alpha in (0.0, 0.01, 1e4):
        for rate in (1e-6, 1e-3):
            hyper = {"alpha": jnp.float32(alpha), "learning_rate": jnp.float32(rate)}
            after = step(params, hyper)
            unchanged = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), after, params)
            assert all(jax.tree.leaves(unchanged)) == (alpha == 0)
    assert len(traces) == 1 and step._cache_size() == 1


def test_what_cannot_be_done_is_named():
    _, params = model(kind="plain")
    refused("'variance': choose", nucl_term, CONTEXT, "variance")
    refused("ffn_up", nucl_term, CONTEXT, targets=("ffn_up",))
    refused("at most once", nucl_term, CONTEXT, targets=("ffn_out", "ffn_out"))
    refused("axis='rows'", nucl_term, CONTEXT, axis="rows")
    refused("layers is empty", nucl_term, CONTEXT, layers=())
    refused(r"layers \[5, 9\].*0 to 4", nucl_term(CONTEXT, layers=(0, 5, 9)).function, params)
    refused("plain FFN has no gate", nucl_term(CONTEXT, targets=("ffn_in_gated",)).function, params)


@pytest.mark.parametrize("as_numpy", [True, False])
def test_layer_statistics_equal_the_oracle(as_numpy):
    _, params = model()
    leaves = flatten(unstack(params))
    dead = np.array(leaves["layers/2/ffn/down/kernel"])
    dead[3] = 0
    dead[4] *= 1e-30
    leaves["layers/2/ffn/down/kernel"] = jnp.asarray(dead)
    tree = unflatten(leaves)
    if as_numpy:
        tree = jax.tree.map(np.asarray, tree)
    statistics = layer_statistics(tree)
    for layer, matrix in zip(statistics, kernels(tree, "ffn/down"), strict=True):
        assert set(layer) == {"entropy", "gini", "mstd"}
        for name, variant in (("entropy", "ent"), ("gini", "gini"), ("mstd", "mstd")):
            assert isinstance(layer[name], float)
            np.testing.assert_allclose(layer[name], oracle.rows(matrix, variant).sum(), rtol=1e-12)


def test_layer_statistics_refuse_nan():
    _, params = model()
    leaves = flatten(unstack(params))
    leaves["layers/3/ffn/down/kernel"] = leaves["layers/3/ffn/down/kernel"].at[1, 2].set(jnp.nan)
    refused("layer 3: ffn/down holds 1 non-finite", layer_statistics, unflatten(leaves))


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_real_weights_with_exact_zeros(smollm2_gguf, every):
    """Trained down matrices of every layer, or of the first and the last."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    zeros = layers = 0
    for tensor in GGUFReader(str(smollm2_gguf)).tensors:
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        if rest != "ffn_down.weight" or int(block) % every:
            continue
        layers += 1
        kernel_md = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).T
        assert kernel_md.shape == (1536, 576)
        zeros += int((kernel_md == 0).sum())
        for variant, total in zip(VARIANTS, compute_nucl(kernel_md), strict=True):
            np.testing.assert_allclose(total, oracle.rows(kernel_md, variant).sum(), rtol=1e-5)
            slopes = np.asarray(_slope(kernel_md, variant))
            assert oracle.gap(slopes, oracle.gradient(kernel_md, variant)) < 1e-5
            assert (slopes[kernel_md == 0] == 0).all()
    assert layers == -(-30 // every) and zeros > 200 * layers


def _slope(w, variant):
    return _SLOPES[variant](w)


_SLOPES = {v: jax.jit(jax.grad(lambda w, v=v: nucl(w, v))) for v in VARIANTS}


def test_bias_alone_is_no_target():
    _, params = model()
    (pattern,) = nucl_term(CONTEXT, "mstd").targets
    assert any(path.endswith("ffn/down/bias") for path in flatten(params))
    assert not any(re.search(pattern, path) for path in flatten(params) if "bias" in path)
