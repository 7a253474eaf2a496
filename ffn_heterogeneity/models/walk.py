"""The one walk over a tree's layers, stacked or not: where each `Linear` is, and writing it back.

A place is (layer, expert, name), "ffn/down" of layer 3, say; the expert is None where a layer has
one block. What experts have of their own lies on a first axis of theirs, kernels [E, in, out].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from ffn_heterogeneity.adapters import FFN_LEAVES, is_linear
from ffn_heterogeneity.models.stack import layer_leaves, stack_leaves, unstack
from ffn_heterogeneity.paths import nodes, replaced, subtree
from ffn_heterogeneity.wording import naming

# What every expert of a layer has of its own; the rest of "ffn" (a router) belongs to the layer.
BLOCK = ("gate", "up", "down", *FFN_LEAVES)


class Place(NamedTuple):
    """The place of a subtree in a model."""

    layer: int
    expert: int | None
    name: str

    @property
    def path(self) -> str:
        """Its name as patterns see it: "layers/3/ffn/down"."""
        return f"layers/{self.layer}/{self.name}"


def linears(params: dict) -> Iterator[tuple[Place, dict]]:
    """(place, leaves of one kernel [in, out]) of every `Linear` of every layer, in order."""
    for layer, tree in enumerate(unstack(params)["layers"]):
        for name, leaves in nodes(tree, is_linear):
            for expert, own in _by_expert(leaves, leaves):
                yield Place(layer, expert, name), own


def ffn_blocks(params: dict) -> Iterator[tuple[Place, dict]]:
    """(place, leaves of one feed-forward block) of any tree, in order; the name is "ffn".

    Raises:
      ValueError: a quantised block.
    """
    for layer, ffn in layer_leaves(params, "ffn"):
        block = {name: ffn[name] for name in BLOCK if name in ffn}
        if any("kernel" not in leaves for leaves in block.values() if isinstance(leaves, dict)):
            raise ValueError(
                f"layer {layer}: its FFN holds codes or factors in place of kernels: fold the "
                "model first (surgery fold)"
            )
        for expert, own in _by_expert(block, block["down"]):
            yield Place(layer, expert, "ffn"), own


def _by_expert(tree: dict, linear: dict) -> Iterator[tuple[int | None, dict]]:
    """(expert, its part of the tree), as many as a `Linear` of it has; (None, the tree) of one."""
    kernel = linear.get("kernel")
    if kernel is None or len(kernel.shape) == 2:
        yield None, tree
        return
    for expert in range(kernel.shape[0]):
        yield expert, jax.tree.map(lambda leaf, e=expert: leaf[e], tree)


def write(params: dict, new: Mapping[Place, Mapping[str, Any]]) -> dict:
    """The unstacked tree with the leaves at those places replaced; the tree given is untouched.

    Raises:
      ValueError: some of a layer's experts alone, or experts of unlike shapes: they stay equally
        wide.
    """
    params = unstack(params)
    layers = list(params["layers"])
    for layer, name in dict.fromkeys((place.layer, place.name) for place in new):
        before = subtree(layers[layer], name)
        count = [e for e, _ in _by_expert(before, before.get("down", before))]
        parts = [new.get(Place(layer, expert, name)) for expert in count]
        if None in parts:
            raise ValueError(f"layer {layer}: only some of its {len(parts)} experts are given")
        leaves: Any = parts[0]
        if count != [None]:
            with naming(f"layer {layer}: experts of unlike shapes"):
                leaves = jax.tree.map(stack_leaves, *parts)
        if name == "ffn":
            leaves = {k: v for k, v in before.items() if k not in BLOCK} | leaves
        layers[layer] = replaced(layers[layer], name, leaves)
    return {**params, "layers": layers}
