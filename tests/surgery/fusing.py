"""Blocks and models to be compressed, for the tests of MLP Fusion and its baselines."""

import jax
import numpy as np
import pytest
from tiny_models import LLAMA, our_logits, random_params

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.fuse import Fusion, fuse_block

TOKENS = np.random.default_rng(1).integers(2, 29, (2, 9))
CLUSTERED = ("fusion", "merged", "sqrt")
KINDS = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
FIRST, NOBODY = Place(0, None, "ffn"), np.zeros(0, int)


def model_of(config=LLAMA, params=None) -> Model:
    return Model(config, random_params(config) if params is None else params, None, "")


def logits(model):
    return our_logits(model.config, model.params, TOKENS)


def fused(model, **settings):
    return SURGERIES["fuse"](model, settings)


def block(gated, m=12, d=5, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    shapes = ({"gate": (d, m)} if gated else {}) | {"up": (d, m), "down": (m, d)}

    def leaves(shape):
        sizes = {"kernel": shape, "bias": shape[1]}
        return {leaf: rng.normal(size=size).astype(dtype) for leaf, size in sizes.items()}

    return {name: leaves(shape) for name, shape in shapes.items()}


def repeated(ffn, times):
    """The block with neuron i there times[i] times, in any order."""
    which = np.random.default_rng(2).permutation(np.repeat(np.arange(len(times)), times))
    down = {"kernel": ffn["down"]["kernel"][which], "bias": ffn["down"]["bias"]}
    others = {name: leaves for name, leaves in ffn.items() if name in ("gate", "up")}
    return jax.tree.map(lambda x: x[..., which], others) | {"down": down}


def output(ffn, x, act):
    """The formula, in the dtype of the leaves."""

    def linear(name, y):
        return y @ ffn[name]["kernel"] + ffn[name]["bias"]

    up = linear("up", x)
    h = act(linear("gate", x)) * up if "gate" in ffn else act(up)
    return linear("down", h * ffn.get("neuron_scale", 1.0))


def apart(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(one)


def compressed(ffn, method, c, **settings):
    m = ffn["down"]["kernel"].shape[0]
    asked = Fusion(method=method, ratio=1 - c / m, **settings)
    return fuse_block(ffn, FIRST, asked, NOBODY)[0]
