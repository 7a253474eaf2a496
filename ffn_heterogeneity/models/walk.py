"""The one walk over a tree's layers, stacked or not: where each `Linear` is, and writing it back.

What experts have of their own has the axis "expert" (models/leaves.py); how many there
are says the config, never a leaf's rank: codes and factors have ranks of their own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ffn_heterogeneity.adapters import FFN_LEAVES, is_linear
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import Place, declared_at
from ffn_heterogeneity.models.stack import layer_leaves, stack_leaves, unstack
from ffn_heterogeneity.tree import flatten, nodes, replaced, subtree, unflatten
from ffn_heterogeneity.wording import naming


def linears(config: ModelConfig, params: dict) -> Iterator[tuple[Place, dict]]:
    """(place, leaves of one kernel [in, out]) of every `Linear` of every layer, in order.

    Raises:
      LeafError: a leaf that nothing declares.
    """
    for layer, tree in enumerate(unstack(params)["layers"]):
        for name, own in nodes(tree, is_linear):
            yield from _by_expert(config, Place(layer, None, name), own)


def ffn_blocks(config: ModelConfig, params: dict) -> Iterator[tuple[Place, dict]]:
    """(place, leaves of one feed-forward block) of any tree, in order; the name is "ffn".

    Of a layer with experts one an expert, without what belongs to the layer (a router).

    Raises:
      LeafError: a leaf that nothing declares.
      ValueError: a quantised block.
    """
    for layer, ffn in layer_leaves(params, "ffn"):
        block = {name: own for name, own in ffn.items() if _of_block(name)}
        if any("kernel" not in leaves for leaves in block.values() if isinstance(leaves, dict)):
            raise ValueError(
                f"layer {layer}: its FFN holds codes or factors in place of kernels: fold the "
                "model first (surgery fold)"
            )
        yield from _by_expert(config, Place(layer, None, "ffn"), block)


def _of_block(name: str) -> bool:
    """True of what every expert has of its own."""
    return name in ("gate", "up", "down") or name in FFN_LEAVES


def _by_expert(config: ModelConfig, place: Place, tree: dict) -> Iterator[tuple[Place, dict]]:
    """(place, its part of the tree), one an expert; (place, the tree) of what has no such axis."""
    leaves = declared_at(config, place, tree)
    axes = {path: leaf.axis("expert") for path, leaf in leaves.items()}
    if not any(axes.values()):
        yield place, tree
        return
    for expert in range(config.layers[place.layer].experts or 0):

        def part(path: str, leaf: Any, expert=expert) -> Any:
            axis = axes[path]  # without it (a mask for all experts) the leaf is every expert's
            return leaf if axis is None else leaf[(slice(None),) * (leaf.ndim + axis) + (expert,)]

        own = {path: part(path, leaf) for path, leaf in flatten(tree).items()}
        yield place._replace(expert=expert), unflatten(own)


def write(config: ModelConfig, params: dict, new: Mapping[Place, Mapping[str, Any]]) -> dict:
    """The unstacked tree with the leaves at those places replaced; the tree given is untouched.

    Raises:
      ValueError: some of a layer's experts alone, or experts of unlike shapes: they stay equally
        wide.
    """
    params = unstack(params)
    layers = list(params["layers"])
    for layer, name in dict.fromkeys((place.layer, place.name) for place in new):
        before = subtree(layers[layer], name)
        whole = Place(layer, None, name)
        leaves: Any = new.get(whole)
        if leaves is None:
            experts = range(config.layers[layer].experts or 0)
            parts = [new.get(whole._replace(expert=expert)) for expert in experts]
            if None in parts or not parts:
                raise ValueError(f"layer {layer}: only some of its {len(parts)} experts are given")
            with naming(f"layer {layer}: experts of unlike shapes"):
                leaves = jax.tree.map(stack_leaves, *parts)
        if name == "ffn":
            leaves = {k: v for k, v in before.items() if not _of_block(k)} | leaves
        layers[layer] = replaced(layers[layer], name, leaves)
    return {**params, "layers": layers}
