"""Metrics of a run: `metrics.jsonl` (one object per line), TensorBoard events, Weights & Biases."""

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
from ffn_heterogeneity.io.read import MAX_METRICS, lines_of, parse_json, read_json, read_text
from ffn_heterogeneity.wording import first_line, spans

BUCKET_SECONDS = 30.0
MAX_STEP = 1 << 40  # above any real run's


class MetricsWriter(contextlib.AbstractContextManager):
    """Writer of metrics; a resumed run's file is the same as that of an uninterrupted run.

    With several processes only the first writes; the others' calls do nothing.

    Lines are `{"step": 3, "loss": 2.5, "nucl/entropy": [...]}`: scalars as numbers, arrays as
    nested lists, exactly as computed (a float32's decimal form is read back to the same float32).
    NaN and infinities are written as the strings "nan", "inf", "-inf". Every line is flushed. In a
    bucket, where appending is impossible, the whole file is rewritten every `BUCKET_SECONDS` and at
    `flush()`.

    Args:
      directory: parent of `metrics.jsonl` and the folder `tensorboard`.
      resume_step: drop the lines of later steps (the resumed run writes them again) and a
        half-written last line. Warns about rows missing since the checkpoint. None: start a new
        file.
      resume_rows: keep at most this number of lines. An evaluation that ran after the checkpoint of
        the same step, and will run again, can only be identified by this number.
      tensorboard: also write events (needs the package tensorboardX; a message says if it is
        missing); never into a bucket.
      wandb: also log to this Weights & Biases project (needs the package; its environment variables
        apply, e.g. WANDB_MODE=offline). A resumed run continues the same W&B run.

    Attributes:
      rows: number of lines in the file.

    Raises:
      OSError: the directory or the file cannot be written.
      ValueError: the existing file is not JSON; see `read_metrics`.
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
        rows = [] if resume_step is None else read_metrics(self.path, last_step=resume_step)
        rows = rows[:resume_rows]
        if lost := resume_rows and resume_rows - len(rows):
            steps = (
                spans(missing_steps(rows, range(1, (resume_step or 0) + 1))) or "evaluations alone"
            )
            said = f"{self.path}: {lost} of {resume_rows} rows are lost, of steps: {steps}"
            print(said, file=sys.stderr)
        lines = [json.dumps(row) + "\n" for row in rows]
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
        """Write one line and its events; values are numbers or arrays on the host.

        Raises:
          OSError: e.g. a full disk; the message names the file.
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
                    raise OSError(errno.ESTALE, "the file was replaced (a lost mount?)")
                self._file.write(line)
                self._file.flush()
                self._write_events(step, metrics)
            except OSError as error:
                self._stop(error)
        else:
            return
        self.rows += 1

    def _stop(self, error: OSError) -> NoReturn:
        """Close without trying to write again, neither now nor when Python ends, and raise."""
        file, events, self._file, self._events = self._file, self._events, None, None
        with contextlib.suppress(OSError):
            file.close()
        if events is not None:
            writer = events.file_writer.event_writer
            writer._worker.stop()  # its thread would print an error when Python ends
            writer.close = lambda: None
        what = f"{error.strerror}; fix the cause, then resume"
        raise OSError(error.errno, what, str(self.path)) from None

    def _write_events(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write events: scalars; for per-layer values their mean and one histogram."""
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
        """Make all written rows durable; call it before a checkpoint counts them."""
        if self._lines is not None:
            write_text(self.path, "".join(self._lines))
            self._written = time.monotonic()
        elif self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                self._stop(error)

    def close(self, failed: bool = False) -> None:
        """Close the files; Weights & Biases shows the run as failed if `failed`."""
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
        self.flush()
        for file in (self._file, self._events):
            if file is not None:
                file.close()

    def __exit__(self, kind: type | None, *_) -> None:
        self.close(failed=kind is not None)


def read_metrics(path: str | os.PathLike, *, last_step: int | None = None) -> list[dict]:
    """Read the rows of a `metrics.jsonl` up to `last_step`, without a half-written last line.

    Raises:
      ValueError: a line other than the last is not JSON with a step.
    """
    path = epath.Path(path)
    rows = parse_metrics(read_text(path, MAX_METRICS) if path.exists() else "", path)
    return [row for row in rows if last_step is None or row["step"] <= last_step]


def parse_metrics(text: str, source: str | os.PathLike) -> list[dict]:
    """Parse the text of a `metrics.jsonl`; errors name `source`.

    Raises:
      ValueError: see `read_metrics`.
    """
    lines, rows = lines_of(text), []
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
    """Expected steps for which no row has a metric with the prefix (lost in a crash)."""
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
    # If PyTorch is installed, tensorboardX imports it to draw module graphs, which takes seconds.
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
    """Start a Weights & Biases run in `<directory>/wandb`; its id is kept when resuming."""
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
    # Not wandb's row count: rows after a checkpoint are written again.
    run.define_metric("*", step_metric="step")
    return run
