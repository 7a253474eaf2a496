"""A corpus cut into chunks: which bytes or rows belong to a shard is a function of the input alone.

Files are taken in order and cut into pieces of about `chunk_bytes`; small files share a chunk. A
chunk becomes one shard, whoever makes it, so any number of processes makes the same shards.

    kind      a document is                               a file is cut
    text      the file; or what `separator` sets apart    at separators only
    jsonl     field `text_field` of a line                at ends of lines
    parquet   `text_field` of a row                       between row groups
    hub       `text_field` of a row                       every HUB_ROWS rows

Text and JSONL may be packed (.gz). No more than a chunk of a file is in memory at a time.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import glob
import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ffn_heterogeneity.data.hub import HubSource, HubStream
from ffn_heterogeneity.data.sources import (
    TEXT_SUFFIXES,
    DataError,
    decode_utf8,
    is_saved,
    kind_of,
    parse_object,
)
from ffn_heterogeneity.data.tasks.base import text_of
from ffn_heterogeneity.wording import first_line

KNOWN = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
SEPARATORS = {"blank_line": b"\n\n", "line": b"\n"}
HUB_ROWS = 10_000
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Layout:
    """The form of a document, and the size of a chunk.

    Attributes:
      text_field: of JSONL, parquet and hub records.
      separator: of text files: "" (a file is a document), "blank_line", "line", or the very text
        that stands between documents ("<|endoftext|>").
      chunk_bytes: input bytes of a chunk, about.
      split, revision: of a hub data set.
      stream: hub data sets are read as they come and not stored.
      max_documents, max_tokens: no more shards are made once there are so many (0: all); nor are
        more rows of a hub data set read.
    """

    text_field: str = "text"
    separator: str = ""
    chunk_bytes: int = 64 << 20
    split: str = "train"
    revision: str | None = None
    stream: bool = False
    max_documents: int = 0
    max_tokens: int = 0

    @property
    def breaks(self) -> bytes:
        """The separator as it stands in a file."""
        return SEPARATORS.get(self.separator, self.separator.encode())


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a file, or its row groups, or rows of a hub data set."""

    path: str
    kind: str
    start: int
    stop: int
    size: int  # in bytes of input, about


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The documents of one shard."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def find_inputs(spec: str | Sequence[str]) -> list[tuple[str, str]]:
    """(path, kind) of what is to be read, in order.

    Args:
      spec: files, directories (all their files, which must be of one kind; hidden ones are left
        out), globs and hub names `name[:config]`; in one string, commas stand between them.

    Raises:
      DataError: nothing there, an unknown kind, several kinds in a directory, or a file twice.
    """
    names = spec.split(",") if isinstance(spec, str) else list(spec)
    if not names or not all(name.strip() for name in names):
        raise DataError(
            f"no input: it is {spec!r}; give files, a directory, a glob or a hub name "
            "(--config.input=corpus.jsonl)"
        )
    found = [item for name in names for item in _expand(name.strip())]
    for path, count in collections.Counter(path for path, _ in found).items():
        if count > 1:
            raise DataError(f"{path} is named more than once; name each file once")
    return found


def plan_chunks(inputs: Sequence[tuple[str, str]], layout: Layout) -> list[Chunk]:
    """Pieces of every input, then chunks of consecutive ones up to `chunk_bytes`.

    Raises:
      DataError: a file that is empty or cannot be read, a parquet file without the field.
    """
    if layout.chunk_bytes < 1:
        raise DataError(f"chunk_bytes is {layout.chunk_bytes}; it must be 1 or more")
    chunks: list[Chunk] = []
    held: list[Piece] = []
    size = 0  # of what is held
    for path, kind in inputs:
        for piece in _pieces(path, kind, layout):
            if held and size + piece.size > layout.chunk_bytes:
                chunks.append(Chunk(len(chunks), tuple(held)))
                held, size = [], 0
            held.append(piece)
            size += piece.size
    return [*chunks, Chunk(len(chunks), tuple(held))]


def read_chunk(chunk: Chunk, layout: Layout) -> Iterator[str]:
    """The documents of a chunk, in order; empty ones too.

    Raises:
      DataError: not UTF-8 (the byte), not JSON or without the field (line or row), half a
        surrogate pair, which no tokenizer takes.
    """
    for piece in chunk.pieces:
        yield from _READERS[piece.kind](piece, layout)


def fingerprint(path: str, kind: str, layout: Layout) -> dict[str, Any]:
    """Name, size and SHA-256 of an input; of a hub data set the split and its fingerprint."""
    if kind == "hub":
        source = _hub(path, layout)
        return {"path": source.name, "rows": source.rows, "fingerprint": source.fingerprint}
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": path, "bytes": Path(path).stat().st_size, "sha256": digest}


@functools.lru_cache(maxsize=2)  # a worker reads many pieces of one data set
def _hub(path: str, layout: Layout) -> HubSource | HubStream:
    kind = HubStream if layout.stream and not is_saved(path) else HubSource
    return kind(path, layout.split, layout.revision)


