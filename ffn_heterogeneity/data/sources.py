"""Sources of records: text, JSONL, CSV and parquet files, saved folders, data sets of the hub.

A source has random access (`len(source)`, `source[i] -> dict`), which grain needs, and knows the
place of row i (`source.where(i)`), so that every error names file and line. Text, JSONL and CSV are
read and checked completely on opening, so that a broken line 90,000 is reported before training.
Data larger than memory must be in parquet or a hub data set (hub.py).
"""

import contextlib
import csv
import io
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from ffn_heterogeneity.data.hub import HubSource, ParquetSource
from ffn_heterogeneity.data.passages import PASSAGE_CHARS, passages
from ffn_heterogeneity.data.record_source import DataError, Source, is_saved
from ffn_heterogeneity.io.read import open_regular, parse_json
from ffn_heterogeneity.wording import check_number

TEXT_SUFFIXES = (".txt", ".text", ".raw", ".md")
NOTES = ".md"  # next to data, in its directory; alone it is data
_KINDS = dict.fromkeys(TEXT_SUFFIXES, "text")
_KINDS |= {".jsonl": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
# Columns of CoLA's files, the only files of GLUE without a header.
_COLA = ["source", "label", "original_mark", "sentence"]
_QUOTED = re.compile(r'"(?:[^"]|"")*"')  # a cell in quotes of CSV
_NO_QUOTING = "quoting is not supported in .tsv: write a table with such cells as .csv"
_LIMIT = threading.Lock()


@contextlib.contextmanager
def named_place(source: Source, row: int) -> Iterator[None]:
    """Add the file and row to the block's errors."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{source.where(row)}: {error}") from error


def read_each(source: Source, read: Callable[[Mapping[str, Any]], Any]) -> Iterator[Any]:
    """Apply `read` to every record, in order; errors name the file and row."""
    for row in range(len(source)):
        with named_place(source, row):
            yield read(source[row])


class ListSource(Source):
    """Records in memory, each with its place in a file."""

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
    """Open a source of records.

    Args:
      path: a file (text, .jsonl, .csv or .tsv with a header, .parquet) or several of one kind (a
        sequence), a directory of such files, a folder of `datasets.save_to_disk`, or a hub name
        `name[:config]`.
      split, revision: for a hub data set or a saved folder; ignored for files.
      passage_chars: running text is cut into records of at most this many characters.

    Raises:
      DataError: no such file, unknown kind, empty, not UTF-8 (file and byte offset), a broken JSON
        or CSV line (file and line number), or a data set that cannot be loaded.
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
    if kind in _READERS:
        return _READERS[kind](files)
    if kind == "parquet":
        return ParquetSource(files)
    if len(files) > 1:
        raise DataError(f"{', '.join(paths)}: give one data set of the hub, or one saved folder")
    return HubSource(files[0], split, revision)


def read_text(paths: Sequence[str], passage_chars: int = PASSAGE_CHARS) -> ListSource:
    """Read text files, each a document, cut at blank lines (or lines, or spaces) into passages.

    Records are `{"text", "passage_starts", "passage_ends"}`; the last two are whether the passage
    begins and ends its document. The passages of a file, concatenated, are the file.
    """
    check_number("passage_chars", passage_chars, "[1, inf)", DataError)
    records, places = [], []
    for path in paths:
        text = read_utf8(path)
        for start, end in passages(text, passage_chars):
            edges = {"passage_starts": start == 0, "passage_ends": end == len(text)}
            records.append({"text": text[start:end], **edges})
            places.append(f"{path}, character {start}")
    return ListSource(_name(paths), records, places, running_text=True)


def read_jsonl(paths: Sequence[str]) -> ListSource:
    """Read one JSON object per line; blank lines are skipped (line numbers count them)."""
    records, places = [], []
    for path in paths:
        # Not splitlines(): JSON strings may contain U+2028 and other line ends.
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


def read_csv(paths: Sequence[str]) -> ListSource:
    """Read a table: a header with the names of the columns, then one record per row.

    In .tsv files, tabs separate cells, quotation marks have no special meaning (as in GLUE's
    files), and CoLA's need no header.

    Raises:
      DataError: a row with another number of columns than the header, an empty or duplicate column
        name, or a .tsv that was written with quoting.
    """
    records, places = [], []
    for path in paths:
        tabs = path.lower().endswith(".tsv")
        (first, names), *rows = (_tab_separated if tabs else _comma_separated)(path) or [(1, [])]
        if tabs and len(names) == 4 and names[1] in ("0", "1") and names[2] in ("", "*"):
            rows, names = [(first, names), *rows], _COLA
        if bad := [x for i, x in enumerate(names) if not x.strip() or x in names[:i]]:
            said = f"{path}, line {first}: the column name {bad[0]!r} is empty or duplicate"
            raise DataError(f"{said}: name each column (pandas: to_csv(index=False))")
        for line, row in rows:
            places.append(f"{path}, line {line}")
            if len(row) != len(names):
                said = f"{places[-1]}: {len(row)} columns, the header has {len(names)}"
                raise DataError(f"{said}; {_NO_QUOTING}" if tabs else said)
            records.append(dict(zip(names, row, strict=True)))
    if not records:
        raise DataError(f"{_name(paths)}: a header and no rows")
    return ListSource(_name(paths), records, places)


def _tab_separated(path: str) -> list[tuple[int, list[str]]]:
    """(line, cells) of the rows; raises an error for quoted cells.

    Quoting is assumed if all cells with a quotation mark are quoted, including column names or
    marks inside cells. Only QQP's original file is read nevertheless, with the marks, like in other
    libraries.
    """
    lines = enumerate(read_utf8(path).split("\n"), 1)
    rows = [(i, line.removesuffix("\r").split("\t")) for i, line in lines if line.strip("\r")]
    marked = [(line, cell) for line, row in rows for cell in row if '"' in cell]
    for line, cell in marked if all(_QUOTED.fullmatch(cell) for _, cell in marked) else ():
        doubled = line == rows[0][0] or '""' in cell[1:-1]
        if doubled and "question1" not in rows[0][1]:
            raise DataError(f"{path}, line {line}: {cell!r:.60} is quoted; {_NO_QUOTING}")
    return rows


def _comma_separated(path: str) -> list[tuple[int, list[str]]]:
    """(last line, cells) of the rows; temporarily removes the process's limit on cell sizes."""
    rows = csv.reader(io.StringIO(read_utf8(path), newline=""), strict=True)
    with _LIMIT:
        before = csv.field_size_limit(2**31 - 1)
        try:
            return [(rows.line_num, row) for row in rows if row]
        except csv.Error as error:
            raise DataError(f"{path}, line {rows.line_num}: not CSV ({error})") from None
        finally:
            csv.field_size_limit(before)


_READERS = {"jsonl": read_jsonl, "csv": read_csv}


def parse_object(line: str) -> dict[str, Any]:
    """Parse a line as a JSON object; the error names its type otherwise."""
    try:
        record = parse_json(line, "", DataError, lax=True)
    except DataError as error:
        shown = line if len(line) <= 60 else line[:57] + "..."
        raise DataError(f"{error}: {shown!r}; each line must be one JSON object") from None
    if not isinstance(record, dict):
        raise DataError(f"{type(record).__name__}, but each line must be one JSON object")
    return record


def read_utf8(path: str) -> str:
    """Read a text file, with its line ends, without a leading byte order mark.

    Raises:
      DataError: the file does not exist, is empty, or is not UTF-8 (names the byte offset).
    """
    path = os.path.expanduser(path)
    try:
        with open_regular(path, DataError) as file:
            data = file.read()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    text = decode_utf8(path, data).removeprefix("\ufeff")
    if not text:
        raise DataError(f"{path}: the file is empty")
    return text


def decode_utf8(path: str, data: bytes, offset: int = 0) -> str:
    """Decode bytes of a file that start at `offset`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start} "
            f"({error.reason}); convert the file to UTF-8 first"
        ) from error


def files_of(path: str | Sequence[str]) -> set[str]:
    """The files that `open_source` reads; none of a hub data set or a saved folder."""
    paths = [path] if isinstance(path, str) else path
    files = (file for name in paths if name for file in _expand(name))
    return {os.path.realpath(file) for file in files if kind_of(file) != "hub"}


def _expand(name: str) -> list[str]:
    """Replace a directory by its data files in order; a saved folder or other path is kept."""
    name = os.path.expanduser(name)
    path = epath.Path(name)
    if not path.is_dir() or kind_of(name) == "hub":
        return [name]
    kinds = [kind for kind in _KINDS if kind != NOTES]
    files = sorted(str(file) for file in path.iterdir() if is_data(file.name, kinds))
    if not files:
        raise DataError(f"{name}: a directory without {', '.join(kinds)} files; name the data file")
    return files


def is_data(name: str, kinds: Collection[str]) -> bool:
    """True if a file of a directory is data of these suffixes: no README.md, no hidden file."""
    suffix = os.path.splitext(name)[1].lower()
    return suffix in kinds and suffix != NOTES and not name.startswith(".")


def kind_of(name: str) -> str:
    """Return "text", "jsonl", "csv" or "parquet" by the suffix, or "hub".

    "hub" is for a folder that `datasets` saved, or a possible hub name.

    Raises:
      DataError: a file of another kind, or neither a file nor a hub name.
    """
    path = epath.Path(name).expanduser()
    suffix = path.suffix.lower()
    if is_saved(name):
        return "hub"
    if suffix in _KINDS:
        return _KINDS[suffix]
    if path.is_dir():
        return "directory"
    if path.exists():
        known = ", ".join(_KINDS)
        raise DataError(f"{name}: unknown kind of data {suffix!r}; known: {known}")
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", name):
        return "hub"
    raise DataError(f"{name}: no such file, and not the form of a hub name (owner/name[:config])")


def _name(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
