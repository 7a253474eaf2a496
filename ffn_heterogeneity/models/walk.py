"""Iteration over a tree's layers, stacked or not: finding each `Linear`, and writing it back.

Leaves of experts have the axis "expert" (models/leaves.py). The number of experts is taken from the
config, never from a leaf's rank, because codes and factors have other ranks.
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
    """Iterate over (place, leaves of one kernel [in, out]) of every `Linear` of every layer.

    Raises:
      LeafError: an undeclared leaf.
    """
    for layer, tree in enumerate(unstack(params)["layers"]):
        for name, leaves in nodes(tree, is_linear):
            yield from _by_expert(config, Place(layer, None, name), leaves)


def ffn_blocks(config: ModelConfig, params: dict) -> Iterator[tuple[Place, dict]]:
    """Iterate over (place, leaves of one feed-forward block) of any tree; the name is "ffn".

    A layer with experts has one block per expert, without the layer's router.

    Raises:
      LeafError: an undeclared leaf.
      ValueError: a quantized block.
    """
    for layer, ffn in layer_leaves(params, "ffn"):
        yield from blocks_of(config, layer, ffn)


def blocks_of(config: ModelConfig, layer: int, ffn: dict) -> Iterator[tuple[Place, dict]]:
    """The blocks of one layer with the leaves `ffn`, as in `ffn_blocks`."""
    block = {name: entry for name, entry in ffn.items() if _of_block(name)}
    if any("kernel" not in leaves for leaves in block.values() if isinstance(leaves, dict)):
        raise ValueError(
            f"layer {layer}: its FFN holds codes or factors in place of kernels: fold the "
            "model first (surgery fold)"
        )
    yield from _by_expert(config, Place(layer, None, "ffn"), block)


def of_expert(config: ModelConfig, layer: int, ffn: dict, expert: int) -> dict:
    """The leaves of one expert of a layer; factors and masks in place of kernels are kept."""
    block = {name: entry for name, entry in ffn.items() if _of_block(name)}
    blocks = _by_expert(config, Place(layer, None, "ffn"), block)
    return next(leaves for place, leaves in blocks if place.expert == expert)


def _of_block(name: str) -> bool:
    """True for leaves that each expert has separately."""
    return name in ("gate", "up", "down") or name in FFN_LEAVES


def _by_expert(config: ModelConfig, place: Place, tree: dict) -> Iterator[tuple[Place, dict]]:
    """(place, its part of the tree) of each expert, or (place, the tree) without experts."""
    leaves = declared_at(config, place, tree)
    axes = {path: leaf.axis("expert") for path, leaf in leaves.items()}
    if not any(axes.values()):
        yield place, tree
        return
    for expert in range(config.layers[place.layer].experts or 0):

        def part(path: str, leaf: Any, expert=expert) -> Any:
            axis = axes[path]  # None: all experts share the leaf (e.g. a mask)
            return leaf if axis is None else leaf[(slice(None),) * (leaf.ndim + axis) + (expert,)]

        expert_leaves = {path: part(path, leaf) for path, leaf in flatten(tree).items()}
        yield place._replace(expert=expert), unflatten(expert_leaves)


def write(config: ModelConfig, params: dict, new: Mapping[Place, Mapping[str, Any]]) -> dict:
    """Return the unstacked tree with the leaves at those places replaced; the input is unchanged.

    Raises:
      ValueError: only some of a layer's experts, or experts of different shapes (all must be
        equally wide).
    """
    params = unstack(params)
    layers = list(params["layers"])
    for layer, name in dict.fromkeys((place.layer, place.name) for place in new):
        leaves = joined(config, Place(layer, None, name), subtree(layers[layer], name), new)
        layers[layer] = replaced(layers[layer], name, leaves)
    return {**params, "layers": layers}


def joined(
    config: ModelConfig, place: Place, before: dict, new: Mapping[Place, Mapping[str, Any]]
) -> dict:
    """Leaves of one layer's place from `new`: its own, or those of all its experts, stacked.

    Errors as `write`.

    Args:
      before: the earlier leaves; of an FFN, those that no single expert has are kept.
    """
    leaves: Any = new.get(place)
    if leaves is None:
        experts = range(config.layers[place.layer].experts or 0)
        parts = [new.get(place._replace(expert=expert)) for expert in experts]
        if None in parts or not parts:
            raise ValueError(
                f"layer {place.layer}: only some of its {len(parts)} experts are given"
            )
        with naming(f"layer {place.layer}: experts of unlike shapes"):
            leaves = jax.tree.map(stack_leaves, *parts)
    if place.name == "ffn":
        leaves = {k: v for k, v in before.items() if not _of_block(k)} | leaves
    return leaves
