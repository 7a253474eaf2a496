"""Removal of neurons that resemble another, with merging (Srinivas & Babu 2015).

The saliency of removing neuron j and merging it into i is

    s_ij = mean_k(W_jk^2) |e_i - e_j|^2,

where e is a neuron's incoming vector (`weights.incoming`) and W_j its outgoing weights. Each step
finds the pair of least saliency, adds W_j to W_i and removes j. Ties go to the lowest i, then to
the lowest j: the first minimum of the matrix s with one row per survivor.

min_i s_ij is mean(W_j^2) times the distance of j to its nearest neighbor, so no matrix is needed:
a merge changes one scalar, and only neurons whose nearest neighbor was removed search again.
"""

import numpy as np

from ffn_heterogeneity.surgery.neighbours import Neighbours, duplicate_groups
from ffn_heterogeneity.surgery.weights import Outgoing, incoming, outgoing, power_of_two


def merges(ffn: dict, count: int) -> np.ndarray:
    """Return (survivor i, removed j) of each step, in order, int [count, 2].

    A survivor may be removed in a later step.

    Raises:
      ValueError: non-finite weights, or no neuron would remain.
    """
    (vectors, _), weights = incoming(ffn), outgoing(ffn)
    if not 0 <= count < len(vectors):
        raise ValueError(f"count={count} must be a number in [0, {len(vectors)})")
    state = _Merging(vectors, weights)
    return np.array([state.step() for _ in range(count)], np.int64).reshape(-1, 2)


class _Merging:
    """The remaining neurons, and the state that the next merge needs.

    Saliencies of zero need no distances: they belong to neurons whose outgoing weights are zero and
    to equal incoming vectors. Distances are computed only when no such neurons remain.
    """

    def __init__(self, vectors: np.ndarray, weights: Outgoing):
        m = len(vectors)
        self.vectors, self.weights = vectors, weights
        # W is divided by a power of two, so that squares of tiny weights do not underflow.
        largest = 1.0 if weights.scale is None else float(np.abs(weights.scale).max())
        self.exponent = power_of_two(weights.kernel) + int(np.frexp(largest)[1])
        self.merged: dict[int, np.ndarray] = {}  # rows of W that merges have changed
        self.squares = np.empty(m)  # mean_k W_jk^2
        for block, rows in weights.blocks():
            rows = np.ldexp(rows, -self.exponent)
            self.squares[block] = np.einsum("mn,mn->m", rows, rows) / rows.shape[1]
        self.alive = np.ones(m, bool)
        self.group = duplicate_groups(vectors)
        self.members = np.bincount(self.group, minlength=m)  # number of remaining neurons per group
        self.costless = True  # there may be saliencies of zero
        self.neighbours: Neighbours | None = None
        self.near = np.full(m, -1)
        self.distance = np.full(m, np.inf)
        self.saliency = np.full(m, np.inf)

    def step(self) -> tuple[int, int]:
        """Merge the pair of least saliency; return (survivor, removed)."""
        pair = self._without_cost() if self.costless else None
        self.costless = pair is not None
        survivor, removed = pair or self._cheapest()
        row = self._row(survivor) + self._row(removed)
        self.merged[survivor] = row
        self.merged.pop(removed, None)
        self.squares[survivor] = np.einsum("n,n->", row, row) / row.size
        self.costless |= self.squares[survivor] == 0
        if self.neighbours is not None:
            self.saliency[survivor] = self.squares[survivor] * self.distance[survivor]
        self._remove(removed)
        return survivor, removed

    def _row(self, neuron: int) -> np.ndarray:
        if neuron in self.merged:
            return self.merged[neuron]
        return np.ldexp(self.weights.rows(np.array([neuron]))[0], -self.exponent)

    def _without_cost(self) -> tuple[int, int] | None:
        """The first (i, j) with saliency 0."""
        dead = np.flatnonzero(self.alive & (self.squares == 0))
        twins = self.alive & (self.members[self.group] > 1)
        if dead.size:
            # Any survivor will do: the first, or the second if the first is to be removed.
            candidates = np.flatnonzero(self.alive)[:2]
        elif twins.any():
            candidates = np.flatnonzero(twins)[:1]
        else:
            return None
        for i in candidates:
            equal = np.flatnonzero(self.alive & (self.group == self.group[i]))
            removed = np.union1d(dead, equal)
            removed = removed[removed != i]
            if removed.size:
                return int(i), int(removed[0])
        return None

    def _cheapest(self) -> tuple[int, int]:
        if self.neighbours is None:
            self.neighbours = Neighbours(self.vectors, self.alive)
            self._look(np.flatnonzero(self.alive))
        tied = np.flatnonzero(self.saliency == self.saliency.min())
        removed = tied[np.lexsort((tied, self.near[tied]))[0]]
        return int(self.near[removed]), int(removed)

    def _look(self, columns: np.ndarray) -> None:
        """Find the nearest neighbors of `columns`."""
        if columns.size and self.alive.sum() > 1:
            self.near[columns], self.distance[columns] = self.neighbours.nearest(columns)
            self.saliency[columns] = self.squares[columns] * self.distance[columns]

    def _remove(self, neuron: int) -> None:
        self.alive[neuron] = False
        self.members[self.group[neuron]] -= 1
        self.saliency[neuron] = np.inf
        if self.neighbours is not None:
            self.neighbours.remove(neuron)
            self._look(np.flatnonzero(self.alive & (self.near == neuron)))
