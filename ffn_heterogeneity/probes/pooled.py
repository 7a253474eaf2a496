"""The pooled token's state after every block: what depth-wise pooling sums up (P-32, section 3).

One vector an example and layer leaves the scan, [L, B, D], never the states of all tokens. An
encoder's pooled token is its first, [CLS]; a decoder's is the last that is no padding, wherever
padding stands.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.probes.base import Probe


def pooled_places(segment_ids_bt: jax.Array, first: bool) -> jax.Array:
    """Where the pooled token of each row stands, int32 [B]: its first or last real one."""
    real_bt = segment_ids_bt > 0
    if first:
        return jnp.argmax(real_bt, axis=1)
    return real_bt.shape[1] - 1 - jnp.argmax(real_bt[:, ::-1], axis=1)


def pooled(x_btd: jax.Array, segment_ids_bt: jax.Array, first: bool) -> jax.Array:
    """The pooled token's vectors, [B, D]."""
    places_b = pooled_places(segment_ids_bt, first)
    return jnp.take_along_axis(x_btd, places_b[:, None, None], axis=1)[:, 0]


@functools.cache
def pooled_probe(first: bool, final_norm: bool = False) -> Probe:
    """The probe "pooled", [L, B, D] of the block outputs; the embedding is not among them.

    Args:
      first: whether the first token is pooled, or the last.
      final_norm: the last block's output is taken behind the model's final norm and the others are
        as they are: `hidden_states` of the usual torch library.
    """

    def function(seen: Any, batch: dict, per_layer: Any) -> jax.Array:
        state_bd = pooled(seen.block_output, batch["segment_ids"], first)
        if not final_norm:
            return state_bd
        return jnp.where(seen.is_last, seen.final_norm(state_bd), state_bd)

    return Probe("pooled", function, kind="example")
