"""Exact nearest neighbors among the incoming vectors of a layer, without an m x m matrix.

The nearest neighbor decides which neuron is removed, so distances are sums of squared differences
in float64. A matrix product in the vectors' dtype only selects candidate columns: its error is
bounded (|fl(a.b) - a.b| <= p u |a| |b|, u the unit roundoff), and the distance of every column that
could be nearest within that bound is computed exactly.
"""

import hashlib

import numpy as np

from ffn_heterogeneity.surgery.weights import blocks

# Columns cached for each vector. A neuron near to all others is often removed early, and all others
# then need their next neighbor: in the tested models none needed more than the 14th.
REMEMBERED = 32
# Elements of a block: a few of these are in memory at a time.
BLOCK = 1 << 21


def duplicate_groups(points: np.ndarray) -> np.ndarray:
    """Return, for each row of `points` [m, p], the lowest index of an equal row, int [m]."""
    first: dict[bytes, int] = {}
    groups = np.empty(len(points), np.int64)
    for i, row in enumerate(points):
        # Adding 0 turns -0.0, which is equal to 0.0, into 0.0.
        groups[i] = first.setdefault(hashlib.sha256((row + 0).tobytes()).digest(), i)
    return groups


class Neighbours:
    """Nearest living row of `points` for any row; rows die one by one.

    Attributes:
      points: [m, p] float32 or float64, no entry larger than 1.
      alive: [m] bool.
    """

    def __init__(self, points: np.ndarray, alive: np.ndarray, remembered: int = REMEMBERED):
        m, p = points.shape
        self.points, self.alive = points, alive.copy()
        self.squares = np.empty(m)
        for block in blocks((m, p), BLOCK):
            rows = points[block].astype(np.float64)
            self.squares[block] = np.einsum("mp,mp->m", rows, rows)
        limits = np.finfo(points.dtype)
        # 2 p u |a| |b| <= p u (|a|^2 + |b|^2), plus a few roundings outside the product; for
        # subnormal numbers the errors are absolute.
        self._relative = 1.01 * (p + 16) * float(limits.eps) / 2
        self._absolute = 4 * p * float(limits.tiny)
        width = min(remembered, m)
        self._columns = np.zeros((m, width), np.int32)
        # Lower bounds of squared distances, without the row's own share (`_bound`).
        self._lower = np.full((m, width), np.inf)
        # ... of every living column that is not cached: nothing is known yet.
        self._beyond = np.full(m, -np.inf)

    def remove(self, row: int) -> None:
        """Exclude `row` from all later searches."""
        self.alive[row] = False

    def nearest(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (index [r] of the nearest other living row, its squared distance [r] in float64).

        Ties go to the lowest index.

        Raises:
          ValueError: no other row is alive.
        """
        rows = np.asarray(rows, np.int64)
        if self.alive.sum() < 2:
            lonely = rows if not self.alive.any() else rows[self.alive[rows]]
            if lonely.size:
                raise ValueError(f"neuron {lonely[0]} has no neighbour left")
        index, distance = np.empty(len(rows), np.int64), np.empty(len(rows))
        known = self._beyond[rows] > -np.inf
        sure = np.zeros(len(rows), bool)
        if known.any():
            remembered = self._from_memory(rows[known])
            index[known], distance[known], sure[known] = remembered
        step = max(1, BLOCK // len(self.points))
        left = np.flatnonzero(~sure)
        for start in range(0, len(left), step):
            chunk = left[start : start + step]
            index[chunk], distance[chunk] = self._from_products(rows[chunk])
        return index, distance

    def _bound(self, rows: np.ndarray) -> np.ndarray:
        """The row's own share of the bound, which `_lower` does not include."""
        return (1 - self._relative) * self.squares[rows] - self._absolute

    def _from_memory(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(index, distance, whether they are certain) from the cached columns."""
        columns = self._columns[rows]
        lower = np.where(self.alive[columns], self._lower[rows], np.inf)
        lower += self._bound(rows)[:, None]
        index, distance = self._exact(rows, columns, lower)
        return index, distance, self._beyond[rows] + self._bound(rows) > distance

    def _from_products(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index, distance) from the products with all columns; updates the cache."""
        base = np.where(self.alive, (1 - self._relative) * self.squares, np.inf)
        lower = (-2 * self.points[rows]) @ self.points.T
        lower += base.astype(lower.dtype)
        lower[np.arange(len(rows)), rows] = np.inf
        width = self._columns.shape[1]
        if width < len(self.points):
            order = np.argpartition(lower, width, axis=1)
            beyond = np.take_along_axis(lower, order[:, width : width + 1], axis=1)[:, 0]
            columns = order[:, :width]
        else:
            columns = np.broadcast_to(np.arange(width), lower.shape)
            beyond = np.full(len(rows), np.inf)
        self._columns[rows] = columns
        self._lower[rows] = np.take_along_axis(lower, columns, axis=1)
        self._beyond[rows] = beyond
        index, distance, sure = self._from_memory(rows)
        if not sure.all():
            # More columns than fit the cache may be nearest: all of them are measured.
            some = rows[~sure]
            wide = lower[~sure] + self._bound(some)[:, None]
            everyone = np.broadcast_to(np.arange(len(self.points)), wide.shape)
            index[~sure], distance[~sure] = self._exact(some, everyone, wide)
        return index, distance

    def _exact(
        self, rows: np.ndarray, columns: np.ndarray, lower: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The nearest of `columns` [r, k], whose squared distances are at least `lower` [r, k]."""
        place = lower.argmin(axis=1)
        index = np.take_along_axis(columns, place[:, None], axis=1)[:, 0].astype(np.int64)
        distance = squared_distances(self.points, rows, index)
        dead = np.isinf(lower[np.arange(len(rows)), place])
        distance[dead] = np.inf
        maybe = (lower <= distance[:, None]) & ~np.isinf(lower)
        maybe[np.arange(len(rows)), place] = False
        row, place = np.nonzero(maybe)
        if not row.size:
            return index, distance
        others = columns[row, place].astype(np.int64)
        row = np.concatenate([np.arange(len(rows)), row])
        others = np.concatenate([index, others])
        measured = np.concatenate(
            [distance, squared_distances(self.points, rows[row[len(rows) :]], others[len(rows) :])]
        )
        best = least_of_rows(row, measured, others)
        return others[best], measured[best]


def squared_distances(points: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b|^2 [r] of pairs of rows of `points`, float64."""
    squared = np.empty(len(a))
    for block in blocks((len(a), points.shape[1]), BLOCK):
        difference = points[a[block]].astype(np.float64)
        difference -= points[b[block]]
        squared[block] = np.einsum("rp,rp->r", difference, difference)
    return squared


def least_of_rows(row: np.ndarray, value: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Positions of the least `value` of each `row`; ties go to the lowest `index`."""
    order = np.lexsort((index, value, row))
    return order[np.unique(row[order], return_index=True)[1]]
