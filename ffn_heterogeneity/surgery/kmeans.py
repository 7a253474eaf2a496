"""k-means on a layer's neurons, fast if there are about as many neurons as coordinates.

An FFN has m neurons of p coordinates (p about m / 2) and c clusters, c a large share of m. So the
inner products of all pairs, K = X X^T [m, m], are computed once for all starts: a step of greedy
k-means++ reads a few rows of K, and a Lloyd step sums K's rows over each cluster,

    x_i . mu_k = mean_{j in k} K_ij,    |x_i - mu_k|^2 = K_ii - 2 x_i . mu_k + |mu_k|^2,

m^2 additions instead of m c p multiplications. If K does not fit in memory, or p is much smaller
than m, products of points and centroids are computed in chunks of rows (`products`).

Each start is one compiled program that returns to the host only after the last step. On several
devices, K's columns and the distances are sharded.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.surgery.weights import CACHED, blocks

MAX_STEPS, MAX_ASSIGNMENTS = 300, 50
TOLERANCE = 1e-4  # times the mean variance of a coordinate: as in scikit-learn (the paper's code)
ZERO = 1e-6  # a squared distance below this share of the norms is 0: duplicates stay duplicates
MAX_BYTES = 4 << 30  # of K
CHUNK = 1024  # rows per chunk of products, without K
_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Clusters(NamedTuple):
    """Clusters of m points, none of them empty.

    Attributes:
      labels: cluster of each point, int [m].
      centroids: means of their points, float64 [c, p].
      sizes: number of points in each, int [c].
      inertia: sum of the squared distances of the points to their centroids.
      share: inertia / sum of the points' squares; 0 where all of them are 0.
      steps: number of Lloyd steps of the best start.
    """

    labels: np.ndarray
    centroids: np.ndarray
    sizes: np.ndarray
    inertia: float
    share: float
    steps: int


def cluster(
    points: np.ndarray,
    c: int,
    *,
    starts: int = 1,
    seed: int = 0,
    seeds: np.ndarray | None = None,
    tolerance: float = TOLERANCE,
    products: bool | None = None,
    mesh: jax.sharding.Mesh | None = None,
    label: str = "",
) -> Clusters:
    """Run k-means `starts` times and return the clusters of lowest inertia; deterministic.

    Args:
      points: [m, p], finite. Distances are computed in float32; results are float64.
      seed: random seed.
      seeds: c initial points instead of random ones (one start).
      tolerance: Lloyd's algorithm ends when the sum of the centroids' squared moves is less than
        this times the mean variance of a coordinate, when no point moves, or after 300 steps.
      products: compute distances from products of points and centroids, not from K. None: do so if
        K exceeds 4 GiB, or p < m / 16.
      mesh: devices that share K's columns; one device if None, or with `products`.
      label: of the progress bar; "" hides it.

    Returns:
      Clusters, none empty: an empty cluster gets the point farthest from its centroid among those
      in clusters of several points. So with c = m every point is its own cluster.

    Raises:
      ValueError: c is outside 1 .. m, or a point is not finite.
    """
    m, p = points.shape
    if not 1 <= c <= m:
        raise ValueError(f"{c} clusters of {m} neurons: choose 1 to {m}")
    largest = float(np.abs(points).max())
    if not math.isfinite(largest):
        raise ValueError("a weight is NaN or infinite: check the checkpoint")
    if products is None:
        products = 4 * m * m > MAX_BYTES or 16 * p < m

    def run(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        first = _spread(data, key, c, products) if seeds is None else jnp.asarray(seeds)
        return _lloyd(data, first, c, products, tolerance, p)

    with jax.enable_x64(False):  # the same draws and clusters in any mode
        # Scaled by a power of two, so that squares neither vanish nor overflow; about their mean,
        # so that float32 is spent on how they differ.
        data = np.ldexp(points, -int(np.frexp(largest)[1]))
        data -= data.mean(0)
        data = jnp.asarray(data, jnp.float32)
        data = data if products else _gram(data, mesh)
        keys = jax.random.split(jax.random.key(seed), starts)
        shown = bar(label if len(keys) > 1 else "", keys, unit="start", leave=False)
        labels, _, steps = min(map(run, shown), key=lambda one: float(one[1]))
    return _clusters(points, np.asarray(labels), c, int(steps))


def _clusters(points: np.ndarray, labels: np.ndarray, c: int, steps: int) -> Clusters:
    order, sizes = np.argsort(labels, kind="stable"), np.bincount(labels, minlength=c)
    sums = np.add.reduceat(points[order], np.cumsum(sizes) - sizes, dtype=np.float64)
    centroids = sums / sizes[:, None]
    inertia = total = 0.0
    for block in blocks(points.shape, CACHED):
        rows = points[block].astype(np.float64)
        total += float(np.vdot(rows, rows))
        rows -= centroids[labels[block]]
        inertia += float(np.vdot(rows, rows))
    return Clusters(labels, centroids, sizes, inertia, inertia / total if total else 0.0, steps)


@functools.partial(jax.jit, static_argnames="mesh")
def _gram(points: jax.Array, mesh: jax.sharding.Mesh | None) -> jax.Array:
    gram = _dot(points, points.T)
    if mesh is None:
        return gram
    spec = jax.sharding.PartitionSpec(None, mesh.axis_names)
    return jax.lax.with_sharding_constraint(gram, jax.sharding.NamedSharding(mesh, spec))


def _norms(data: jax.Array, products: bool) -> jax.Array:
    return jnp.sum(data * data, 1) if products else jnp.diagonal(data)


@functools.partial(jax.jit, static_argnames=("c", "products"))
def _spread(data: jax.Array, key: jax.Array, c: int, products: bool) -> jax.Array:
    """Greedy k-means++: each next seed is the best of 2 + log c, drawn by squared distance.

    Args:
      data: K, or the points where `products`.

    Returns:
      Indices of the c initial points.
    """
    norms, trials = _norms(data, products), 2 + int(math.log(c))

    def distances(rows: jax.Array) -> jax.Array:
        inner = _dot(data[rows], data.T) if products else data[rows]
        sums = norms[rows, None] + norms
        apart = sums - 2 * inner
        return jnp.where(apart < ZERO * sums, 0.0, apart)

    def step(i, carry):
        seeds, closest, key = carry
        key, subkey = jax.random.split(key)
        sums = jnp.cumsum(closest)
        drawn = jax.random.uniform(subkey, (trials,)) * sums[-1]
        rows = jnp.searchsorted(sums, drawn, side="right", method="compare_all")
        rows = jnp.minimum(rows, len(norms) - 1)
        nearer = jnp.minimum(closest, distances(rows))
        best = jnp.argmin(nearer.sum(1))
        return seeds.at[i].set(rows[best]), nearer[best], key

    first, key = jax.random.split(key)
    seeds = jnp.zeros(c, jnp.int32).at[0].set(jax.random.randint(first, (), 0, len(norms)))
    return jax.lax.fori_loop(1, c, step, (seeds, distances(seeds[:1])[0], key))[0]


@functools.partial(jax.jit, static_argnames=("c", "products", "p"))
def _lloyd(
    data: jax.Array, seeds: jax.Array, c: int, products: bool, tolerance: float, p: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(labels [m], inertia, steps) from these seeds.

    A centroid is represented by its products with all points, [c, m]; with `products`, by its
    coordinates, [c, p].
    """
    norms = _norms(data, products)
    m = len(norms)
    least = tolerance * norms.mean() / p  # the points' mean is 0

    def nearest(centres, squares):
        """(label, |mu|^2 - 2 x . mu of it) of every point."""
        if not products:
            return _least(squares[:, None] - 2 * centres)

        def one(point):
            return _least(squares - 2 * _dot(centres, point))

        return jax.lax.map(one, data, batch_size=min(CHUNK, m))

    def means(labels):
        """(centroids, |mu|^2, sizes)."""
        sizes = jnp.zeros(c).at[labels].add(1.0)
        centres = jax.ops.segment_sum(data, labels, c) / sizes[:, None]
        if products:
            return centres, jnp.sum(centres**2, 1), sizes
        dots = centres[labels, jnp.arange(m)]
        return centres, jax.ops.segment_sum(dots, labels, c) / sizes, sizes

    def step(state):
        before, centres, squares, _, steps = state
        labels, score = nearest(centres, squares)
        inner = (squares[labels] - score) / 2
        labels = _filled(labels, norms + score, c)
        moved, new, sizes = means(labels)
        inner = jax.ops.segment_sum(inner, labels, c) / sizes
        shift = jnp.sum(jnp.maximum(new + squares - 2 * inner, 0))
        still = jnp.all(labels == before)
        return labels, moved, new, jnp.where(still, -1.0, shift), steps + 1

    def going(state):
        *_, shift, steps = state
        return (shift > least) & (steps < MAX_STEPS)

    start = (jnp.full(m, -1, jnp.int32), data[seeds], norms[seeds], jnp.inf, jnp.int32(0))
    _, centres, squares, _, steps = jax.lax.while_loop(going, step, start)
    labels, score = nearest(centres, squares)
    return _filled(labels, norms + score, c), jnp.sum(norms + score), steps


