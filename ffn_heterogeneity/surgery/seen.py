"""Activations of each neuron on bos and on calibration text: for what looks at them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.data.sources import read_utf8
from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.own_text import own_rows

# Of calibration text, and of the model's own, where nobody says how many tokens.
OWN, TOKENS, OWN_TOKENS = "own", 2048, 8192
WINDOW = 512
BATCH = 4  # rows observed at once
HELD_OUT = 4  # every fourth row chooses what the others are fitted with


def calibration_rows(
    model: Model, calibration: str, tokens: int | None = None, seed: int = 0
) -> Sequence[np.ndarray]:
    """Rows of token ids, bos and at most 512 tokens each, `tokens` in all.

    Args:
      calibration: a UTF-8 text, or "own": what the model writes (`own_text.own_rows`).
      tokens: of a text a multiple of 512; None: 2,048, of the model's own text 8,192.

    Raises:
      ValueError: no tokenizer, a text that is too short, or as `own_rows`.
    """
    if calibration == OWN:
        return own_rows(model, tokens or OWN_TOKENS, seed)
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer to read the calibration text with")
    windows, rest = divmod(tokens or TOKENS, WINDOW)
    if rest:
        raise ValueError(f"calibration_tokens={tokens}: of a text a multiple of {WINDOW}")
    rows = text_windows(read_utf8(calibration), model.tokenizer, WINDOW, max_windows=windows)
    if len(rows) < windows:
        needed = f"{windows} are needed for {windows * WINDOW:,} tokens"
        raise ValueError(f"{calibration}: {len(rows)} windows of {WINDOW} tokens, {needed}")
    return list(rows)


def seen_states(
    config: ModelConfig,
    params: dict,
    rows: Sequence[np.ndarray] | None = None,
    token: int | None = None,
    moments: bool = False,
) -> list[dict]:
    """A dict a layer, of its neurons' intermediate states h.

    "bos": |h| when bos stands alone, float64 [m]; "massive": whether the layer is the massive one.
    With calibration rows, over all their tokens but the first (bos): "mean": mean |h|, "norm":
    ||h||_2, "signed": mean h, float64 [m]; and "tokens", how many.

    Args:
      rows: of token ids, bos first, of any lengths.
      token: in the place of bos.
      moments: also "moments", (mean h h^T [m, m] of three rows of four, that of the fourth), 2 m^2
        numbers a layer, and "held_share", the fourth's part of the tokens.

    Raises:
      ValueError: as `massive_weights`; states that are not finite.
    """
    found = massive_weights(config, params, token=token)
    layers = [{"massive": i == found.layer} for i in range(config.n_layers)]
    sums = {"bos": found.states.astype(np.float64)}
    if rows is not None:
        fitted, held = list(rows), []
        if moments:
            held = fitted[HELD_OUT - 1 :: HELD_OUT]
            del fitted[HELD_OUT - 1 :: HELD_OUT]
        if moments and not held:
            raise ValueError(
                f"{len(rows)} rows of calibration text: give at least {HELD_OUT} (of a text more "
                "calibration_tokens)"
            )
        parts = [_sums(config, params, part, moments) for part in (fitted, held) if part]
        names = [name for name in parts[0] if name != "gram"]
        total = {name: np.sum([part[name] for part in parts], axis=0) for name in names}
        tokens = total["tokens"][0]
        sums |= {"mean": total["size"] / tokens, "norm": np.sqrt(total["square"])}
        sums |= {"signed": total["sum"] / tokens}
        for i, layer in enumerate(layers):
            layer["tokens"], width = int(tokens), config.ffn_widths[i]
            if moments:
                layer["held_share"] = parts[1]["tokens"][0] / tokens
                layer["moments"] = tuple(
                    part["gram"][i, :width, :width] / part["tokens"][0] for part in parts
                )
    for name, values in sums.items():
        if not np.isfinite(values).all():
            raise ValueError(f"the states ({name}) are not finite: check the checkpoint")
        for layer, width, own in zip(layers, config.ffn_widths, values, strict=True):
            layer[name] = own[:width]
    return layers


def _sums(config: ModelConfig, params: dict, rows: Sequence[np.ndarray], gram: bool) -> dict:
    """The sums of `_sums_of` over all rows, [L, ...]."""
    probe, longest = _sums_of(max(config.ffn_widths), gram), max(map(len, rows))
    size = min(BATCH, len(rows))

    def batch(some: Sequence[np.ndarray]) -> dict:
        tokens, real = np.zeros((2, size, longest), np.int32)
        for i, row in enumerate(some):
            tokens[i, : len(row)], real[i, : len(row)] = row, 1
        return {"tokens": tokens, "segment_ids": real}

    batches = (batch(rows[start : start + size]) for start in range(0, len(rows), size))
    return observe(config, params, batches, probe)[probe.name]


@functools.cache
def _sums_of(width: int, gram: bool) -> Probe:
    """Sums of h, |h| and h^2 over all real tokens but the first, float32 [width] each, "tokens" of
    them; with `gram` that of h h^T."""

    def function(seen, batch, per_layer):
        real = (batch["segment_ids"][:, 1:] > 0).astype(jnp.float32)
        state = seen.ffn_state[:, 1:].astype(jnp.float32) * real[..., None]
        state = jnp.pad(state, ((0, 0), (0, 0), (0, width - state.shape[-1])))
        sums = {"sum": state, "size": jnp.abs(state), "square": state**2}
        sums = {name: jnp.sum(values, (0, 1)) for name, values in sums.items()}
        if gram:
            sums["gram"] = jnp.einsum("btm,btk->mk", state, state)
        return sums | {"tokens": jnp.sum(real)}

    return Probe("ffn_sums", function)
