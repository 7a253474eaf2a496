"""The loop's lines on the console, and its hearing of signals."""

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
    """A signal came while something long was running between two steps."""


@contextlib.contextmanager
def catch_signals(callback: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM, SIGHUP (a terminal that closes) and the first Ctrl-C only set a flag; a second
    Ctrl-C interrupts at once. What `nohup` started stays deaf to SIGHUP."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    if old[signal.SIGHUP] is signal.SIG_IGN:
        del old[signal.SIGHUP]

    def handle(number, _frame):
        if number == signal.SIGHUP:
            _leave_terminal()
        # Not print: the signal may have come in the middle of one.
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
    """A terminal may be gone before Python has run the handler of the signal that says so."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO or not _leave_terminal():
            raise


class Progress:
    """A tqdm bar on a terminal, else about twenty lines over the run."""

    def __init__(self, steps: int, start: int):
        import tqdm

        self.steps, self._tqdm = steps, tqdm.tqdm
        self.every = max(1, steps // 20)
        # What does not fit is cut off at its end: how far it is and how long it takes stay.
        form = "{percentage:3.0f}%|{bar:8}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        self.bar = tqdm.tqdm(
            total=steps, initial=start, bar_format=form, dynamic_ncols=True, disable=None
        )

    @_shown()
    def update(self, step: int, values: Mapping[str, float], rate: float | None) -> None:
        """`rate`: tokens a second; None where the step's time was the compiler's."""
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
