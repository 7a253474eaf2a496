"""Metrics of a run: `metrics.jsonl` (one object a line) and TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import is_bucket

BUCKET_SECONDS = 30.0


class MetricsWriter:
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
        None: start a new file.
      resume_rows: and at most so many lines are kept. An evaluation that was made after the
        checkpoint of its own step, and will be made again, is told only by their number.
      tensorboard: also write events (needs the package tensorboardX; without it a line says so);
        never into a bucket.

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
    ):
        directory = epath.Path(directory)
        self.path, self.rows = directory / "metrics.jsonl", 0
        self._file = self._events = self._lines = None
        if jax.process_index() != 0:
            return
        directory.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else read_metrics(self.path, last_step=resume_step)
        kept = kept[:resume_rows]
        _replace_lines(self.path, kept)
        self.rows = len(kept)
        if is_bucket(directory):
            self._lines, self._written = [json.dumps(row) for row in kept], time.monotonic()
            return
        self._file = self.path.open("a")
        if tensorboard:
            self._events = _tensorboard(directory / "tensorboard", resume_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one line and its events. Values are numbers or arrays on the host.

        Raises:
          OSError: names the file; the disk is full, say.
        """
        if self._file is None and self._lines is None:
            return
        row = {"step": int(step), **{name: _plain(value) for name, value in metrics.items()}}
        line = json.dumps(row, allow_nan=False)
        if self._lines is not None:
            self._lines.append(line)
            self.rows += 1
            if time.monotonic() - self._written > BUCKET_SECONDS:
                self.flush()
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._drop()
            raise OSError(
                error.errno, f"{error.strerror}; put that right, then resume", str(self.path)
            ) from None
        self.rows += 1
        if self._events is not None:
            self._write_events(step, metrics)

    def _write_events(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            value = np.asarray(value)
            if value.dtype.kind not in "fiub":
                continue
            if value.ndim == 0:
                self._events.add_scalar(name, float(value), step)
            elif value.ndim == 1:
                # Per-layer values: one curve a layer, named so that they sort by depth.
                for i, item in enumerate(value):
                    self._events.add_scalar(f"{name}/{i:03d}", float(item), step)
            elif np.all(np.isfinite(value)):
                self._events.add_histogram(name, value.reshape(-1).astype(np.float64), step)
        self._events.flush()

    def flush(self) -> None:
        """Nothing written so far can be lost after it; call it before a checkpoint counts it."""
        if self._lines is not None:
            self.path.write_text("".join(line + "\n" for line in self._lines))
            self._written = time.monotonic()

    def _drop(self) -> None:
        """Closes the file without a second try at the line that could not be written."""
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            file.close()

    def close(self) -> None:
        """Closes the files."""
        self.flush()
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(path: str | os.PathLike, *, last_step: int | None = None) -> list[dict]:
    """The rows of a `metrics.jsonl` up to `last_step`; a half-written last line is left out.

    Raises:
      ValueError: a line other than the last is not JSON.
    """
    path = epath.Path(path)
    if not path.exists():
        return []
    lines, rows = path.read_text().splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
    return [row for row in rows if last_step is None or row["step"] <= last_step]


def _replace_lines(path: epath.Path, rows: list[dict]) -> None:
    if is_bucket(path):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    temporary = path.parent / f".{path.name}.partial"
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.replace(path)


def _tensorboard(directory: epath.Path, resume_step: int | None):
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        print("tensorboardX is not installed: metrics go to metrics.jsonl only", flush=True)
        return None
    purge = None if resume_step is None else resume_step + 1
    return SummaryWriter(os.fspath(directory), purge_step=purge)


def _plain(value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return value
    value = np.asarray(value).tolist()

    def finite(item):
        if isinstance(item, list):
            return [finite(x) for x in item]
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)
        return item

    return finite(value)
