"""Where the kernels of a target are, layer by layer: shared by the terms on parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.stack import tree_segments


class Site(NamedTuple):
    """The leaves of one kernel, or of a stack of them, and the layers they belong to."""

    layers: tuple[int, ...]
    leaves: dict[str, jax.Array]
    stacked: bool


def pattern(place: str, chosen: frozenset[int] | None) -> str:
    """Matches the kernel at `place` and its adapters' leaves; never its bias."""
    listed = r"\d+" if chosen is None else "|".join(map(str, sorted(chosen)))
    return rf"^(?:stack/segment_\d+/slot_\d+|layers/(?:{listed}))/{place}/(?!bias$)[^/]+$"


def sites(params: dict, place: str) -> list[Site]:
    """Every kernel at `place`, stacked ones together."""
    if "stack" not in params:
        found = [(i, _descend(layer, place)) for i, layer in enumerate(params["layers"])]
        return [Site((i,), leaves, False) for i, leaves in found if leaves is not None]
    stacked = []
    for i, segment in enumerate(tree_segments(params["stack"])):
        for slot in range(segment.slots):
            leaves = _descend(params["stack"][f"segment_{i}"][f"slot_{slot}"], place)
            if leaves is not None:
                layers = tuple(segment.layer(slot, repeat) for repeat in range(segment.repeats))
                stacked.append(Site(layers, leaves, True))
    return stacked


def _descend(layer: dict, place: str) -> dict | None:
    for part in place.split("/"):
        if part not in layer:
            return None
        layer = layer[part]
    # The bias is no part of a kernel, and lax.map below would slice it for nothing.
    return {name: leaf for name, leaf in layer.items() if name != "bias"}


def layer_count(params: dict) -> int:
    """Layers of the tree, stacked or not."""
    if "stack" not in params:
        return len(params["layers"])
    return sum(segment.slots * segment.repeats for segment in tree_segments(params["stack"]))


def by_layer(site: Site, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`function` of every effective kernel, [layers of the site, ...]; it takes [..., m, n]."""

    def value(leaves):
        return function(effective_kernel(leaves))

    if not site.stacked:
        return value(site.leaves)[None]
    if set(site.leaves) == {"kernel"}:
        return value(site.leaves)
    # Layer by layer, recomputed for the backward pass: no stacked effective kernel ever exists.
    return jax.lax.map(jax.checkpoint(value), site.leaves)
