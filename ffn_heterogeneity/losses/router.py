"""Losses on the routers of layers with experts: balanced load, small logits.

With f_r the mean over tokens of the number of times that column r is chosen (the sum over r is
top_k, as in transformers' Mixtral; top_k = 1 is Switch's), P_r the mean probability of column r and
R columns, a layer's balance loss is

    R sum_r f_r P_r    (Switch Transformers, equations 4 to 6; 1 times top_k at equal load)

with no gradient through f. Padding is excluded. The means are those of a micro-batch, over all
devices [ours: with accumulation, the losses of the micro-batches are averaged by tokens]. With
`per_row`, f and P are means over one row, and the loss is the mean over rows (transformers' Switch:
`per_row` and `pooled`; it adds the losses of the two stacks, of which this is the mean).
"""

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.routing import routing_probe, row_routing_probe


def _routers(context: TermContext) -> tuple[Probe, np.ndarray]:
    """(the probe, the number of router columns of each layer: 0 without experts)."""
    layers = () if context.model is None else context.model.layers
    columns = np.array([layer.columns for layer in layers])
    if not columns.any():
        raise ValueError(f"term {context.name!r} needs a model with experts: no layer has any")
    return routing_probe(int(columns.max())), columns


def load_balance_term(
    context: TermContext, pooled: bool = False, per_row: bool = False
) -> LossTerm:
    """The mean over layers of the balance loss.

    Metrics: "load" [L, R], the share of all choices that fall on each column; "max_load" [L], the
    largest times R (1: equal load); "unused" [L], the share of columns that no token chooses;
    "entropy" [L] of a token's probabilities, in nats; "dropped" [L], the share of tokens with a
    choice beyond the capacity.

    Args:
      context: its weight; Switch uses 0.01, Mixtral's and Qwen3-MoE's configs 0.001.
      pooled: f and P are means over the tokens of all layers (of a stack) together, as in
        transformers' Mixtral (which needs routers of one width).
      per_row: f and P are means over the tokens of one row.

    Raises:
      ValueError: no layer has experts; `pooled`, and routers of different widths.
    """
    probe, columns = _routers(context)
    sparse = np.flatnonzero(columns)
    if pooled and len(set(columns[sparse])) > 1:
        raise ValueError(f"pooled=True needs routers of one width, not {sorted(set(columns))}")
    assert context.model is not None
    stacks = {
        stack: (start, sparse[(sparse >= start) & (sparse < end)])
        for stack, (start, end) in context.model.stacks.items()
    }
    rows = row_routing_probe(int(columns.max()))

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        seen, losses = outputs["probes"][probe.name], []
        for stack, (start, layers) in stacks.items():
            sums, places = seen, layers
            if per_row:
                sums = outputs["probes"][rows.name]
                if len(stacks) > 1:
                    sums, places = sums[stack], layers - start
            if len(layers):
                chosen = jax.tree.map(lambda leaf, i=places: leaf[i], sums)
                balance = _balance(chosen, pooled, per_row)
                losses.append(columns[layers[: len(balance)]] * balance)
        counts = seen["count"]
        count = jnp.mean(counts[sparse])
        # Layers of two stacks have different numbers of tokens; metrics are divided by one.
        each = count / jnp.maximum(counts, 1)
        means = {name: seen[name] * each for name in ("entropy", "dropped")}
        metrics = jax.lax.stop_gradient({"load": seen["chosen"]} | means)
        return TermValue(jnp.mean(jnp.concatenate(losses)) * count, count, metrics)

    def derived(metrics: dict) -> dict:
        load = metrics["load"]
        used = jnp.sum(load > 0, axis=-1)
        shares = load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1e-30)
        return metrics | {
            "load": shares,
            "max_load": columns * jnp.max(shares, axis=-1),
            "unused": (columns - used) / np.maximum(columns, 1),
        }

    probes = (probe, rows) if per_row else (probe,)
    return LossTerm(context.name, function, context.weight, probes=probes, derived=derived)


def _balance(sums: dict, pooled: bool, per_row: bool) -> jax.Array:
    """sum_r f_r P_r of each layer, or of all of them together, [L or 1].

    Args:
      sums: of a routing probe's, those of the layers of one stack.
    """
    count = jnp.maximum(sums["count"], 1)[..., None]
    f, p = jax.lax.stop_gradient(sums["chosen"]) / count, sums["probability"] / count
    real = sums["count"] > 0
    if pooled:
        f, p, real = f.mean(0, keepdims=True), p.mean(0, keepdims=True), real[:1]
    balance = jnp.sum(f * p, axis=-1)
    if per_row:  # rows of padding have no loss
        balance = jnp.sum(balance, axis=1) / jnp.maximum(jnp.sum(real, axis=1), 1)
    return balance


def router_z_term(context: TermContext) -> LossTerm:
    """The mean over layers of the means over tokens of log(sum of exp(logits))^2.

    ST-MoE, equation 5. With two stacks, micro-batches count by the mean of their tokens [ours].

    Raises:
      ValueError: no layer has experts.
    """
    probe, columns = _routers(context)
    sparse = np.flatnonzero(columns)

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        seen = outputs["probes"][probe.name]
        counts = seen["count"][sparse]
        count = jnp.mean(counts)
        return TermValue(jnp.mean(seen["z"][sparse] / jnp.maximum(counts, 1)) * count, count)

    return LossTerm(context.name, function, context.weight, probes=(probe,))
