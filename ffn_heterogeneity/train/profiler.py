"""Traces of chosen steps, for TensorBoard or Perfetto."""

import re
import tempfile
from typing import Any

import jax
from etils import epath

from ffn_heterogeneity.io.files import copy_tree, is_bucket


def parse_window(text: str) -> tuple[int, int] | None:
    """Parse "10:13" to (10, 13): steps 10, 11 and 12 as counted in metrics (from 1); "" to None.

    Raises:
      ValueError: not such a pair.
    """
    if not text:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", text)
    window = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= window[0] < window[1]:
        raise ValueError(
            f"profile={text!r}: write <start>:<stop>, the first step to trace (from 1; the first "
            "one of a run holds the compilation) and the first not to, e.g. 10:13"
        )
    return window


class Profiler:
    """Starts and stops JAX's profiler around the steps of `window`; None: never.

    Args:
      directory: directory for the trace; every process writes separate files.
    """

    def __init__(self, window: tuple[int, int] | None, directory: epath.Path):
        self.directory, self.running = directory, False
        self._first, self._end = window or (0, 0)
        self._held: epath.Path | None = None

    def before(self, step: int) -> None:
        """Must be called before step `step` (from 1) is started."""
        if not self.running and self._first <= step < self._end:
            if is_bucket(self.directory):
                self._held = epath.Path(tempfile.mkdtemp(prefix="ffn_profile_"))
            jax.profiler.start_trace(str(self._held or self.directory))
            self.running = True

    def after(self, step: int, results: Any) -> str | None:
        """Must be called after it; waits for `results` at the window's end. Returns a message."""
        if self.running and step + 1 >= self._end:
            jax.block_until_ready(results)
            self.close()
            return f"trace of steps {self._first} to {step}: {self.directory}"
        return None

    def close(self) -> None:
        """Write a trace that ends with the run."""
        if self.running:
            self.running = False
            jax.profiler.stop_trace()
            if self._held:  # JAX's profiler writes to disks only
                copy_tree(self._held, self.directory)
                self._held.rmtree()
