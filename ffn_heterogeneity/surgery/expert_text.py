"""Experts on calibration text, for surgeries that merge them.

`routers_on` observes all layers in one pass. `ExpertText` goes layer after layer: otherwise all
experts' states of all layers would be in memory at once, and no layer could run on top of the
merged one before it.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.context import with_both_sides
from ffn_heterogeneity.models.experts import Experts, Rows
from ffn_heterogeneity.probes.experts import expert_probe
from ffn_heterogeneity.probes.observe import observe, token_batches
from ffn_heterogeneity.probes.routing import routing_probe, similarity_probe
from ffn_heterogeneity.surgery.blockwise import embedded, one_layer

ROWS = 8  # per batch


class Seen(NamedTuple):
    """Sums over the text of one layer with R router columns, padding excluded.

    Attributes:
      tokens: their number.
      usage: tokens sent to each column's expert, [R].
      scores: REAP's: the mean over those tokens of gate x |output|, [R]; 0 without tokens.
      logits: inner products of the columns' logits, [R, R].
      outputs: inner products of p_r(x) E_r(x), every expert applied to every token, p the softmax;
        [R, R]; None from `routers_on`.
      states: h of every expert for every token, float32 [R, tokens, m]; None from `routers_on`.
    """

    tokens: int
    usage: np.ndarray
    scores: np.ndarray
    logits: np.ndarray
    outputs: np.ndarray | None = None
    states: np.ndarray | None = None


class Everywhere(NamedTuple):
    """Every routed expert applied to each of N tokens.

    Attributes:
      rows: the number of each token's row, [N].
      streams: the residual streams before the layer, [N, D].
      columns: the router's choices, [N, k].
      outputs: of the experts, without gates, float32 [E, N, D].
    """

    rows: np.ndarray
    streams: np.ndarray
    columns: np.ndarray
    outputs: jax.Array


def routers_on(model: Model, rows: Sequence[np.ndarray]) -> dict[int, Seen]:
    """{layer with experts: what it does on a text}, all layers in one pass.

    Both stacks of an encoder-decoder read the text (`context.with_both_sides`) [ours].
    """
    config = model.config
    sparse = [i for i, layer in enumerate(config.layers) if layer.experts is not None]
    columns, experts = (
        max(getattr(config.layers[i], name) for i in sparse) for name in ("columns", "experts")
    )
    batches = token_batches(rows, ROWS, progress="text")
    if config.kind == "encoder_decoder":
        batches = (with_both_sides(config, batch) for batch in batches)
    used = expert_probe(experts, max(config.ffn_widths))
    found = observe(
        config, model.params, batches, routing_probe(columns), similarity_probe(columns), used
    )
    seen = {}
    for i in sparse:
        layer = config.layers[i]
        sent, gated = (found["experts"][name][i] for name in ("tokens", "gated"))
        scores = np.divide(gated, sent, out=np.zeros_like(sent), where=sent > 0)
        logits = found["similarity"][i][: layer.columns, : layer.columns]
        _check_finite(i, scores, logits)
        usage = found["routing"]["chosen"][i][: layer.columns]  # beyond the capacity, too
        tokens = int(found["routing"]["count"][i])
        seen[i] = Seen(tokens, usage, scores[layer.shared : layer.experts], logits)
    return seen


def _check_finite(layer: int, *values: np.ndarray) -> None:
    if not all(np.isfinite(value).all() for value in values):
        raise ValueError(f"layer {layer}: its states are not finite: check the checkpoint")


class ExpertText:
    """The residual streams of a text before one layer, moved on layer by layer.

    Args:
      rows: token ids, of any lengths.
      size: rows per batch; every expert is applied to all their tokens.
    """

    def __init__(self, model: Model, rows: Sequence[np.ndarray], size: int = ROWS):
        causal_lm.require_one_stack(model.config, "merging and comparing experts on text")
        self._config = model.config
        self._batches = list(token_batches(rows, size))
        tables = {"embed": jax.device_put(model.params["embed"])}
        self._streams = [embedded(model.config, tables, batch) for batch in self._batches]

    def seen(self, layer: int, leaves: dict) -> Seen:
        """Observe a layer of the model on the streams.

        Raises:
          ValueError: values that are not finite.
        """
        config, sums, states = self._one(self._config.layers[layer]), {}, []
        shared, leaves = config.layers[0].shared, jax.device_put(leaves)
        for x, batch in zip(self._streams, self._batches, strict=True):
            for name, value in _observed(config, leaves, x, batch).items():
                if name == "states":
                    real = batch["segment_ids"].reshape(-1) > 0
                    states.append(np.asarray(value)[shared:, real])
                else:
                    sums[name] = sums.get(name, 0) + np.asarray(value, np.float64)
        _check_finite(layer, *sums.values())
        usage, gated = sums["tokens"][shared:], sums["gated"][shared:]
        scores = np.divide(gated, usage, out=np.zeros_like(usage), where=usage > 0)
        outputs, every = sums["outputs"][shared:, shared:], np.concatenate(states, axis=1)
        return Seen(int(sums["count"]), usage, scores, sums["logits"], outputs, every)

    def everywhere(self, layer: int, leaves: dict) -> Iterator[Everywhere]:
        """Apply all experts of a layer to the tokens of each batch, padding excluded."""
        config, leaves, first = self._one(self._config.layers[layer]), jax.device_put(leaves), 0
        for x, batch in zip(self._streams, self._batches, strict=True):
            columns, outputs = _applied(config, leaves, x, batch)
            real = batch["segment_ids"].reshape(-1) > 0
            rows = first + np.arange(len(real)) // x.shape[1]
            streams = np.asarray(x, np.float32).reshape(len(real), -1)[real]
            outputs = outputs[config.layers[0].shared :, real]
            yield Everywhere(rows[real], streams, np.asarray(columns)[real], outputs)
            first += len(x)

    def move(self, layer: LayerConfig, leaves: dict) -> None:
        """Pass the streams through a layer."""
        config, leaves = self._one(layer), jax.device_put(leaves)
        rows = zip(self._streams, self._batches, strict=True)
        self._streams = [one_layer(config, leaves, x, batch) for x, batch in rows]

    def _one(self, layer: LayerConfig) -> ModelConfig:
        return dataclasses.replace(self._config, layers=(layer,))


@functools.partial(jax.jit, static_argnums=0)
def _observed(config: ModelConfig, leaves: dict, x: jax.Array, batch: dict) -> dict[str, jax.Array]:
    """Sums of one layer, by stored expert; see `Seen`."""
    layer = config.layers[0]
    _, seen = causal_lm.one_layer(config, 0, leaves, x, batch)
    sums = expert_probe(layer.experts, layer.ffn_width).function(seen, batch, None)
    real = batch["segment_ids"].reshape(-1) > 0
    logits = jnp.where(real[:, None], seen.routing.logits.reshape(-1, layer.columns), 0)
    found = {"tokens": sums["tokens"], "gated": sums["gated"], "count": jnp.sum(real)}
    found["logits"] = logits.T @ logits
    rows = _every_row(config, leaves, seen.ffn_input)
    gated = jnp.where(real[rows.tokens], rows.gates, 0)[:, None] * rows.outputs
    outputs = _by_expert(layer, rows, gated, len(real))
    found["outputs"] = jnp.einsum("rnd,snd->rs", outputs, outputs)
    found["states"] = _by_expert(layer, rows, rows.states, len(real))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _applied(
    config: ModelConfig, leaves: dict, x: jax.Array, batch: dict
) -> tuple[jax.Array, jax.Array]:
    """(chosen columns [B T, k], outputs of all experts [E, B T, D]) of one layer."""
    _, seen = causal_lm.one_layer(config, 0, leaves, x, batch)
    rows, tokens = _every_row(config, leaves, seen.ffn_input), x.shape[0] * x.shape[1]
    outputs = _by_expert(config.layers[0], rows, rows.outputs, tokens)
    return seen.routing.columns.reshape(tokens, -1), outputs


def _every_row(config: ModelConfig, leaves: dict, ffn_input: jax.Array) -> Rows:
    """Rows of every expert for every token, with the softmax probability as the gate."""
    layer = config.layers[0]
    routed = dataclasses.replace(layer, top_k=layer.columns, gates="softmax", capacity=None)
    _, routing = Experts(config, routed).apply({"params": leaves["ffn"]}, ffn_input)
    return routing.rows


def _by_expert(layer: LayerConfig, rows: Rows, values: jax.Array, tokens: int) -> jax.Array:
    """Values of rows by expert and token, float32 [E, tokens, ...]."""
    empty = jnp.zeros((layer.experts or 0, tokens, values.shape[-1]), jnp.float32)
    # Rows of constants have expert -1, which would mean the last one.
    experts = jnp.where(rows.experts < 0, len(empty), rows.experts)
    return empty.at[experts, rows.tokens].set(values.astype(jnp.float32), mode="drop")
