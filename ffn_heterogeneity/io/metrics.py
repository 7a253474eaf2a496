"""Metrics of a run: `metrics.jsonl` (one object a line), TensorBoard events, Weights & Biases."""

import contextlib
import errno
import json
import os
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import is_bucket, plain, write_text
from ffn_heterogeneity.io.read import parse_json, read_json, read_text
from ffn_heterogeneity.wording import first_line, spans

BUCKET_SECONDS = 30.0
# Bytes of a run's file, and steps in it: more than any run's, less than memory's end.
MAX_BYTES, MAX_STEP = 4 << 30, 1 << 40


class MetricsWriter(contextlib.AbstractContextManager):
    """Appends metrics; a resumed run continues as if it had never stopped.

    Of several processes only the first writes; in the others every call does nothing.

    Lines are `{"step": 3, "loss": 2.5, "nucl/entropy": [...]}`: scalars as numbers, arrays as
    nested lists, exactly as computed (a float32's decimal form reads back to the same float32).
    NaN and infinities are written as the strings "nan", "inf", "-inf". Every line is flushed; in a
    bucket, where nothing can be appended, the whole file is written anew every `BUCKET_SECONDS`,
    and at `flush()`.

    Args:
      directory: where `metrics.jsonl` and the folder `tensorboard` go.
      resume_step: lines of later steps are dropped first (they were written after the checkpoint
        that is resumed from, and will be written again), and so is a half-written last line.
        Rows that the checkpoint counted and that are not there are said to be lost.
        None: start a new file.
      resume_rows: and at most so many lines are kept. An evaluation that was made after the
        checkpoint of its own step, and will be made again, is told only by their number.
      tensorboard: also write events (needs the package tensorboardX; without it a line says so);
        never into a bucket.
      wandb: also log to this project of Weights & Biases (needs the package; its environment
        variables hold, WANDB_MODE=offline say). A resumed run is the same run there.

    Attributes:
      rows: the number of lines in the file.

    Raises:
      OSError: the directory or the file cannot be written.
      ValueError: the file to continue is not JSON; see `read_metrics`.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        resume_step: int | None = None,
        resume_rows: int | None = None,
        tensorboard: bool = True,
        wandb: str = "",
    ):
        directory = epath.Path(directory)
        self.path, self.rows = directory / "metrics.jsonl", 0
        self._file = self._events = self._lines = self._wandb = None
        if jax.process_index() != 0:
            return
        directory.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else read_metrics(self.path, last_step=resume_step)
        kept = kept[:resume_rows]
        if lost := resume_rows and resume_rows - len(kept):
            steps = (
                spans(missing_steps(kept, range(1, (resume_step or 0) + 1))) or "evaluations alone"
            )
            said = f"{self.path}: {lost} of {resume_rows} rows are lost, of steps: {steps}"
            print(said, file=sys.stderr)
        lines = [json.dumps(row) + "\n" for row in kept]
        self.rows = len(lines)
        write_text(self.path, "".join(lines))
        if wandb:
            self._wandb = _wandb(wandb, directory, resume_step is None)
        if is_bucket(directory):
            self._lines, self._written = lines, time.monotonic()
            return
        self._file = self.path.open("a")
        if tensorboard:
            self._events = _tensorboard(directory / "tensorboard", resume_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one line and its events. Values are numbers or arrays on the host.

        Raises:
          OSError: names the file; the disk is full, say.
        """
        line = json.dumps(plain({"step": int(step), **metrics}), allow_nan=False) + "\n"
        if self._lines is not None:
            self._lines.append(line)
            if time.monotonic() - self._written > BUCKET_SECONDS:
                self.flush()
            self._write_events(step, metrics)
        elif self._file is not None:
            try:
                # After a lost mount the open file may accept lines that are never read.
                if not os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno())):
                    raise OSError(errno.ESTALE, "another file is in its place (a lost mount?)")
                self._file.write(line)
                self._file.flush()
                self._write_events(step, metrics)
            except OSError as error:
                self._stop(error)
        else:
            return
        self.rows += 1

    def _stop(self, error: OSError) -> NoReturn:
        """Closes without a second try at what could not be written, now and when Python ends."""
        file, events, self._file, self._events = self._file, self._events, None, None
        with contextlib.suppress(OSError):
            file.close()
        if events is not None:
            writer = events.file_writer.event_writer
            writer._worker.stop()  # its thread would die loudly when Python ends
            writer.close = lambda: None
        what = f"{error.strerror}; put that right, then resume"
        raise OSError(error.errno, what, str(self.path)) from None

    def _write_events(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Scalars; of per-layer values their mean and one histogram (each stands in the file)."""
        arrays = {name: np.asarray(value) for name, value in metrics.items()}
        numbers = {k: x for k, x in arrays.items() if x.dtype.kind in "fiub" and x.ndim < 2}
        points = {name: float(x.mean()) for name, x in numbers.items() if x.size}
        spread = {k: x[np.isfinite(x)] for k, x in numbers.items() if x.ndim}
        spread = {f"{name}/layers": x for name, x in spread.items() if x.size}
        if self._wandb is not None:
            import wandb  # pyright: ignore[reportMissingImports]

            drawn = {name: wandb.Histogram(x) for name, x in spread.items()}
            self._wandb.log({"step": int(step), **points, **drawn})
        if self._events is not None:
            for name, x in points.items():
                self._events.add_scalar(name, x, step)
            for name, x in spread.items():
                self._events.add_histogram(name, x, step)
            self._events.flush()

    def flush(self) -> None:
        """Nothing written so far can be lost after it; call it before a checkpoint counts it."""
        if self._lines is not None:
            write_text(self.path, "".join(self._lines))
            self._written = time.monotonic()
        elif self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._stop(error)

    def close(self, failed: bool = False) -> None:
        """Closes the files; `failed` is what Weights & Biases shows of the run."""
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
        self.flush()
        for file in (self._file, self._events):
            if file is not None:
                file.close()

    def __exit__(self, kind: type | None, *_) -> None:
        self.close(failed=kind is not None)


def read_metrics(path: str | os.PathLike, *, last_step: int | None = None) -> list[dict]:
    """The rows of a `metrics.jsonl` up to `last_step`; a half-written last line is left out.

    Raises:
      ValueError: a line other than the last is not JSON with a step.
    """
    path = epath.Path(path)
    rows = parse_metrics(read_text(path, MAX_BYTES) if path.exists() else "", path)
    return [row for row in rows if last_step is None or row["step"] <= last_step]


def parse_metrics(text: str, source: str | os.PathLike) -> list[dict]:
    """The rows in the text of a `metrics.jsonl`; `source` is what an error names.

    Raises:
      ValueError: see `read_metrics`.
    """
    lines, rows = text.splitlines(), []
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise ValueError(f"{source}, line {number} is not JSON with a step: {line[:60]}")
    return rows


def missing_steps(
    rows: Sequence[Mapping[str, Any]], expected: Iterable[int], prefix: str = "train/"
) -> list[int]:
    """The expected steps of which no row has a metric with that prefix: a crash took it."""
    there = {row["step"] for row in rows if any(name.startswith(prefix) for name in row)}
    return [step for step in expected if step not in there]


def _row(line: str) -> dict | None:
    try:
        row = parse_json(line, "")
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if type(step) is int and 0 <= step < MAX_STEP else None


def _tensorboard(directory: epath.Path, resume_step: int | None):
    # Where torch is installed tensorboardX imports it, for seconds, to draw graphs of its modules.
    hidden = {"torch": None} if "torch" not in sys.modules else {}
    sys.modules |= hidden
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        print("tensorboardX is not installed: metrics go to metrics.jsonl only", file=sys.stderr)
        return None
    finally:
        for name in hidden:
            del sys.modules[name]
    purge = None if resume_step is None else resume_step + 1
    return SummaryWriter(os.fspath(directory), purge_step=purge)


def _wandb(project: str, directory: epath.Path, new: bool):
    """A run of Weights & Biases, in `<directory>/wandb`; its id stays over resumes."""
    import wandb  # pyright: ignore[reportMissingImports]  (extra `wandb`)

    path, config = directory / "wandb" / "id", directory / "config.json"
    if new or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex)
    try:
        run = wandb.init(
            project=project,
            id=path.read_text(),
            resume="allow",
            reinit="create_new",
            name=f"{directory.parent.name}/{directory.name}",
            dir=None if is_bucket(directory) else os.fspath(directory),
            config=read_json(config) if config.exists() else None,
            settings=wandb.Settings(console="off"),
        )
    except wandb.errors.Error as error:
        raise ValueError(
            f"wandb={project!r}: {first_line(error)}; run `wandb login`, or set WANDB_MODE=offline"
        ) from None
    # Not wandb's own count of rows: those after a checkpoint come again.
    run.define_metric("*", step_metric="step")
    return run
