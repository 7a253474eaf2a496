"""Statistics of routers, as sums over the tokens of a batch, padding excluded."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.displacement import counted_tokens


@functools.cache
def routing_probe(columns: int) -> Probe:
    """The probe "routing": sums over tokens, per layer; 0 in layers without experts.

    {"chosen": how often each column is chosen [L, columns], "probability": its probability
    [L, columns], "entropy": of a token's probabilities, in nats [L], "z": squared logarithm of the
    sum of exp(logits) [L], "dropped": tokens with a choice beyond the capacity [L], "count": tokens
    [L]}, float32.

    Args:
      columns: number of columns of the widest router; others are padded with zeros.
    """

    def function(seen: Any, batch: dict, per_layer: Any) -> dict[str, jax.Array]:
        if seen.routing is None:
            zero = jnp.zeros((), jnp.float32)
            each = jnp.zeros(columns, jnp.float32)
            empty = dict.fromkeys(("entropy", "z", "dropped", "count"), zero)
            return {"chosen": each, "probability": each, **empty}
        logits = seen.routing.logits
        real_bt = counted_tokens(batch, logits.shape[:2])["all"]
        log_p = jax.nn.log_softmax(logits)
        chosen_btr = _chosen(seen)
        accepted = seen.routing.accepted
        dropped_bt = jnp.zeros(real_bt.shape) if accepted is None else ~jnp.all(accepted, axis=-1)

        def total(values: jax.Array) -> jax.Array:
            mask = real_bt.reshape(*real_bt.shape, *(1,) * (values.ndim - 2))
            summed = jnp.sum(jnp.where(mask, values, 0), axis=(0, 1))
            return jnp.pad(summed, (0, columns - summed.size)) if summed.ndim else summed

        return {
            "chosen": total(jax.lax.stop_gradient(chosen_btr)),
            "probability": total(jnp.exp(log_p)),
            "entropy": total(-jnp.sum(jnp.exp(log_p) * log_p, axis=-1)),
            "z": total(jnp.square(jax.nn.logsumexp(logits, axis=-1))),
            "dropped": total(dropped_bt.astype(logits.dtype)),
            "count": jnp.sum(real_bt, dtype=logits.dtype),
        }

    return Probe("routing", function)


@functools.cache
def row_routing_probe(columns: int) -> Probe:
    """The probe "row_routing": sums over each row's tokens, per layer; 0 in layers without experts.

    {"chosen", "probability": as in `routing_probe`, [B, columns], "count": tokens [B]}.

    Args:
      columns: as in `routing_probe`.
    """

    def function(seen: Any, batch: dict, per_layer: Any) -> dict[str, jax.Array]:
        shape = seen.ffn_input.shape[:2]
        real_bt = counted_tokens(batch, shape)["all"] & jnp.ones(shape, bool)
        if seen.routing is None:
            zero = jnp.zeros((shape[0], columns), jnp.float32)
            return {"chosen": zero, "probability": zero, "count": jnp.sum(real_bt, axis=1)}

        def total(values_btr: jax.Array) -> jax.Array:
            summed = jnp.sum(jnp.where(real_bt[..., None], values_btr, 0), axis=1)
            return jnp.pad(summed, ((0, 0), (0, columns - summed.shape[-1])))

        return {
            "chosen": total(jax.lax.stop_gradient(_chosen(seen))),
            "probability": total(jax.nn.softmax(seen.routing.logits)),
            "count": jnp.sum(real_bt, axis=1),
        }

    return Probe("row_routing", function, kind="example")


def _chosen(seen: Any) -> jax.Array:
    """Number of times that each token chooses each column, [B, T, R]."""
    routing = seen.routing
    return jnp.sum(jax.nn.one_hot(routing.columns, routing.logits.shape[-1]), axis=2)


@functools.cache
def similarity_probe(columns: int) -> Probe:
    """The probe "similarity": inner products of the columns' logits over tokens, [L, columns^2].

    Args:
      columns: as in `routing_probe`.
    """

    def function(seen: Any, batch: dict, per_layer: Any) -> jax.Array:
        if seen.routing is None:
            return jnp.zeros((columns, columns))
        logits_btr = seen.routing.logits
        real_bt = counted_tokens(batch, logits_btr.shape[:2])["all"]
        logits_btr = jnp.where(real_bt[..., None], logits_btr, 0)
        products = jnp.einsum("btr,bts->rs", logits_btr, logits_btr)
        return jnp.pad(products, (0, columns - products.shape[0]))

    return Probe("similarity", function)


@functools.cache
def first_token_probe(columns: int) -> Probe:
    """The router's probabilities for each row's first token, float32 [B, columns].

    Args:
      columns: as in `routing_probe`; -1 behind a layer's columns, and in layers without experts.
    """

    def function(seen: Any, batch: dict, per_layer: Any) -> jax.Array:
        if seen.routing is None:
            return jnp.full((len(seen.ffn_input), columns), -1.0)
        p = jax.nn.softmax(seen.routing.logits[:, 0])
        return jnp.pad(p, ((0, 0), (0, columns - p.shape[-1])), constant_values=-1.0)

    return Probe("first_token", function, kind="example")
