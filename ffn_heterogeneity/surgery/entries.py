"""MLP Fusion's baselines that keep every neuron: truncated SVD and masks on single weights.

A method is (blocks, kept share of their weights, model, seed) -> new blocks under the same
`Place`s.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.adapters import low_rank
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.surgery.ntk_sap import ntk_sap
from ffn_heterogeneity.surgery.selection import highest_share

Blocks = Mapping[Place, dict]


def svd(blocks: Blocks, share: float, model: Model, seed: int) -> dict[Place, dict]:
    """Replace each kernel [n, k] by two trainable factors of rank floor(share n k / (n + k)).

    The factors have at most that share of the kernel's parameters; at k = 4 n the rank is the
    paper's 4 / 5 s p. The rank is at least 1.
    """

    def factored(leaves: dict) -> dict:
        n, k = leaves["kernel"].shape
        rank = max(1, math.floor(share * n * k / (n + k) + 1e-9))
        rest = {name: leaf for name, leaf in leaves.items() if name != "kernel"}
        return low_rank.of_kernel(leaves["kernel"], rank) | rest

    return {
        place: {name: factored(leaves) for name, leaves in ffn.items()}
        for place, ffn in blocks.items()
    }


def unstructured(blocks: Blocks, share: float, model: Model, seed: int) -> dict[Place, dict]:
    """Put a fixed mask on every kernel that keeps the largest weights of all blocks together.

    Weights that were already masked stay masked.
    """
    named = [(place, name) for place, ffn in blocks.items() for name in ffn]
    every = (blocks[place][name] for place, name in named)
    sizes = [np.abs(np.asarray(x["kernel"]) * x.get("mask", 1)) for x in every]
    new: dict[Place, dict] = {place: {} for place in blocks}
    for (place, name), stays in zip(named, highest_share(sizes, share), strict=True):
        leaves = blocks[place][name]
        mask = stays & (leaves.get("mask", 1) != 0)
        new[place][name] = leaves | {"mask": mask.astype(leaves["kernel"].dtype)}
    return new


MASKS = {"unstructured": unstructured, "ntk_sap": ntk_sap}
ENTRIES: dict[str, Callable[[Blocks, float, Model, int], dict[Place, dict]]] = {"svd": svd, **MASKS}


def weights(ffn: Mapping[str, Any]) -> int:
    """Number of a block's trainable parameters: unmasked weights, factors and biases; not P."""
    linears = [leaves for leaves in ffn.values() if isinstance(leaves, Mapping)]
    sizes = [leaf.size for leaves in linears for name, leaf in leaves.items() if name != "mask"]
    return sum(sizes) - masked_out(ffn)


def masked_out(ffn: Mapping[str, Any]) -> int:
    """Number of a block's weights that its masks set to 0."""
    linears = (leaves for leaves in ffn.values() if isinstance(leaves, Mapping))
    return sum(
        int((np.asarray(leaves["mask"]) == 0).sum()) for leaves in linears if "mask" in leaves
    )
