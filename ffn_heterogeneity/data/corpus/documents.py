"""Reading of the documents of a corpus chunk.

Text is read in blocks (a document may be larger than memory), JSONL line by line, parquet and the
hub's data sets row group by row group.
"""

import codecs
import dataclasses
import functools
import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ffn_heterogeneity.data.hub import HubSource, HubStream
from ffn_heterogeneity.data.record_source import DataError, is_saved
from ffn_heterogeneity.data.sources import decode_utf8, parse_object
from ffn_heterogeneity.data.tasks.base import text_of
from ffn_heterogeneity.wording import first_line

SEPARATORS = {"blank_line": b"\n\n", "line": b"\n"}
MAX_LINE = 64 << 20  # bytes of a line of JSONL
BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Layout:
    """The form of a document, and the size of a chunk.

    Attributes:
      text_field: text field of JSONL, parquet and hub records.
      separator: for text files: "" (a file is a document), "blank_line", "line", or the exact text
        between documents ("<|endoftext|>").
      chunk_bytes: approximate input bytes of a chunk.
      split, revision: for a hub data set.
      stream: whether hub data sets are streamed instead of stored.
      max_documents, max_tokens: stop making shards, and reading rows of a hub data set, at these
        numbers (0: no limit). A shard, and a document in it, also ends at `max_tokens`.
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
        """The separator's bytes in a file."""
        return SEPARATORS.get(self.separator, self.separator.encode())


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a file, or its row groups, or rows of a hub data set."""

    path: str
    kind: str
    start: int
    stop: int
    size: int  # approximate, in bytes of input


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The documents of one shard."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class DocumentPart(NamedTuple):
    """A document or a part of a long one; `ends`: whether it is the last part."""

    text: str
    ends: bool = True


def read_parts(chunk: Chunk, layout: Layout) -> Iterator[DocumentPart]:
    """Iterate over the documents of a chunk, including empty ones; long texts come in parts.

    Raises:
      DataError: not UTF-8 (names the byte), not JSON or without the field (names the line or row),
        or half a surrogate pair, which no tokenizer accepts.
    """
    for piece in chunk.pieces:
        yield from READERS[piece.kind](piece, layout)


@functools.lru_cache(maxsize=2)  # a worker reads many pieces of one data set
def hub(path: str, layout: Layout) -> HubSource | HubStream:
    kind = HubStream if layout.stream and not is_saved(path) else HubSource
    return kind(path, layout.split, layout.revision)


def open_parquet(path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({first_line(error)})") from error


def _read_text(piece: Piece, layout: Layout) -> Iterator[DocumentPart]:
    breaks, lines = layout.breaks.decode(), layout.separator in SEPARATORS
    # The part of the current document that is not yielded yet, and whether a part was yielded.
    held, given, edge = "", False, ""
    for text in _decoded(piece):
        if lines and "\r\n" in edge + text:
            raise DataError(
                f"{piece.path}: its lines end in CRLF, so separator={layout.separator!r} would not "
                "be found: write it with LF line ends first"
            )
        edge = text[-1:]
        *documents, held = (held + text).split(breaks) if breaks else [held + text]
        for document in documents:
            if lines and not (given or document.strip("\n")):
                continue  # a run of blank lines is one separator
            yield DocumentPart(_stripped(document, given, True) if lines else document)
            given = False
        if len(held) > BLOCK:
            # Keep text that may begin a separator, or is to be stripped.
            stop = len(held.rstrip("\n")) if lines else max(len(held) - len(breaks or " ") + 1, 0)
            passage, held = held[:stop], held[stop:]
            passage = _stripped(passage, given, False) if lines else passage
            given = given or bool(passage)
            yield DocumentPart(passage, False)
    held = _stripped(held, given, True) if lines else held
    if held or given or not breaks:  # a piece may end with a separator
        yield DocumentPart(held)


def _stripped(text: str, given: bool, ends: bool) -> str:
    """Strip line ends at the beginning and the end of a document."""
    text = text if given else text.lstrip("\n")
    return text.rstrip("\n") if ends else text


def _decoded(piece: Piece) -> Iterator[str]:
    """Iterate over the text of a piece, block by block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for offset in range(piece.start, piece.stop, BLOCK):
        data = read_range(piece.path, offset, min(BLOCK, piece.stop - offset))
        try:
            text = decoder.decode(data, offset + len(data) >= piece.stop)
        except UnicodeDecodeError as error:  # in these bytes, or the rest of the previous ones
            begin = offset + len(data) - len(error.object)
            text = decode_utf8(piece.path, error.object, begin)  # raises, naming the byte
        yield text if offset else text.removeprefix("\ufeff")


def _read_jsonl(piece: Piece, layout: Layout) -> Iterator[DocumentPart]:
    offset = piece.start
    for line in _lines(piece):
        try:
            if len(line) > MAX_LINE:
                raise DataError(f"a line of more than {MAX_LINE >> 20} MB is not read")
            text = decode_utf8(piece.path, line, offset)
            text = text if offset else text.removeprefix("\ufeff")
            if text.strip():
                yield DocumentPart(text_of(parse_object(text), layout.text_field))
        except DataError as error:
            raise DataError(f"{piece.path}, line {_line(piece.path, offset)}: {error}") from error
        offset += len(line) + 1


def _lines(piece: Piece) -> Iterator[bytes]:
    """Lines of a piece without line ends; ends after the beginning of a too long line."""
    rest = b""
    for start in range(piece.start, piece.stop, BLOCK):
        block = rest + read_range(piece.path, start, min(BLOCK, piece.stop - start))
        *lines, rest = block.split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE:
            break
    yield rest


def _line(path: str, offset: int) -> int:
    """Number of the line at an offset."""
    starts = range(0, offset, BLOCK)
    blocks = (read_range(path, start, min(BLOCK, offset - start)) for start in starts)
    return 1 + sum(block.count(b"\n") for block in blocks)


def _read_parquet(piece: Piece, layout: Layout) -> Iterator[DocumentPart]:
    file = open_parquet(piece.path)
    before = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, piece.stop))
    for batch in file.iter_batches(row_groups=groups, columns=[layout.text_field]):
        for value in batch.column(0).to_pylist():
            before += 1
            record = {layout.text_field: value}
            yield DocumentPart(_text(record, layout.text_field, f"{piece.path}, row {before}"))


def _read_hub(piece: Piece, layout: Layout) -> Iterator[DocumentPart]:
    source = hub(piece.path, layout)
    for number, row in enumerate(source.read(piece.start, piece.stop), piece.start):
        yield DocumentPart(_text(row, layout.text_field, source.where(number)))


def size_of(path: str) -> int:
    """Size of the file's content in bytes; a compressed file is read completely."""
    if not path.endswith(".gz"):
        return Path(path).stat().st_size
    read_range(path, sys.maxsize, 0)
    return _opened(path, Path(path).stat().st_mtime_ns).tell()


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    try:
        return text_of(record, field)
    except DataError as error:
        raise DataError(f"{where}: {error}; set text_field") from error


def read_range(path: str, start: int, size: int) -> bytes:
    """Read bytes of a file's content.

    The file stays open: in a compressed file reading on is cheap, going back is not.
    """
    try:
        file = _opened(path, Path(path).stat().st_mtime_ns)
        file.seek(start)
        return file.read(size)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a readable .gz file ({first_line(error)})") from error


@functools.lru_cache(maxsize=1)
def _opened(path: str, changed: int) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")


READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "hub": _read_hub}
