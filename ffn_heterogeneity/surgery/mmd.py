"""Support points of a layer's neurons, by maximum mean discrepancy (MLP Fusion, appendix B-B).

c points y start at rows x of the m neurons and are moved to minimize

    MMD^2 = mean k(x, x') - 2 mean k(x, y) + mean k(y, y').

The means are over all pairs, including each point with itself. The paper does not specify the
kernel; the authors' code uses sum over b of exp(-d / b), where d is the Euclidean distance and
b = 1, 2, 4, 8, 16 times a quarter of the mean distance between two of the m + c points. The base
is recomputed at each step and is not differentiated.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ffn_heterogeneity.surgery.kmeans import ZERO

RATE, DECAY = 1e-2, 1e-2  # AdamW's: the authors' code, PyTorch's default


def support_points(
    points: np.ndarray, c: int, *, steps: int = 100, seed: int = 0
) -> tuple[np.ndarray, float, float]:
    """Return (c points [c, p], MMD^2 at the start, at the end), by float32 AdamW on all points.

    Args:
      points: [m, p], m >= c.
      steps: AdamW steps; 0: the initial rows.
    """
    rows = np.random.default_rng(seed).permutation(len(points))[:c]
    data = jnp.asarray(points, jnp.float32)
    support, first, last = _moved(data, data[rows], steps)
    return np.asarray(support), float(first), float(last)


def discrepancy(x: jax.Array, y: jax.Array) -> jax.Array:
    """MMD^2 of two sets of points, [m, p] and [c, p]."""
    within, between, among = _distances(x, x), _distances(x, y), _distances(y, y)
    base = jax.lax.stop_gradient(_base(within.sum(), between, among))
    xx, xy, yy = (_kernel(one, base).mean() for one in (within, between, among))
    return xx - 2 * xy + yy


@functools.partial(jax.jit, static_argnames="steps")
def _moved(x: jax.Array, y: jax.Array, steps: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Optimize y; the x are fixed, so only the sum of their pairwise distances is needed."""
    optimizer, within = optax.adamw(RATE, weight_decay=DECAY), _distances(x, x).sum()

    def loss(y):
        between, among = _distances(x, y), _distances(y, y)
        base = jax.lax.stop_gradient(_base(within, between, among))
        return _kernel(among, base).mean() - 2 * _kernel(between, base).mean()

    def step(carry, _):
        y, state = carry
        updates, state = optimizer.update(jax.grad(loss)(y), state, y)
        return (y + updates, state), None

    (moved, _), _ = jax.lax.scan(step, (y, optimizer.init(y)), length=steps)
    return moved, discrepancy(x, y), discrepancy(x, moved)


def _distances(a: jax.Array, b: jax.Array) -> jax.Array:
    """Euclidean distances [m, c]; the gradient at distance 0 is 0 (sqrt's would be infinite)."""
    sums = jnp.sum(a * a, 1)[:, None] + jnp.sum(b * b, 1)
    squares = sums - 2 * jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)
    apart = squares > ZERO * sums
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, squares, 1.0)), 0.0)


def _base(within: jax.Array, between: jax.Array, among: jax.Array) -> jax.Array:
    m, c = between.shape
    pairs = (m + c) * (m + c - 1)
    base = (within + 2 * between.sum() + among.sum()) / pairs / 4
    return jnp.where(base > 0, base, 1.0)  # 0: all points are equal


def _kernel(distances: jax.Array, base: jax.Array) -> jax.Array:
    """Sum of exp(-d / (16 base)) and its powers 2, 4, 8, 16."""
    total = power = jnp.exp(-distances / (16 * base))
    for _ in range(4):
        power = power * power
        total = total + power
    return total
