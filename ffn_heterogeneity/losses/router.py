"""Losses on the routers of layers with experts: balanced load, small logits.

With f_r the mean over tokens of the number of times that column r is chosen (the sum over r is
top_k, as in transformers' Mixtral; top_k = 1 is Switch's), P_r the mean probability of column r and
R columns, a layer's balance loss is

    R sum_r f_r P_r    (Switch Transformers, equations 4 to 6; 1 times top_k at equal load)

with no gradient through f. Padding is excluded. The means are those of a micro-batch, over all
devices [ours: with accumulation, the losses of the micro-batches are averaged by tokens].
"""

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.routing import routing_probe


def _routers(context: TermContext) -> tuple[Probe, np.ndarray]:
    """(the probe, the number of router columns of each layer: 0 without experts)."""
    layers = () if context.model is None else context.model.layers
    columns = np.array([layer.columns for layer in layers])
    if not columns.any():
        raise ValueError(f"term {context.name!r} needs a model with experts: no layer has any")
    return routing_probe(int(columns.max())), columns


def load_balance_term(context: TermContext, pooled: bool = False) -> LossTerm:
    """The mean over layers of the balance loss.

    Metrics: "load" [L, R], the share of all choices that fall on each column; "max_load" [L], the
    largest times R (1: equal load); "unused" [L], the share of columns that no token chooses;
    "entropy" [L] of a token's probabilities, in nats.

    Args:
      context: its weight; Switch uses 0.01, Mixtral's and Qwen3-MoE's configs 0.001.
      pooled: f and P are means over the tokens of all layers together, as in transformers' Mixtral
        (which needs routers of one width).

    Raises:
      ValueError: no layer has experts; `pooled`, and routers of different widths.
    """
    probe, columns = _routers(context)
    sparse = np.flatnonzero(columns)
    if pooled and len(set(columns[sparse])) > 1:
        raise ValueError(f"pooled=True needs routers of one width, not {sorted(set(columns))}")

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        seen = outputs["probes"][probe.name]
        count = seen["count"][sparse[0]]
        f, p = (seen[name][sparse] / jnp.maximum(count, 1) for name in ("chosen", "probability"))
        f = jax.lax.stop_gradient(f)
        if pooled:
            f, p = f.mean(0, keepdims=True), p.mean(0, keepdims=True)
        losses = columns[sparse[: len(f)]] * jnp.sum(f * p, axis=-1)
        sums = {"load": seen["chosen"], "entropy": seen["entropy"]}
        metrics = jax.lax.stop_gradient(sums)
        return TermValue(jnp.mean(losses) * count, count, metrics)

    def derived(metrics: dict) -> dict:
        load = metrics["load"]
        used = jnp.sum(load > 0, axis=-1)
        shares = load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1e-30)
        return metrics | {
            "load": shares,
            "max_load": columns * jnp.max(shares, axis=-1),
            "unused": (columns - used) / np.maximum(columns, 1),
        }

    return LossTerm(context.name, function, context.weight, probes=(probe,), derived=derived)


def router_z_term(context: TermContext) -> LossTerm:
    """The mean over tokens and layers of log(sum of exp(logits))^2 (ST-MoE, equation 5).

    Raises:
      ValueError: no layer has experts.
    """
    probe, columns = _routers(context)
    sparse = np.flatnonzero(columns)

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        seen = outputs["probes"][probe.name]
        return TermValue(jnp.mean(seen["z"][sparse]), seen["count"][sparse[0]])

    return LossTerm(context.name, function, context.weight, probes=(probe,))
