"""Documents to ids, and a chunk of them to its shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ffn_heterogeneity.data.corpus import corpora, shards
from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.passages import PASSAGE_CHARS, passages
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example
from ffn_heterogeneity.io.files import write_json

PROGRESS = "progress"
# Documents are tokenised in batches of about so many characters.
BATCH_CHARS = 1 << 18

Report = Callable[[int, int], None]


def _nothing(size: int, tokens: int) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of turning documents into tokens.

    Attributes:
      layout: what a document is.
      eos: whether documents end with the tokenizer's eos.
      passage_chars: a longer document is tokenised in pieces of at most so many characters, cut at
        blank lines, lines or spaces, which bounds memory and time.
    """

    layout: corpora.Layout = corpora.Layout()
    eos: bool = True
    passage_chars: int = PASSAGE_CHARS


class Tokeniser:
    """Documents to ids: no bos, an eos where the settings say so."""

    def __init__(self, tokenizer: Any, settings: Settings):
        self.settings = settings
        self.tokenizer, self.encoder = tokenizer, Encoder(tokenizer, "none", settings.eos)
        if settings.eos and self.encoder.eos_id is None:
            raise DataError("this tokenizer has no eos token; set eos=False")
        self.end = [] if self.encoder.eos_id is None else [self.encoder.eos_id]
        self.dtype = shards.token_dtype(shards.vocab_size(tokenizer))

    def encode(self, texts: Sequence[str], report: Report = _nothing) -> list[list[int]]:
        """Ids of each text; `report` is told the characters and tokens done, now and then."""
        limit = self.settings.passage_chars
        short = [text for text in texts if len(text) <= limit]
        found = self._batch(short)
        report(sum(map(len, short)), sum(map(len, found)))
        encoded, ids = [], iter(found)
        for text in texts:
            if len(text) <= limit:
                encoded.append(next(ids) + self.end)
            else:
                encoded.append(self._long(text, report))
        return encoded

    def _batch(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        tokenizer: Any = self.tokenizer
        if not callable(tokenizer):
            return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        options = {"return_attention_mask": False, "verbose": False}
        encoded: Any = tokenizer(texts, add_special_tokens=False, **options)
        return encoded["input_ids"]

    def _long(self, text: str, report: Report) -> list[int]:
        found = []
        for start, stop in passages(text, self.settings.passage_chars):
            example = Example("", text[start:stop], start == 0, stop == len(text))
            ids, _ = self.encoder.ids(example)
            found += ids
            report(stop - start, len(ids))
        return found


def write_shard(
    name: str,
    texts: Iterable[str],
    tokeniser: Tokeniser,
    directory: Path,
    size: int = 0,
    report: Report = _nothing,
) -> dict[str, Any]:
    """Writes a shard; returns its entry, with the number of `empty` documents left out.

    Args:
      size: bytes of the input, about.
      report: told how many of those, and how many tokens, are done, now and then.
    """
    empty, left = 0, size

    def bounded(done: int, tokens: int) -> None:
        nonlocal left
        done = min(done, left)
        left -= done
        report(done, tokens)

    with shards.ShardWriter(directory, name, tokeniser.dtype) as writer:
        for batch in _batches(texts):
            full = [text for text in batch if text.strip()]
            empty += len(batch) - len(full)
            for ids in tokeniser.encode(full, bounded):
                if len(ids) > len(tokeniser.end):
                    writer.add(ids)
                else:  # the tokenizer keeps nothing of it
                    empty += 1
        entry = writer.close() | {"empty": empty}
    write_json(note(directory, name), entry)
    report(left, 0)
    return entry


def note(directory: Path, name: str) -> Path:
    """The file that says, until the manifest is there, that a shard is whole."""
    return directory / PROGRESS / f"{name}.json"


def shard_name(number: int) -> str:
    """The name of a chunk's shard: in order of names they are in order of numbers."""
    return f"shard-{number:06d}"


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
