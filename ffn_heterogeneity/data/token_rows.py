"""Rows of T positions from token shards, with random access and without tokenization.

The concatenated documents of a corpus are a stream of inputs x and targets y. Row r is its
positions rT ... rT + T - 1, so a document may continue in the next row. A document t_0 ... t_{n-1}
gives:

    with a bos    x = bos, t_0 ... t_{n-2}    y = t_0 ... t_{n-1}    n positions
    without       x = t_0 ... t_{n-2}         y = t_1 ... t_{n-1}    n - 1 positions

which equals the result of `packing.Encoder` and `pack` for running text. With bos "segment", the
first input of a row that starts inside a document is also a bos; with "document" it is the token
before.
"""

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ffn_heterogeneity.data.batches import Batch
from ffn_heterogeneity.data.corpus.shards import Corpus, Shard
from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.wording import check_number


class ShardPart(NamedTuple):
    """Documents [first, last) of a shard."""

    shard: Shard
    first: int
    last: int


def whole(corpus: Corpus) -> list[ShardPart]:
    """All documents of a corpus."""
    return [ShardPart(shard, 0, shard.documents_count) for shard in corpus.shards]


def split(corpus: Corpus, fraction: float) -> tuple[list[ShardPart], list[ShardPart]]:
    """Split into (training, held-out) documents: the last ones of every shard are held out.

    So both parts are slices, and if the shards have several sources, each contributes its share.
    At every shard's end, round(fraction * d) of the first d documents of the corpus are held out;
    at least one and not all.

    Raises:
      DataError: a fraction outside [0, 1), or a corpus of a single document.
    """
    check_number("validation_fraction", fraction, "[0, 1)", DataError)
    if fraction == 0.0:
        return whole(corpus), []
    counts = [shard.documents_count for shard in corpus.shards]
    total = sum(counts)
    if total < 2:
        raise DataError(
            f"{corpus.directory}: {total} document cannot be split into training and validation; "
            "give validation_path"
        )
    ends = np.cumsum(counts)
    due = np.floor(fraction * ends + 0.5).astype(np.int64)
    due[-1] = min(max(due[-1], 1), total - 1)
    training, held, before = [], [], 0
    for shard, target in zip(corpus.shards, due.tolist(), strict=True):
        out = min(max(target - before, 0), shard.documents_count)
        before += out
        middle = shard.documents_count - out
        training.append(ShardPart(shard, 0, middle))
        held.append(ShardPart(shard, middle, shard.documents_count))
    return [p for p in training if p.first < p.last], [p for p in held if p.first < p.last]


class TokenRows:
    """Random access to the rows of some parts of a corpus.

    Attributes:
      documents, positions: their numbers.

    Raises:
      DataError: no position to predict in them.
    """

    def __init__(self, parts: Sequence[ShardPart], encoder: Encoder, seq_len: int):
        self._parts, self._bos, self._seq_len = parts, encoder.bos, seq_len
        self._bos_id = encoder.bos_id
        self._skipped = int(encoder.bos_id is None)  # a document's first id is an input only
        starts = [0]
        for span in parts:
            tokens = span.shard.offsets[span.last] - span.shard.offsets[span.first]
            starts.append(starts[-1] + int(tokens) - self._skipped * (span.last - span.first))
        self._starts = starts
        self.documents = sum(span.last - span.first for span in parts)
        self.positions = starts[-1]
        if not self.positions:
            raise DataError(
                f"{self.documents} documents of the token shards leave no token to predict: they "
                "have one token each; check what they were made from"
            )

    def __len__(self) -> int:
        return -(-self.positions // self._seq_len)

    def where(self, position: int) -> str:
        """Shard and document of a position, for errors."""
        at = bisect.bisect_right(self._starts, position) - 1
        span, begins = self._parts[at], functools.partial(self._begins, self._parts[at])
        documents = range(span.first, span.last)
        inside = bisect.bisect_right(documents, position - self._starts[at], key=begins)
        shard = span.shard
        return f"{shard.directory / shard.name}.tokens, document {span.first + inside}"

    def _begins(self, span: ShardPart, document: int) -> int:
        """First position of a document within its part."""
        offsets = span.shard.offsets
        before = int(offsets[document]) - int(offsets[span.first])
        return before - self._skipped * (document - span.first)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The five arrays [len(numbers), T]; a negative number gives a row of padding.

        The last row of the corpus is padded: segment 0, loss_mask False.
        """
        shape = (len(numbers), self._seq_len)
        batch = {
            key: np.zeros(shape, np.int32)
            for key in ("tokens", "targets", "segment_ids", "positions")
        }
        batch["loss_mask"] = np.zeros(shape, bool)
        for row, number in enumerate(numbers):
            if number >= 0:
                self._fill({key: value[row] for key, value in batch.items()}, int(number))
        return batch

    def _fill(self, row: Batch, number: int) -> None:
        start = number * self._seq_len
        stop = min(start + self._seq_len, self.positions)
        at = bisect.bisect_right(self._starts, start) - 1
        place, segments = start, 0
        while place < stop:
            offset, end = self._starts[at], min(stop, self._starts[at + 1])
            views = {key: value[place - start : end - start] for key, value in row.items()}
            if place < end:
                added = self._fill_part(views, self._parts[at], place - offset, end - offset)
                views["segment_ids"] += segments
                segments += added
            place, at = end, at + 1
        row["loss_mask"][: stop - start] = True
        if self._bos == "segment":
            row["tokens"][0] = self._bos_id

    def _fill_part(self, row: Batch, span: ShardPart, start: int, stop: int) -> int:
        """Fill in positions [start, stop) of a part, segments from 1; return their number."""
        tokens, offsets, skipped = span.shard.tokens, span.shard.offsets, self._skipped
        base = int(offsets[span.first])

        begins = functools.partial(self._begins, span)
        documents = range(span.first, span.last)
        first = span.first + bisect.bisect_right(documents, start, key=begins) - 1
        last = bisect.bisect_left(documents, stop, lo=first + 1 - span.first, key=begins)
        numbers = np.arange(first, span.first + last)
        edges = offsets[numbers[0] : numbers[-1] + 1] - base - skipped * (numbers - span.first)
        begun = edges[0] == start
        edges[0] = start
        lengths = np.diff(edges, append=stop)
        if skipped and not lengths.all():  # documents of one token have no position
            numbers, edges, lengths = (v[lengths > 0] for v in (numbers, edges, lengths))
        # Positions of the targets; with a bos they are contiguous.
        low = base + start + skipped * int(numbers[0] + 1 - span.first)
        high = base + stop + skipped * int(numbers[-1] + 1 - span.first)
        if high - low == stop - start:
            row["targets"][:] = tokens[low:high]
            row["tokens"][1:] = tokens[low : high - 1]
            if not begun or skipped:
                row["tokens"][0] = tokens[low - 1]
        else:
            ids = tokens[low - 1 : high]
            at = np.arange(stop - start) + np.repeat(numbers - numbers[0], lengths)
            row["targets"][:], row["tokens"][:] = ids[at + 1], ids[at]
        if not skipped:
            row["tokens"][edges[0 if begun else 1 :] - start] = self._bos_id
        row["segment_ids"][:] = np.repeat(np.arange(1, len(numbers) + 1), lengths)
        row["positions"][:] = np.arange(start, stop) - np.repeat(edges, lengths)
        return len(numbers)
