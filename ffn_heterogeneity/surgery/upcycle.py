"""Upcycling (arXiv 2212.05055): experts as copies of a dense block.

Gates of sum 1 give the dense model for any router and any top_k, until the copies are trained.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.surgery.sparse_layers import (
    check_top_k,
    dense_blocks,
    with_experts,
    zero_router,
)
from ffn_heterogeneity.wording import check_numbers, settings_of


@dataclasses.dataclass(frozen=True)
class Upcycling:
    """Settings of `upcycle`.

    Attributes:
      experts: E, the number of copies.
      top_k: number of experts per token.
      layers: as `selection.layer_subset` reads it.
      noise: standard deviation of the router's values; 0: zeros.
      seed: seed of that noise.
    """

    experts: int = 8
    top_k: int = 2
    layers: str = "all"
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check_numbers(self, experts="[1, 4096]", noise="[0, inf)")
        check_top_k(self.top_k, self.experts)


def upcycle(model: Model, settings: Mapping[str, Any] | Upcycling, data=None, key=None) -> tuple:
    """Replace the block of the layers that `settings` name by E copies; same outputs.

    Also runs on shapes alone.

    Returns:
      (the model, a report as `partition`'s, with "noise").

    Raises:
      ValueError: settings out of range, a layer with experts or adapters, or non-finite weights.
    """
    asked = settings_of(Upcycling, settings)
    new = {}
    for layer, ffn in dense_blocks(model, asked.layers).items():
        router = zero_router(ffn, asked.experts, "linear")
        if asked.noise:
            drawn = np.random.default_rng([asked.seed, layer]).normal(size=router["kernel"].shape)
            router = {"kernel": (asked.noise * drawn).astype(router["kernel"].dtype)}
        copies = jax.tree.map(lambda leaf: leaf[None].repeat(asked.experts, axis=0), ffn)
        new[layer] = {**copies, "router": router}
    fields: dict[str, Any] = {"experts": asked.experts, "top_k": asked.top_k}
    fields |= {"gates": "renormalized", "shared": 0, "router": "linear"}
    return with_experts(model, new, fields, dataclasses.asdict(asked), {})
