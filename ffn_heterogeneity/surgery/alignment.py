"""Alignment of experts: permutations of their neurons, means and barycenters of aligned experts.

An expert is its neurons' rows [m, p] (`neurons.rows_of`: incoming columns, biases, outgoing row).
Permuting the rows leaves the expert's outputs unchanged. Everything is float64 on the host; an
assignment of m neurons takes O(m^3).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ffn_heterogeneity.surgery import neurons

ROUNDS = 20  # of `barycenter`, at most


class Aligned(NamedTuple):
    """A barycenter [m, p], and the experts with their neurons in its order [E, m, p]."""

    center: np.ndarray
    experts: np.ndarray


def points_of(block: dict, layer: int) -> np.ndarray:
    """Return the neurons' rows of an expert, [m, p].

    Raises:
      ValueError: the block has adapters or neuron factors, or values that are not finite.
    """
    return neurons.joined(neurons.rows_of(block, layer)).astype(np.float64)


def block_from(points: np.ndarray, like: dict, layer: int) -> dict:
    """Build an expert from its neurons' rows, with the dtypes and the output bias of `like`."""
    return neurons.block_of(neurons.split(points, neurons.rows_of(like, layer)), like)


def matched(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the order of `other`'s rows that maximizes the sum of inner products with `reference`.

    It minimizes the squared distance |reference - other[order]|^2, too.
    """
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(reference @ other.T, maximize=True)[1]


def matched_by(*pairs: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return the order that minimizes the sum of distances between normalized rows, over all pairs.

    Args:
      pairs: (reference [m, .], other [m, .]), e.g. of weights and of states; zero rows stay zero.
    """
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(sum(_distances(*map(_unit, pair)) for pair in pairs))[1]


def _distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Distances between all rows; by products, because scipy's cdist is many times slower."""
    squares = np.sum(one**2, axis=1)[:, None] + np.sum(other**2, axis=1) - 2 * one @ other.T
    return np.sqrt(np.maximum(squares, 0))


def _unit(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)


def weighted_mean(
    blocks: Sequence[dict], weights: np.ndarray, orders: Sequence[np.ndarray], layer: int
) -> dict:
    """Return the weighted mean of experts whose neurons are taken in the given orders.

    Args:
      weights: not negative, with a positive sum.
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    points = sum(
        share * points_of(block, layer)[order]
        for share, block, order in zip(shares, blocks, orders, strict=True)
    )
    mean = block_from(np.asarray(points), blocks[0], layer)
    if "bias" in (down := mean["down"]):
        biases = np.stack([np.asarray(block["down"]["bias"], np.float64) for block in blocks])
        down["bias"] = (shares @ biases).astype(down["bias"].dtype)
    return mean


def barycenter(experts: np.ndarray) -> Aligned:
    """Return the mean of experts whose neurons are aligned to it, [E, m, p] -> `Aligned`.

    Alternates between assignment and mean, from the first expert on, until no order changes: the
    sum of squared distances never grows. (A free-support Wasserstein barycenter of m points with
    equal masses; the result is a local minimum.)
    """
    center, orders = experts[0], None
    for _ in range(ROUNDS):
        before, orders = orders, np.stack([matched(center, expert) for expert in experts])
        aligned = np.take_along_axis(experts, orders[:, :, None], axis=1)
        center = aligned.mean(axis=0)
        if before is not None and np.array_equal(before, orders):
            break
    return Aligned(center, aligned)