def _least(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(first index of the minimum along axis 0, the minimum); XLA's argmin is slow on CPUs."""
    least, index = scores.min(0), jnp.arange(len(scores), dtype=jnp.int32)
    index = index.reshape(-1, *(1,) * least.ndim)
    return jnp.where(scores == least, index, len(scores)).min(0), least


def _filled(labels: jax.Array, apart: jax.Array, c: int) -> jax.Array:
    """Fill empty clusters, in order, with the point that is farthest from its own centroid."""

    def sizes(labels):
        return jnp.zeros(c, jnp.int32).at[labels].add(1)

    def fill(labels):
        now = sizes(labels)
        farthest = jnp.argmax(jnp.where(now[labels] > 1, apart, -jnp.inf))
        return labels.at[farthest].set(jnp.argmin(now).astype(labels.dtype))

    return jax.lax.while_loop(lambda labels: sizes(labels).min() == 0, fill, labels)


# ---- clusters of equal size


def balanced(points: np.ndarray, c: int, seed: int = 0) -> tuple[np.ndarray, float]:
    """Balanced k-means: c clusters of exactly m / c points, from the centroids of plain k-means.

    Each step assigns the points so that the sum of the squared distances is least (scipy's
    `linear_sum_assignment` on every centroid repeated m / c times), and then computes the means. It
    ends when no point moves, or after 50 steps.

    Args:
      points: [m, p]; c divides m.

    Returns:
      (the cluster of each point, int [m]; the sum of the squared distances to the centroids over
      the sum of the points' squares).
    """
    from scipy.optimize import linear_sum_assignment

    points = points.astype(np.float64)
    size, labels = len(points) // c, np.full(len(points), -1)
    centroids = cluster(points, c, seed=seed).centroids
    for _ in range(MAX_ASSIGNMENTS):
        costs = np.sum(centroids**2, axis=1) - 2 * points @ centroids.T
        before, labels = labels, linear_sum_assignment(np.repeat(costs, size, axis=1))[1] // size
        centroids = np.stack([points[labels == one].mean(0) for one in range(c)])
        if np.array_equal(labels, before):
            break
    total = np.sum(points**2)
    return labels, float(np.sum((points - centroids[labels]) ** 2) / total) if total else 0.0
