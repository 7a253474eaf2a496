"""Perplexity over non-overlapping windows (MW and its evaluation code; NUCL's Table 4 models)."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.evaluate.inputs import check_rows, padded_batches
from ffn_heterogeneity.losses.cross_entropy import chunked_nll
from ffn_heterogeneity.models.causal_lm import (
    RunOptions,
    forward,
    head_kernel,
    require_language_model,
)
from ffn_heterogeneity.models.config import ModelConfig


@functools.partial(jax.jit, static_argnums=(0, 1))
def window_nll(config: ModelConfig, options: RunOptions, params: dict, rows: jax.Array):
    """Summed NLL in nats and number of predictions of each row of int32 [B, T + 1]: ([B], [B]).

    A row that is all -1 (padding of the last batch) counts nothing.
    """
    valid = rows[:, 1:] >= 0
    rows = jnp.maximum(rows, 0)
    hidden = forward(config, params, {"tokens": rows[:, :-1]}, options=options)["hidden"]
    kernel, layout = head_kernel(config, params)

    def one(row):
        hidden, targets, valid = (x[None] for x in row)
        sums = chunked_nll(
            hidden, kernel, targets, valid, layout=layout, softcap=config.final_softcap
        )
        return sums.total, sums.count

    return jax.lax.map(one, (hidden, rows[:, 1:], valid))


def perplexity(
    config: ModelConfig,
    params: dict,
    rows: np.ndarray,
    *,
    batch_size: int = 4,
    options: RunOptions = RunOptions(),
    progress: str | None = "perplexity",
) -> dict[str, float]:
    """exp of the mean NLL over all predictions of equally long windows.

    Args:
      params: stacked tree; numpy leaves are put on the device once.
      rows: int [windows, length]; every position after the first is predicted.

    Returns:
      {"perplexity", "nll" (nats a token), "tokens" (predictions), "windows", "nll_windows": of
      each}.

    Raises:
      ValueError: an encoder; rows that are not 2-D integers of at least two columns, or hold ids
        outside the vocabulary.
    """
    require_language_model(config, "perplexity")
    rows = np.asarray(rows)
    check_rows(rows, config.vocab_size)
    params, nlls, counts = jax.device_put(params), [], []
    for number, batch in enumerate(padded_batches(rows, batch_size, progress)):
        nll, count = window_nll(config, options, params, batch)
        if np.isnan(nll).any():
            raise ValueError(
                f"the NLL of the windows from {number * len(batch)} on is NaN: the weights or the "
                "computation overflow; try compute_dtype=float32, or check the checkpoint"
            )
        nlls, counts = [*nlls, *np.asarray(nll, float)], [*counts, *np.asarray(count, int)]
    nlls, counts = (np.array(each[: len(rows)]) for each in (nlls, counts))
    tokens = int(counts.sum())
    nll = float(nlls.sum()) / tokens
    return {
        # A model broken by an attack may exceed what a float holds.
        "perplexity": math.exp(nll) if nll < 700 else math.inf,
        "nll": nll,
        "tokens": tokens,
        "windows": len(rows),
        "nll_windows": (nlls / counts).tolist(),
    }
