"""The makers of shards: this process, or several that each have a copy of the tokenizer."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ffn_heterogeneity.data.corpus.documents import Chunk, read_parts
from ffn_heterogeneity.data.corpus.tokenise import Tokeniser, shard_name, write_shard

# Of a process that `open_pool` started: what it makes shards with.
_STARTED: list[Worker] = []


class Stopped(Exception):
    """Another process failed, or the user stopped the program."""


class Worker:
    """Makes shards and counts in `counters`: input bytes, tokens; the third tells it to stop."""

    def __init__(self, tokeniser: Tokeniser, directory: Path, counters: Any):
        self._tokeniser, self._directory = tokeniser, directory
        self.counters = counters
        self.tick: Callable[[], None] | None = None

    def __call__(self, chunk: Chunk) -> dict[str, Any]:
        parts = read_parts(chunk, self._tokeniser.settings.layout)
        name = shard_name(chunk.number)
        return write_shard(name, parts, self._tokeniser, self._directory, chunk.size, self._report)

    def _report(self, size: int, tokens: int) -> None:
        with getattr(self.counters, "get_lock", contextlib.nullcontext)():
            self.counters[0] += size
            self.counters[1] += tokens
            stop = self.counters[2]
        if stop:
            raise Stopped
        if self.tick:
            self.tick()


class Pool:
    """Calls functions, here and now or in other processes.

    Attributes:
      counters: input bytes and tokens done so far.
    """

    def __init__(self, worker: Worker, executor: concurrent.futures.Executor | None = None):
        self.counters, self._worker, self._executor = worker.counters, worker, executor

    def submit(self, function: Callable, *args: Any) -> concurrent.futures.Future:
        """A function of a module."""
        if self._executor is not None:
            return self._executor.submit(function, *args)
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(function(*args))
        return future

    def tokenise(self, chunk: Chunk, tick: Callable[[], None]) -> concurrent.futures.Future:
        """A chunk to its shard's entry; `tick` is called now and then if that is done here."""
        if self._executor is not None:
            return self._executor.submit(_tokenise, chunk)
        self._worker.tick = tick
        return self.submit(self._worker, chunk)


@contextlib.contextmanager
def open_pool(tokeniser: Tokeniser, directory: Path, processes: int) -> Iterator[Pool]:
    """A pool of as many processes; 1 is this one."""
    if processes == 1:
        yield Pool(Worker(tokeniser, directory, [0, 0, 0]))
        return
    # Spawned: libraries that have threads of their own do not survive a fork.
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 3)
    executor = concurrent.futures.ProcessPoolExecutor(
        processes, context, _start, (tokeniser, directory, counters)
    )
    try:
        yield Pool(Worker(tokeniser, directory, counters), executor)
    except BaseException:
        counters[2] = 1
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _start(tokeniser: Tokeniser, directory: Path, counters: Any) -> None:
    # One thread each: the processes are as many as the user wants to be busy.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _STARTED.append(Worker(tokeniser, directory, counters))


def _end_with_parent() -> None:
    """A parent that was killed cannot end its processes: they would wait for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _tokenise(chunk: Chunk) -> dict[str, Any]:
    return _STARTED[0](chunk)
