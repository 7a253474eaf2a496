"""Effective kernels for losses on weights, by layer; stacked ones together."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.stack import slots
from ffn_heterogeneity.tree import subtree


class Kernels(NamedTuple):
    """The leaves of one kernel, or of a stack of them, and the layers they belong to."""

    layers: tuple[int, ...]
    leaves: dict[str, jax.Array]
    stacked: bool


def pattern(place: str, chosen: frozenset[int] | None) -> str:
    """Regex for the kernel at `place` and its adapters' leaves, but not its bias."""
    listed = r"\d+" if chosen is None else "|".join(map(str, sorted(chosen)))
    return rf"^(?:stack/segment_\d+/slot_\d+|layers/(?:{listed}))/{place}/(?!bias$)[^/]+$"


def kernels(params: dict, place: str) -> list[Kernels]:
    """Every kernel at `place` ("ffn/down"), stacked ones together."""
    result = []
    for slot in slots(params):
        leaves = subtree(slot.tree, place)
        if leaves is not None:
            # Without the bias, which lax.map below would slice unnecessarily.
            leaves = {name: leaf for name, leaf in leaves.items() if name != "bias"}
            result.append(Kernels(slot.layers, leaves, slot.stacked))
    return result


def layer_count(params: dict) -> int:
    """Layers of the tree, stacked or not."""
    return sum(len(slot.layers) for slot in slots(params))


def by_layer(stack: Kernels, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Apply `function`, which takes [..., m, n], to every effective kernel: [layers, ...]."""

    def value(leaves):
        return function(effective_kernel(leaves))

    if not stack.stacked:
        return value(stack.leaves)[None]
    if set(stack.leaves) == {"kernel"}:
        return value(stack.leaves)
    # Layer by layer, recomputed for the backward pass: no stacked effective kernel ever exists.
    return jax.lax.map(jax.checkpoint(value), stack.leaves)
