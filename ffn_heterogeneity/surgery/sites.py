"""Where the feed-forward blocks of a model are: one a layer, or one an expert of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.models.stack import layer_leaves, unstack

# (layer, expert); the expert is None where a layer has one block.
Site = tuple[int, int | None]
# Subtrees of "ffn" that every expert has its own of; the others (a router) belong to the layer.
BLOCK = ("gate", "up", "down", "neuron_scale")


def ffn_sites(params: dict) -> Iterator[tuple[Site, dict]]:
    """(site, its FFN leaves, kernels [in, out]) of any tree, in order.

    Experts lie on a first axis of their own, kernels [E, in, out].
    """
    for layer, ffn in layer_leaves(params, "ffn"):
        block = {name: ffn[name] for name in BLOCK if name in ffn}
        if any("kernel" not in leaves for leaves in block.values() if isinstance(leaves, dict)):
            raise ValueError(f"layer {layer}: its FFN is quantised: fold the model first (surgery "
                             "fold)")  # fmt: skip
        if ffn["down"]["kernel"].ndim == 2:
            yield (layer, None), block
            continue
        for expert in range(ffn["down"]["kernel"].shape[0]):
            yield (layer, expert), jax.tree.map(lambda leaf, e=expert: leaf[e], block)


def write_sites(params: dict, new: Mapping[Site, Mapping[str, Any]]) -> dict:
    """The unstacked tree with the leaves of those sites replaced; the tree given is untouched.

    Raises:
      ValueError: some of a layer's experts alone, or experts of unlike shapes: they stay equally
        wide.
    """
    params = unstack(params)
    layers, found = list(params["layers"]), dict(ffn_sites(params))
    for layer in {layer for layer, _ in new}:
        parts = [new.get(site) for site in found if site[0] == layer]
        if None in parts:
            raise ValueError(f"layer {layer}: only some of its {len(parts)} experts are given")
        if (layer, None) in new:
            block = parts[0]
        else:
            try:
                block = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
            except ValueError as error:
                raise ValueError(f"layer {layer}: experts of unlike shapes: {error}") from None
        rest = {k: v for k, v in layers[layer]["ffn"].items() if k not in BLOCK}
        layers[layer] = {**layers[layer], "ffn": {**rest, **block}}
    return {**params, "layers": layers}
