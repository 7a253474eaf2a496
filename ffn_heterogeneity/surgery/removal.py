"""Removing inner neurons: rows of W, columns of G and U, and what belongs to them."""

from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import Place, declared_at, neuron_axis
from ffn_heterogeneity.tree import flatten, unflatten


def take_neurons(config: ModelConfig, place: Place, ffn: dict, kept: np.ndarray) -> dict:
    """The FFN leaves of one layer, or of one of its experts, with only the neurons `kept`, in that
    order.

    Removing neuron i deletes row i of W, column i of G and U, and its biases (NUCL, section 4.2).
    The result computes exactly what the whole layer computes with those neurons' outputs zeroed.

    Args:
      config: of the model.
      place: of the block; without an expert in it each expert of a layer loses the same neurons.

    Raises:
      LeafError: a leaf that nothing declares, or that removal does not handle.
    """
    taken, leaves = {}, declared_at(config, place, ffn)
    for path, leaf in flatten(ffn).items():
        axis = neuron_axis(f"{place.path}/{path}", leaves[path])
        taken[path] = leaf if axis is None else _take(leaf, kept, axis)
    return unflatten(taken)


def _take(leaf: Any, kept: np.ndarray, axis: int) -> Any:
    """leaf.take, which would first copy a whole kernel that is stored as its transpose."""
    if isinstance(leaf, np.ndarray) and leaf.ndim == 2 and leaf.flags.f_contiguous:
        return leaf.T.take(kept, axis=-3 - axis).T  # -1 <-> -2
    return leaf.take(kept, axis=axis)
