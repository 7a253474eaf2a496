"""A child process with limits on time and memory.

It runs what came with a model's directory (templates, tokenizers) and may never finish.
"""

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
    """Return the cached child of a task; a forked process (another id) gets a new one."""
    return Child(task, memory)


def ask(
    task: str, request: Any, seconds: float, memory: int, meanwhile: Callable[[], Any] = int
) -> dict[str, Any]:
    """Return the answer of a task's child process, or {"runaway": why it was stopped}.

    Args:
      task: one of `child_main.TASKS`.
      seconds: limit on CPU time, so that a busy machine makes no difference.
      memory: bytes that it may use in addition to those of its interpreter.
      meanwhile: called while the child works.
    """
    return kept(task, memory, os.getpid()).ask(json.dumps([seconds, request]), seconds, meanwhile)


class Child:
    """A child process; it ends with its parent, because the parent's end of the pipe closes."""

    def __init__(self, task: str, memory: int):
        self.command = [sys.executable, "-P", os.fspath(MAIN), task, str(memory)]
        self.memory, self.lock, self.process = memory, threading.Lock(), None

    def ask(self, line: str, seconds: float, meanwhile: Callable[[], Any]) -> dict[str, Any]:
        """Return the child's answer to a line."""
        with self.lock:
            # Not reused after an interrupt: its late answer would be taken for the next one's.
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
        if process.returncode == -signal.SIGABRT:  # how Rust and C++ programs end without memory
            return {"runaway": f"wants more than {self.memory >> 20} MB"}
        return {"runaway": f"ends the process that tries it (exit status {process.returncode})"}

    def _start(self) -> subprocess.Popen:
        # A separate session, so that Ctrl-C does not end it while a run saves its state.
        return subprocess.Popen(
            self.command,
            text=True,
            start_new_session=True,
            # Each thread would use part of the limited address space.
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
