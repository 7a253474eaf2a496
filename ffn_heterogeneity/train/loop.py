"""The training loop: steps, evaluation, checkpoints, resuming, and a clean end in every case."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from ffn_heterogeneity.io.checkpoints import Checkpoints
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.metrics import MetricsWriter
from ffn_heterogeneity.io.workdir import resume_command
from ffn_heterogeneity.parallel.placement import cut, place_batch, place_scalars
from ffn_heterogeneity.parallel.processes import say
from ffn_heterogeneity.train.console import Progress, StopRequested, catch_signals
from ffn_heterogeneity.train.hooks import Best, Hook, Stopping, Throughput
from ffn_heterogeneity.train.objectives import Batches
from ffn_heterogeneity.train.profiler import Profiler
from ffn_heterogeneity.train.state import TrainState, not_finite
from ffn_heterogeneity.tree import flatten
from ffn_heterogeneity.wording import check_numbers, some


class TrainingDiverged(ValueError):
    """A non-finite loss term, gradient or update; names the step, the cause and a checkpoint."""


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """The loop's schedule.

    Attributes:
      steps: optimizer steps of the whole run.
      checkpoint_every: steps between checkpoints; 0: only at the end, at a stop, and when best.
      accumulation: micro-batches per step; batches [B, T] are reshaped to [A, B / A, T].
      best_metric, best_mode: the hooks' metric that selects the best checkpoint, and whether its
        "min" or "max" is best.
      keep: number of latest checkpoints to keep.
      keep_best: save and keep a checkpoint whenever the best metric improves during training.
      save_at_end: also save after the last step (so that a finished run can be restored).
      profile: (first step to trace, first step after), from 1, into `<workdir>/profile`; or None.
      tensorboard, wandb: further targets of metrics, see `MetricsWriter`.
    """

    steps: int
    checkpoint_every: int = 0
    accumulation: int = 1
    best_metric: str = "validation/nll"
    best_mode: str = "min"
    keep: int = 1
    keep_best: bool = True
    save_at_end: bool = True
    profile: tuple[int, int] | None = None
    tensorboard: bool = True
    wandb: str = ""

    def __post_init__(self):
        counts = dict.fromkeys(("steps", "keep", "accumulation"), "[1, inf)")
        check_numbers(self, checkpoint_every="[0, inf)", **counts)


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled part of a run.

    Attributes:
      train_step: from `make_train_step`.
      hyper: step (0-based) -> floats for `train_step`.
      shardings: (state, batch, replicated) shardings of the step.
      gradient_paths: sorted paths of the trainable leaves, to name one with a bad gradient.
      lengths: number of shapes of its batches, i.e. of programs that may be compiled.
      terms: names of the loss's terms.
    """

    train_step: Any
    hyper: Callable[[int], dict[str, float]]
    shardings: tuple[Any, Any, Any] = (None, None, None)
    gradient_paths: tuple[str, ...] = ()
    lengths: int = 1
    terms: tuple[str, ...] = ()


@dataclasses.dataclass
class LoopResult:
    """The end of a run; `stopped` is None after the last step, else the signal's name.

    `best` is `{"step", "metric", "value"}` (None: nothing was evaluated). With `keep_best` its
    parameters are `Checkpoints(workdir / "checkpoints").restore(state, best["step"])`; step 0 is
    the original model, which is not saved.
    """

    state: TrainState
    step: int
    stopped: str | None
    best: dict[str, Any] | None
    tokens_per_second: float | None
    compile_seconds: float | None