def _expand(name: str) -> list[tuple[str, str]]:
    path = Path(name)
    if path.is_dir() and not is_saved(name):
        files = [
            str(file)
            for file in sorted(path.rglob("*"))
            if Path(file.name.removesuffix(".gz")).suffix.lower() in KNOWN
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not files:
            raise DataError(f"{name}: a directory without {', '.join(KNOWN)} files")
        kinds = sorted({_kind(file) for file in files})
        if len(kinds) > 1:
            raise DataError(
                f"{name}: files of several kinds {kinds}; choose with a glob ({name}/*.jsonl)"
            )
        return [(file, kinds[0]) for file in files]
    if glob.has_magic(name) and not path.exists():
        files = sorted(file for file in glob.glob(name, recursive=True) if Path(file).is_file())
        if not files:
            raise DataError(f"{name}: no file is named so")
        return [(file, _kind(file)) for file in files]
    kind = _kind(name)
    if kind != "hub" and not path.is_file():
        raise DataError(f"{name}: no such file")
    return [(name, kind)]


def _kind(name: str) -> str:
    kind = kind_of(name.removesuffix(".gz"))
    if kind not in _READERS:
        raise DataError(f"{name}: documents are read from {', '.join(KNOWN)} files, not {kind}")
    return kind


def _pieces(path: str, kind: str, layout: Layout) -> Iterator[Piece]:
    if kind == "hub":
        source = _hub(path, layout)
        rows = min(filter(None, (source.rows, layout.max_documents)), default=None)
        if rows is None:
            raise DataError(f"{source.name} does not say how many rows it has: set max_documents")
        for start in range(0, rows, HUB_ROWS):
            # A chunk of its own each: its bytes are not known.
            yield Piece(path, kind, start, min(start + HUB_ROWS, rows), layout.chunk_bytes)
        return
    size = _size(path)
    if not size:
        raise DataError(f"{path}: the file is empty")
    if kind == "parquet":
        yield from _row_groups(path, layout)
        return
    separator = b"\n" if kind == "jsonl" else layout.breaks
    start = 0
    while start < size:
        stop = _next_break(path, start + layout.chunk_bytes, separator, size)
        yield Piece(path, kind, start, stop, stop - start)
        start = stop


def _next_break(path: str, offset: int, separator: bytes, size: int) -> int:
    """Behind the first separator that starts at `offset` or later; else the end of the file."""
    if not separator or offset >= size:
        return size
    while offset < size:
        block = _read(path, offset, _BLOCK - 1 + len(separator))
        if (found := block.find(separator)) >= 0:
            return offset + found + len(separator)
        offset += _BLOCK  # all that begin before it lay in this block
    return size


def _row_groups(path: str, layout: Layout) -> Iterator[Piece]:
    file = _open_parquet(path)
    names = file.schema_arrow.names
    if layout.text_field not in names:
        raise DataError(
            f"{path}: no field {layout.text_field!r}; fields seen: {', '.join(names)}; set "
            "text_field"
        )
    if not file.metadata.num_rows:
        raise DataError(f"{path}: the file has no rows")
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).total_byte_size
        yield Piece(path, "parquet", group, group + 1, max(size, 1))


def _open_parquet(path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({first_line(error)})") from error


def _read_text(piece: Piece, layout: Layout) -> Iterator[str]:
    data = _read(piece.path, piece.start, piece.stop - piece.start)
    text = decode_utf8(piece.path, data, piece.start)
    if not piece.start:
        text = text.removeprefix("\ufeff")
    if not layout.separator:
        yield text
        return
    if layout.separator in SEPARATORS and "\r\n" in text:
        raise DataError(
            f"{piece.path}: its lines end in CRLF, so separator={layout.separator!r} would not be "
            "found: write it with LF line ends first"
        )
    for part in text.split(layout.breaks.decode()):
        # A run of blank lines is one separator.
        yield part.strip("\n") if layout.separator in SEPARATORS else part


def _read_jsonl(piece: Piece, layout: Layout) -> Iterator[str]:
    offset = piece.start
    for line in _read(piece.path, piece.start, piece.stop - piece.start).split(b"\n"):
        text = decode_utf8(piece.path, line, offset)
        text = text if offset else text.removeprefix("\ufeff")
        if text.strip():
            try:
                yield text_of(parse_object(text), layout.text_field)
            except DataError as error:
                number = _read(piece.path, 0, offset).count(b"\n") + 1
                raise DataError(f"{piece.path}, line {number}: {error}") from error
        offset += len(line) + 1


def _read_parquet(piece: Piece, layout: Layout) -> Iterator[str]:
    file = _open_parquet(piece.path)
    before = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, piece.stop))
    for batch in file.iter_batches(row_groups=groups, columns=[layout.text_field]):
        for value in batch.column(0).to_pylist():
            before += 1
            record = {layout.text_field: value}
            yield _text(record, layout.text_field, f"{piece.path}, row {before}")


def _read_hub(piece: Piece, layout: Layout) -> Iterator[str]:
    source = _hub(piece.path, layout)
    for number, row in enumerate(source.read(piece.start, piece.stop), piece.start):
        yield _text(row, layout.text_field, source.where(number))


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    try:
        return text_of(record, field)
    except DataError as error:
        raise DataError(f"{where}: {error}; set text_field") from error


def _size(path: str) -> int:
    """Of the file's content: a packed one is read through."""
    if not path.endswith(".gz"):
        return Path(path).stat().st_size
    _read(path, sys.maxsize, 0)
    return _opened(path, Path(path).stat().st_mtime_ns).tell()


def _read(path: str, start: int, size: int) -> bytes:
    """Of a file's content. It stays open: in a packed one to go on is cheap, to go back is not."""
    try:
        file = _opened(path, Path(path).stat().st_mtime_ns)
        file.seek(start)
        return file.read(size)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a readable .gz file ({first_line(error)})") from error


@functools.lru_cache(maxsize=1)
def _opened(path: str, changed: int) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")


_READERS = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "hub": _read_hub,
}
