"""MLP Fusion's methods: exactness, the paper's theorem (appendix B) and bound (appendix C)."""

import dataclasses

import fusing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LLAMA, run_script, save_tiny, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.families import count_parameters
from ffn_heterogeneity.models.feed_forward import ACTIVATIONS
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.fuse import METHODS, Fusion, fuse_block
from ffn_heterogeneity.surgery.neurons import canonical, joined, rows_of, split


def kernels(ffn, act, leaves=None):
    """(sign kernel, SGD kernel) of a scalar of the block on six inputs of four tokens, float64.

    P is no weight: its gradient is left out.
    """
    rng = np.random.default_rng(5)
    xs, v = rng.normal(size=(6, 4, 5)), rng.normal(size=(4, 5))
    with jax.enable_x64(True):
        weights = {k: x for k, x in ffn.items() if k != "neuron_scale"}
        rest = {k: jnp.float64(x) for k, x in ffn.items() if k == "neuron_scale"}
        slope = jax.grad(lambda w, x: jnp.sum(jnp.tanh(fusing.output(w | rest, x, act)) * v))
        grads = [slope(weights, x) for x in jnp.asarray(xs)]
        places = [(name, kind) for kind in ("kernel", "bias") for name in leaves or weights]
        flat = [np.concatenate([np.ravel(g[x][kind]) for x, kind in places]) for g in grads]
        flat = np.stack(flat)
    return flat @ np.sign(flat).T, flat @ flat.T


# ---- exactness


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("method", fusing.CLUSTERED)
def test_as_many_clusters_as_neurons_is_the_same_model(family, method):
    model = fusing.model_of(LLAMA if family == "llama" else tiny_of(family))
    same, report = fusing.fused(model, method=method, ratio=0.0)
    assert report["inertia_share"] == 0 and same.config == model.config
    np.testing.assert_allclose(fusing.logits(same), fusing.logits(model), atol=1e-5)


@fusing.KINDS
@pytest.mark.parametrize("method", fusing.CLUSTERED)
def test_duplicated_neurons_fuse_without_error(gated, method):
    """The multiplicity is unequal, so that P matters; sqrt(P) through GELU is not exact."""
    ffn, times = fusing.block(gated), np.arange(12) % 5 + 1
    many = fusing.repeated(ffn, times)
    few = fusing.compressed(many, method, 12)
    x = np.random.default_rng(3).normal(size=(7, 5))
    acts = {"relu": jax.nn.relu, "gelu": ACTIVATIONS["gelu"]}
    with jax.enable_x64(True):
        for name, act in acts.items():
            error = fusing.apart(fusing.output(many, x, act), fusing.output(few, x, act))
            assert (error < 1e-12) == (gated or name == "relu" or method != "sqrt"), (name, error)


@fusing.KINDS
def test_the_theorem_of_appendix_b(gated):
    """Fusion keeps the kernel of sign descent, sqrt with ReLU that of SGD (if gated, of up and down
    alone, with any activation); the others keep neither."""
    many = fusing.repeated(fusing.block(gated), np.arange(12) % 5 + 1)
    act = jax.nn.silu if gated else jax.nn.relu
    errors = {}
    for method in fusing.CLUSTERED:
        few = fusing.compressed(many, method, 12)
        for leaves in (None, ["up", "down"]):
            pairs = zip(kernels(many, act, leaves), kernels(few, act, leaves), strict=True)
            errors[method, leaves is None] = [fusing.apart(*pair) for pair in pairs]
    assert errors["fusion", True][0] < 1e-12
    assert min(errors[name, True][0] for name in ("merged", "sqrt")) > 0.05
    assert errors["sqrt", not gated][1] < 1e-12 and errors["fusion", True][1] > 0.05
    assert (errors["sqrt", True][1] < 1e-12) == (not gated)


@fusing.KINDS
def test_merged_has_fusions_outputs_and_gradients_but_for_p(gated):
    ffn, x = fusing.block(gated), np.random.default_rng(3).normal(size=(7, 5))
    apart_, one = (fusing.compressed(ffn, method, 5) for method in ("fusion", "merged"))
    factor = apart_.pop("neuron_scale")
    assert "neuron_scale" not in one and factor.sum() == 12

    def loss(w, more):
        return jnp.sum(jnp.sin(fusing.output(w | more, x, jax.nn.gelu)))

    with jax.enable_x64(True):
        a, da = jax.value_and_grad(loss)(apart_, {"neuron_scale": jnp.asarray(factor)})
        b, db = jax.value_and_grad(loss)(one, {})
    da, db = jax.tree.map(np.asarray, (da, db))
    assert float(a) == pytest.approx(float(b), rel=1e-12)
    np.testing.assert_allclose(
        da["down"]["kernel"], factor[:, None] * db["down"]["kernel"], rtol=1e-9, atol=1e-12
    )
    for name in set(ffn) - {"down"}:
        for leaf in ("kernel", "bias"):
            np.testing.assert_allclose(da[name][leaf], db[name][leaf], rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.integers(1, 12), st.sampled_from(["relu", "gelu", "silu"]))