class TrainLoop:
    """Runs the steps of a run, from the latest checkpoint in `workdir` if there is one.

    Args:
      config: the schedule.
      program: the compiled step, and its arguments other than state and batch.
      state: the state at step 0, placed. It is donated: keep no reference.
      batches: see `objectives.Batches`; at its beginning.
      workdir: directory for checkpoints and metrics; claim it with `prepare_workdir` first.
      hooks: measurements between steps; their metrics are one row of the metrics file.
    """

    def __init__(
        self,
        config: LoopConfig,
        program: Program,
        state: TrainState,
        batches: Batches,
        workdir: str | os.PathLike,
        hooks: Sequence[Hook] = (),
    ):
        self.config, self.program, self.state = config, program, state
        self.batches, self.hooks, self.workdir = batches, tuple(hooks), epath.Path(workdir)
        self.checkpoints = Checkpoints(self.workdir / "checkpoints", keep=config.keep)
        # Written once: they are the same in every checkpoint.
        trained = program.gradient_paths
        paths = set(flatten(state.params)) - {*trained} if trained else ()
        self._frozen = tuple(f"params/{path}" for path in sorted(paths))
        self.step, self.last_measured = 0, -1
        self.best = Best(config.best_metric, config.best_mode)
        self.saved_step: int | None = None
        self._saved_rows: int | None = None
        self._profiler = Profiler(config.profile, self.workdir / "profile")
        self._speaks = jax.process_index() == 0
        self.stopping, self.throughput = Stopping(), Throughput()
        self._pending: tuple[int, Any, dict] | None = None
        self._improved = False
        self.compile_seconds: float | None = None
        self._shapes: set[tuple] = set()  # of the batches so far
        self._first_calls: set[int] = set()  # steps whose time is the compiler's too

    def run(self) -> LoopResult:
        """Train until the end or a signal; see `LoopResult`.

        Raises:
          TrainingDiverged: a non-finite value; the update was not applied.
          CheckpointError: the checkpoint to resume from is damaged or another model's, or a
            checkpoint could not be written (e.g. a full disk).
          ValueError: the data ended early.
          RuntimeError: the step was compiled a second time.
        """
        self._resume()
        done, progress = False, contextlib.nullcontext()
        if self._speaks:
            progress = Progress(self.config.steps, self.step)
        with (
            self._metrics_writer() as self.writer,
            catch_signals(self.stopping.on_signal),
            progress as self.progress,
        ):
            try:
                self._loop()
                self.checkpoints.wait()  # a run whose last save failed is not done
                # A signal in the last evaluation leaves it to the next start.
                measured = not self.hooks or self.last_measured == self.step
                done = self.step >= self.config.steps and measured
            finally:
                self._profiler.close()
                # Printed first: closing may also fail, or wait for a disk that does not respond.
                if not done and (self.step or self.saved_step is not None):
                    self._say(
                        f"stopped at step {self.step}; to resume: {resume_command(self.workdir)}"
                    )
                self.checkpoints.close()
        return LoopResult(
            state=self.state,
            step=self.step,
            stopped=None if done else self.stopping.signal,
            best=self.best.row,
            tokens_per_second=self.throughput.mean,
            compile_seconds=self.compile_seconds,
        )

    def _metrics_writer(self) -> MetricsWriter:
        return MetricsWriter(
            self.workdir,
            resume_step=self.saved_step,
            resume_rows=self._saved_rows,
            tensorboard=self.config.tensorboard,
            wandb=self.config.wandb,
        )

    def _loop(self) -> None:
        last = self.config.steps
        while True:
            if self.last_measured != self.step:
                with contextlib.suppress(StopRequested):
                    self._measure([hook for hook in self.hooks if hook.due(self.step, last)])
            every = self.config.checkpoint_every
            if (every and 0 < self.step < last and self.step % every == 0) or self._improved:
                self._save()
            if self.step >= last or self.stopping.signal:
                break
            self._train_one()
        self._drain()
        if self.stopping.signal or self.config.save_at_end:
            self._save()

    def _train_one(self) -> None:
        try:
            batch = next(self.batches)
        except StopIteration:
            self._drain()
            self._save()
            raise ValueError(
                f"the training data ended after {self.step} of {self.config.steps} steps: "
                "lower steps, or let the data repeat"
            ) from None
        hyper, shapes = self.program.hyper(self.step), tuple(x.shape for x in batch.values())
        placed = self._place(batch, hyper)
        self._profiler.before(self.step + 1)
        if shapes not in self._shapes:
            self._shapes.add(shapes)
            metrics = self._first_call(placed)
        else:
            # From here on, implicit transfers between host and device are errors.
            with jax.transfer_guard("disallow"):
                self.state, metrics = self.program.train_step(self.state, *placed)
        self.step += 1
        if line := self._profiler.after(self.step, metrics):
            self._say(line)
        compiled = self.program.train_step._cache_size()
        if compiled > self.program.lengths:
            shown = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in batch.items()}
            raise RuntimeError(
                f"the train step was compiled {compiled} times by step {self.step}, where "
                f"{self.program.lengths} are expected: a batch or hyper leaf changed its shape or "
                f"dtype; batch {shown}, hyper {sorted(hyper)}"
            )
        previous, self._pending = self._pending, (self.step, metrics, hyper)
        self._report(previous)

    def _first_call(self, placed: tuple) -> Any:
        start = time.perf_counter()
        self.state, metrics = self.program.train_step(self.state, *placed)
        jax.block_until_ready(metrics)
        self._first_calls.add(self.step + 1)
        if self.compile_seconds is None:
            self.compile_seconds = time.perf_counter() - start
        self.throughput.restart()
        return metrics

    def _place(self, batch: dict[str, np.ndarray], hyper: Mapping[str, float]) -> tuple:
        """Place both on the devices; the batch includes this process's stop flag."""
        _, rows, replicated = self.program.shardings
        parts = cut(batch, self.config.accumulation, self.stopping.wanted is not None)
        return place_batch(parts, rows), place_scalars(hyper, replicated)

    def _drain(self) -> None:
        previous, self._pending = self._pending, None
        self._report(previous)

    def _report(self, pending: tuple[int, Any, dict] | None) -> None:
        """Fetch a step's metrics (while the next step runs), check and write them."""
        if pending is None:
            return
        step, metrics, hyper = pending
        metrics = jax.device_get(metrics)
        tokens = float(metrics.get("tokens", 0))
        timed = step not in self._first_calls
        seconds = self.throughput.step(tokens, counts=timed)
        self.stopping.hear(metrics.pop("stop", 0))
        finite, by_leaf = metrics.pop("finite"), metrics.pop("gradient_finite")
        if not finite or not np.isfinite(metrics["update_norm"]):
            raise self._diverged(step, metrics, by_leaf)
        row = {f"train/{name}": value for name, value in metrics.items()}
        row |= {f"train/{name}": float(value) for name, value in hyper.items()}
        if timed and seconds > 0:
            row["timing/seconds"] = seconds
            row["timing/tokens_per_second"] = tokens / seconds
        if metrics.get("target_tokens", 1) == 0:
            self._say(f"step {step}: the batch has no target, so its loss is 0")
        self.writer.write(step, row)
        # Show each term without its weight: the weighted sum of several terms is less useful.
        terms = self.program.terms if len(self.program.terms) > 1 else ("loss",)
        shown = {name: float(metrics[name]) for name in terms}
        if self._speaks:
            self.progress.update(step, shown, tokens / seconds if timed and seconds else None)
        if timed and (line := self.throughput.first_word(self.config.steps - step)):
            self._say(line)

    def _diverged(self, step: int, metrics: dict, by_leaf: np.ndarray) -> TrainingDiverged:
        terms = [
            f"{name}={float(value)}"
            for name, value in metrics.items()
            if np.ndim(value) == 0 and not name.endswith("_norm") and not np.isfinite(value)
        ]
        leaves = [
            p for p, good in zip(self.program.gradient_paths, by_leaf, strict=False) if not good
        ]
        if terms:
            what = f"not finite: {', '.join(t for t in terms if not t.startswith('loss='))}"
        elif not np.all(by_leaf):
            what = f"the gradient of {leaves[0] if leaves else 'a leaf'} is not finite"
        else:
            what = "the update is not finite"
        if bad := not_finite(self.state.params):
            what += f"; weights that are not finite: {some(bad)}"
        return TrainingDiverged(
            f"step {step}: {what}; {self._last_checkpoint()}. Lower the learning rate or the "
            "term's weight, or check the batch of that step"
        )

    def _last_checkpoint(self) -> str:
        try:
            good = self.checkpoints.latest_step()
        except CheckpointError as error:  # the save in the background failed as well
            return str(error)
        if good is None:
            return "there is no checkpoint yet"
        return f"last good checkpoint: {self.checkpoints.directory / str(good)}"

    def _measure(self, due: Sequence[Hook]) -> None:
        """Call the hooks and write their metrics as one row; update the best value."""
        if not due:
            return
        self._drain()
        if self.last_measured < 0:
            self._say("evaluating (the first time compiles) ...")
        metrics: dict[str, Any] = {}
        for hook in due:
            metrics |= hook.function(self.state, self.stopping.check)
        self.last_measured = self.step
        name = self.config.best_metric
        # The metric may come from a hook that is called less often.
        if name in metrics or self.step == 0:
            improved = self.best.update(self.step, metrics)
            if not np.isfinite(metrics[name]):
                raise TrainingDiverged(
                    f"step {self.step}: {name}={float(metrics[name])}; {self._last_checkpoint()}"
                )
            # At step 0 the best is the original model: nothing to save.
            self._improved = improved and self.config.keep_best and self.step > 0
            best = self.best.row or {"value": math.nan}
            self._say(f"step {self.step}: {name} {metrics[name]:.5f} (best {best['value']:.5f})")
        self.writer.write(self.step, metrics)
        self.throughput.restart()

    def _save(self) -> None:
        """Save once per step, after checking its metrics, so a diverged step is never saved."""
        self._drain()
        improved, self._improved = self._improved, False
        if self.saved_step == self.step and not improved:
            return
        info = {
            "data": self.batches.get_state(),
            "best": self.best.row,
            "last_measured": self.last_measured,
            "rows": self.writer.rows,
        }
        self.writer.flush()
        self.checkpoints.save(self.step, self.state, info, best=improved, frozen=self._frozen)
        self.saved_step = self.step
        self.throughput.restart()

    def _resume(self) -> None:
        step = self.checkpoints.latest_step()
        if step is None:
            return
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state
        )
        self.state = None  # free it before the saved one is read
        self.state, info = self.checkpoints.restore(abstract, step)
        self.batches.set_state(info["data"])
        self.best.row, self.last_measured = info["best"], info["last_measured"]
        self.step = self.saved_step = step
        self._saved_rows = info.get("rows")
        say(f"resumed from {self.checkpoints.directory / str(step)}")

    def _say(self, line: str) -> None:
        if self._speaks:
            self.progress.say(line)
