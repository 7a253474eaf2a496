"""Removal of inner neurons: rows of W, columns of G and U, and their biases and factors."""

from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import Place, declared_at, neuron_axis
from ffn_heterogeneity.tree import flatten, unflatten


def take_neurons(config: ModelConfig, place: Place, ffn: dict, survivors: np.ndarray) -> dict:
    """Return the FFN leaves of a layer or an expert with only the neurons `survivors`, in order.

    Removing neuron i deletes row i of W, column i of G and U, and its biases (NUCL, section 4.2).
    The result computes exactly what the dense layer computes with those neurons' outputs zeroed.

    Args:
      config: the model's.
      place: which block; if it names no expert, each expert of the layer loses the same neurons.

    Raises:
      LeafError: an undeclared leaf, or one that removal does not support.
    """
    taken, leaves = {}, declared_at(config, place, ffn)
    for path, leaf in flatten(ffn).items():
        axis = neuron_axis(f"{place.path}/{path}", leaves[path])
        taken[path] = leaf if axis is None else _take(leaf, survivors, axis)
    return unflatten(taken)


def _take(leaf: Any, survivors: np.ndarray, axis: int) -> Any:
    """Take along an axis without copying a kernel that is stored transposed, as leaf.take would."""
    if isinstance(leaf, np.ndarray) and leaf.ndim == 2 and leaf.flags.f_contiguous:
        return leaf.T.take(survivors, axis=-3 - axis).T  # -1 <-> -2
    return leaf.take(survivors, axis=axis)
