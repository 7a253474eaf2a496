"""Console output of the loop, and handling of signals."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping


class StopRequested(Exception):
    """A signal arrived during a long operation between two steps."""


@contextlib.contextmanager
def catch_signals(callback: Callable[[str], None]) -> Iterator[None]:
    """Make SIGTERM, SIGHUP (a closed terminal) and the first Ctrl-C call `callback`.

    A second Ctrl-C interrupts at once. SIGHUP stays ignored if `nohup` started the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    if old[signal.SIGHUP] is signal.SIG_IGN:
        del old[signal.SIGHUP]

    def handle(number, _frame):
        if number == signal.SIGHUP:
            _leave_terminal()
        # Not print: the signal may interrupt one.
        os.write(
            2, f"{signal.Signals(number).name}: saving and stopping after this step\n".encode()
        )
        callback(signal.Signals(number).name)
        signal.signal(signal.SIGINT, old[signal.SIGINT])

    for number in old:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _leave_terminal() -> bool:
    """Discard further output: writing to a closed terminal is an error.

    Returns whether anything went to one.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    terminals = [number for number in (1, 2) if stat.S_ISCHR(os.fstat(number).st_mode)]
    for descriptor in terminals:
        os.dup2(nowhere, descriptor)
    return bool(terminals)


@contextlib.contextmanager
def _shown() -> Iterator[None]:
    """Ignore output errors: a terminal may be closed before the handler of its signal runs."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO or not _leave_terminal():
            raise


class Progress:
    """A tqdm bar on a terminal, otherwise about twenty lines per run."""

    def __init__(self, steps: int, start: int):
        import tqdm

        self.steps, self._tqdm = steps, tqdm.tqdm
        self.every = max(1, steps // 20)
        # A too long line is cut at its end: progress and time stay visible.
        form = "{percentage:3.0f}%|{bar:8}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        self.bar = tqdm.tqdm(
            total=steps, initial=start, bar_format=form, dynamic_ncols=True, disable=None
        )

    @_shown()
    def update(self, step: int, values: Mapping[str, float], rate: float | None) -> None:
        """Show a step; `rate`: tokens per second, None if the step includes compilation."""
        speed = [] if rate is None else [f"{rate:,.0f} tokens/s"]
        text = ", ".join([*speed, *(f"{name} {value:.4f}" for name, value in values.items())])
        if not self.bar.disable:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step == 1 or step % self.every == 0:
            print(f"step {step}/{self.steps}: {text}", file=sys.stderr, flush=True)

    @_shown()
    def say(self, line: str) -> None:
        if self.bar.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self._tqdm.write(line, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()
