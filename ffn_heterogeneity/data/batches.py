"""Batches of a process: its rows of the global batch, and an iterator with a state.

Every process makes the same stream of global batches [batch_size, T] and then takes its rows. So
the position of a run is the same number in all processes, and a run can be resumed with another
number of processes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.packing import Counts
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.wording import check_number

Batch = dict[str, np.ndarray]
# 2: positions in the stream of all processes (1: in the stream of the saving process).
STATE_VERSION = 2


@dataclasses.dataclass
class Feed:
    """Base class of batch pipelines.

    Attributes:
      config: a `data_config.DataConfig`.
      seed: seed of the order of the records, unless the config has one.
      rows: the rows of every global batch [batch_size, T] that this process feeds.
      vocab_size: the model's vocabulary size; None: ids are not checked.
      decoder: of an encoder-decoder, as in `packing.ExampleReader`.
    """

    config: Any
    tokenizer: Any
    batch_size: int
    seq_len: int
    seed: int
    rows: np.ndarray
    vocab_size: int | None
    decoder: tuple[int, int] | None = None

    def __post_init__(self):
        if self.seq_len < 2:
            raise DataError(f"seq_len is {self.seq_len}; a row needs at least 2 positions")
        if self.config.shuffle_seed is not None:
            self.seed = self.config.shuffle_seed

    def identity(self, epochs: int | None) -> dict[str, Any]:
        """Settings that must be equal for a state to mean the same position."""
        return {
            "task": self.task.name,
            "records": len(self.train),
            "seed": self.seed,
            "shuffle": self.config.shuffle,
            "epochs": epochs,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            **({} if self.decoder is None else {"decoder": list(self.decoder)}),
            # With "auto" a conversation's is its template's.
            "bos": [
                self._encoder.bos,
                self._encoder.bos_id,
                *([self._encoder.auto_bos] if self.task.encode else []),
            ],
        }


class BatchIterator:
    """Iterator over batches with a small JSON-able state, from which another iterator can resume.

    The state is the same in every process and for any number of processes. `counts` has statistics
    of the documents read, over all processes (the reader is `prefetch` batches ahead).
    """

    def __init__(self, iterator: Any, identity: Mapping[str, Any], counts: Counts):
        self._identity, self.counts = dict(identity), counts
        # At exit the thread must end and grain's iterator must be deleted (later its __del__ would
        # fail) before the interpreter clears the modules.
        self._held = [iterator]
        self._closing = weakref.finalize(self, _close, self._held)

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    @property
    def _iterator(self) -> Any:
        if not self._held:
            raise DataError("this batch iterator is closed; make a new one")
        return self._held[0]

    def get_state(self) -> dict[str, Any]:
        """Return the consumer's position: plain dicts, ints and strings."""
        state = self._iterator.get_state()
        return {"version": STATE_VERSION, "pipeline": dict(self._identity), "position": state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position.

        Raises:
          DataError: a state of another version or pipeline; the message names the difference.
        """
        if state.get("version") != STATE_VERSION:
            raise DataError(
                f"data state has version {state.get('version')!r}, this code reads "
                f"{STATE_VERSION}; continue with the code that saved it, or start a new run"
            )
        saved = state.get("pipeline", {})
        different = [
            f"{key} was {saved.get(key)!r}, is {value!r}"
            for key, value in self._identity.items()
            if saved.get(key) != value
        ]
        if different:
            raise DataError(
                f"cannot resume: the data state is of another pipeline ({'; '.join(different)}); "
                "use the settings of that run, or start a new one"
            )
        self._iterator.set_state(_tuples(state["position"]))

    def close(self) -> None:
        """Stop the background thread."""
        self._closing()


def chosen_rows(rows: Sequence[int] | None, batch_size: int, accumulation: int) -> np.ndarray:
    """Check and return the given rows of the global batch (None: all), [R].

    Raises:
      DataError: no rows, repeated ones or rows outside the batch; or rows that, reshaped to
        [A, R/A], would not be in the same micro-batches as in the global batch.
    """
    check_number("accumulation", accumulation, "[1, inf)", DataError)
    if batch_size < 1 or batch_size % accumulation:
        fitting = max(-(-batch_size // accumulation), 1) * accumulation
        raise DataError(
            f"batch_size is {batch_size}; it must be a positive multiple of the {accumulation} "
            f"micro-batches it is cut into, as {fitting} is"
        )
    chosen = np.arange(batch_size) if rows is None else np.asarray(rows)
    shown = f"rows is {chosen.tolist()!r:.80}"
    if chosen.ndim != 1 or not len(chosen) or chosen.dtype.kind not in "iu":
        raise DataError(f"{shown}; it must be a sequence of one or more row numbers")
    if chosen.min() < 0 or chosen.max() >= batch_size or len(np.unique(chosen)) < len(chosen):
        raise DataError(
            f"{shown}; it must hold different rows of the global batch, 0 .. {batch_size - 1}"
        )
    places = np.arange(len(chosen)) * accumulation // len(chosen)
    if len(chosen) % accumulation or (chosen // (batch_size // accumulation) != places).any():
        raise DataError(
            f"{shown}; with accumulation {accumulation} it must hold equally many rows of each "
            f"micro-batch ({batch_size // accumulation} rows of the global batch), in their order"
        )
    return chosen


def take_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """Copy these rows of every array, so that the global batch can be freed."""
    return {key: value[rows] for key, value in batch.items()}


def pad_to(batch_size: int) -> Any:
    """Pad a short last batch with all-zero rows: segment 0, loss_mask False."""
    import grain

    return functools.partial(grain.experimental.batch_and_pad, batch_size=batch_size)


def finite(batches: Any, limit: int | None) -> Iterator[Batch]:
    """Iterate over the first `limit` batches of a grain data set, then close it."""
    iterator = iter(batches)
    try:
        yield from itertools.islice(iterator, limit)
    finally:
        iterator.close()


def _close(held: list[Any]) -> None:
    while held:
        held.pop().close()


def _tuples(state: Any) -> Any:
    """Convert lists back to tuples: grain compares slices with tuples, and JSON has only lists."""
    if isinstance(state, Mapping):
        return {key: _tuples(value) for key, value in state.items()}
    return tuple(_tuples(value) for value in state) if isinstance(state, list | tuple) else state
