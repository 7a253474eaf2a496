"""Perplexity over non-overlapping windows (as in MW's evaluation code; for NUCL's Table 4)."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.evaluate.inputs import OVERFLOW, checked_rows
from ffn_heterogeneity.losses.cross_entropy import chunked_nll
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.probes.observe import token_batches


@functools.partial(jax.jit, static_argnums=(0, 1))
def window_nll(config: ModelConfig, options: causal_lm.RunOptions, params: dict, batch: dict):
    """Each row's summed NLL in nats, number of predictions, and how many are right: 3 x [B].

    Args:
      batch: from `token_batches`, [B, T + 1]; a row without tokens does not count.
    """
    rows, valid = batch["tokens"], batch["segment_ids"][:, 1:] > 0
    hidden = causal_lm.forward(config, params, {"tokens": rows[:, :-1]}, options=options)["hidden"]
    kernel, layout = causal_lm.head_kernel(config, params)

    def one(row):
        hidden, targets, valid = (x[None] for x in row)
        sums = chunked_nll(
            hidden, kernel, targets, valid, layout=layout, softcap=config.final_softcap
        )
        return sums.total, sums.count, sums.correct

    return jax.lax.map(one, (hidden, rows[:, 1:], valid))


def perplexity(
    config: ModelConfig,
    params: dict,
    rows: np.ndarray,
    *,
    batch_size: int = 4,
    options: causal_lm.RunOptions = causal_lm.RunOptions(),
    progress: str | None = "perplexity",
) -> dict[str, float]:
    """Perplexity: exp of the mean NLL over all predictions of equally long windows.

    Args:
      params: stacked tree; numpy leaves are put on the device once.
      rows: int [windows, length]; every position after the first is predicted.

    Returns:
      {"perplexity", "nll" (nats per token), "accuracy" (share of the predictions that are the token
      of largest logit), "tokens" (predictions), "windows", "nll_windows" and "accuracy_windows":
      both of each window}.

    Raises:
      ValueError: an encoder; rows that are not 2-D integers of at least two columns, or hold ids
        outside the vocabulary.
    """
    causal_lm.require_decoder(config, "perplexity")
    rows = checked_rows(np.asarray(rows), config.vocab_size)
    params, sums = jax.device_put(params), []
    size = min(batch_size, len(rows))
    for number, batch in enumerate(token_batches(rows, size, progress=progress)):
        sums.append(np.asarray(window_nll(config, options, params, batch), float))
        if np.isnan(sums[-1]).any():
            first = number * size
            raise ValueError(f"the NLL of the windows from {first} on is NaN: {OVERFLOW}")
    nlls, counts, right = np.concatenate(sums, axis=1)[:, : len(rows)]
    tokens = int(counts.sum())
    nll = float(nlls.sum()) / tokens
    return {
        # A model broken by an attack may exceed the range of a float.
        "perplexity": math.exp(nll) if nll < 700 else math.inf,
        "nll": nll,
        "accuracy": float(right.sum()) / tokens,
        "tokens": tokens,
        "windows": len(rows),
        "nll_windows": (nlls / counts).tolist(),
        "accuracy_windows": (right / counts).tolist(),
    }


def by_text(results: Mapping[str, Any], windows: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """{name: "nll", "accuracy", "windows" and "first_window"} of several texts measured together.

    Args:
      results: from `perplexity`, of the texts' windows in order, all equally long.
      windows: name -> number of windows.
    """
    ends = np.cumsum([*windows.values()])[:-1]
    firsts = [0, *ends.tolist()]
    parts = {x: np.split(results[f"{x}_windows"], ends) for x in ("nll", "accuracy")}
    return {
        name: {x: float(part[i].mean()) for x, part in parts.items()}
        | {"windows": count, "first_window": firsts[i]}
        for i, (name, count) in enumerate(windows.items())
    }
