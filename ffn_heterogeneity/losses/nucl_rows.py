"""NUCL statistics of rows: heterogeneity of each neuron's connections (Stahlberg & Kumar).

For a row w of n weights, with Z = sum |w|, r = |w| / Z and q = sum r^2 = (sum w^2) / Z^2:

    ent  = H(r) = log Z - (1/Z) sum |w| log |w|      dent/dw_j  = -sign(w_j) (log r_j + H) / Z
    gini = 1 - q                                     dgini/dw_j = -(2/Z) sign(w_j) (r_j - q)
    mstd = -std(r) = -sqrt((q - 1/n) / n)            dmstd/dw_j = -sign(w_j) (r_j - q) / (n s Z),
                                                     s = std(r) over the row (population)

Minimizing any of the three makes the row less uniform. The penalty is the SUM over rows and over
every targeted matrix of every layer (equation 6). Gradients are closed form: the forward pass reads
the weights once, the backward pass reads them once and writes the gradient once; three numbers per
row are saved in between.

Degenerate rows, where the paper's listing fails, are handled as follows: an all-zero row (a removed
or padded neuron) contributes 0 with gradient 0; a uniform row has mstd 0 with gradient 0; a weight
that is exactly 0 has gradient 0; rows of 1e-24 or 1e38 neither underflow nor overflow. Rows whose
largest weight is below about 1e-30 count as all-zero (1 / Z would overflow float32).

Rows sharded over the devices of a mesh use the form `sharded`: first Z, then the sums of r itself,
each one all-reduce of one number per row. It has no branch (a predicate over all rows would be a
third all-reduce, and its slow branch four more) and reads the weights once more; r is in range and
centered for any scale of the row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

VARIANTS = ("ent", "gini", "mstd")

# Rows with a coefficient of variation below this are computed with centered sums, because too many
# digits of q - 1/n would cancel. Gaussian weights have sqrt(pi/2 - 1) = 0.76.
_NEARLY_UNIFORM = 0.22


def nucl_rows(
    w: jax.Array, variant: str = "mstd", *, axis: int = -1, sharded: bool = False
) -> jax.Array:
    """One variant of NUCL for every row, differentiable in closed form.

    Args:
      w: [..., m, n] weights of any float dtype.
      variant: "ent" (nats), "gini" or "mstd" (both without unit).
      axis: axis of a distribution: -1, or -2 for one distribution per column. Neither needs a copy.
      sharded: whether the weights are sharded over several devices.

    Returns:
      [..., m] for axis -1, [..., n] for axis -2; float32 (float64 for float64 weights).

    Raises:
      ValueError: unknown variant or axis, or an empty row.
      TypeError: the weights are not real floating point numbers.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r}: choose one of {VARIANTS}")
    w = jnp.asarray(w)
    if axis not in (-1, -2) or w.ndim < -axis:
        raise ValueError(f"axis={axis} of weights {w.shape}: must be -1 or -2 and exist")
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"NUCL needs floating point weights, got {w.dtype}")
    if w.shape[axis] == 0:
        raise ValueError(f"weights {w.shape} have empty rows along axis {axis}")
    return _rows(w, variant, axis, sharded)


# Jitted so that a call outside of jit compiles once a shape; inside, XLA inlines it.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _rows(w, variant, axis, sharded):
    return _rows_fwd(w, variant, axis, sharded)[0]


def _rows_fwd(w, variant, axis, sharded):
    if variant == "ent":
        entropy, shift, inv = (_sharded_entropy if sharded else _entropy)(w, axis)
        return entropy, (w, shift, inv, inv)
    cv, inv, alive = (_sharded_variation if sharded else _variation)(w, axis)
    n = w.shape[axis]
    q = (1 + cv * cv) / n
    if variant == "gini":
        return jnp.where(alive, 1 - q, 0), (w, q, inv, jnp.full_like(q, 2))
    # n s is the coefficient of variation. It stays a separate factor from 1 / Z: their product
    # could leave float32 for a tiny and nearly uniform row.
    return -cv / n, (w, q, inv, jnp.where(cv > 0, 1 / jnp.where(cv > 0, cv, 1), 0))


