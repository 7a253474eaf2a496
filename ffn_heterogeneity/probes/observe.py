"""The one loop over data that observes a model: a forward pass a batch, and what its probes saw."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.models.causal_lm import forward
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.probes.base import Probe


def observe(
    config: ModelConfig,
    params: dict,
    batches: Iterable[Mapping[str, Any]],
    *probes: Probe,
    options: RunOptions = RunOptions(),
) -> dict[str, Any]:
    """{name of a probe: its results of all layers, [L, ...], on the host}.

    Sums are added up over the batches, in float64; of a probe whose kind is "example" the rows of
    all batches stand one behind the other, [L, rows, ...].

    Args:
      params: stacked tree; numpy leaves are put on the device once.
      batches: as `causal_lm.forward` reads them; those of one shape are one program.

    Raises:
      ValueError: there are none.
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


def _behind(before: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.concatenate([before, rows], axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _probed(config, options, probes, params, batch):
    return forward(config, params, batch, options=options, probes=probes)["probes"]
