"""MLP Fusion inside experts: neurons with copies are fused without error, through the router."""

import dataclasses

import fusing
import jax
import numpy as np
import pytest
from tiny_models import LLAMA, random_params, tiny_of, with_experts

from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.tree import flatten, unflatten

NEURONS, COPIES = 6, 15
LAYERS = {"llama": "all", "switch": "encoder:sparse:all+decoder:sparse:all"}


def fewer(family: str):
    """Config in which each expert has NEURONS neurons; Switch's are ReLU, in both stacks."""
    if family == "llama":
        return with_experts(LLAMA.with_widths([NEURONS] * 4), 3, top_k=2)
    config = tiny_of("switch", 4)
    return config.with_widths([NEURONS if i in config.groups["sparse"] else 12 for i in range(4)])


def repeated(few):
    """A float64 model in which each expert has neuron i another number of times, 15 in all."""
    tree, rng = unstack(random_params(few, dtype=np.float64)), np.random.default_rng(0)
    widths = list(few.ffn_widths)
    for i, layer in enumerate(few.layers):
        if layer.experts is None:
            continue
        ffn, which, widths[i] = tree["layers"][i]["ffn"], [], COPIES
        for _ in range(layer.experts):
            times = 1 + rng.multinomial(COPIES - NEURONS, [1 / NEURONS] * NEURONS)
            which.append(rng.permutation(np.repeat(np.arange(NEURONS), times)))
        for name, axis in (("gate", 2), ("up", 2), ("down", 1)):
            if name in ffn:
                kernel, index = ffn[name]["kernel"], np.expand_dims(which, 3 - axis)
                ffn[name]["kernel"] = np.take_along_axis(kernel, index, axis)
    many = few.with_widths(widths)
    return fusing.model_of(many, restack(many, tree))


def value_and_kernels(model):
    """(A scalar of each of six rows [6], the sign and the SGD kernel [6, 6]) of sparse layers."""
    leaves = flatten(model.params)
    sparse = {p.rpartition("/ffn/")[0] for p in leaves if "/ffn/router/" in p}
    weights = {
        p: x
        for p, x in leaves.items()
        if p.rpartition("/ffn/")[0] in sparse and "/ffn/" in p and "neuron_scale" not in p
    }

    def of_row(weights, row):
        params = unflatten(leaves | weights)
        batch = {"tokens": row[None]}
        if model.config.kind == "encoder_decoder":
            batch["encoder_tokens"] = row[None, ::-1]
        options = RunOptions(compute_dtype=np.float64)
        seen = causal_lm.forward(model.config, params, batch, options=options)
        return jax.numpy.tanh(seen["hidden"]).sum()

    rows = np.random.default_rng(1).integers(2, 29, (6, 9)).astype(np.int32)
    with jax.enable_x64(True):
        leaves = {path: jax.numpy.asarray(x) for path, x in leaves.items()}
        both = jax.jit(jax.value_and_grad(of_row))
        values, grads = zip(*(both(weights, row) for row in rows), strict=True)
        assert any("router" in path for path in weights)
        flat = np.stack([np.concatenate([x.ravel() for x in g.values()]) for g in grads])
    return np.array(values), {"sign": flat @ np.sign(flat).T, "sgd": flat @ flat.T}


@pytest.mark.parametrize("family", LAYERS)
def test_fusion_keeps_outputs_and_the_sign_kernel_of_experts(family):
    """Appendix B with experts: P is of each expert, and the router's gradient is kept too."""
    few_config = fewer(family)
    many = repeated(few_config)
    before, kernels = value_and_kernels(many)

    def fused(method):
        asked = {"method": method, "ratio": 1 - NEURONS / COPIES, "layers": LAYERS[family]}
        few, _ = fusing.fused(many, **asked)
        assert few.config == few_config
        values, its_kernels = value_and_kernels(few)
        np.testing.assert_allclose(values, before, rtol=1e-12)
        return few, {name: fusing.apart(kernels[name], its_kernels[name]) for name in kernels}

    few, errors = fused("fusion")
    assert errors["sign"] < 1e-12 and errors["sgd"] > 0.05
    assert fused("merged")[1]["sign"] > 0.05
    if family == "switch":  # equation 15: exact for ReLU
        errors = fused("sqrt")[1]
        assert errors["sgd"] < 1e-12 and errors["sign"] > 0.01
    # P of another expert is another model.
    swapped = {
        p: np.roll(x, 1, -2) if "neuron_scale" in p else x for p, x in flatten(few.params).items()
    }
    other = dataclasses.replace(few, params=unflatten(swapped))
    assert np.abs(value_and_kernels(other)[0] - before).max() > 1e-3
