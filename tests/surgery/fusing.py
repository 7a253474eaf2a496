"""Blocks and models to be compressed, for the tests of MLP Fusion and its baselines."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import LLAMA, our_logits, random_params

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.walk import Place
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
    names = {"gate": (d, m), "up": (d, m), "down": (m, d)}
    return {
        name: {"kernel": rng.normal(size=shape).astype(dtype),
               "bias": rng.normal(size=shape[1]).astype(dtype)}
        for name, shape in names.items() if gated or name != "gate"
    }  # fmt: skip


def repeated(ffn, times):
    """The block with neuron i there times[i] times, in any order."""
    which = np.random.default_rng(2).permutation(np.repeat(np.arange(len(times)), times))
    new = {name: {leaf: x[..., which] for leaf, x in ffn[name].items()}
           for name in ("gate", "up") if name in ffn}  # fmt: skip
    down = {"kernel": ffn["down"]["kernel"][which], "bias": ffn["down"]["bias"]}
    return new | {"down": down}


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
