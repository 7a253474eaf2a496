"""A process kept beside this one, with bounds on time and memory: there is tried what came with a
model's directory and may compute without end."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAIN = Path(__file__).with_name("child_main.py")


@functools.cache
def kept(task: str, memory: int, process_id: int) -> Child:
    """The one of a task; a process that was forked (another id) has its own."""
    return Child(task, memory)


def ask(
    task: str, request: Any, seconds: float, memory: int, meanwhile: Callable[[], Any] = int
) -> dict[str, Any]:
    """The answer of the process that is kept for a task, or {"runaway": why it had to be ended}.

    Args:
      task: one of `child_main.TASKS`.
      seconds: of computing, not of waiting: a busy machine changes nothing.
      memory: bytes beside those of its interpreter.
      meanwhile: called while it works.
    """
    return kept(task, memory, os.getpid()).ask(json.dumps([seconds, request]), seconds, meanwhile)


class Child:
    """The other process; it ends with this one, whose end of the pipe closes then."""

    def __init__(self, task: str, memory: int):
        self.command = [sys.executable, "-P", os.fspath(MAIN), task, str(memory)]
        self.memory, self.lock, self.process = memory, threading.Lock(), None

    def ask(self, line: str, seconds: float, meanwhile: Callable[[], Any]) -> dict[str, Any]:
        """Its answer to a line."""
        with self.lock:
            # Not kept where this is interrupted: its answer would be taken for the next one's.
            process, self.process = self.process or self._start(), None
            try:
                process.stdin.write(f"{line}\n")
                process.stdin.flush()
                meanwhile()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if answer.endswith("\n"):
                self.process = process
                return json.loads(answer)
            process.communicate()
        if process.returncode == -signal.SIGPROF:
            return {"runaway": f"computes for more than {seconds:g} s"}
        if process.returncode == -signal.SIGABRT:  # so end Rust and C++ where memory ends
            return {"runaway": f"wants more than {self.memory >> 20} MB"}
        return {"runaway": f"ends the process that tries it (exit status {process.returncode})"}

    def _start(self) -> subprocess.Popen:
        # In a session of its own: it outlives Ctrl-C while a run saves its state.
        return subprocess.Popen(
            self.command,
            text=True,
            start_new_session=True,
            # Each thread would take of the address space that is bounded.
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
