"""Leaves times constants: controls of pre-training without and with JREG.

Adam's steps do not depend on the scale of a gradient. So a leaf that is multiplied by s once, with
a learning rate that is multiplied by s as well (`optimizer.rates`), trains like a leaf that the
forward pass multiplies by s: norms over sqrt(l) are LayerNorm Scaling (arXiv 2502.05795), and
smaller outgoing kernels of the last block are a model whose last layer cannot jump far. (But for
Adam's epsilon, clipping by the global norm, and weight decay, which the rate scales as well.)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.stack import layer_names
from ffn_heterogeneity.parallel.partition import by_layer, match_rules
from ffn_heterogeneity.tree import flatten, unflatten
from ffn_heterogeneity.wording import check_number, settings_of


@dataclasses.dataclass(frozen=True)
class Rescaling:
    """Settings of `rescale`; `factors`: (regex, factor) pairs, as `optimizer.rates`."""

    factors: tuple = ()

    def __post_init__(self):
        for pattern, factor in self.factors:
            check_number(f"rescale.factors: {pattern}", factor, "(-inf, inf)")


def rescale(model: Model, settings: Mapping[str, Any] | Rescaling, data=None, key=None) -> tuple:
    """Multiply every leaf by the factor of the first rule that matches its path; others stay.

    Also runs under `jax.eval_shape`.

    Returns:
      (the model, {"factors"}).

    Raises:
      ValueError: a factor that is no finite number, a rule that matches no leaf, or no regular
        expression; a norm that adds to its scale (Gemma); codes, indices or masks.
    """
    asked = settings_of(Rescaling, settings)
    leaves, offset = flatten(model.params), model.config.norm_offset
    factors = match_rules(asked.factors, layer_names(model.params), 1.0)
    norms = [path for path in leaves if path.endswith("norm/scale") and factors[path] != 1]
    if offset and norms:
        raise ValueError(
            f"rescale.factors: {norms[0]}: norms of {model.config.family} multiply by {offset:g} + "
            "scale, so a factor of the scale is none of the norm"
        )
    known = declared(model.config, model.params)
    if data := [path for path in leaves if factors[path] != 1 and not known[path].trains]:
        raise ValueError(
            f"rescale.factors: {data[0]} has no weights (codes, indices, a mask or a constant): "
            "fold the model first, or name its kernels"
        )
    changed = {
        path: _times(leaf, factors[path]) for path, leaf in leaves.items() if factors[path] != 1
    }
    params = unflatten(leaves | changed)
    report = {"factors": [list(rule) for rule in asked.factors]}
    return dataclasses.replace(model, params=params), report


def _times(leaf: Any, factor: Any) -> Any:
    """The leaf times a factor that is not rounded to the leaf's dtype; rounded once."""
    wide = leaf.astype(np.promote_types(leaf.dtype, np.float32))
    return (wide * by_layer(factor, wide)).astype(leaf.dtype)
