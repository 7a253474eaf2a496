"""State shared by several runs of one process: the loaded model and the planned programs."""

from collections.abc import Hashable
from typing import Any

from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.train.plan import Plan


class Shared:
    """State shared by several runs of one process, passed to each.

    Runs with equal static settings (`plan.static_key`: they differ only in learning rates, weights
    of losses, dropout rates, schedules, seeds, steps) use the same compiled train step and
    evaluation.

    Args:
      keep_model: keep the last loaded model in host memory for the next run.

    Attributes:
      plans: plans by their keys, see `plan.plan`.
    """

    def __init__(self, keep_model: bool = True):
        self._keep_model = keep_model
        self._model: tuple[tuple[Any, ...], Model] | None = None
        self.plans: dict[Hashable, Plan] = {}

    def load(self, spec: str, revision: str | None = None) -> Model:
        """Call `load_model` once for runs of the same model; its leaves must not be changed."""
        if not self._keep_model:
            return load_model(spec, revision=revision)
        if self._model is None or self._model[0] != (spec, revision):
            self._model = None  # freed before the next one is read
            self._model = ((spec, revision), load_model(spec, revision=revision))
        return self._model[1]

    @property
    def programs(self) -> int:
        """Number of different train steps compiled so far."""
        return sum(plan.train_step._cache_size() > 0 for plan in self.plans.values())

    @property
    def compilations(self) -> int:
        """Number of compilations of train steps so far; at most one per program."""
        return sum(plan.train_step._cache_size() for plan in self.plans.values())
