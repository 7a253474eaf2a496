"""Activations of each neuron on bos and on calibration text, for criteria that need them."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.probes.base import Probe
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
    ||h||_2, "signed": mean h, float64 [m]; "tokens": their number.

    Args:
      rows: token ids, bos first, of any lengths.
      token: used instead of bos.

    Raises:
      ValueError: as `massive_weights`; non-finite states.
    """
    massive = massive_weights(config, params, token=token)
    layers = [{"massive": i == massive.layer} for i in range(config.n_layers)]
    sums = {"bos": massive.states.astype(np.float64)}
    if rows is not None:
        total = _sums(config, params, rows)
        tokens = total["tokens"][0]
        sums |= {"mean": total["size"] / tokens, "norm": np.sqrt(total["square"])}
        sums |= {"signed": total["sum"] / tokens}
        layers = [layer | {"tokens": int(tokens)} for layer in layers]
    for name, values in sums.items():
        if not np.isfinite(values).all():
            raise ValueError(f"the states ({name}) are not finite: check the checkpoint")
        for layer, width, layer_values in zip(layers, config.ffn_widths, values, strict=True):
            layer[name] = layer_values[:width]
    return layers


def _sums(config: ModelConfig, params: dict, rows: Sequence[np.ndarray]) -> dict:
    """The sums of `_sums_of` over all rows, [L, ...]."""
    probe = _sums_of(max(config.ffn_widths))
    return observe(config, params, token_batches(rows, BATCH), probe)[probe.name]


@functools.cache
def _sums_of(width: int) -> Probe:
    """Probe for sums of h, |h|, h^2 over real tokens but the first, float32 [width], "tokens"."""

    def function(seen, batch, per_layer):
        real = (batch["segment_ids"][:, 1:] > 0).astype(jnp.float32)
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
        state = jnp.abs(seen.require_state()[:, 1:].astype(jnp.float32))
        _, index = jax.lax.top_k(state, min(ACTIVE, state.shape[-1]))
        marks = jnp.broadcast_to(real[..., None], index.shape)
        return {"active": jnp.zeros(width).at[index].add(marks), "tokens": jnp.sum(real)}

    return Probe("active", function)
