"""The input pipeline: shuffles, tokenizes, packs and batches records in a background thread.

It is based on grain and can be resumed at the exact batch. Steps: records -> shuffle of this epoch
-> next epoch -> tokenize -> pack -> global batch -> this process's rows. Tokenization is lazy. All
steps except the last are the same in every process, so the stream of tokens does not depend on the
number of processes, and a run may be resumed with another number. Validation is the same, with one
pass over the held-out records in order.
"""

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data import mixtures
from ffn_heterogeneity.data.batches import (
    Batch,
    BatchIterator,
    Feed,
    chosen_rows,
    finite,
    pad_to,
    take_rows,
)
from ffn_heterogeneity.data.data_config import DataConfig
from ffn_heterogeneity.data.packing import (
    MIN_OPEN_ROWS,
    Counts,
    Encoder,
    ExampleReader,
    encode,
    pack,
    read_example,
)
from ffn_heterogeneity.data.sources import DataError, Source, Subset, named_place
from ffn_heterogeneity.data.tasks import Fields, Task, get_task
from ffn_heterogeneity.data.token_pipeline import TokenPipeline
from ffn_heterogeneity.data.weighted import WeightedPipeline, parse_mixture
from ffn_heterogeneity.wording import check_number, check_numbers

# The held-out records depend only on the data, so runs with different seeds can be compared.
SPLIT_SEED = 0


