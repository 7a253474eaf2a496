"""Angular displacement of the residual stream through a block (JREG, section 3).

    Psi_l = (1 - cos(h_{l-1}, h_l)) / 2, in [0, 1], l = 1 .. L

h_0 is the embedding output (after Gemma's multiplier), h_l the residual stream after block l. The
paper leaves two choices open, and both options of each are available. First, h_L is taken before or
after the model's final norm; only Psi_L depends on it. Before is our default for training;
transformers' hidden states are those after it. Second, the average is over all real tokens, or
over the last token of each document, whose next token is predicted.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.block_cosine import cosine
from ffn_heterogeneity.probes.base import Probe

POSITIONS = ("all", "last")


def counted_tokens(batch: dict, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """Masks of the tokens in the averages: {positions: bool [B, T]}.

    Padding (segment 0) is excluded; "last" is only the last token of each document.
    """
    segments = batch.get("segment_ids")
    if segments is None:
        segments = jnp.ones(shape, jnp.int32)
    following = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return {"all": segments > 0, "last": (segments > 0) & (following != segments)}


def _sums(final_norm: bool, seen: Any, batch: dict, per_layer: Any) -> dict:
    if final_norm:
        after = jnp.where(seen.is_last, seen.final_norm(seen.block_output), seen.block_output)
        psi_bt = (1.0 - cosine(seen.block_input, after)) / 2.0
    else:
        psi_bt = (1.0 - seen.block_cosine) / 2.0
    return {
        positions: {
            "sum": jnp.sum(jnp.where(counted_bt, psi_bt, 0.0)),
            "count": jnp.sum(counted_bt, dtype=psi_bt.dtype),
        }
        for positions, counted_bt in counted_tokens(batch, psi_bt.shape).items()
    }


# Results of both, over the tokens of the batch: {"all": {"sum": float32 [L], "count": float32 [L]},
# "last": the same}; float32 for any compute dtype.
DISPLACEMENT = Probe(
    "displacement", functools.partial(_sums, False), needs=frozenset({"block_cosine"})
)
# In training with full rematerialization it recomputes the last product of every block; the other
# probe recomputes nothing.
DISPLACEMENT_AFTER_NORM = Probe("displacement_after_norm", functools.partial(_sums, True))


def jump_rates(psi_l: Any) -> dict[str, Any]:
    """zeta_L, zeta_{L-1}, zeta_{L-2} of the averaged displacements Psi_1 .. Psi_L (section 3).

    zeta_l = 100 * sum_{k=l..L} max(0, Psi_k - Psi_{k-1}), for l >= 2: in percent, 0 iff Psi does
    not increase from l - 1 on (the paper prints that condition reversed). It is computed from the
    averages over tokens, and is not an average itself.

    Args:
      psi_l: [L], numpy or jax.

    Returns:
      {"zeta_L", "zeta_L-1", "zeta_L-2"}: scalars, without those with l < 2 (short models).
    """
    rises = 100.0 * jnp.maximum(0.0, psi_l[1:] - psi_l[:-1])  # of k = 2 .. L
    names = ("zeta_L", "zeta_L-1", "zeta_L-2")
    return {
        name: jnp.sum(rises[-1 - back :]) for back, name in enumerate(names) if back < len(rises)
    }