def _rows_bwd(variant, axis, sharded, residuals, cotangent):
    del sharded
    w, shift, inv, factor = residuals
    x = w.astype(_wide(w))
    scale = jnp.expand_dims(-cotangent * inv, axis)
    shift, factor = jnp.expand_dims(shift, axis), jnp.expand_dims(factor, axis)
    if variant == "ent":
        # shift = (1/Z) sum |w| log |w|, so that log |w_j| - shift = log r_j + H.
        inner = jnp.log(jnp.where(x == 0, 1, jnp.abs(x))) - shift
    else:
        inner = (jnp.abs(x) * jnp.expand_dims(inv, axis) - shift) * factor
    # sign(0) = 0: |w| has no gradient at 0, so removed weights stay 0. Rows that count as all-zero
    # have scale 0.
    return ((inner * jnp.sign(x) * scale).astype(w.dtype),)


_rows.__wrapped__.defvjp(_rows_fwd, _rows_bwd)


# Per-row statistics. Each has a fast form for ordinary rows, with one read of the weights. If some
# row is out of its range, `lax.cond` runs a slower form, rescaled per row, for those.


def _variation(w, axis):
    """(std / mean of |w|, 1 / Z, not all-zero) along `axis`; both 0 for an all-zero row."""
    a = _magnitude(w)
    z, square = _sums(a, a * a, axis, longest=36)

    def fast(w, z, square):
        some = z > 0
        inv = jnp.where(some, 1 / jnp.where(some, z, 1), 0)
        cv2 = jnp.where(some, square * inv * inv * w.shape[axis] - 1, 0)
        return jnp.sqrt(jnp.maximum(cv2, 0)), inv, some

    def rescaled(w, z, square):
        keep, new, old = ordinary(w, z, square), _rescaled_variation(w, axis), fast(w, z, square)
        return tuple(jnp.where(keep, *pair) for pair in zip(old, new, strict=True))

    def ordinary(w, z, square):
        in_range = (z > 2.0**-30) & (z < 2.0**50)
        return (z == 0) | (in_range & (fast(w, z, square)[0] > _NEARLY_UNIFORM))

    return lax.cond(jnp.all(ordinary(w, z, square)), fast, rescaled, w, z, square)


def _rescaled_variation(w, axis):
    """`_variation` for rows of any scale and uniformity, from |w| over its mid-range.

    Differences from the mid-range are exactly 0 in a uniform row and small in a nearly uniform one,
    so there is no cancellation.
    """
    n = w.shape[axis]
    alive, middle, scale = _row_scale(w, axis)
    d = (_magnitude(w) - jnp.expand_dims(middle, axis)) * jnp.expand_dims(scale, axis)
    total, square = (s / n for s in _sums(d, d * d, axis, longest=96, lanes=4))
    mean = jnp.where(alive, middle * scale + total, 1)
    cv = jnp.where(alive, jnp.sqrt(jnp.maximum(square - total * total, 0)) / mean, 0)
    return _no_noise(cv), scale / (n * mean), alive


def _entropy(w, axis):
    """(H, (1/Z) sum |w| log |w|, 1 / Z) along `axis`; all 0 for an all-zero row."""
    a = _magnitude(w)
    z, plogp = _sums(a, _xlogx(a), axis, longest=18)

    def fast(w, z, plogp):
        some = z > 0
        inv = jnp.where(some, 1 / jnp.where(some, z, 1), 0)
        return jnp.log(jnp.where(some, z, 1)) - plogp * inv, plogp * inv, inv

    def rescaled(w, z, plogp):
        new, old = _rescaled_entropy(w, axis), fast(w, z, plogp)
        return tuple(jnp.where(ordinary(z), *pair) for pair in zip(old, new, strict=True))

    def ordinary(z):
        return (z == 0) | ((z > 2.0**-60) & (z < 2.0**60))

    return lax.cond(jnp.all(ordinary(z)), fast, rescaled, w, z, plogp)


def _rescaled_entropy(w, axis):
    """`_entropy` for rows of any scale, from |w| over its mid-range."""
    alive, middle, scale = _row_scale(w, axis)
    u = _magnitude(w) * jnp.expand_dims(scale, axis)
    z, plogp = _sums(u, _xlogx(u), axis, longest=96, lanes=4)
    z = jnp.where(alive, z, 1)
    within = jnp.where(alive, plogp / z, 0)
    entropy = jnp.where(alive, jnp.log(z) - within, 0)
    shift = jnp.where(alive, within - jnp.log(jnp.where(alive, scale, 1)), 0)
    return entropy, shift, scale / z