class Pipeline(Feed):
    """Training and validation batches of one task; made by `make_pipeline`.

    Every batch: "tokens", "targets", "segment_ids" (0 padding, documents from 1), "positions"
    (restart in every segment) int32 and "loss_mask" bool, all [len(rows), T].

    Attributes:
      train, held_out: the records; `held_out` is None without validation data.
    """

    def __post_init__(self):
        super().__post_init__()
        config = self.config
        _check(config)
        self.task: Task = get_task(config.task)
        policy = (config.bos, config.eos, config.chat_template)
        policy += (config.append, config.loss_on_prompt, config.template_date)
        self._encoder = Encoder(self.tokenizer, *policy)
        self._fields = Fields(config.prompt_field, config.response_field, config.text_field)
        self.train, self.held_out = self._open()

    def train_iterator(self, epochs: int | None = None) -> BatchIterator:
        """Iterate over this process's rows of batches, for `epochs` passes (None: forever).

        For a mixture, one pass is as many draws as there are records in total. With finite `epochs`
        the last batch is padded; all processes get equally many batches.

        Raises:
          DataError: while iterating, an unreadable record, or no token to predict in any record.
        """
        batches, counts = self._batches(self._order(epochs), self.train, training=True)
        return BatchIterator(iter(batches), self.identity(epochs), counts)

    def _order(self, epochs: int | None) -> Any:
        """The training records as a grain `MapDataset` in reading order."""
        import grain

        source, seeds = self.train.source, None
        parts = source.parts if isinstance(source, mixtures.MixedSource) else ()
        if self.config.shuffle:
            # Hashed, because grain adds the epoch to the seed: neighboring seeds would share
            # orders.
            state = np.random.SeedSequence(self.seed).generate_state(max(len(parts), 1))
            seeds = [int(seed) for seed in state]
        if parts:
            records = mixtures.mixed_records(source, self.train, seeds)
            return records if epochs is None else records[: epochs * len(self.train)]
        records = grain.MapDataset.source(self.train)
        return (records.shuffle(seed=seeds[0]) if seeds else records).repeat(epochs)

    def validation_iterator(self, max_batches: int | None = None) -> Iterator[Batch]:
        """Iterate once over the held-out records in order, with the last batch padded.

        Raises:
          DataError: no held-out records, or (while iterating) an unreadable one.
        """
        import grain

        if self.held_out is None:
            raise DataError(
                "no validation data: set validation_fraction, validation_path or validation_split"
            )
        records = grain.MapDataset.source(self.held_out)
        batches, _ = self._batches(records, self.held_out, training=False)
        return finite(batches, max_batches)

    def _batches(self, records: Any, subset: Subset, training: bool) -> tuple[Any, Counts]:
        """Convert records to this process's rows of the global batches, ahead of use, in a thread.

        There is only one thread, so the order never depends on timing.
        """
        import grain

        reader = ExampleReader(
            task=self.task,
            fields=self._fields,
            source=subset.source,
            encoder=self._encoder,
            seq_len=self.seq_len,
            total=len(subset),
            packing=self.config.packing,
            skip_bad=self.config.skip_bad,
            vocab_size=self.vocab_size,
            decoder=self.decoder,
        )
        items = records.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        elements = grain.experimental.FlatMapIterDataset(items, reader)
        rounds = -(-MIN_OPEN_ROWS // self.batch_size) if self.config.packing else 1
        rows = pack(
            elements,
            self.task,
            self._encoder,
            self.seq_len,
            self.decoder,
            packing=self.config.packing,
            open_rows=self.batch_size * rounds,
            seed=self.seed if training and self.config.shuffle else None,
        )
        pad = pad_to(self.batch_size)
        batches = rows.batch(self.batch_size, drop_remainder=False, batch_fn=pad)
        batches = batches.map(lambda batch: take_rows(batch, self.rows))
        prefetched = grain.experimental.ThreadPrefetchIterDataset(
            batches, prefetch_buffer_size=self.config.prefetch
        )
        return prefetched, reader.counts

    def _open(self) -> tuple[Subset, Subset | None]:
        """Open the training and held-out records and check that the task can read them."""
        config, task = self.config, self.task
        options = [member.option for member in task.members if member.option]
        names = ("revision", "passage_chars", "skip_bad")
        opened = {name: getattr(config, name) for name in names}
        split = config.split or task.split
        left_out = [option for option in options if not getattr(config, option)]
        source = mixtures.open_task(task, config.path, split, left_out=left_out, **opened)
        if isinstance(source, mixtures.MixedSource):
            mixtures.report_sizes(source)
        self._check_records(source)
        if not (config.validation_path or config.validation_split):
            return split_records(source, config.validation_fraction)
        path = config.validation_path or config.path
        held_split = config.validation_split or ("validation" if config.validation_path else split)
        if twice := mixtures.read_twice(task, (config.path, split), (path, held_split)):
            raise DataError(
                f"{twice}: training and validation both read it: name other files or splits, or "
                "hold out a part (data.validation_fraction)"
            )
        # Members that only help in training have no validation file.
        held_out = mixtures.open_task(task, path, held_split, left_out=options, **opened)
        self._check_records(held_out)
        return Subset(source, range(len(source))), Subset(held_out, range(len(held_out)))

    def _check_records(self, source: Source) -> None:
        """Check all records if that is cheap, otherwise only the first, e.g. for missing fields."""
        if self.config.skip_bad:
            return
        for row in range(len(source) if source.in_memory else 1):
            read_example(self.task, self._fields, source, row, source[row])

    def identity(self, epochs: int | None) -> dict[str, Any]:
        """The settings of `Feed`, and a fingerprint of the records, from a sample of them."""
        source, shares, members = self.train.source, [self.train.rows], {}
        if isinstance(source, mixtures.MixedSource):
            shares = source.shares(self.train.rows)
            sizes = zip(source.parts, shares, strict=True)
            members = {
                "members": {member.task: [member.weight, len(rows)] for member, rows in sizes}
            }
        sampled = [int(s[i]) for s in shares for i in (0, len(s) // 2, len(s) - 1)]
        texts = [self._sample(source, row) for row in sampled]
        probe = "The quick brown fox, 1234 times: naïve\n"
        return {
            **super().identity(epochs),
            **members,
            "data_crc": zlib.crc32(repr([sampled, texts]).encode()),
            "tokenizer_crc": zlib.crc32(repr(encode(self.tokenizer, probe)).encode()),
            "packing": self.config.packing,
            "eos": self._encoder.eos_id,
            "append": self.config.append,
            "loss_on_prompt": self.config.loss_on_prompt,
        }

    def _sample(self, source: Source, row: int) -> Any:
        """The content of a row; for a conversation, its ids after the chat template."""
        try:
            example = read_example(self.task, self._fields, source, row, source[row])
            with named_place(source, row):
                encode = self.task.encode
                return [example, encode(example, self._encoder)] if encode else example
        except DataError as error:
            if not self.config.skip_bad:
                raise
            return str(error)


def make_pipeline(
    config: DataConfig | Mapping[str, Any],
    tokenizer: Any,
    batch_size: int,
    seq_len: int,
    seed: int,
    *,
    accumulation: int = 1,
    rows: Sequence[int] | None = None,
    vocab_size: int | None = None,
    decoder: tuple[int, int] | None = None,
) -> Pipeline | TokenPipeline | WeightedPipeline:
    """Open and check the data, and make the pipeline.

    Args:
      config: a `DataConfig`, or a mapping with its keys.
      tokenizer: `transformers`-like: `encode(text, add_special_tokens=False)`, `bos_token_id`,
        `eos_token_id`.
      batch_size: rows of a batch over all processes together.
      seq_len: T, the positions of a row, at least 2.
      seed: seed of the shuffle, unless the config has one; the same in every process.
      accumulation: A, the number of micro-batches into which the caller splits a batch,
        [A, rows / A, T]. It decides which rows a process takes, not the content of a global batch.
      rows: the rows of the global batch that this process feeds (for a mesh, those of
        `parallel.placement.local_rows`); None: all of them.
      vocab_size: the model's vocabulary size, to check ids; None: no check.
      decoder: (positions of the decoder's rows, its start id) of an encoder-decoder, whose encoder
        reads the prompts, at most `seq_len` tokens; one example a row. None: one stack.

    Cost: every process tokenizes and packs everything, so each must keep up with the whole run, not
    with its share. Measured with the SmolLM2 tokenizer in its one thread, on a 2.8 GHz machine busy
    with other work: 110,000 to 190,000 tokens/s (GSM8K, T = 512), 190,000 to 250,000 (WikiText,
    T = 1,024). Training SmolLM2-135M on 2 such cores consumes 170 tokens/s (docs/performance.md),
    Gemma-2 2B on an H200 about 31,000 (an estimate: 16k tokens in 530 ms): no bottleneck. It
    becomes one if the whole run consumes more than this: that 2B model on more than 4 to 8 such
    GPUs, or 135M on a single one (some 350,000 at a third of its peak).

    Raises:
      DataError: invalid settings or data; the message is one line.
    """
    if not isinstance(config, DataConfig):
        config = DataConfig.from_mapping(config)
    fed = chosen_rows(rows, batch_size, accumulation)
    if decoder is not None:
        config = _for_pairs(config)
    if config.mixture or config.task == "mixture":
        if config.task != "mixture" or config.path:
            raise DataError(
                f"mixture has its own tasks and files, but task={config.task!r} and "
                f"path={config.path!r}: set task='mixture' and path=''"
            )
        members = []
        for task, path, weight in parse_mixture(config.mixture):
            one = dataclasses.replace(config, task=task, path=path, mixture=())
            made = make_pipeline(one, tokenizer, 1, seq_len, seed, vocab_size=vocab_size)
            members.append((f"{task}:{path}", weight, made))
        return WeightedPipeline(
            members, config, tokenizer, batch_size, seq_len, seed, fed, vocab_size
        )
    without_prompts = config.task == "tokens" or get_task(config.task).encode
    if without_prompts and (config.append or config.loss_on_prompt):
        raise DataError(
            f"append={config.append!r}, loss_on_prompt={config.loss_on_prompt}: task "
            f"{config.task!r} has no prompts and responses"
        )
    made = TokenPipeline if config.task == "tokens" else Pipeline
    return made(config, tokenizer, batch_size, seq_len, seed, fed, vocab_size, decoder)


def _for_pairs(config: DataConfig) -> DataConfig:
    """The settings for prompts and responses in separate rows."""
    mixed = bool(config.mixture) or config.task == "mixture"
    task = None if mixed or config.task == "tokens" else get_task(config.task)
    if task is None or task.encode or task.split_long or config.loss_on_prompt:
        raise DataError(
            f"task={config.task!r}, loss_on_prompt={config.loss_on_prompt}: an encoder-decoder "
            "reads the prompts of one task, and learns the responses (text: span_corruption)"
        )
    return dataclasses.replace(config, packing=False)


def split_records(source: Source, fraction: float) -> tuple[Subset, Subset | None]:
    """Split all records into training and held-out ones; the split depends only on the data."""
    check_number("validation_fraction", fraction, "[0, 1)", DataError)
    if fraction == 0.0:
        return Subset(source, range(len(source))), None
    parts = (
        source.parts
        if isinstance(source, mixtures.MixedSource)
        else [mixtures.Part("", 1, source, 0)]
    )
    training, held = [], []
    for member in parts:
        rest, out = _split_rows(member.source, fraction)
        training.append(member.start + rest)
        held.append(member.start + out)
    return Subset(source, np.concatenate(training)), Subset(source, np.concatenate(held))


def _split_rows(source: Source, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    groups = getattr(source, "groups", np.arange(len(source)))
    names = np.unique(groups)
    count = len(names)
    if count < 2:
        raise DataError(
            f"{source.name}: {count} record cannot be split into training and validation; give "
            "validation_path, or a smaller passage_chars for one long text"
        )
    held = min(max(round(fraction * count), 1), count - 1)
    order = np.arange(count)
    if not source.running_text:
        order = np.random.default_rng(SPLIT_SEED).permutation(count)
    out = np.isin(groups, names[order[-held:] if source.running_text else order[:held]])
    return np.flatnonzero(~out), np.flatnonzero(out)


def _check(config: DataConfig) -> None:
    check_numbers(config, DataError, prefetch="[0, inf)")
