"""What a run trains towards beside its losses: a head, and metrics of whole predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Objective:
    """Language modelling is the objective without any of these.

    Attributes:
      head: (params["task_head"], outputs, batch) -> what losses and predictions read under
        outputs["predictions"]. Its leaves are put there by a surgery of `config.prepare`.
      predictions: (params, outputs, batch) -> {name: array [B, ...]}, of validation: one row an
        example, references among them; rows where "valid" [B] is False count nowhere.
      metrics: {name: numpy array of all valid rows, of every process} -> {name: number}, on the
        host: what does not add up over batches (F1, Matthews, Spearman).
      probes: that predictions read in outputs["probes"].
    """

    head: Callable[..., Any] | None = None
    predictions: Callable[..., dict] | None = None
    metrics: Callable[[Mapping[str, np.ndarray]], Mapping[str, float]] | None = None
    probes: tuple = ()


LANGUAGE = "language_model"
# name -> (config, model's config) -> objective
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    LANGUAGE: lambda config, model: Objective(),
}