def test_the_bound_of_appendix_c(seed, c, name):
    """Plain, without biases: |H - H~| <= L (C2 CX + C1 CX) eps + L CX eps^2."""
    lipschitz = {"relu": 1.0, "gelu": 1.129, "silu": 1.100}[name]
    ffn = fusing.block(gated=False, seed=seed)
    for leaves in ffn.values():
        leaves["bias"][:] = 0
    few, facts = fuse_block(ffn, fusing.FIRST, Fusion(ratio=1 - c / 12), fusing.NOBODY)
    eps = np.sqrt(facts["inertia_share"]) * np.linalg.norm(joined(rows_of(ffn, 0)))
    x, act = np.random.default_rng(seed).normal(size=(4, 5)), ACTIVATIONS[name]
    with jax.enable_x64(True):
        error = np.linalg.norm(fusing.output(ffn, x, act) - fusing.output(few, x, act))
    c1, c2 = (np.linalg.norm(ffn[side]["kernel"], 2) for side in ("up", "down"))
    cx = np.linalg.norm(x)
    assert error <= lipschitz * cx * ((c1 + c2) * eps + eps**2) + 1e-12


# ---- canonical form, sketches, spared neurons


def test_canonical_neurons_are_the_same_function():
    """Copies of a neuron at other scales and signs are one cluster only in canonical form."""
    ffn, rng = fusing.block(gated=True), np.random.default_rng(4)
    many = fusing.repeated(ffn, np.arange(12) % 5 + 1)
    m = many["down"]["kernel"].shape[0]
    scale = rng.choice([-1, 1], m) * rng.uniform(0.2, 5, m)
    many["up"] = {leaf: x * scale for leaf, x in many["up"].items()}
    many["down"]["kernel"] = many["down"]["kernel"] / scale[:, None]
    few = {flag: fusing.compressed(many, "fusion", 12, canonical=flag) for flag in (True, False)}
    x = rng.normal(size=(7, 5))
    with jax.enable_x64(True):
        expected, *outputs = (
            fusing.output(one, x, ACTIVATIONS["silu"]) for one in (many, *few.values())
        )
        errors = {flag: fusing.apart(one, expected) for flag, one in zip(few, outputs, strict=True)}
    assert errors[True] < 1e-12 < 0.05 < errors[False]
    rows = canonical(rows_of(many, 0))
    up = np.concatenate([rows["up", "kernel"], rows["up", "bias"]], 1)
    np.testing.assert_allclose(
        *(np.linalg.norm(side, axis=1) for side in (up, rows["down", "kernel"]))
    )


@fusing.KINDS
def test_rows_are_the_block_and_back(gated):
    ffn = fusing.block(gated)
    rows = rows_of(ffn, 0)
    points = joined(rows)
    assert points.shape == (12, 5 + 5 + 1 + (6 if gated else 0))
    for key, row in split(points, rows).items():
        np.testing.assert_array_equal(row, rows[key])
    column = 6 if gated else 0
    np.testing.assert_array_equal(points[3, column : column + 5], ffn["up"]["kernel"][:, 3])
    np.testing.assert_array_equal(points[3, -5:], ffn["down"]["kernel"][3])


