"""Observation of a model over data: one forward pass per batch, and its probes' results."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.models.causal_lm import forward
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.progress import bar


def observe(
    config: ModelConfig,
    params: dict,
    batches: Iterable[Mapping[str, Any]],
    *probes: Probe,
    options: RunOptions = RunOptions(),
) -> dict[str, Any]:
    """Return {name of a probe: its results of all layers, [L, ...], on the host}.

    Sums are added over the batches in float64; for a probe of kind "example" the rows of all
    batches are concatenated, [L, rows, ...].

    Args:
      params: stacked tree; numpy leaves are put on the device once.
      batches: as for `causal_lm.forward`; batches of one shape share a compiled program.

    Raises:
      ValueError: no batches.
    """
    params, total = jax.device_put(params), None
    for batch in batches:
        seen = jax.device_get(_probed(config, options, probes, params, dict(batch)))
        for probe in probes:
            if probe.kind == "sum":
                to_float64 = functools.partial(np.asarray, dtype=np.float64)
                seen[probe.name] = jax.tree.map(to_float64, seen[probe.name])
        if total is None:
            total = seen
            continue
        for probe in probes:
            join = np.add if probe.kind == "sum" else _behind
            total[probe.name] = jax.tree.map(join, total[probe.name], seen[probe.name])
    if total is None:
        raise ValueError("there is no data to observe the model on")
    return total


def token_batches(
    rows: Sequence[np.ndarray], size: int, longest: int = 0, progress: str | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of rows of token ids: "tokens" and "segment_ids", 0 at padding.

    All have the same shape, int32 [size, longest], so that they need only one program.

    Args:
      size: maximum rows per batch.
      longest: length of the batches; 0: the longest row's length.
      progress: label of the progress bar; None: no bar.
    """
    size, longest = min(size, len(rows)), longest or max(map(len, rows))
    for start in bar(progress, range(0, len(rows), size)):
        tokens, real = np.zeros((2, size, longest), np.int32)
        for i, row in enumerate(rows[start : start + size]):
            tokens[i, : len(row)], real[i, : len(row)] = row, 1
        yield {"tokens": tokens, "segment_ids": real}


def _behind(before: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.concatenate([before, rows], axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _probed(config, options, probes, params, batch):
    return forward(config, params, batch, options=options, probes=probes)["probes"]
