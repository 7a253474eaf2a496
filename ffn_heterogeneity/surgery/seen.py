"""Activations of each neuron on bos and on calibration text: for criteria that look at them."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.data.sources import read_utf8
from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe
from ffn_heterogeneity.surgery.attack import massive_weights

# Of calibration text, 2,048 tokens.
WINDOWS, WINDOW = 4, 512


def calibration_rows(model: Model, path: str) -> np.ndarray:
    """int [4, 513] of a UTF-8 text: bos and 512 tokens each.

    Raises:
      ValueError: no tokenizer, or a text that is too short.
    """
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer to read the calibration text with")
    rows = text_windows(read_utf8(path), model.tokenizer, WINDOW, max_windows=WINDOWS)
    if len(rows) < WINDOWS:
        raise ValueError(f"{path}: {len(rows)} windows of {WINDOW} tokens, {WINDOWS} are needed")
    return rows


def seen_states(
    config: ModelConfig, params: dict, rows: np.ndarray | None = None, token: int | None = None
) -> list[dict]:
    """A dict a layer, of its neurons' intermediate states h.

    "bos": |h| when bos stands alone, float64 [m]; "massive": whether the layer is the massive one.
    With calibration rows, over all their tokens but the first (bos): "mean": mean |h|, and "norm":
    ||h||_2, float64 [m].

    Args:
      rows: int [windows, length], bos first.
      token: in the place of bos.

    Raises:
      ValueError: as `massive_weights`; states that are not finite.
    """
    found = massive_weights(config, params, token=token)
    layers = [{"massive": i == found.layer} for i in range(config.n_layers)]
    sums = {"bos": found.states.astype(np.float64)}
    if rows is not None:
        probe = _sums_of(max(config.ffn_widths))
        one_by_one = ({"tokens": row[None]} for row in np.asarray(rows, np.int32))
        total = observe(config, params, one_by_one, probe)[probe.name]
        tokens = len(rows) * (np.shape(rows)[1] - 1)
        sums |= {"mean": total["size"] / tokens, "norm": np.sqrt(total["square"])}
    for name, values in sums.items():
        if not np.isfinite(values).all():
            raise ValueError(f"the states ({name}) are not finite: check the checkpoint")
        for layer, width, own in zip(layers, config.ffn_widths, values, strict=True):
            layer[name] = own[:width]
    return layers


@functools.cache
def _sums_of(width: int) -> Probe:
    """Sums of |h| and h^2 over all tokens but the first, float32 [width] each."""

    def function(seen, batch, per_layer):
        state = seen.ffn_state[:, 1:].astype(jnp.float32)
        state = jnp.pad(state, ((0, 0), (0, 0), (0, width - state.shape[-1])))
        return {"size": jnp.sum(jnp.abs(state), (0, 1)), "square": jnp.sum(state**2, (0, 1))}

    return Probe("ffn_sums", function)
