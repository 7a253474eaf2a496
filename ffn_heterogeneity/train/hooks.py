"""Hooks between the steps of a run: measurements, the best value, throughput, signals."""

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ffn_heterogeneity.train.console import StopRequested
from ffn_heterogeneity.wording import check_choice


@dataclasses.dataclass(frozen=True)
class Hook:
    """`function(state, check_stop) -> metrics`, called between two steps.

    Attributes:
      function: gets the `TrainState`, which it only reads, and `check_stop`, which long work calls
        from time to time so that signals are handled. Returns numbers and arrays on the host, by
        name.
      every: interval in steps, in addition to before the first and after the last; 0: only then.
    """

    function: Callable[[Any, Callable[[], None]], dict[str, Any]]
    every: int = 0

    def due(self, step: int, last: int) -> bool:
        return step in (0, last) or bool(self.every) and step % self.every == 0


@dataclasses.dataclass
class Best:
    """Best value so far of one metric; `row` is {"step", "metric", "value"}, or None."""

    metric: str
    mode: str = "min"
    row: dict[str, Any] | None = None

    def __post_init__(self):
        check_choice("best_mode", self.mode, ("min", "max"))

    def update(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Return True if the metric is the best so far; non-finite values are ignored.

        Raises:
          ValueError: `metrics` does not have the metric.
        """
        if self.metric not in metrics:
            raise ValueError(
                f"best_metric={self.metric!r} is not among the evaluation metrics {sorted(metrics)}"
            )
        value = float(metrics[self.metric])
        sign = 1.0 if self.mode == "min" else -1.0
        better = self.row is None or sign * value < sign * self.row["value"]
        if better and math.isfinite(value):
            self.row = {"step": step, "metric": self.metric, "value": value}
        return better


class Throughput:
    """Tokens per second over steps only: call `restart` after other work."""

    def __init__(self):
        self._clock, self._steps = time.perf_counter(), []

    def restart(self) -> None:
        self._clock = time.perf_counter()

    def step(self, tokens: float, counts: bool = True) -> float:
        """Return the seconds since the last step (or restart); `counts`: add them to the mean."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if counts and seconds > 0:
            self._steps.append((tokens, seconds))
        return seconds

    def first_word(self, left: int) -> str | None:
        """Describe the speed and the remaining time, once, after three counted steps."""
        if len(self._steps) != 4 or not left:
            return None
        mean = sum(seconds for _, seconds in self._steps[1:]) / 3
        rest = f"{left:,} more take about {datetime.timedelta(seconds=math.ceil(left * mean))}"
        return f"{mean:.3g} s per step, {self.mean:,.0f} tokens/s: {rest} without evaluations"

    @property
    def mean(self) -> float | None:
        steps = self._steps[1:] or self._steps
        seconds = sum(seconds for _, seconds in steps)
        return sum(tokens for tokens, _ in steps) / seconds if seconds else None


class Stopping:
    """Signals, handled by all processes at the same step.

    Only one of several processes may get a signal. It is then sent with the next batch (`wanted`),
    and all processes read it from that step's metrics (`hear`).
    """

    def __init__(self):
        self._many, self.wanted, self.signal = jax.process_count() > 1, None, None

    def on_signal(self, name: str) -> None:
        self.wanted = name
        if not self._many:
            self.signal = name

    def hear(self, stop: Any) -> None:
        if stop:
            self.signal = self.wanted or "SIGTERM"

    def check(self) -> None:
        """Raise `StopRequested` after a signal."""
        if self.signal:
            raise StopRequested
