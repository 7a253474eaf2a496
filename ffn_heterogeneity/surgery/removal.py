"""Removing inner neurons: rows of W, columns of G and U, and what belongs to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.paths import flatten, unflatten
from ffn_heterogeneity.surgery.plan import Plan

# Axis that runs over the inner neurons, by leaf of "ffn"; None: the leaf has no such axis.
NEURON_AXIS: dict[str, int | None] = {
    "gate/kernel": -1, "gate/bias": -1, "gate/mask": -1,
    "up/kernel": -1, "up/bias": -1, "up/mask": -1,
    "down/kernel": -2, "down/mask": -2, "down/bias": None,
    "neuron_scale": -1,
}  # fmt: skip


def take_neurons(ffn: dict, kept: np.ndarray) -> dict:
    """The FFN leaves of one layer with only the neurons `kept`, in that order.

    Raises:
      ValueError: a leaf whose neuron axis is not known (an adapter surgery was not taught about).
    """
    taken = {}
    for path, leaf in flatten(ffn).items():
        if path not in NEURON_AXIS:
            raise ValueError(
                f"ffn/{path}: surgery does not know which axis runs over the neurons; merge the "
                "adapter first, or add it to NEURON_AXIS in surgery/removal.py"
            )
        axis = NEURON_AXIS[path]
        taken[path] = leaf if axis is None else _take(leaf, kept, axis)
    return unflatten(taken)


def _take(leaf: Any, kept: np.ndarray, axis: int) -> Any:
    """leaf.take, which would first copy a whole kernel that is stored as its transpose."""
    if isinstance(leaf, np.ndarray) and leaf.ndim == 2 and leaf.flags.f_contiguous:
        return leaf.T.take(kept, axis=-3 - axis).T  # -1 <-> -2
    return leaf.take(kept, axis=axis)


def remove_neurons(
    config: ModelConfig, params: dict, removed: Mapping[int, Sequence[int]]
) -> tuple[ModelConfig, dict]:
    """The model without the neurons `removed[layer]`; the input tree is untouched.

    Removing neuron i deletes row i of W, column i of G and U, and its biases (NUCL, section 4.2).
    The result computes exactly what the full model computes with those neurons' outputs zeroed.

    Args:
      params: unstacked (or stacked: it is unstacked first).

    Returns:
      (config with the new widths, unstacked params).

    Raises:
      ValueError: a layer or neuron out of range or named twice, or a layer left without neurons.
    """
    params = unstack(params)
    layers, widths = list(params["layers"]), list(config.ffn_widths)
    for layer, indices in removed.items():
        if not 0 <= layer < config.n_layers:
            raise ValueError(f"layer {layer} is out of range: 0 to {config.n_layers - 1}")
        gone = np.asarray(indices, dtype=np.int64).reshape(-1)
        width = widths[layer]
        if gone.size == 0:
            continue
        if gone.min() < 0 or gone.max() >= width:
            raise ValueError(f"layer {layer}: a neuron in {gone.tolist()} is not in 0..{width - 1}")
        if np.unique(gone).size < gone.size:
            raise ValueError(f"layer {layer}: a neuron is named twice in {gone.tolist()}")
        if gone.size == width:
            raise ValueError(f"layer {layer}: all {width} neurons would go; leave at least one")
        kept = np.setdiff1d(np.arange(width), gone)
        layers[layer] = {**layers[layer], "ffn": take_neurons(layers[layer]["ffn"], kept)}
        widths[layer] = int(kept.size)
    return config.with_widths(widths), {**params, "layers": layers}


def choose_neurons(
    config: ModelConfig,
    params: dict,
    *,
    criterion: str,
    ratio: float | None = None,
    count: int | None = None,
    layers: str | Sequence[int] = "all",
    budget: str = "layer",
    reverse: bool = False,
    seed: int = 0,
) -> dict[int, np.ndarray]:
    """Which neurons a criterion removes: {layer: ascending indices}, chosen layers only.

    Args:
      budget: "layer" (each chosen layer loses its share) or "global" (one budget over them all).
      Others as in `layer_scores`, `layer_subset`, `removal_count`.

    Raises:
      ValueError: an argument is out of its range; the message names it and the value.
    """
    plan = Plan(criterion, ratio, count, layers, budget, reverse, seed)
    trees = unstack(params)["layers"]
    cuts = plan.cuts(config.ffn_widths, lambda layer: trees[layer]["ffn"])
    return {i: plan.choose(trees[i]["ffn"], i, cut)[0] for i, cut in cuts.items()}
