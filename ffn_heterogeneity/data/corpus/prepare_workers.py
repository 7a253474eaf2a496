"""Workers that make shards: a thread, or processes with a copy of the tokenizer each."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ffn_heterogeneity.data.corpus.documents import Chunk, read_parts
from ffn_heterogeneity.data.corpus.tokenise import Tokeniser, shard_name, write_shard

# The worker of a process that `open_pool` started.
_STARTED: list[Worker] = []


class Stopped(Exception):
    """Another process failed, or the user stopped the program."""


class Worker:
    """Makes shards and updates `counters`: input bytes, tokens; the third one tells it to stop."""

    def __init__(self, tokeniser: Tokeniser, directory: Path, counters: Any):
        self._tokeniser, self._directory, self._counters = tokeniser, directory, counters

    def __call__(self, chunk: Chunk) -> dict[str, Any]:
        parts = read_parts(chunk, self._tokeniser.settings.layout)
        name = shard_name(chunk.number)
        return write_shard(name, parts, self._tokeniser, self._directory, chunk.size, self._report)

    def _report(self, size: int, tokens: int) -> None:
        with getattr(self._counters, "get_lock", contextlib.nullcontext)():
            self._counters[0] += size
            self._counters[1] += tokens
            stop = self._counters[2]
        if stop:
            raise Stopped


class Pool(NamedTuple):
    """The thread or the processes that make shards.

    Attributes:
      map: maps a module's function over arguments; with one process in this process, so that Ctrl-C
        ends it.
      tokenise: a chunk -> the future of its shard's entry.
      counters: input bytes and tokens done so far.
    """

    map: Callable[..., Iterable]
    tokenise: Callable[[Chunk], concurrent.futures.Future]
    counters: Any


@contextlib.contextmanager
def open_pool(tokeniser: Tokeniser, directory: Path, processes: int) -> Iterator[Pool]:
    """Open a pool of that number of processes; 1 means a thread of this process."""
    executor: concurrent.futures.Executor
    if processes == 1:
        counters: Any = [0, 0, 0]
        executor = concurrent.futures.ThreadPoolExecutor(1)
        calls, work = map, Worker(tokeniser, directory, counters)
    else:
        # Spawned, because libraries with threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        counters, work = context.Array("q", 3), _tokenise
        made_of = (tokeniser, directory, counters)
        executor = concurrent.futures.ProcessPoolExecutor(processes, context, _start, made_of)
        calls = executor.map
    try:
        yield Pool(calls, functools.partial(executor.submit, work), counters)
    except BaseException:
        counters[2] = 1
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _start(tokeniser: Tokeniser, directory: Path, counters: Any) -> None:
    # One thread each: the user chose the number of busy processes.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells when to stop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _STARTED.append(Worker(tokeniser, directory, counters))


def _end_with_parent() -> None:
    """End with the parent process: without it, a worker would wait forever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _tokenise(chunk: Chunk) -> dict[str, Any]:
    return _STARTED[0](chunk)
