"""Tokenization of documents, and of a chunk of them to a shard."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ffn_heterogeneity.data.corpus import shards
from ffn_heterogeneity.data.corpus.documents import DocumentPart, Layout
from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.passages import PASSAGE_CHARS, streamed
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example
from ffn_heterogeneity.io.files import write_json

PROGRESS = "progress"
# Approximate number of characters per batch of documents.
BATCH_CHARS = 1 << 18

Report = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of tokenization.

    Attributes:
      layout: form of the documents.
      eos: whether documents end with the tokenizer's eos.
      passage_chars: longer documents are tokenized in pieces of at most this number of characters,
        cut at blank lines, lines or spaces, which bounds memory and time.
    """

    layout: Layout = Layout()
    eos: bool = True
    passage_chars: int = PASSAGE_CHARS


class Tokeniser:
    """Converter of documents to ids, without bos, and with eos according to the settings."""

    def __init__(self, tokenizer: Any, settings: Settings):
        self.settings = settings
        self.tokenizer, self.encoder = tokenizer, Encoder(tokenizer, "none", settings.eos)
        if settings.eos and self.encoder.eos_id is None:
            raise DataError("this tokenizer has no eos token; set eos=False")
        self.end = [] if self.encoder.eos_id is None else [self.encoder.eos_id]
        self.dtype = shards.token_dtype(shards.vocab_size(tokenizer))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of several short documents."""
        tokenizer: Any = self.tokenizer
        if not texts or not callable(tokenizer):
            encodings = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        else:
            options = {"return_attention_mask": False, "verbose": False}
            encoded: Any = tokenizer(texts, add_special_tokens=False, **options)
            encodings = encoded["input_ids"]
        return [ids + self.end for ids in encodings]

    def encode_long(self, parts: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
        """Iterate over (text, ids) of the passages of a document."""
        for text, starts, ends in streamed(parts, self.settings.passage_chars):
            ids, _ = self.encoder.ids(Example("", text, starts, ends))
            yield text, ids


def write_shard(
    name: str,
    parts: Iterable[DocumentPart],
    tokeniser: Tokeniser,
    directory: Path,
    size: int = 0,
    report: Report = lambda size, tokens: None,
) -> dict[str, Any]:
    """Write a shard; return its entry, with the number of `empty` documents that were omitted.

    Reading stops at the layout's `max_tokens`, also inside a long document.

    Args:
      size: approximate bytes of the input.
      report: called from time to time with the numbers of bytes and tokens done.
    """
    empty, left = 0, size
    limit = tokeniser.settings.layout.max_tokens or sys.maxsize

    def bounded(done: int, tokens: int) -> None:
        nonlocal left
        done = min(done, left)
        left -= done
        report(done, tokens)

    with shards.ShardWriter(directory, name, tokeniser.dtype) as writer:
        for batch in _batches(parts, tokeniser.settings.passage_chars):
            add = _add if isinstance(batch, list) else _add_long
            empty += add(batch, tokeniser, writer, bounded)
            if writer.tokens >= limit:
                break
        entry = writer.close() | {"empty": empty}
    write_json(note(directory, name), entry)
    report(left, 0)
    return entry


def _add(texts: list[str], tokeniser: Tokeniser, writer: shards.ShardWriter, report: Report) -> int:
    """Write short documents; return how many of them were empty."""
    before, empty = writer.tokens, 0
    full = [text for text in texts if text.strip()]
    for ids in tokeniser.encode(full) if full else ():
        if len(ids) > len(tokeniser.end):
            writer.add(ids)
        else:  # the tokenizer returns no ids
            empty += 1
    report(sum(map(len, texts)), writer.tokens - before)
    return len(texts) - len(full) + empty


def _add_long(
    parts: Iterator[str], tokeniser: Tokeniser, writer: shards.ShardWriter, report: Report
) -> int:
    """Write a long document up to the token limit; return 1 if it is empty."""
    limit, full = tokeniser.settings.layout.max_tokens or sys.maxsize, False
    for text, ids in tokeniser.encode_long(parts):
        full = full or bool(text.strip())
        writer.extend(ids)
        report(len(text), len(ids))
        if writer.tokens >= limit:
            break
    return not writer.end(len(tokeniser.end) + 1 if full else sys.maxsize)


def note(directory: Path, name: str) -> Path:
    """The file that marks a shard as complete until the manifest exists."""
    return directory / PROGRESS / f"{name}.json"


def shard_name(number: int) -> str:
    """Name of a chunk's shard; names sort like numbers."""
    return f"shard-{number:06d}"


def _batches(parts: Iterable[DocumentPart], limit: int) -> Iterator[list[str] | Iterator[str]]:
    """Lists of documents of at most `limit` characters, and iterators over parts of longer ones.

    Such an iterator must be read to its end before the next item, unless it is the last.
    """
    parts, batch, size = iter(parts), [], 0
    for document_part in parts:
        if document_part.ends and len(document_part.text) <= limit:
            batch.append(document_part.text)
            size += len(document_part.text)
            if size < BATCH_CHARS:
                continue
        if batch:
            yield batch
            batch, size = [], 0
        if not document_part.ends or len(document_part.text) > limit:
            yield _document(document_part, parts)
    if batch:
        yield batch


def _document(document_part: DocumentPart, more: Iterator[DocumentPart]) -> Iterator[str]:
    yield document_part.text
    while not document_part.ends:
        document_part = next(more)
        yield document_part.text
