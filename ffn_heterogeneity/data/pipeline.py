"""The input pipeline: records in a seeded order, tokenised, packed and batched in a background
thread, resumable to the very next batch (grain).

Order of things, training: records -> this epoch's global shuffle -> this process's share -> next
epoch -> tokenise -> pack -> batch. Nothing is tokenised before it is needed. Validation: records
in order, packed alike in every process, each process takes its rows of every batch; so all
processes see the same number of batches.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.packing import (
    MIN_OPEN_ROWS,
    Counts,
    Encoder,
    ExampleReader,
    encode,
    pack,
    read_example,
)
from ffn_heterogeneity.data.sources import PASSAGE_CHARS, DataError, Source, Subset, open_source
from ffn_heterogeneity.data.tasks import Fields, Task, get_task

Batch = dict[str, np.ndarray]
STATE_VERSION = 1
# The held-out records depend on the data alone, so runs with other seeds can be compared.
SPLIT_SEED = 0


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to read and how to lay it out.

    Attributes:
      task: name of a task ("text", "jsonl", "gsm8k", ...).
      path: file, directory, several files, or hub name `name[:config]`; "" takes the task's own.
      split, revision: of a hub data set ("" takes the task's split).
      prompt_field, response_field, text_field: record fields; "" leaves it to the task.
      validation_fraction: share of the records held out, in [0, 1); the same whatever the seed.
        Of running text the last stretch is taken, else records at random.
      validation_path, validation_split: held-out data of its own instead.
      shuffle: a new order of the records in every epoch; False keeps the file's.
      shuffle_seed: seed of that order; None takes the run's.
      packing: several documents in one row; False gives each its own, padded.
      bos: "auto", "segment", "document" or "none"; see `packing.Encoder`.
      eos: whether documents end with the tokenizer's eos.
      passage_chars: running text is shuffled in passages of at most this many characters, and no
        context reaches beyond its passage: raise it (T * 5 or so) for very long rows.
      prefetch: batches prepared ahead by the background thread; 0 for none.
    """

    task: str = "text"
    path: str | Sequence[str] = ""
    split: str = ""
    revision: str | None = None
    prompt_field: str = ""
    response_field: str = ""
    text_field: str = ""
    validation_fraction: float = 0.0
    validation_path: str | Sequence[str] = ""
    validation_split: str = ""
    shuffle: bool = True
    shuffle_seed: int | None = None
    packing: bool = True
    bos: str = "auto"
    eos: bool = True
    passage_chars: int = PASSAGE_CHARS
    prefetch: int = 2

    @classmethod
    def from_mapping(cls, config: Any) -> DataConfig:
        """From a dict or `ConfigDict` with these keys; an unknown key names the nearest ones."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in config:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"known: {names}"
                raise DataError(f"unknown data setting {key!r}; {hint}")
        return cls(**dict(config))


class BatchIterator:
    """Batches, and a small JSON-able state from which a twin goes on with the next one.

    `counts` tells what became of the documents read (the reader is `prefetch` batches ahead).
    """

    def __init__(self, iterator: Any, identity: Mapping[str, Any], counts: Counts):
        self._identity, self.counts = dict(identity), counts
        # At exit the thread must end, and grain's iterator be gone (its __del__ fails later on),
        # before the interpreter takes the modules apart.
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
        """Where the consumer stands: plain dicts, ints and strings."""
        state = self._iterator.get_state()
        return {"version": STATE_VERSION, "pipeline": dict(self._identity), "position": state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved place; a state of another pipeline is refused, naming what differs."""
        if state.get("version") != STATE_VERSION:
            raise DataError(
                f"data state has version {state.get('version')!r}, this code reads {STATE_VERSION}"
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
        """Stops the background thread."""
        self._closing()


class Pipeline:
    """Training and validation batches of one task; made by `make_pipeline`.

    Every batch: "tokens", "targets", "segment_ids" (0 padding, documents from 1), "positions"
    (restart in every segment) int32 and "loss_mask" bool, all [batch_size / process_count, T].
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        batch_size: int,
        seq_len: int,
        seed: int,
        process_index: int,
        process_count: int,
    ):
        _check(config, batch_size, seq_len, process_index, process_count)
        self.config, self.batch_size, self.seq_len = config, batch_size, seq_len
        self.seed = seed if config.shuffle_seed is None else config.shuffle_seed
        self.process_index, self.process_count = process_index, process_count
        self.task: Task = get_task(config.task)
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, config.bos, config.eos)
        self._fields = Fields(config.prompt_field, config.response_field, config.text_field)
        self.train, self.held_out = self._open()

    def train_iterator(self, epochs: int | None = None) -> BatchIterator:
        """Batches for `epochs` passes over this process's records, None for ever.

        Shares of processes are disjoint in every epoch and together cover it; with finite `epochs`
        the last batch is padded, and processes may differ in their number of batches.
        """
        import grain

        records = grain.MapDataset.source(self.train)
        if self.config.shuffle:
            # Mixed, because grain adds the epoch to the seed: neighbours would share their orders.
            seed = np.random.SeedSequence(self.seed).generate_state(1)[0]
            records = records.shuffle(seed=int(seed))
        records = records[self.process_index :: self.process_count]
        total = len(records)
        local = self.batch_size // self.process_count
        rows, counts = self._rows(records.repeat(epochs), total, self.train.source, local, True)
        pad = _pad_to(local)
        batches = rows.batch(local, drop_remainder=False, batch_fn=pad)
        return BatchIterator(iter(self._prefetch(batches)), self._identity(epochs), counts)

    def validation_iterator(self, max_batches: int | None = None) -> Iterator[Batch]:
        """One pass over the held-out records, in order, the last batch padded; always the same."""
        import grain

        if self.held_out is None:
            raise DataError(
                "no validation data: set validation_fraction, validation_path or validation_split"
            )
        total, source = len(self.held_out), self.held_out.source
        records = grain.MapDataset.source(self.held_out)
        rows, _ = self._rows(records, total, source, self.batch_size, False)
        pad = _pad_to(self.batch_size)
        local = self.batch_size // self.process_count
        mine = slice(self.process_index * local, (self.process_index + 1) * local)
        batches = rows.batch(self.batch_size, drop_remainder=False, batch_fn=pad)
        batches = batches.map(lambda batch: {key: value[mine] for key, value in batch.items()})
        return _finite(self._prefetch(batches), max_batches)

    def count_epoch(self) -> dict[str, int]:
        """One epoch tokenised and packed: its `batches`, and the numbers of `Counts`.

        Shows a progress bar on a terminal.
        """
        import tqdm

        iterator, batches = self.train_iterator(epochs=1), 0
        total = len(range(self.process_index, len(self.train), self.process_count))
        with tqdm.tqdm(total=total, desc="tokenising", unit="doc", disable=None) as bar:
            for batches, _ in enumerate(iterator, 1):  # noqa: B007 (the count is what we want)
                bar.update(iterator.counts.documents - bar.n)
            bar.update(iterator.counts.documents - bar.n)
        iterator.close()
        return {"batches": batches, **dataclasses.asdict(iterator.counts)}

    def _rows(
        self, records: Any, total: int, source: Source, batch_size: int, training: bool
    ) -> tuple[Any, Counts]:
        """Records -> packed rows, all in one thread: the order never depends on timing."""
        import grain

        reader = ExampleReader(
            task=self.task,
            fields=self._fields,
            source=source,
            encoder=self._encoder,
            seq_len=self.seq_len,
            total=total,
            packing=self.config.packing,
        )
        items = records.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        elements = grain.experimental.FlatMapIterDataset(items, reader)
        rounds = -(-MIN_OPEN_ROWS // batch_size) if self.config.packing else 1
        rows = pack(
            elements,
            self.task,
            self._encoder,
            self.seq_len,
            packing=self.config.packing,
            open_rows=batch_size * rounds,
            seed=self.seed if training and self.config.shuffle else None,
        )
        return rows, reader.counts

    def _prefetch(self, batches: Any) -> Any:
        import grain

        return grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=self.config.prefetch
        )

    def _open(self) -> tuple[Subset, Subset | None]:
        """Training and held-out records, each checked to be readable by the task."""
        config = self.config
        path = config.path or self.task.hub
        if not path:
            raise DataError(f"task {self.task.name!r} needs a path: a file or a hub name")
        opened = {"revision": config.revision, "passage_chars": config.passage_chars}
        split = config.split or self.task.split
        source = open_source(path, split=split, **opened)
        self._check_records(source)
        if config.validation_path or config.validation_split:
            held_out = open_source(
                config.validation_path or path, split=config.validation_split or split, **opened
            )
            self._check_records(held_out)
            train = Subset(source, range(len(source)))
            rest: Subset | None = Subset(held_out, range(len(held_out)))
        else:
            train, rest = split_records(source, config.validation_fraction)
        if len(train) < self.process_count:
            raise DataError(
                f"{source.name}: {len(train)} training records for {self.process_count} processes; "
                "each needs at least one"
            )
        return train, rest

    def _check_records(self, source: Source) -> None:
        """A missing field is found now where that is cheap, else in the first record at least."""
        for row in range(len(source) if source.in_memory else 1):
            read_example(self.task, self._fields, source, row, source[row])

    def _identity(self, epochs: int | None) -> dict[str, Any]:
        """What must be equal for a state to mean the same place."""
        source, rows = self.train.source, self.train.rows
        sampled = [int(rows[i]) for i in (0, len(rows) // 2, len(rows) - 1)]
        texts = [read_example(self.task, self._fields, source, r, source[r]) for r in sampled]
        probe = "The quick brown fox, 1234 times: naïve\n"
        return {
            "task": self.task.name,
            "records": len(self.train),
            "data_crc": zlib.crc32(repr([sampled, texts]).encode()),
            "tokenizer_crc": zlib.crc32(repr(encode(self._tokenizer, probe)).encode()),
            "seed": self.seed,
            "shuffle": self.config.shuffle,
            "epochs": epochs,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "packing": self.config.packing,
            "bos": [self._encoder.bos, self._encoder.bos_id],
            "eos": self._encoder.eos_id,
            "process": [self.process_index, self.process_count],
        }


def make_pipeline(
    config: DataConfig | Mapping[str, Any],
    tokenizer: Any,
    batch_size: int,
    seq_len: int,
    seed: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> Pipeline:
    """Opens the data and checks it.

    Args:
      config: a `DataConfig`, or a mapping with its keys.
      tokenizer: `transformers`-like: `encode(text, add_special_tokens=False)`, `bos_token_id`,
        `eos_token_id`.
      batch_size: rows of a batch over all processes together.
      seq_len: T, the positions of a row, at least 2.
      seed: of the shuffle, unless the config has its own.
      process_index, process_count: this process and how many there are.

    Raises:
      DataError: anything wrong with the settings or the data, in one line.
    """
    if not isinstance(config, DataConfig):
        config = DataConfig.from_mapping(config)
    return Pipeline(config, tokenizer, batch_size, seq_len, seed, process_index, process_count)


def split_records(source: Source, fraction: float) -> tuple[Subset, Subset | None]:
    """Disjoint training and held-out records, together all; a function of the data only."""
    if not 0.0 <= fraction < 1.0:
        raise DataError(f"validation_fraction is {fraction}; it must be in [0, 1)")
    count = len(source)
    if fraction == 0.0:
        return Subset(source, range(count)), None
    if count < 2:
        raise DataError(
            f"{source.name}: {count} record cannot be split into training and validation; give "
            "validation_path, or a smaller passage_chars for one long text"
        )
    held = min(max(round(fraction * count), 1), count - 1)
    if source.running_text:
        return Subset(source, range(count - held)), Subset(source, range(count - held, count))
    order = np.random.default_rng(SPLIT_SEED).permutation(count)
    return Subset(source, np.sort(order[held:])), Subset(source, np.sort(order[:held]))


def _check(
    config: DataConfig, batch_size: int, seq_len: int, process_index: int, process_count: int
) -> None:
    if seq_len < 2:
        raise DataError(f"seq_len is {seq_len}; a row needs at least 2 positions")
    if process_count < 1 or not 0 <= process_index < process_count:
        raise DataError(f"process_index {process_index} is not one of {process_count} processes")
    if batch_size < 1 or batch_size % process_count:
        raise DataError(
            f"batch_size is {batch_size}; it must be a positive multiple of the {process_count} "
            "processes"
        )
    if config.prefetch < 0:
        raise DataError(f"prefetch is {config.prefetch}; it must be 0 or more batches")
    if config.validation_fraction and (config.validation_path or config.validation_split):
        raise DataError(
            f"validation_fraction is {config.validation_fraction} and validation_path or "
            "validation_split is set too: choose one"
        )


def _pad_to(batch_size: int) -> Any:
    """A short last batch is filled with all-zero rows: segment 0, loss_mask False."""
    import grain

    return functools.partial(grain.experimental.batch_and_pad, batch_size=batch_size)


def _finite(batches: Any, limit: int | None) -> Iterator[Batch]:
    iterator = iter(batches)
    try:
        yield from itertools.islice(iterator, limit)
    finally:
        iterator.close()


def _close(held: list[Any]) -> None:
    while held:
        held.pop().close()


def _tuples(state: Any) -> Any:
    """Lists back to tuples: grain compares slices with tuples, and JSON has only lists."""
    if isinstance(state, Mapping):
        return {key: _tuples(value) for key, value in state.items()}
    return tuple(_tuples(value) for value in state) if isinstance(state, list | tuple) else state
