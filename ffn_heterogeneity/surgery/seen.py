"""Activations of each neuron on bos and on calibration text, for criteria that need them.

In a layer with experts they are of the tokens sent to each expert.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.experts import expert_probe
from ffn_heterogeneity.probes.observe import observe, token_batches
from ffn_heterogeneity.surgery.attack import massive_weights

BATCH = 4  # rows per batch
ACTIVE = 10  # neurons per token that count as active (CMoE's K_a)


def seen_states(
    config: ModelConfig,
    params: dict,
    rows: Sequence[np.ndarray] | None = None,
    token: int | None = None,
) -> list[dict]:
    """Statistics of the neurons' intermediate states h, one dict per layer.

    "bos": |h| on a lone bos token, float64 [m]; "massive": whether the layer is the massive one.
    With calibration rows, over all their tokens except the first (bos): "mean": mean |h|, "norm":
    ||h||_2, "signed": mean h, float64 [m]; "tokens": their number. In a layer with experts all have
    a first axis of experts (`of_place`), and an expert's tokens are those sent to it.

    Args:
      rows: token ids, bos first, of any lengths.
      token: used instead of bos; None: the rows' own first token if the model has no bos.

    Raises:
      ValueError: as `massive_weights`; non-finite states; an expert to which no token is sent.
    """
    if token is None and config.bos_id is None and rows is not None:
        first = {int(row[0]) for row in rows}
        token = first.pop() if len(first) == 1 else None  # [CLS]
    massive, layers = massive_weights(config, params, token=token), []
    for i, layer in enumerate(config.layers):
        here = i == massive.layer
        if layer.experts is not None:
            here = (np.arange(layer.experts) == massive.expert) & here
        layers.append({"massive": here, "bos": massive.states[i].astype(np.float64)})
    for i, total in enumerate(_sums(config, params, rows) if rows is not None else ()):
        tokens = total["tokens"]
        if config.layers[i].experts is not None and not np.all(tokens):
            raise ValueError(f"layer {i}: {unvisited(tokens)}: more calibration text is needed")
        each = np.asarray(tokens)[..., None]
        layers[i] |= {"mean": total["size"] / each, "norm": np.sqrt(total["square"])}
        layers[i] |= {"signed": total["sum"] / each, "tokens": tokens}
    for name in ("mean", "norm", "signed"):
        if not all(np.isfinite(layer.get(name, 0)).all() for layer in layers):
            raise ValueError(f"the states ({name}) are not finite: check the checkpoint")
    return layers


def of_place(seen: Mapping[str, Any] | None, place: Place) -> Mapping[str, Any] | None:
    """A layer's entry of `seen_states` for one block: that of its expert."""
    if seen is None or place.expert is None:
        return seen
    return {name: values[place.expert] for name, values in seen.items()}


def unvisited(tokens: np.ndarray) -> str:
    """Names the experts without tokens, and the least visited of the others."""
    empty = np.flatnonzero(tokens == 0)
    names = ", ".join(map(str, empty[:8])) + (", ..." if len(empty) > 8 else "")
    visited = np.where(tokens > 0, tokens, np.inf)
    least = int(np.argmin(visited))
    rest = f"; of the others expert {least} gets the fewest, {tokens[least]:.0f}"
    text = f"no token is sent to {len(empty)} of {len(tokens)} experts ({names})"
    return text + (rest if np.isfinite(visited[least]) else "")


def _sums(config: ModelConfig, params: dict, rows: Sequence[np.ndarray]) -> list[dict]:
    """Sums of every layer: "sum", "size", "square" [m] or [E, m], and "tokens", a number or [E]."""
    width, probes = max(config.ffn_widths), []
    experts = max(layer.experts or 0 for layer in config.layers)
    if any(layer.experts is None for layer in config.layers):
        probes.append(_sums_of(width))
    if experts:
        probes.append(expert_probe(experts, width))
    seen, layers = observe(config, params, token_batches(rows, BATCH), *probes), []
    for i, layer in enumerate(config.layers):
        sparse, m = layer.experts is not None, layer.ffn_width
        total = seen["experts" if sparse else "ffn_sums"]
        sums = {name: total[name][i][..., :m] for name in ("sum", "size", "square")}
        tokens = total["later" if sparse else "tokens"][i]
        if sparse:
            sums = {name: one[: layer.experts] for name, one in sums.items()}
            layers.append(sums | {"tokens": tokens[: layer.experts]})
        else:
            layers.append(sums | {"tokens": int(tokens)})
    return layers


@functools.cache
def _sums_of(width: int) -> Probe:
    """Probe for sums of h, |h|, h^2 over real tokens but the first, float32 [width], "tokens"."""

    def function(seen, batch, per_layer):
        real = (batch["segment_ids"][:, 1:] > 0).astype(jnp.float32)
        if seen.ffn_state is None:  # in a layer with experts: `expert_probe`
            zeros = jnp.zeros(width, jnp.float32)
            return dict.fromkeys(("sum", "size", "square"), zeros) | {"tokens": jnp.sum(real)}
        state = seen.require_state()[:, 1:].astype(jnp.float32) * real[..., None]
        state = jnp.pad(state, ((0, 0), (0, 0), (0, width - state.shape[-1])))
        sums = {"sum": state, "size": jnp.abs(state), "square": state**2}
        sums = {name: jnp.sum(values, (0, 1)) for name, values in sums.items()}
        return sums | {"tokens": jnp.sum(real)}

    return Probe("ffn_sums", function)


def activation_rates(
    config: ModelConfig, params: dict, rows: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Share of tokens on which a neuron has one of the 10 largest |h|, float64 [m] per layer.

    Over all tokens but the first of each row.

    Args:
      rows: as for `seen_states`.
    """
    probe = _active_of(max(config.ffn_widths))
    counts = observe(config, params, token_batches(rows, BATCH), probe)[probe.name]
    widths = zip(counts["active"], counts["tokens"], config.ffn_widths, strict=True)
    return [active[:width] / tokens for active, tokens, width in widths]


@functools.cache
def _active_of(width: int) -> Probe:
    """Probe for how often each neuron is active, float32 [width], and "tokens"."""

    def function(seen, batch, per_layer):
        real = (batch["segment_ids"][:, 1:] > 0).astype(jnp.float32)
        if seen.ffn_state is None:  # a layer with experts, which the caller did not choose
            return {"active": jnp.zeros(width), "tokens": jnp.sum(real)}
        state = jnp.abs(seen.require_state()[:, 1:].astype(jnp.float32))
        _, index = jax.lax.top_k(state, min(ACTIVE, state.shape[-1]))
        marks = jnp.broadcast_to(real[..., None], index.shape)
        return {"active": jnp.zeros(width).at[index].add(marks), "tokens": jnp.sum(real)}

    return Probe("active", function)
