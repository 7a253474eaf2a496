"""The pooled token's state after every block, for depth-wise pooling (P-32, section 3).

The scan returns one vector per example and layer, [L, B, D], never the states of all tokens. An
encoder's pooled token is its first, [CLS]; a decoder's is the last one that is not padding.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.probes.base import Probe


def pooled_places(segment_ids_rt: jax.Array, first: bool, examples: int = 1) -> jax.Array:
    """Position of each example's pooled token, int32 [R, E]: its first or last token.

    A row's examples are its segments 1 to `examples`; 0 is padding.
    """
    own_ret = segment_ids_rt[:, None] == jnp.arange(1, examples + 1)[None, :, None]
    if first:
        return jnp.argmax(own_ret, axis=-1)
    return own_ret.shape[-1] - 1 - jnp.argmax(own_ret[..., ::-1], axis=-1)


def pooled(x_rtd: jax.Array, batch: Mapping[str, jax.Array], first: bool) -> jax.Array:
    """The pooled token's vectors, [B, D].

    Args:
      batch: "segment_ids" [R, T], and "valid" [B] if rows contain several examples.
    """
    segments_rt = batch["segment_ids"]
    examples = len(batch["valid"]) // len(segments_rt) if "valid" in batch else 1
    places_re = pooled_places(segments_rt, first, examples)
    states_red = jnp.take_along_axis(x_rtd, places_re[:, :, None], axis=1)
    return states_red.reshape(-1, x_rtd.shape[-1])


@functools.cache
def pooled_probe(first: bool, final_norm: bool = False) -> Probe:
    """The probe "pooled": the block outputs [L, B, D], without the embedding.

    Args:
      first: whether the first token is pooled, or the last.
      final_norm: whether the last block's output is taken after the model's final norm, like
        `hidden_states` of transformers.
    """

    def function(seen: Any, batch: dict, per_layer: Any) -> jax.Array:
        state_bd = pooled(seen.block_output, batch, first)
        if not final_norm:
            return state_bd
        return jnp.where(seen.is_last, seen.final_norm(state_bd), state_bd)

    return Probe("pooled", function, kind="example")
