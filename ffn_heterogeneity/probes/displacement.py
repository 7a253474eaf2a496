"""Angular displacement of the residual stream through a block (JREG, section 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.block import LayerIO
from ffn_heterogeneity.probes.base import Probe


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """cos(a, b) over the last axis, at least float32; 0 with gradient 0 where a vector is zero."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    a, b = a.astype(wide), b.astype(wide)
    squares = jnp.sum(a * a, -1) * jnp.sum(b * b, -1)
    safe = jnp.where(squares > 0, squares, 1.0)
    return jnp.where(squares > 0, jnp.sum(a * b, -1) * jax.lax.rsqrt(safe), 0.0)


def displacement_sums(seen: LayerIO, batch: dict, per_layer: None = None) -> dict:
    """Psi_l = (1 - cos(h_{l-1}, h_l)) / 2 in [0, 1], summed over the batch's real tokens.

    h_0 is the embedding output, h_l the residual stream after block l, before the final norm (the
    paper does not say; for training we take before).

    Returns:
      {"sum": float32, "count": float32}; padding (segment 0) is left out of both.
    """
    psi_bt = (1.0 - cosine(seen.block_input, seen.block_output)) / 2.0
    segments = batch.get("segment_ids")
    valid = jnp.ones(psi_bt.shape, bool) if segments is None else segments > 0
    return {
        "sum": jnp.sum(jnp.where(valid, psi_bt, 0.0)),
        "count": jnp.sum(valid, dtype=psi_bt.dtype),
    }


DISPLACEMENT = Probe("displacement", displacement_sums)
