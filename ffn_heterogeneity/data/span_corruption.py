"""T5's span corruption: spans of a text become sentinels, and the targets are the spans.

Input:   x_0 x_1 <s0> x_4 <s1> x_7 eos        target:   <s0> x_2 x_3 <s1> x_5 x_6 eos

As in T5's published code: a share of the tokens is noise, in spans of a mean length; lengths of
spans are random partitions; the first span is kept and the last is noise, so no sentinel follows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.wording import check_number

SENTINEL = "<extra_id_{}>"


@dataclasses.dataclass(frozen=True)
class Corruption:
    """Settings of span corruption.

    Attributes:
      sentinels: ids of the sentinels, in order of use.
      eos_id: ends inputs and targets.
      density: share of the tokens that is noise.
      mean_span: mean length of a span of noise, in tokens.
    """

    sentinels: tuple[int, ...]
    eos_id: int
    density: float = 0.15
    mean_span: float = 3.0

    def __post_init__(self):
        check_number("density", self.density, "(0, 1)", DataError)
        check_number("mean_span", self.mean_span, "[1, inf)", DataError)

    def counts(self, tokens: int) -> tuple[int, int]:
        """(tokens of noise, spans of noise) of a row."""
        noise = min(max(round(tokens * self.density), 1), tokens - 1)
        return noise, min(max(round(noise / self.mean_span), 1), noise, tokens - noise)

    def lengths(self, tokens: int) -> tuple[int, int]:
        """Lengths of (input, target) of a row of `tokens` tokens, with eos."""
        noise, spans = self.counts(tokens)
        return tokens - noise + spans + 1, noise + spans + 1

    def row_length(self, inputs: int) -> int:
        """The largest number of tokens whose input has at most that length.

        Raises:
          DataError: no row is so short, or there are too few sentinels.
        """
        if inputs < self.lengths(2)[0]:
            raise DataError(f"seq_len={inputs}: span corruption needs {self.lengths(2)[0]} or more")
        tokens = 2
        while self.lengths(tokens + 1)[0] <= inputs:
            tokens += 1
        if (spans := self.counts(tokens)[1]) > len(self.sentinels):
            raise DataError(
                f"seq_len={inputs} has {spans} spans, and there are {len(self.sentinels)} sentinels"
            )
        return tokens

    def corrupt(self, ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(input, target) of a row of at least two tokens, with eos."""
        noise, spans = self.counts(len(ids))
        lengths = np.stack([partition(len(ids) - noise, spans, rng), partition(noise, spans, rng)])
        ends = np.cumsum(lengths.T.reshape(-1))
        parts = np.split(ids, ends[:-1])
        inputs, targets = [], []
        for i, (kept, lost) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            sentinel = np.array([self.sentinels[i]], ids.dtype)
            inputs += [kept, sentinel]
            targets += [sentinel, lost]
        eos = np.array([self.eos_id], ids.dtype)
        return np.concatenate([*inputs, eos]), np.concatenate([*targets, eos])


def partition(items: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes of `parts` non-empty parts of `items`, each partition equally likely."""
    cuts = np.sort(rng.permutation(items - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [items]])).astype(int)


def sentinels_of(tokenizer: Any, vocab_size: int, count: int = 100) -> tuple[int, ...]:
    """Ids of the sentinels: a T5 tokenizer's, else the vocabulary's last ids, from the end.

    Raises:
      DataError: the tokenizer uses those ids.
    """
    known = tokenizer.get_vocab()
    if SENTINEL.format(0) in known:
        names = (SENTINEL.format(i) for i in range(count))
        return tuple(known[name] for name in names if name in known)
    if len(tokenizer) + count > vocab_size:
        raise DataError(
            f"the tokenizer has {len(tokenizer):,} tokens and no <extra_id_0>: span corruption "
            f"needs {count} further ids, so a vocabulary of {len(tokenizer) + count:,} or more "
            f"(shape.vocab_size), got {vocab_size:,}"
        )
    return tuple(range(vocab_size - 1, vocab_size - 1 - count, -1))


def corrupted_batch(
    batch: dict[str, np.ndarray],
    how: Corruption,
    start_id: int,
    pad_id: int,
    seed: Sequence[int],
    rows: Sequence[int],
) -> dict[str, np.ndarray]:
    """A batch for an encoder-decoder, from packed rows of one stack.

    The decoder's inputs are its targets shifted right, after `start_id`. Documents of a row are one
    text, as in T5. Rows with fewer than two tokens are all padding.

    Args:
      batch: "tokens" and "segment_ids" (0: padding), [B, L].
      seed: with the row's number in `rows`, seed of its spans.
    """
    longest = how.lengths(batch["tokens"].shape[1])
    encoder, decoder = (np.full((len(rows), length), pad_id, np.int32) for length in longest)
    made = [np.zeros(x.shape, np.int32) for x in (encoder, decoder)]
    for i, number in enumerate(rows):
        ids = batch["tokens"][i][batch["segment_ids"][i] > 0]
        if len(ids) < 2:
            continue
        pair = how.corrupt(ids, np.random.default_rng([*seed, int(number)]))
        for x, real, values in zip((encoder, decoder), made, pair, strict=True):
            x[i, : len(values)], real[i, : len(values)] = values, 1
    shifted = np.concatenate([np.full((len(rows), 1), start_id, np.int32), decoder[:, :-1]], 1)
    return {
        "encoder_tokens": encoder,
        "encoder_segment_ids": made[0],
        "tokens": np.where(made[1] > 0, shifted, pad_id).astype(np.int32),
        "segment_ids": made[1],
        "targets": decoder,
        "loss_mask": made[1] > 0,
    }
