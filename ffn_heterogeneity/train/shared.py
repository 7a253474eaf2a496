"""Several runs of one process: the loaded model and the compiled programs that they share."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.train.build import Built, build, static_key
from ffn_heterogeneity.train.settings import TrainConfig


class Shared:
    """Held by whoever starts several runs, one after the other, and given to each.

    Runs whose static settings are equal (`build.static_key`: they differ in learning rates, weights
    of losses, dropout rates, schedules, seeds, steps) use the very same compiled train step and
    evaluation.

    Args:
      keep_model: the model that was read last stays in host memory for the next run.
    """

    def __init__(self, keep_model: bool = True):
        self._keep_model = keep_model
        self._model: tuple[tuple[str, str | None], Model] | None = None
        self._built: dict[Any, Built] = {}

    def load(self, spec: str, revision: str | None = None) -> Model:
        """`load_model`, once for runs of the same model. Its leaves are for reading only."""
        if not self._keep_model:
            return load_model(spec, revision=revision)
        if self._model is None or self._model[0] != (spec, revision):
            self._model = None  # freed before the next one is read
            self._model = ((spec, revision), load_model(spec, revision=revision))
        return self._model[1]

    def build(self, config: TrainConfig, model: Model, mesh: Mesh) -> Built:
        """`build.build`, once for runs with equal static settings."""
        key = static_key(config, model, mesh)
        if key not in self._built:
            self._built[key] = build(config, model, mesh)
        return self._built[key]

    @property
    def programs(self) -> int:
        """Different train steps so far."""
        return len(self._built)

    @property
    def compilations(self) -> int:
        """The number of times a train step was compiled so far; at most once a program."""
        return sum(built.train_step._cache_size() for built in self._built.values())
