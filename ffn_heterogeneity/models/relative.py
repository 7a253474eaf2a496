"""Bias of attention logits by the distance of query and key (T5).

If the rows are in order, the bias is constant along each diagonal of [T, T], so 2 T - 1 numbers per
head describe it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np


def relative_bias(
    table: jax.Array, q_positions_bt: jax.Array, kv_positions_bs: jax.Array, causal: bool, far: int
) -> jax.Array:
    """T5's bias of the attention logits by distance, [B or 1, N, T, S].

    Each distance up to half of the rows has a separate row; the others share rows of logarithmic
    width up to the distance `far`, and the last row beyond it. Unless `causal`, keys before and
    after the query have half of the rows each.

    Args:
      table: [rows, N].
    """
    ahead = kv_positions_bs[:, None, :] - q_positions_bt[:, :, None]
    rows = table.shape[0] if causal else table.shape[0] // 2
    apart = jnp.minimum(jnp.maximum(-ahead, 0) if causal else jnp.abs(ahead), far)
    row_bts = jnp.asarray(distance_rows(rows, far))[apart]
    row_bts = row_bts if causal else row_bts + jnp.where(ahead > 0, rows, 0)
    return table[row_bts].transpose(0, 3, 1, 2)


def bias_line(table: jax.Array, length: int, causal: bool, far: int) -> jax.Array:
    """`relative_bias` of rows of `length` tokens by key minus query, [N, 2 length - 1]."""
    apart = jnp.arange(1 - length, length)[None]
    return relative_bias(table, jnp.zeros((1, 1), int), apart, causal, far)[0, :, 0]


def on_block(line_nd: jax.Array, rows: slice, keys: slice) -> jax.Array:
    """The bias of a block of queries and keys, [1, N, Q, S], from `bias_line`.

    By copies and a change of shape, so the gradient is a sum: gathering and scattering T^2 numbers
    would cost more than attention's products.
    """
    queries, count = rows.stop - rows.start, keys.stop - keys.start
    n, width = line_nd.shape[0], queries + count
    first = keys.start - rows.stop + (line_nd.shape[1] + 1) // 2
    part = jnp.pad(line_nd[:, first : first + width - 1], ((0, 0), (0, 1)))
    # Of copies of the line in rows one number shorter, each row begins one number further left.
    # The copies are in memory: computed where they are read, each number would cost a division.
    copies = jax.lax.optimization_barrier(
        jnp.tile(jnp.roll(part, 1 - queries, axis=1), (1, queries))
    )
    shifted = copies[:, : queries * (width - 1)].reshape(n, queries, width - 1)
    return shifted[None, :, :, :count]


@functools.cache
def distance_rows(rows: int, far: int) -> np.ndarray:
    """The row of each distance 0, 1, ... far; with the published code's float32 operations."""
    exact, apart = rows // 2, np.arange(far + 1)
    steps = np.log(np.maximum(apart, 1).astype(np.float32) / exact) / math.log(far / exact)
    shared = exact + (steps * (rows - exact)).astype(np.int32)
    return np.where(apart < exact, apart, np.minimum(shared, rows - 1)).astype(np.int32)
