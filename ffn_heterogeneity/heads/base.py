"""The class of all heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

ROOT = "task_head"


@dataclasses.dataclass(frozen=True)
class Head:
    """One head.

    Attributes:
      leaves: key -> the leaves under `params["task_head"]` at first; runs under `jax.eval_shape`.
      apply: (params, outputs, batch, drop) -> what losses and predictions read as
        `outputs["predictions"]`. It is handed the whole tree; `drop(x)` is x under the run's
        dropout in training, x itself elsewhere.
      says: its leaves -> what results.json tells of them.
      probes: what it reads of the layers, in `outputs["probes"]`.
    """

    leaves: Callable[[jax.Array], dict]
    apply: Callable[[dict, dict, Mapping[str, jax.Array], Callable], Any]
    says: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda leaves: {}
    probes: tuple = ()
