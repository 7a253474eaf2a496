"""Division of a corpus into chunks, which depends only on the input.

Files are taken in order and cut into pieces of about `chunk_bytes`; small files share a chunk. Each
chunk becomes one shard, so any number of processes makes the same shards.

    kind      a document is                               a file is cut
    text      the file; or text between `separator`s      at separators only
    jsonl     field `text_field` of a line                at ends of lines
    parquet   `text_field` of a row                       between row groups
    hub       `text_field` of a row                       every HUB_ROWS rows

Text and JSONL files may be compressed (.gz). `documents` reads the chunks.
"""

import collections
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ffn_heterogeneity.data.corpus.documents import (
    BLOCK,
    READERS,
    Chunk,
    Layout,
    Piece,
    hub,
    open_parquet,
    read_range,
    size_of,
)
from ffn_heterogeneity.data.record_source import DataError, is_saved
from ffn_heterogeneity.data.sources import NOTES, TEXT_SUFFIXES, is_data, kind_of
from ffn_heterogeneity.wording import check_numbers

KNOWN = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
HUB_ROWS = 10_000


def find_inputs(spec: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return (path, kind) of all inputs, in order.

    Args:
      spec: files, directories (all their data, `is_data`, which must be of one kind),
        globs and hub names `name[:config]`; separated by commas in one string.

    Raises:
      DataError: no input, an unknown kind, several kinds in a directory, or a duplicate file.
    """
    names = spec.split(",") if isinstance(spec, str) else list(spec)
    if not names or not all(name.strip() for name in names):
        raise DataError(
            f"no input: it is {spec!r}; give files, a directory, a glob or a hub name "
            "(--config.input=corpus.jsonl)"
        )
    inputs = [item for name in names for item in _expand(name.strip())]
    for path, count in collections.Counter(path for path, _ in inputs).items():
        if count > 1:
            raise DataError(f"{path} is named more than once; name each file once")
    return inputs


def plan_chunks(inputs: Sequence[tuple[str, str]], layout: Layout) -> list[Chunk]:
    """Cut every input into pieces, and join consecutive ones to chunks of up to `chunk_bytes`.

    Raises:
      DataError: an empty or unreadable file, or a parquet file without the field.
    """
    check_numbers(layout, DataError, chunk_bytes="[1, inf)")
    chunks: list[Chunk] = []
    held: list[Piece] = []
    size = 0  # of the current chunk
    for path, kind in inputs:
        for piece in _pieces(path, kind, layout):
            if held and size + piece.size > layout.chunk_bytes:
                chunks.append(Chunk(len(chunks), tuple(held)))
                held, size = [], 0
            held.append(piece)
            size += piece.size
    return [*chunks, Chunk(len(chunks), tuple(held))]


def fingerprint(path: str, kind: str, layout: Layout) -> dict[str, Any]:
    """Name, size and SHA-256 of an input; for a hub data set its split and fingerprint."""
    if kind == "hub":
        source = hub(path, layout)
        return {"path": source.name, "rows": source.rows, "fingerprint": source.fingerprint}
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": path, "bytes": Path(path).stat().st_size, "sha256": digest}


def _expand(name: str) -> list[tuple[str, str]]:
    name = os.path.expanduser(name)
    path = Path(name)
    if path.is_dir() and not is_saved(name):
        files = [
            str(file)
            for file in sorted(path.rglob("*"))
            if file.is_file()
            and is_data(file.name.removesuffix(".gz"), KNOWN)
            and not any(segment.startswith(".") for segment in file.relative_to(path).parts)
        ]
        if not files:
            others = ", ".join(kind for kind in KNOWN if kind != NOTES)
            raise DataError(f"{name}: a directory without {others} files; a glob may name others")
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
    kind = "unknown" if kind == "hub" and Path(name).is_file() else kind
    if kind not in READERS:
        raise DataError(f"{name}: documents are read from {', '.join(KNOWN)} files, not {kind}")
    return kind


def _pieces(path: str, kind: str, layout: Layout) -> Iterator[Piece]:
    if kind == "hub":
        source = hub(path, layout)
        rows = min(filter(None, (source.rows, layout.max_documents)), default=None)
        if rows is None:
            raise DataError(f"{source.name} does not say how many rows it has: set max_documents")
        for start in range(0, rows, HUB_ROWS):
            # A separate chunk each, because the size in bytes is unknown.
            yield Piece(path, kind, start, min(start + HUB_ROWS, rows), layout.chunk_bytes)
        return
    size = size_of(path)
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
    """End of the first separator that starts at `offset` or later; else the end of the file."""
    if not separator or offset >= size:
        return size
    while offset < size:
        block = read_range(path, offset, BLOCK - 1 + len(separator))
        if (index := block.find(separator)) >= 0:
            return offset + index + len(separator)
        offset += BLOCK  # all separators that begin before it were in this block
    return size


def _row_groups(path: str, layout: Layout) -> Iterator[Piece]:
    file = open_parquet(path)
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