def _sharded_variation(w, axis):
    """`_variation` in two passes: Z, then the centered second moment of r."""
    r, _, inv, alive = _proportions(w, axis)
    n = w.shape[axis]
    cv = jnp.sqrt(n * jnp.sum(jnp.square(r - 1 / n), axis))
    return _no_noise(jnp.where(alive, cv, 0)), inv, alive


def _sharded_entropy(w, axis):
    """`_entropy` in two passes: Z, then sum r log r."""
    r, log_z, inv, alive = _proportions(w, axis)
    plogp = jnp.sum(_xlogx(r), axis)
    return jnp.where(alive, -plogp, 0), jnp.where(alive, plogp + log_z, 0), inv


def _proportions(w, axis):
    """(r, log Z, 1 / Z, not all-zero); r = 0 and 1 / Z = 0 in an all-zero row."""
    # Scaled down, so that sums of the largest weights do not overflow; 1e-30 stays normal.
    shrink = 2.0**-20
    a = _magnitude(w)
    z = jnp.sum(a * shrink, axis)
    tiny = float(jnp.finfo(a.dtype).tiny)
    alive = z >= tiny**0.8 * shrink
    z = jnp.where(alive, z, 1)
    huge = z > 0.125 * shrink / tiny  # 1 / Z would be subnormal, which processors flush to 0
    inv = jnp.where(alive, jnp.where(huge, 1, shrink) / z, 0)
    # One factor per row: the compiler would merge a constant into `inv`, which gives 1 / Z again.
    scale = jnp.expand_dims(jnp.where(huge, shrink, 1), axis)
    r = a * scale * jnp.expand_dims(inv, axis)
    return r, jnp.log(z) - np.log(shrink), inv * jnp.where(huge, shrink, 1), alive


def _no_noise(cv):
    """Return 0 instead of rounding noise for a coefficient of variation of a few roundings."""
    return jnp.where(cv > 4 * jnp.finfo(cv.dtype).eps, cv, 0)


def _row_scale(w, axis):
    """(the row is not all-zero, m = (max |w| + min |w|) / 2, about 1 / m or 0), in one read.

    "About": the reciprocal of the largest m would be subnormal, which processors flush to 0.
    """
    a = _magnitude(w)
    infinity = jnp.asarray(jnp.inf, a.dtype)
    top, bottom = lax.reduce(
        (a, a),
        (-infinity, infinity),
        lambda x, y: (jnp.maximum(x[0], y[0]), jnp.minimum(x[1], y[1])),
        (axis % a.ndim,),
    )
    middle = bottom + (top - bottom) * 0.5  # not (top + bottom) / 2: overflow
    tiny = float(jnp.finfo(a.dtype).tiny)
    alive = middle >= tiny**0.8
    return alive, middle, jnp.where(alive, 1 / jnp.clip(middle, tiny**0.8, 0.125 / tiny), 0)


def _xlogx(a):
    return a * jnp.log(jnp.where(a > 0, a, 1))


def _magnitude(w):
    return jnp.abs(w).astype(_wide(w))


def _wide(w):
    return jnp.promote_types(w.dtype, jnp.float32)


def _sums(x, y, axis, longest, lanes=16):
    """(sum x, sum y) along `axis`, of two arrays computed from the same one, in one read."""

    def plain(x, y):
        return jnp.sum(x, axis), jnp.sum(y, axis)

    def cpu(x, y):
        # GPU and TPU compilers merge the two sums of `plain` into one read. XLA:CPU does so only
        # for one reduction of pairs, and vectorizes that only if the reduced axis is short and not
        # the last one. So runs of up to `longest` are summed first, then their sums.
        # Longer runs and fewer lanes need less memory, and are slower.
        size, across = x.shape[axis], lanes if axis == -1 else 1
        if size % across:
            return plain(x, y)
        run = max(t for t in range(1, longest + 1) if size // across % t == 0)
        if run < 4:
            return plain(x, y)
        if axis == -1:
            shape, rest = (*x.shape[:-1], size // (across * run), run, across), (-1, -2)
        else:
            shape, rest = (*x.shape[:-2], size // run, run, x.shape[-1]), (-2,)
        zero = jnp.zeros((), x.dtype)
        partial = lax.reduce(
            (x.reshape(shape), y.reshape(shape)),
            (zero, zero),
            lambda a, b: (a[0] + b[0], a[1] + b[1]),
            (len(shape) - 2,),
        )
        return tuple(jnp.sum(run_sums, rest) for run_sums in partial)

    return lax.platform_dependent(x, y, cpu=cpu, default=plain)
