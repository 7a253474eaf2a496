"""Hard-concrete gates on the rank of a factorized kernel (FLOP): K = A diag(gate) B.

Each training step draws u ~ U(0, 1) again and sets gate j to

    s = clip(1.2 sigmoid(logit u + log_alpha_j) - 0.1, 0, 1)    (temperature 1, stretched by 0.1)

which is exactly 0 or 1 with positive probability: P(gate_j > 0) = sigmoid(log_alpha_j - log(0.1 /
1.1)), and L0 is the sum of these. Outside training the stored draw is 0: then the round(r - L0)
gates with the smallest sigmoid(0.8 log_alpha) are 0 and the others have that value.

The two multipliers of `losses.sparsity_terms.size_term` are also leaves here: every kernel has a
pair, and the paper's multipliers are the means over all kernels.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.adapters.rows import of_rows
from ffn_heterogeneity.tree import nodes, replaced

A, B, LOG_ALPHA = "gates_a", "gates_b", "gates_log_alpha"
DRAW, MULTIPLIERS = "gates_draw", "gates_multipliers"
STRETCH = 0.1
EDGE = 1e-6  # distance of u from 0 and 1, so that its logit is finite
EVALUATED = 0.8  # the authors' factor, found empirically


def open_probability(log_alpha: jax.Array) -> jax.Array:
    """P(gate > 0) of each gate; L0 is their sum."""
    return jax.nn.sigmoid(log_alpha - math.log(STRETCH / (1 + STRETCH)))


def gate(leaves: dict[str, jax.Array]) -> jax.Array:
    """Gates [..., rank] from this step's draw or, without one, for evaluation."""
    log_alpha, draw = jnp.asarray(leaves[LOG_ALPHA]), jnp.asarray(leaves[DRAW])
    drawn = draw > 0
    u = jnp.where(drawn, draw, 0.5)  # the logit of 0 would make the gradient NaN
    wide = jax.nn.sigmoid(jnp.log(u) - jnp.log1p(-u) + log_alpha) * (1 + 2 * STRETCH) - STRETCH
    value = jax.nn.sigmoid(EVALUATED * log_alpha)
    closed = jnp.round(jnp.sum(1 - open_probability(log_alpha), -1, keepdims=True))
    place = jnp.argsort(jnp.argsort(value))
    return jnp.where(drawn, jnp.clip(wide, 0, 1), jnp.where(place < closed, 0, value))


def kernel(leaves: dict[str, jax.Array]) -> jax.Array:
    """A diag(gate) B, [..., in, out]."""
    return (leaves[A] * gate(leaves)[..., None, :]) @ leaves[B]


def product(y, x, leaves: dict[str, jax.Array], kernel, dot, drop) -> jax.Array:
    """((x A) * gate) B, without materializing the kernel."""
    thin = dot(x, leaves[A])
    return dot(thin * of_rows(gate(leaves), thin, dot), leaves[B])


def refresh(settings: Mapping[str, Any]) -> Callable[..., dict]:
    """(params, step, key, hyper, train) -> params with this step's draws, unchanged in evaluation.

    The settings are the surgery's (`surgery.sparsity.Gates`) and are not used here.
    """
    del settings

    def function(params: dict, step, key, hyper, train: bool) -> dict:
        for path, leaves in nodes(params, lambda node: DRAW in node) if train else ():
            subkey = jax.random.fold_in(key, zlib.crc32(path.encode()))
            u = jax.random.uniform(subkey, leaves[DRAW].shape, minval=EDGE, maxval=1 - EDGE)
            params = replaced(params, path, {**leaves, DRAW: u})
        return params

    return function


def init(key: jax.Array, a: Any, b: Any, start: float) -> dict[str, Any]:
    """The leaves of the factors a [in, rank] and b [rank, out]: log_alpha ~ N(start, 0.01^2)."""
    (rank,) = a.shape[1:]
    return {
        A: a,
        B: b,
        LOG_ALPHA: start + 0.01 * jax.random.normal(key, (rank,)),
        DRAW: jnp.zeros(rank),
        MULTIPLIERS: jnp.zeros(2),
    }
