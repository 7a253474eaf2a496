"""Removing inner neurons: rows of W, columns of G and U, and what belongs to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ffn_heterogeneity.paths import flatten, unflatten

# Axis that runs over the inner neurons, by leaf of "ffn"; None: the leaf has no such axis.
NEURON_AXIS: dict[str, int | None] = {
    "gate/kernel": -1, "gate/bias": -1, "gate/mask": -1,
    "up/kernel": -1, "up/bias": -1, "up/mask": -1,
    "down/kernel": -2, "down/mask": -2, "down/bias": None,
    "neuron_scale": -1,
}  # fmt: skip


def take_neurons(ffn: dict, kept: np.ndarray) -> dict:
    """The FFN leaves of one layer with only the neurons `kept`, in that order.

    Removing neuron i deletes row i of W, column i of G and U, and its biases (NUCL, section 4.2).
    The result computes exactly what the whole layer computes with those neurons' outputs zeroed.

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
