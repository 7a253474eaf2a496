"""MLP Fusion inside experts: neurons with copies are fused without error, through the router."""

import dataclasses

import fusing
import jax
import numpy as np
from tiny_models import LLAMA, random_params, with_experts

from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.tree import flatten, unflatten

NEURONS, EXPERTS, COPIES = 6, 3, 15
FEW = with_experts(LLAMA.with_widths([NEURONS] * 4), EXPERTS, top_k=2)
MANY = FEW.with_widths([COPIES] * 4)


def repeated():
    """A float64 model of MANY; each expert has neuron i another number of times, 15 in all."""
    tree, rng = unstack(random_params(FEW, dtype=np.float64)), np.random.default_rng(0)
    for layer in tree["layers"]:
        ffn, which = layer["ffn"], []
        for _ in range(EXPERTS):
            times = 1 + rng.multinomial(COPIES - NEURONS, [1 / NEURONS] * NEURONS)
            which.append(rng.permutation(np.repeat(np.arange(NEURONS), times)))
        for name, axis in (("gate", 2), ("up", 2), ("down", 1)):
            kernel, index = ffn[name]["kernel"], np.expand_dims(which, 3 - axis)
            ffn[name]["kernel"] = np.take_along_axis(kernel, index, axis)
    return fusing.model_of(MANY, restack(MANY, tree))


def value_and_kernel(model):
    """(A scalar of each of six rows [6], sign kernel [6, 6]) of all weights of sparse layers."""
    leaves = flatten(model.params)
    weights = {p: x for p, x in leaves.items() if "/ffn/" in p and "neuron_scale" not in p}

    def of_row(weights, row):
        params = unflatten(leaves | weights)
        options = RunOptions(compute_dtype=np.float64)
        seen = causal_lm.forward(model.config, params, {"tokens": row[None]}, options=options)
        return jax.numpy.tanh(seen["hidden"]).sum()

    rows = np.random.default_rng(1).integers(2, 29, (6, 9)).astype(np.int32)
    with jax.enable_x64(True):
        leaves = {path: jax.numpy.asarray(x) for path, x in leaves.items()}
        both = jax.jit(jax.value_and_grad(of_row))
        values, grads = zip(*(both(weights, row) for row in rows), strict=True)
        assert any("router" in path for path in weights)
        flat = np.stack([np.concatenate([x.ravel() for x in g.values()]) for g in grads])
    return np.array(values), flat @ np.sign(flat).T


def test_fusion_keeps_outputs_and_the_sign_kernel_of_experts():
    """Appendix B with experts: P is of each expert, and the router's gradient is kept too."""
    many = repeated()
    few, _ = fusing.fused(many, method="fusion", ratio=1 - NEURONS / COPIES)
    assert few.config == FEW
    (before, kernel), (after, fused_kernel) = value_and_kernel(many), value_and_kernel(few)
    np.testing.assert_allclose(after, before, rtol=1e-12)
    assert fusing.apart(kernel, fused_kernel) < 1e-12
    merged, _ = fusing.fused(many, method="merged", ratio=1 - NEURONS / COPIES)
    values, merged_kernel = value_and_kernel(merged)
    np.testing.assert_allclose(values, before, rtol=1e-12)
    assert fusing.apart(kernel, merged_kernel) > 0.05
    # P of another expert is another model.
    swapped = {
        p: np.roll(x, 1, -2) if "neuron_scale" in p else x for p, x in flatten(few.params).items()
    }
    other = dataclasses.replace(few, params=unflatten(swapped))
    assert np.abs(value_and_kernel(other)[0] - before).max() > 1e-3
