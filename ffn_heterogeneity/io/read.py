"""Files that somebody else wrote, read with bounds: regular ones, size first; JSON by one parser.

What is refused names the file (and the line) and the trouble, in one line. Links to regular files
are followed: the hub's cache is made of them.
"""

import collections
import json
import os
import stat
from collections.abc import Iterator
from typing import IO, Any

from etils import epath

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.wording import first_line

# No file of settings, names or results is larger: the index of a model with 10^5 tensors has 10 MB.
MAX_FILE = 64 << 20
# Objects and lists inside each other, objects and lists in all, digits of a number.
MAX_DEPTH, MAX_PARTS, MAX_DIGITS = 64, 2_000_000, 40


def open_regular(path: str | os.PathLike, error: type[Exception] = ValueError) -> IO[bytes]:
    """The file, open for reading; of a bucket an object.

    Raises:
      FileNotFoundError: there is none.
      error: a directory, a FIFO, a device or a socket, of which no end may come; no right to read.
    """
    if "://" in os.fspath(path):
        return epath.Path(path).open("rb")
    try:
        # A FIFO without a writer would wait here.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as trouble:  # links in a circle, no rights; a NUL in the name
        raise error(f"{os.fspath(path)!r:.200} cannot be read: {first_line(trouble)}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise error(f"{os.fspath(path)} is no regular file: it is not read")
    return os.fdopen(handle, "rb")


def read_bytes(
    path: str | os.PathLike, limit: int = MAX_FILE, error: type[Exception] = ValueError
) -> bytes:
    """All of a regular file.

    Raises:
      FileNotFoundError: there is none.
      error: see `open_regular`; more than `limit` bytes.
    """
    parts, size = [], 0
    with open_regular(path, error) as file:
        # A size may be a lie, as in /proc; what is asked for at once is taken from memory at once.
        while part := file.read(1 << 16):
            parts.append(part)
            if (size := size + len(part)) > limit:
                raise error(f"{os.fspath(path)} has more than the {limit:,} bytes that are read")
    return b"".join(parts)


def read_text(
    path: str | os.PathLike, limit: int = MAX_FILE, error: type[Exception] = ValueError
) -> str:
    """The text of a regular file.

    Raises:
      FileNotFoundError: there is none.
      error: see `read_bytes`; not UTF-8.
    """
    try:
        return read_bytes(path, limit, error).decode()
    except UnicodeDecodeError as trouble:
        raise error(f"{os.fspath(path)} is no text: {first_line(trouble)}") from None


def read_json(path: str | os.PathLike, error: type[Exception] = ValueError) -> Any:
    """The value in a JSON file.

    Raises:
      FileNotFoundError: there is none.
      error: see `read_text` and `parse_json`; the message names the file and the place.
    """
    return parse_json(read_text(path, error=error), os.fspath(path), error)


def read_object(
    path: str | os.PathLike, error: type[Exception] = CheckpointError
) -> dict[str, Any]:
    """The object in a JSON file; raises as `read_json`, and where it holds none."""
    return parse_object(read_text(path, error=error), os.fspath(path), error)


def parse_object(text: str, place: str, error: type[Exception] = ValueError) -> dict[str, Any]:
    """The object that a text of JSON is; raises as `parse_json`, and where it is none."""
    value = parse_json(text, place, error)
    if not isinstance(value, dict):
        raise error(f"{place} is malformed: it holds a {type(value).__name__}, no object")
    return value


def parse_json(
    text: str, place: str, error: type[Exception] = ValueError, *, lax: bool = False
) -> Any:
    """The value that a text of JSON is.

    Args:
      place: the file, and the line, for the message; "" where the caller says it.
      lax: rows of data: NaN, long numbers and half a surrogate pair may stand where nobody looks.

    Raises:
      error: no JSON; NaN and infinity, which are none; a number of more than `MAX_DIGITS` digits;
        more than `MAX_DEPTH` levels or `MAX_PARTS` objects and lists; a name twice in one object;
        half a surrogate pair, which no file can hold.
    """
    at = f"{place}: " if place else ""
    parts = text.count("[") + text.count("{")  # at least as many as there are
    if parts > MAX_PARTS:
        raise error(f"{at}not JSON (more than {MAX_PARTS:,} objects and lists)")
    more = {} if lax else {"parse_constant": _float, "parse_int": _int, "parse_float": _float}
    try:
        value = json.loads(text, object_pairs_hook=_object, **more)
        if parts > MAX_DEPTH and _deeper(value):
            raise RecursionError
        if not lax and "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as trouble:
        line = f"line {trouble.lineno}, " if "\n" in text else ""
        raise error(f"{at}not JSON ({trouble.msg} at {line}column {trouble.colno})") from None
    except UnicodeEncodeError:
        raise error(f"{at}half a surrogate pair, which no file can hold") from None
    except RecursionError:
        raise error(f"{at}not JSON (more than {MAX_DEPTH} objects in each other)") from None
    except ValueError as trouble:
        raise error(f"{at}not JSON ({first_line(trouble)})") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {twice!r:.60} stands twice in one object")
    return found


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if value - value != 0:
        what = "beyond every number" if digits[-1].isdigit() else "no number of JSON"
        raise ValueError(f"{digits:.40} is {what}")
    return value


def _deeper(value: Any) -> bool:
    """True beyond `MAX_DEPTH` levels; level by level, not by recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = list(_inner(level))
    return bool(level)


def _inner(level: list) -> Iterator[Any]:
    for value in level:
        inside = value.values() if isinstance(value, dict) else value
        yield from (one for one in inside if isinstance(one, (dict, list)))
