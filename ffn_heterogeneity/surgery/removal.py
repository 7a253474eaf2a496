"""Removing inner neurons: rows of W, columns of G and U, and what belongs to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ffn_heterogeneity.adapters import leaf_axes
from ffn_heterogeneity.paths import flatten, unflatten

# Which side of an FFN's kernel its inner neurons are.
NEURONS = {"gate": "out", "up": "out", "down": "in"}


def neuron_axis(path: str, leaf: Any) -> int | None:
    """Axis that runs over the inner neurons, of a leaf of "ffn"; None: it has no such axis.

    Raises:
      ValueError: an unknown leaf, or one that removal would give another meaning.
    """
    module, _, name = path.rpartition("/")
    axes = leaf_axes().get(name)
    if axes == ("neurons",) and not module:
        return -1
    if module not in NEURONS or axes is None:
        raise ValueError(
            f"ffn/{path}: surgery does not know which axis runs over the neurons; give the leaf "
            "its axes in adapters/__init__.py"
        )
    if "picked" in axes or (name != "bias" and axes == ("out",) and NEURONS[module] == "in"):
        # Numbers of neurons, and lengths of columns over them, would mean others afterwards.
        raise ValueError(
            f"ffn/{path} stands for neurons that would go: fold the model first (surgery fold)"
        )
    # A mask of fewer axes stands for its kernel's last ones.
    axes = axes[len(axes) - leaf.ndim :]
    return axes.index(NEURONS[module]) - leaf.ndim if NEURONS[module] in axes else None


def take_neurons(ffn: dict, kept: np.ndarray) -> dict:
    """The FFN leaves of one layer with only the neurons `kept`, in that order.

    Removing neuron i deletes row i of W, column i of G and U, and its biases (NUCL, section 4.2).
    The result computes exactly what the whole layer computes with those neurons' outputs zeroed.

    Raises:
      ValueError: a leaf whose neuron axis is not known.
    """
    taken = {}
    for path, leaf in flatten(ffn).items():
        axis = neuron_axis(path, leaf)
        taken[path] = leaf if axis is None else _take(leaf, kept, axis)
    return unflatten(taken)


def _take(leaf: Any, kept: np.ndarray, axis: int) -> Any:
    """leaf.take, which would first copy a whole kernel that is stored as its transpose."""
    if isinstance(leaf, np.ndarray) and leaf.ndim == 2 and leaf.flags.f_contiguous:
        return leaf.T.take(kept, axis=-3 - axis).T  # -1 <-> -2
    return leaf.take(kept, axis=axis)
