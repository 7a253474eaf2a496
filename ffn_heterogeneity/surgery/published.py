"""FLAP and Wanda-sp as their authors' code chooses neurons (both in FLAP's repository).

Of the states h of all tokens of the calibration text, also the first of a row, and the outgoing
rows W_i:

- wanda_sp_published: ||h_i||_2 mean_j |W_ij|; every layer loses the lowest of its neurons, and the
  next layer is measured on the model without them.
- flap_published (arXiv 2312.11983, WIFV and AL-MM): var(h_i) |W_i|^2, less the layer's mean and
  over its standard deviation; the lowest of all layers go. All is measured on the dense model. With
  `compensation=bias` it is FLAP: what goes is replaced by its mean, here over all tokens but the
  first of a row, and with the weights of `blockwise` behind a norm [ours: theirs is over all]. (In
  the authors' running variance the first sample of text counts for nothing; here all count.)

Both remove heads as well in the authors' code; here the FFN alone is reduced [ours]. The rows begin
with bos, where theirs are pieces of a long text.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.probes.observe import token_batches
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.surgery.blockwise import embedded, one_layer
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.surgery.selection import highest, layer_subset
from ffn_heterogeneity.surgery.weights import outgoing

BATCH = 8  # rows per batch


def published_cuts(
    model: Model, plan: RemovalPlan, rows: Sequence[np.ndarray]
) -> dict[int, np.ndarray]:
    """Return {layer: the neurons that go, ascending} by a criterion of `criteria.PUBLISHED`.

    Args:
      rows: token ids of the calibration text.

    Raises:
      ValueError: a layer with experts; states that are not finite.
    """
    config, sequential = model.config, plan.budget == "layer"
    causal_lm.require_one_stack(config, f"criterion {plan.criterion!r}")
    chosen = layer_subset(plan.layers, config.n_layers, config.groups)
    if sparse := [i for i in chosen if config.layers[i].experts is not None]:
        raise ValueError(f"criterion={plan.criterion!r}: layer {sparse[0]} has experts")
    batches = list(token_batches(rows, BATCH, max(map(len, rows))))
    tables = {"embed": jax.device_put(model.params["embed"])}
    streams = [embedded(config, tables, batch) for batch in batches]
    scores, gone = {}, {}
    for i, leaves in enumerate(bar(plan.criterion, unstack(model.params)["layers"], unit="block")):
        one, behind = dataclasses.replace(config, layers=(config.layers[i],)), None
        if i in chosen:
            behind, sums = _observed(one, leaves, streams, batches)
            if not all(np.isfinite(total).all() for total in sums.values()):
                raise ValueError(f"layer {i}: its states are not finite: check the checkpoint")
            scores[i] = -_SCORES[plan.criterion](leaves["ffn"], sums)
        if i in chosen and sequential:
            gone[i] = highest(scores[i], plan.count_of(len(scores[i])))
            kept = np.setdiff1d(np.arange(len(scores[i])), gone[i])
            ffn = take_neurons(one, Place(0, None, "ffn"), leaves["ffn"], kept)
            one, leaves = one.with_widths([len(kept)]), {**leaves, "ffn": ffn}
            behind = None
        if behind is None:
            leaves = jax.device_put(leaves)
            behind = [one_layer(one, leaves, *x) for x in zip(streams, batches, strict=True)]
        streams = behind
    return gone if sequential else plan.global_cuts(scores)


@functools.partial(jax.jit, static_argnums=0)
def _layer_and_sums(config: ModelConfig, leaves: dict, x: jax.Array, batch: dict) -> tuple:
    x, seen = causal_lm.one_layer(config, 0, leaves, x, batch)
    real = (batch["segment_ids"] > 0)[..., None]
    state = jnp.where(real, seen.require_state().astype(jnp.float32), 0)
    return x, {
        "sum": jnp.sum(state, (0, 1)),
        "square": jnp.sum(state**2, (0, 1)),
        "tokens": jnp.sum(real),
    }


def _observed(config: ModelConfig, leaves: dict, streams: Sequence, batches: Sequence) -> tuple:
    """(the streams after the layer, sums of h, h^2 [m] and the tokens, float64)."""
    leaves, behind, total = jax.device_put(leaves), [], None
    for x, batch in zip(streams, batches, strict=True):
        x, sums = _layer_and_sums(config, leaves, x, batch)
        sums = {name: np.asarray(value, np.float64) for name, value in sums.items()}
        total = sums if total is None else {name: total[name] + sums[name] for name in sums}
        behind.append(x)
    return behind, total


def _wanda_sp(ffn: dict, sums: Mapping[str, np.ndarray]) -> np.ndarray:
    size = np.concatenate([np.abs(rows).mean(1) for _, rows in outgoing(ffn).blocks()])
    return np.sqrt(sums["square"]) * size


def _flap(ffn: dict, sums: Mapping[str, np.ndarray]) -> np.ndarray:
    squares = [np.einsum("mn,mn->m", rows, rows) for _, rows in outgoing(ffn).blocks()]
    variance = sums["square"] / sums["tokens"] - (sums["sum"] / sums["tokens"]) ** 2
    scores = np.maximum(variance, 0) * np.concatenate(squares)
    return (scores - scores.mean()) / max(scores.std(ddof=1), np.finfo(float).tiny)


_SCORES = {"flap_published": _flap, "wanda_sp_published": _wanda_sp}
