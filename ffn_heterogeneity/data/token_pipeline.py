"""Batches from token shards (task "tokens"), with the interface of `pipeline.Pipeline`.

Row numbers -> shuffle of this epoch -> next epoch -> global batch of numbers -> this process's
rows, read from the memory maps in a background thread. A process reads only its rows.
"""

import json
import logging
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.batches import Batch, BatchIterator, Feed, finite
from ffn_heterogeneity.data.corpus.shards import Corpus, open_corpus, tokenizer_facts
from ffn_heterogeneity.data.packing import Counts, Encoder, unknown_token
from ffn_heterogeneity.data.sources import DataError, named_place
from ffn_heterogeneity.data.tasks import get_task
from ffn_heterogeneity.data.token_rows import ShardPart, TokenRows, split, whole

_log = logging.getLogger(__name__)


class TokenPipeline(Feed):
    """Training and validation batches of token shards; made by `pipeline.make_pipeline`.

    The rows are cut once, from the documents in their order; an epoch is a new order of the rows.

    Attributes:
      train, held_out: the rows of T positions; `held_out` is None without validation data.
    """

    def __post_init__(self):
        super().__post_init__()
        config = self.config
        self.task = get_task("tokens")
        self._encoder = Encoder(self.tokenizer, config.bos, config.eos)
        self.train, self.held_out = self._open()

    def train_iterator(self, epochs: int | None = None) -> BatchIterator:
        """Iterate over this process's rows of batches, for `epochs` passes (None: forever).

        With finite `epochs` the last batch is padded.
        """
        import grain

        numbers = grain.MapDataset.range(len(self.train))
        if self.config.shuffle:
            # Hashed as in `Pipeline`, because grain adds the epoch to the seed.
            state = np.random.SeedSequence(self.seed).generate_state(1)
            numbers = numbers.shuffle(seed=int(state[0]))
        # "Forever" is a length that grain can still divide by a batch of one row.
        numbers, counts = numbers.repeat(epochs or 2**31), Counts()
        batches = self._batches(numbers, self.train, counts)
        return BatchIterator(iter(batches), self.identity(epochs), counts)

    def validation_iterator(self, max_batches: int | None = None) -> Iterator[Batch]:
        """Iterate once over the held-out rows in order, with the last batch padded.

        Raises:
          DataError: no held-out data.
        """
        import grain

        if self.held_out is None:
            raise DataError("no validation data: set validation_fraction or validation_path")
        numbers = grain.MapDataset.range(len(self.held_out))
        return finite(self._batches(numbers, self.held_out, Counts()), max_batches)

    def _batches(self, numbers: Any, rows: TokenRows, counts: Counts) -> Any:
        import grain

        def pad(row_numbers: Sequence[int]) -> np.ndarray:
            return np.pad(row_numbers, (0, self.batch_size - len(row_numbers)), constant_values=-1)

        def read(row_numbers: np.ndarray) -> Batch:
            real = row_numbers[row_numbers >= 0]
            last = np.count_nonzero(real == len(rows) - 1)  # several if rows < batch
            tokens = len(real) * self.seq_len - last * (len(rows) * self.seq_len - rows.positions)
            counts.input_tokens += tokens
            counts.loss_tokens += tokens
            numbers = row_numbers[self.rows]
            batch = rows.batch(numbers)
            ids = np.maximum(batch["tokens"], batch["targets"])
            row, column = divmod(int(ids.argmax()), self.seq_len)
            with named_place(rows, int(numbers[row]) * self.seq_len + column):
                if problem := unknown_token(ids, self.vocab_size, self.tokenizer):
                    raise DataError(problem)
            return batch

        batches = numbers.batch(self.batch_size, batch_fn=pad)
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        return grain.experimental.ThreadPrefetchIterDataset(
            batches.to_iter_dataset(reading).map(read), prefetch_buffer_size=self.config.prefetch
        )

    def _open(self) -> tuple[TokenRows, TokenRows | None]:
        config = self.config
        if not config.packing:
            raise DataError("task 'tokens' is always packed: set packing=True")
        if not isinstance(config.path, str) or not config.path:
            raise DataError(
                f"task 'tokens' needs the directory of the shards, path is {config.path!r}"
            )
        corpus = self._corpus(config.path)
        if not config.validation_path:
            training, held = split(corpus, config.validation_fraction)
            self._digest = _digest(corpus, training)
            return self._make(training), self._make(held) if held else None
        self._digest = _digest(corpus, whole(corpus))
        other = self._corpus(str(config.validation_path))
        if corpus.directory.samefile(other.directory):
            raise DataError(
                f"{corpus.directory}: training and validation both read it: name other shards, or "
                "hold out a part (data.validation_fraction)"
            )
        return self._make(whole(corpus)), self._make(whole(other))

    def _corpus(self, path: str) -> Corpus:
        corpus = open_corpus(path, verify=self.config.verify)
        theirs, ours = corpus.manifest["tokenizer"], tokenizer_facts(self.tokenizer)
        if theirs["fingerprint"] != ours["fingerprint"]:
            raise DataError(
                f"{corpus.directory}: made with the tokenizer of "
                f"{theirs['name'] or 'another model'} ({theirs['vocab_size']} ids), which is not "
                f"this model's ({ours['vocab_size']} ids); prepare the data with this model's "
                "tokenizer, or use the model with their tokenizer"
            )
        stored = corpus.manifest["policy"]["eos_id"]
        if stored != self._encoder.eos_id:
            text = "%s: documents were prepared with eos %s; this run's eos is %s"
            _log.warning(text, path, stored, self._encoder.eos_id)
        return corpus

    def _make(self, parts: Sequence[ShardPart]) -> TokenRows:
        return TokenRows(parts, self._encoder, self.seq_len)

    def identity(self, epochs: int | None) -> dict[str, Any]:
        """The settings of `Feed`, and a digest of the shards."""
        return {**super().identity(epochs), "data_crc": self._digest}


def _digest(corpus: Corpus, parts: Sequence[ShardPart]) -> int:
    """Digest of the shards' hashes and of the ranges of documents."""
    hashes = [entry["sha256"] for entry in corpus.manifest["shards"]]
    taken = [(span.shard.name, span.first, span.last) for span in parts]
    return zlib.crc32(json.dumps([hashes, taken]).encode())
