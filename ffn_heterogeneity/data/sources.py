"""Sources of records: text, JSONL and parquet files, or a data set of the Hugging Face hub.

A source is random access (`len(source)`, `source[i] -> dict`), as grain wants it, and can say where
row i stands (`source.where(i)`), so that every error names file and line. Text and JSONL are read
and checked whole when they are opened: a broken line 90,000 is reported now, not after an hour of
training. Data larger than memory belongs in parquet or in a hub data set.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from ffn_heterogeneity.data.passages import PASSAGE_CHARS, passages
from ffn_heterogeneity.wording import first_line

TEXT_SUFFIXES = (".txt", ".text", ".raw", ".md")


class DataError(ValueError):
    """Data that cannot be used; the message names file and row, the value seen and the way out."""


class Source:
    """Random access to records.

    `in_memory`: reading every record is cheap. `running_text`: neighbouring records continue each
    other, so a held-out part must be one stretch of them, not a scattering.
    """

    name: str
    in_memory = running_text = False

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The place of a record, for errors."""
        return f"{self.name}, row {index + 1}"


@contextlib.contextmanager
def named_place(source: Source, row: int) -> Iterator[None]:
    """Errors of the block name the file and row."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{source.where(row)}: {error}") from error


def read_each(source: Source, read: Callable[[Mapping[str, Any]], Any]) -> Iterator[Any]:
    """`read` of every record, in order; its errors name the file and row."""
    for row in range(len(source)):
        with named_place(source, row):
            yield read(source[row])


class ListSource(Source):
    """Records held in memory, each with the place it was read from."""

    in_memory = True

    def __init__(
        self,
        name: str,
        records: Sequence[Mapping[str, Any]],
        places: Sequence[str],
        running_text: bool = False,
    ):
        self.name, self.running_text = name, running_text
        self._records, self._places = records, places

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._records[index]

    def where(self, index: int) -> str:
        return self._places[index]


class ParquetSource(Source):
    """Rows of a parquet file, memory-mapped when it is local."""

    def __init__(self, path: str):
        import pyarrow
        import pyarrow.parquet

        try:
            self._table = pyarrow.parquet.read_table(path, memory_map="://" not in path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable parquet file ({first_line(error)})") from error
        if not len(self._table):
            raise DataError(f"{path}: the file has no rows")
        self.name = path

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]


class HubSource(Source):
    """One split of a data set loaded by name through `datasets` (cached, memory-mapped)."""

    def __init__(self, name: str, split: str, revision: str | None = None):
        import datasets

        repository, _, config = name.partition(":")
        with hub_errors(name, split):
            self._data = datasets.load_dataset(
                repository, config or None, split=split, revision=revision
            )
        if not len(self):
            raise DataError(f"data set {name!r}, split {split!r}, has no rows")
        self.name, self.rows = f"{name}[{split}]", len(self)
        self.fingerprint = str(getattr(self._data, "_fingerprint", ""))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._data[index]

    def read(self, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        """Rows [start, stop)."""
        return map(self.__getitem__, range(start, stop))


class HubStream(Source):
    """One split of a data set of the hub, read as it comes and never stored.

    Attributes:
      rows: how many there are; None where the data set does not say.
    """

    def __init__(self, name: str, split: str, revision: str | None = None):
        import datasets

        repository, _, config = name.partition(":")
        with hub_errors(name, split):
            builder = datasets.load_dataset_builder(repository, config or None, revision=revision)
            self._data = builder.as_streaming_dataset(split=split)
        known = (builder.info.splits or {}).get(split)
        self.rows = known.num_examples if known else None
        self.name, self.fingerprint = f"{name}[{split}]", f"{builder.config_id} {builder.hash}"
        self._split, self._at = split, math.inf

    def read(self, start: int, stop: int) -> Iterator[Mapping[str, Any]]:
        """Those of the rows [start, stop) that there are. To go on is cheap, to go back is not."""
        if start < self._at:
            self._rows, self._at = iter(self._data), 0
        before, self._at = self._at, math.inf  # begun anew where this is not read to its end
        with hub_errors(self.name, self._split):
            yield from itertools.islice(self._rows, start - before, stop - before)
        self._at = stop


@contextlib.contextmanager
def hub_errors(name: str, split: str) -> Iterator[None]:
    """Whatever goes wrong in `datasets` (network, names, formats) has one way out."""
    try:
        with _offline_without_network():
            yield
    except Exception as error:
        raise DataError(
            f"{name!r} is no local file, and the hub did not give its split {split!r} "
            f"({type(error).__name__}: {first_line(error)}); try again, or give a local .jsonl, "
            ".parquet or .txt file"
        ) from error


class Subset:
    """Some records of a source, each with its row number: `{"row": i, "record": source[i]}`."""

    def __init__(self, source: Source, rows: Sequence[int]):
        self.source, self.rows = source, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = int(self.rows[index])
        return {"row": row, "record": self.source[row]}


def open_source(
    path: str | Sequence[str],
    *,
    split: str = "train",
    revision: str | None = None,
    passage_chars: int = PASSAGE_CHARS,
) -> Source:
    """Opens what `path` names.

    Args:
      path: a text file, a .jsonl file, a .parquet file, a directory of .txt files, several text or
        several JSONL files (a sequence), or a hub name `name[:config]`.
      split, revision: of a hub data set; local files have neither and ignore them.
      passage_chars: running text is cut into records of at most this many characters.

    Raises:
      DataError: no such file, unknown kind, empty, not UTF-8 (file and byte offset), a broken JSON
        line (file and line number), or a hub name that cannot be loaded.
    """
    paths = [path] if isinstance(path, str) else list(path)
    if not paths or not all(paths):
        raise DataError(f"no data: path is {path!r}; give a file, a directory or a hub name")
    files = [file for name in paths for file in _expand(name)]
    kinds = {kind_of(file) for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"{', '.join(paths)}: files of several kinds {sorted(kinds)}; give one kind"
        )
    kind = kinds.pop()
    if kind == "text":
        return read_text(files, passage_chars)
    if kind == "jsonl":
        return read_jsonl(files)
    if len(files) > 1:
        raise DataError(f"{', '.join(paths)}: only text and JSONL can be given as several files")
    return ParquetSource(files[0]) if kind == "parquet" else HubSource(files[0], split, revision)


def read_text(paths: Sequence[str], passage_chars: int = PASSAGE_CHARS) -> ListSource:
    """Each file is a document, cut at blank lines (or lines, or spaces) into passages.

    Records are `{"text", "passage_starts", "passage_ends"}`; the last two tell whether the passage
    begins and ends its document. The passages of a file, joined, are the file: nothing is lost.
    """
    if passage_chars < 1:
        raise DataError(f"passage_chars is {passage_chars}; it must be at least 1")
    records, places = [], []
    for path in paths:
        text = read_utf8(path)
        for start, end in passages(text, passage_chars):
            edges = {"passage_starts": start == 0, "passage_ends": end == len(text)}
            records.append({"text": text[start:end], **edges})
            places.append(f"{path}, character {start}")
    return ListSource(_name(paths), records, places, running_text=True)


def read_jsonl(paths: Sequence[str]) -> ListSource:
    """One JSON object per line; blank lines are passed over (line numbers count them)."""
    records, places = [], []
    for path in paths:
        # Not splitlines(): JSON strings may hold U+2028 and other ends of line as they are.
        for number, line in enumerate(read_utf8(path).split("\n"), 1):
            if not line.strip():
                continue
            places.append(f"{path}, line {number}")
            try:
                records.append(parse_object(line))
            except DataError as error:
                raise DataError(f"{places[-1]}: {error}") from error
    if not records:
        raise DataError(f"{_name(paths)}: no JSON objects, only blank lines")
    return ListSource(_name(paths), records, places)


def parse_object(line: str) -> dict[str, Any]:
    """The JSON object that a line is; an error says what else it is."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        shown = line if len(line) <= 60 else line[:57] + "..."
        raise DataError(
            f"not JSON ({error.msg} at column {error.colno}): {shown!r}; each line must be one "
            "JSON object"
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{type(record).__name__}, but each line must be one JSON object")
    return record


def read_utf8(path: str) -> str:
    """The text of a file, line ends untouched, a leading byte order mark dropped.

    Raises:
      DataError: it does not exist, is empty, or is not UTF-8 (names the byte offset).
    """
    try:
        data = epath.Path(path).read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    text = decode_utf8(path, data).removeprefix("\ufeff")
    if not text:
        raise DataError(f"{path}: the file is empty")
    return text


def decode_utf8(path: str, data: bytes, offset: int = 0) -> str:
    """The text of bytes from `offset` of a file on."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start} "
            f"({error.reason}); convert the file to UTF-8 first"
        ) from error


def _expand(name: str) -> list[str]:
    """A directory becomes its .txt files in order; anything else is itself."""
    path = epath.Path(name)
    if not path.is_dir():
        return [name]
    files = sorted(str(file) for file in path.glob("*.txt"))
    if not files:
        raise DataError(f"{name}: a directory without .txt files; name the data file itself")
    return files


def kind_of(name: str) -> str:
    """ "text", "jsonl" or "parquet" by the suffix, or "hub" for what may be a hub name.

    Raises:
      DataError: a file of another kind, or no file and no hub name.
    """
    suffix = epath.Path(name).suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return "text"
    if suffix in (".jsonl", ".parquet"):
        return suffix[1:]
    if epath.Path(name).exists():
        known = ", ".join((*TEXT_SUFFIXES, ".jsonl", ".parquet"))
        raise DataError(f"{name}: cannot tell what kind of data {suffix!r} is; known: {known}")
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", name):
        return "hub"
    raise DataError(f"{name}: no such file, and not the form of a hub name (owner/name[:config])")


@contextlib.contextmanager
def _offline_without_network() -> Iterator[None]:
    """Without a network the hub's client retries for 25 s: tell it at once (the cache still works).

    Behind a proxy names may not resolve here though the hub can be reached: nothing is done then.
    """
    import datasets
    import huggingface_hub

    host = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT).hostname
    flags = (huggingface_hub.constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in flags]
    try:
        if not urllib.request.getproxies():
            socket.getaddrinfo(host, 443)
    except OSError:
        for module in flags:
            module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(flags, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _name(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