def test_sketches_are_normal_mixtures_and_the_hybrid_keeps_the_loudest():
    """One-hot neurons make a sketch S itself, with variance 1 / c."""
    m, c = 600, 90
    rows = {("up", "kernel"): np.eye(m), ("down", "kernel"): np.arange(1, m + 1.0)[:, None]}
    mix = METHODS["sketch"](rows, c, Fusion(), 3).rows["up", "kernel"]
    assert mix.shape == (c, m) and mix.std() == pytest.approx(c**-0.5, rel=0.01)
    assert abs(mix.mean()) < 4 / (c * m) ** 0.5 / c**0.5
    made = METHODS["hybrid_sketch"](rows, c, Fusion(), 3).rows
    np.testing.assert_array_equal(made["down", "kernel"][:30, 0], np.arange(m - 29, m + 1))
    rest = made["up", "kernel"][30:]
    assert not rest[:, m - 30 :].any() and rest[:, : m - 30].std() == pytest.approx(60**-0.5, 0.01)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_massive_neurons_are_spared(method):
    model = fusing.model_of()
    few, report = fusing.fused(model, method=method, ratio=0.5, spare=3)
    widths = set(report["ffn_widths_after"])
    assert widths == {width // 2 for width in model.config.ffn_widths}
    massive = massive_weights(model.config, model.params)
    before, after = (unstack(one.params)["layers"][massive.layer]["ffn"] for one in (model, few))
    spared = np.asarray(after["down"]["kernel"])[:3]
    np.testing.assert_array_equal(spared, np.asarray(before["down"]["kernel"])[massive.indices[:3]])
    if method == "fusion":
        assert (np.asarray(after["neuron_scale"])[:3] == 1).all()


def test_only_the_layers_named_are_compressed_and_nothing_given_changes():
    model = fusing.model_of()
    before = jax.tree.map(np.copy, model.params)
    few, report = fusing.fused(model, method="fusion", ratio=0.5, layers="1")
    widths = [w // 2 if i == 1 else w for i, w in enumerate(model.config.ffn_widths)]
    assert report["ffn_widths_after"] == widths == list(few.config.ffn_widths)
    jax.tree.map(np.testing.assert_array_equal, model.params, before)
    again, _ = fusing.fused(model, method="fusion", ratio=0.5, layers="1")
    jax.tree.map(np.testing.assert_array_equal, few.params, again.params)
    assert np.isfinite(fusing.logits(few)).all()


# ---- files and errors


def test_p_is_kept_by_a_save_and_multiplied_in_for_others(tmp_path):
    save_tiny(tmp_path / "tiny", dataclasses.replace(LLAMA))
    flags = [f"--config.model={tmp_path}/tiny", "--config.ratio=0.5", "--config=configs/fuse.py"]
    for name, export in (("kept", "auto"), ("padded", "padded")):
        done = run_script("compress", *flags, workdir=tmp_path / name, export=export)
        total = count_parameters(LLAMA)["total"]
        assert done.code == 0 and f"compressed by fusion: {total:,} -> " in done.out, done.err
    native, padded = (load_model(f"{tmp_path}/{name}/model") for name in ("kept", "padded"))
    scales = [layer["ffn"].get("neuron_scale") for layer in unstack(native.params)["layers"]]
    assert all(scale is not None and scale.sum() == 24 for scale in scales)
    assert all("neuron_scale" not in layer["ffn"] for layer in unstack(padded.params)["layers"])
    np.testing.assert_allclose(fusing.logits(native), fusing.logits(padded), atol=1e-5)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"method": "kmeans"}, "method='kmeans': choose one of"),
        ({"ratio": 1.0}, r"ratio=1.0 must be a number in \[0, 1\)"),
        ({"n_init": 0}, "n_init=0 must be a number in"),
        ({"steps": -1}, "steps=-1 must be a number in"),
        ({"layers": "9"}, "layer 9 is out of range"),
        ({"spare": 2, "method": "svd"}, "spare=2: svd keeps every neuron"),
        ({"canonical": True, "method": "unstructured"}, "canonical=True: unstructured keeps every"),
        ({"spare": 20, "ratio": 0.5}, "layer .: of 24 neurons 20 are spared, and none is left"),
    ],
)
def test_bad_settings_are_refused(settings_, words):
    refused(words, fusing.fused, fusing.model_of(), **settings_)


def test_blocks_that_cannot_be_fused_are_named():
    adapted, _ = SURGERIES["lora"](fusing.model_of(), {"targets": "layers/2/ffn/up"})
    refused(r"layer 2 has ffn/up/lora_a: fold the model first", fusing.fused, adapted)
    twice, _ = fusing.fused(fusing.model_of(), ratio=0.25)
    refused(r"layer 0 has ffn/neuron_scale: fold the model first", fusing.fused, twice)
    folded, _ = SURGERIES["fold"](twice, {})
    assert fusing.fused(folded, ratio=0.5)[1]["inertia_share"] > 0
    with pytest.raises(ValueError, match="layer 0: canonical=True needs a gated block"):
        fusing.fused(fusing.model_of(tiny_of("bert")), canonical=True)
    bad = jax.tree.map(np.array, fusing.model_of().params)
    for leaf in jax.tree.leaves(bad):
        leaf[..., -1] = np.nan
    refused("layer 0: ffn/down/kernel holds NaN", fusing.fused, fusing.model_of(params=bad))
