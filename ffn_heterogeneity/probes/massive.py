"""Massive activations: the largest magnitudes in every state of a layer (MW, section 2.2).

    x = h_{l-1};  a = LN(x);  b = ATTN(a);  y = x + b;  c = LN(y);  i = act(c G) * (c U);  f = i W;
    h_l = y + f

The paper follows these states of a lone bos token through the early layers, and finds the first
massive value in i, the intermediate state, of one early layer. For families that also normalize the
branches' outputs, b and f are the outputs before that norm.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.block import LayerIO
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.displacement import counted_tokens

# Saved values per state, equal for layers of any width; attacks need at most 30.
TOP = 32
# The paper's states in the order in which a layer computes them, and their fields in `LayerIO`.
STATES = {
    "h_in": "block_input",
    "attention_norm": "attention_input",
    "attention": "attention_output",
    "h_middle": "middle",
    "ffn_norm": "ffn_input",
    "intermediate": "ffn_state",
    "ffn": "ffn_output",
    "h_out": "block_output",
}


def largest(x_btm: jax.Array) -> dict[str, jax.Array]:
    """The largest |x| of x [B, T, M]: "values" [B, T, 32] descending, "indices", "median" [B, T].

    Values are float32. Narrower states are padded with 0 at index -1.
    """
    size_btm = jnp.abs(x_btm.astype(jnp.float32))
    values, indices = jax.lax.top_k(size_btm, min(TOP, x_btm.shape[-1]))
    fill = ((0, 0), (0, 0), (0, TOP - values.shape[-1]))
    return {
        "values": jnp.pad(values, fill),
        "indices": jnp.pad(indices, fill, constant_values=-1),
        "median": jnp.median(size_btm, axis=-1),
    }


@functools.cache
def magnitudes_probe(experts: int = 0) -> Probe:
    """{state: its `largest`} of every token (zeros for padding), one row per example.

    The intermediate state of a layer with experts has index e m + i for neuron i of expert e, and
    is 0 for experts to which the token is not sent.

    Args:
      experts: the largest number of experts of a layer.
    """

    def states_of(seen: LayerIO, field: str) -> jax.Array:
        if field != "ffn_state" or seen.routing is None:
            return getattr(seen, field)
        rows, (b, t) = seen.routing.rows, seen.ffn_input.shape[:2]
        m = rows.states.shape[-1]
        places = rows.tokens, jnp.where(rows.experts < 0, experts, rows.experts)
        wide = jnp.zeros((b * t, experts, m), rows.states.dtype)
        return wide.at[places].set(rows.states, mode="drop").reshape(b, t, experts * m)

    def function(seen: LayerIO, batch: dict, per_layer: Any) -> dict[str, dict[str, jax.Array]]:
        real_bt = counted_tokens(batch, seen.block_input.shape[:2])["all"][..., None]
        return {
            name: largest(jnp.where(real_bt, states_of(seen, field), 0.0))
            for name, field in STATES.items()
        }

    return Probe("magnitudes", function, kind="example")


def _sinks(seen: LayerIO, batch: dict, per_layer: Any) -> dict[str, jax.Array]:
    real_bt = counted_tokens(batch, seen.block_input.shape[:2])["all"]
    real_bt &= jnp.arange(real_bt.shape[1]) > 0
    share_bt = jnp.mean(seen.sink_weights, axis=-1)
    return {
        "sum": jnp.sum(jnp.where(real_bt, share_bt, 0.0)),
        "count": jnp.sum(real_bt, dtype=share_bt.dtype),
    }


# The share of attention of all later tokens to the row's first token, over heads: float32 [L] each.
# (Section 2.1: attention sinks.) Later packed documents do not see it and count as 0.
SINKS = Probe("sinks", _sinks, needs=frozenset({"sink_weights"}))
