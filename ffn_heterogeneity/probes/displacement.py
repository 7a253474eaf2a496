"""Angular displacement of the residual stream through a block (JREG, section 3)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.block import LayerIO
from ffn_heterogeneity.models.block_cosine import cosine
from ffn_heterogeneity.probes.base import Probe

POSITIONS = ("all", "last")


def counted_tokens(batch: dict, shape: tuple[int, ...], positions: str) -> jax.Array:
    """Which tokens enter the average: bool [B, T].

    Padding (segment 0) never does; with positions = "last", the last token of each document alone.
    """
    segments = batch.get("segment_ids")
    if segments is None:
        segments = jnp.ones(shape, jnp.int32)
    valid = segments > 0
    if positions == "last":
        following = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
        valid &= following != segments
    return valid


def _sums(final_norm: bool, positions: str, seen: LayerIO, batch: dict, per_layer: Any) -> dict:
    if final_norm:
        after = jnp.where(seen.is_last, seen.final_norm(seen.block_output), seen.block_output)
        psi_bt = (1.0 - cosine(seen.block_input, after)) / 2.0
    else:
        psi_bt = (1.0 - seen.block_cosine) / 2.0
    valid = counted_tokens(batch, psi_bt.shape, positions)
    return {
        "sum": jnp.sum(jnp.where(valid, psi_bt, 0.0)),
        "count": jnp.sum(valid, dtype=psi_bt.dtype),
    }


def displacement_probe(final_norm: bool = False, positions: str = "all") -> Probe:
    """Psi_l = (1 - cos(h_{l-1}, h_l)) / 2 in [0, 1], l = 1..L, summed over the batch's real tokens.

    h_0 is the embedding output (after Gemma's multiplier), h_l the residual stream after block l.
    Whether h_L is taken before or after the model's final norm the paper does not say: `final_norm`
    chooses, and only Psi_L depends on it. Before is our default for training; the hidden states of
    the usual torch library are those after it.

    Args:
      final_norm: h_L after the final norm. In training it costs the last product of every block
        once more under full rematerialisation; without it nothing is recomputed.
      positions: "all" real tokens, or the "last" of each document. The paper does not say; all.

    Returns:
      A probe whose results are {"sum": float32 [L], "count": float32 [L]}; float32 inside whatever
      the compute dtype.

    Raises:
      ValueError: `positions` is neither.
    """
    if positions not in POSITIONS:
        raise ValueError(f"positions={positions!r}: choose one of {POSITIONS}")
    return _probe(bool(final_norm), positions)


@functools.cache  # equal settings are the same probe: two terms that name it share its work
def _probe(final_norm: bool, positions: str) -> Probe:
    name = "displacement" + "_after_norm" * final_norm + "_last" * (positions == "last")
    needs = frozenset() if final_norm else frozenset({"block_cosine"})
    return Probe(name, functools.partial(_sums, final_norm, positions), needs)


DISPLACEMENT = displacement_probe()


def jump_rates(psi_l: Any) -> dict[str, Any]:
    """zeta_L, zeta_{L-1}, zeta_{L-2} of the averaged displacements Psi_1 .. Psi_L (section 3).

    zeta_l = 100 * sum_{k=l..L} max(0, Psi_k - Psi_{k-1}), for l >= 2: in percent, 0 iff Psi never
    rises from l - 1 on (the paper prints that condition reversed). It is taken from the average
    over tokens, not averaged itself.

    Args:
      psi_l: [L], numpy or jax.

    Returns:
      {"zeta_L", "zeta_L-1", "zeta_L-2"}: scalars; those with l < 2 (short models) are left out.
    """
    rises = 100.0 * jnp.maximum(0.0, psi_l[1:] - psi_l[:-1])  # of k = 2 .. L
    names = ("zeta_L", "zeta_L-1", "zeta_L-2")
    return {
        name: jnp.sum(rises[-1 - back :]) for back, name in enumerate(names) if back < len(rises)
    }
