"""Bias of attention logits by the distance of query and key (T5)."""

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


@functools.cache
def distance_rows(rows: int, far: int) -> np.ndarray:
    """The row of each distance 0, 1, ... far; with the published code's float32 operations."""
    exact, apart = rows // 2, np.arange(far + 1)
    steps = np.log(np.maximum(apart, 1).astype(np.float32) / exact) / math.log(far / exact)
    shared = exact + (steps * (rows - exact)).astype(np.int32)
    return np.where(apart < exact, apart, np.minimum(shared, rows - 1)).astype(np.int32)
