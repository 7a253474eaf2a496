"""Statistics of what experts compute, as sums over the tokens that are sent to them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.displacement import counted_tokens


@functools.cache
def expert_probe(experts: int, width: int) -> Probe:
    """The probe "experts": sums per layer and expert, float32; 0 in layers without experts.

    Over the real tokens sent to an expert, with y its output before the gate g (as applied), and h
    its intermediate state before P: {"tokens": their number [L, E], "gates": g [L, E], "norms":
    |y|_2 [L, E], "gated": g |y|_2 [L, E], "squares": |y|_2^2 [L, E], "outputs": y [L, E, D],
    "absolute": sum of |h| over tokens and neurons [L, E], "energy": of h^2 [L, E]}. Per neuron,
    without each row's first token (bos): {"later": number of tokens [L, E], "sum": h [L, E, m],
    "size": |h|, "square": h^2}.

    Args:
      experts, width: the largest numbers of experts and neurons; others are padded with zeros.
    """

    def function(seen: Any, batch: dict, per_layer: Any) -> dict[str, jax.Array]:
        each = jnp.zeros(experts, jnp.float32)
        shape = seen.ffn_input.shape
        if seen.routing is None:
            neurons = jnp.zeros((experts, width), jnp.float32)
            sums = dict.fromkeys(("sum", "size", "square"), neurons)
            names = ("tokens", "gates", "norms", "gated", "squares", "absolute", "energy", "later")
            outputs = jnp.zeros((experts, shape[-1]), jnp.float32)
            return dict.fromkeys(names, each) | sums | {"outputs": outputs}
        rows = seen.routing.rows
        real = counted_tokens(batch, shape[:2])["all"].reshape(-1)[rows.tokens]
        later = real & (rows.tokens % shape[1] > 0)

        def total(values: jax.Array, mask: jax.Array = real) -> jax.Array:
            values = jnp.where(mask.reshape(-1, *(1,) * (values.ndim - 1)), values, 0)
            # Rows of no expert have the number -1, which no segment has.
            return jax.ops.segment_sum(values.astype(jnp.float32), rows.experts, experts)

        y, h = rows.outputs.astype(jnp.float32), rows.states.astype(jnp.float32)
        h = jnp.pad(h, ((0, 0), (0, width - h.shape[-1])))
        squares, one = jnp.sum(y * y, axis=-1), jnp.ones(len(y), jnp.float32)
        return {
            "tokens": total(one),
            "gates": total(rows.gates),
            "norms": total(jnp.sqrt(squares)),
            "gated": total(rows.gates * jnp.sqrt(squares)),
            "squares": total(squares),
            "outputs": total(y),
            "absolute": total(jnp.sum(jnp.abs(h), axis=-1)),
            "energy": total(jnp.sum(h * h, axis=-1)),
            "later": total(one, later),
            "sum": total(h, later),
            "size": total(jnp.abs(h), later),
            "square": total(h * h, later),
        }

    return Probe("experts", function)
