"""MLP Fusion's baselines that keep every neuron: truncated SVD, and weights taken out one by one.

A method is (blocks, kept share of their weights) -> the new blocks; `Place`s stay.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.adapters import low_rank
from ffn_heterogeneity.models.leaves import Place

Blocks = Mapping[Place, dict]


def svd(blocks: Blocks, share: float) -> dict[Place, dict]:
    """Each kernel [n, k] as factors of rank floor(share n k / (n + k)), both of which train.

    The factors then have at most that share of the kernel's parameters; the paper's 4 / 5 s p is
    this at k = 4 n. The rank is at least 1.
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


def unstructured(blocks: Blocks, share: float) -> dict[Place, dict]:
    """A fixed mask on every kernel: the weights of largest size stay, over all blocks together.

    Of weights of one size at the border all stay; what a mask took out before stays out.
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


def highest_share(values: Sequence[np.ndarray], share: float) -> list[np.ndarray]:
    """True where a value stays: the highest of all arrays together, equals at the border too."""
    every = np.concatenate([own.ravel() for own in values])
    gone = math.floor((1 - share) * every.size + 1e-9)
    border = np.partition(every, gone)[gone] if gone else -np.inf
    return [own >= border for own in values]


MASKED = "unstructured"
ENTRIES: dict[str, Callable[[Blocks, float], dict[Place, dict]]] = {
    "svd": svd,
    MASKED: unstructured,
}


def weights(ffn: Mapping[str, Any]) -> int:
    """Numbers of a block that count and train: unmasked weights, factors, biases; not P."""
    linears = [leaves for leaves in ffn.values() if isinstance(leaves, Mapping)]
    sizes = [leaf.size for leaves in linears for name, leaf in leaves.items() if name != "mask"]
    return sum(sizes) - masked_out(ffn)


def masked_out(ffn: Mapping[str, Any]) -> int:
    """Weights of a block that its masks take out."""
    linears = (leaves for leaves in ffn.values() if isinstance(leaves, Mapping))
    return sum(
        int((np.asarray(leaves["mask"]) == 0).sum()) for leaves in linears if "mask" in leaves
    )
