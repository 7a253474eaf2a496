"""Reading of untrusted files with limits on type and size, and of JSON with limits.

Errors name the file (and the line) and the problem in one line. Links to regular files are
followed, because the hub's cache consists of them.
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

# Upper bound for files of settings, names or results: the index of 10^5 tensors has 10 MB.
MAX_FILE = 64 << 20
MAX_METRICS = 4 << 30  # of a metrics.jsonl: above any real run's, below the machine's memory
# Limits: nesting of objects and lists, their total number, digits of a number.
MAX_DEPTH, MAX_PARTS, MAX_DIGITS = 64, 2_000_000, 40


def open_regular(path: str | os.PathLike, error: type[Exception] = ValueError) -> IO[bytes]:
    """Open a regular file (or a bucket's object) for reading.

    Raises:
      FileNotFoundError: no such file.
      error: a directory, or a FIFO, device or socket, which may never end; no permission to read.
    """
    if "://" in os.fspath(path):
        return epath.Path(path).open("rb")
    try:
        # A FIFO without a writer would block here.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as trouble:  # circular links, no permission; a NUL in the name
        raise error(f"{os.fspath(path)!r:.200} cannot be read: {first_line(trouble)}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise error(f"{os.fspath(path)} is no regular file: it is not read")
    return os.fdopen(handle, "rb")


def read_bytes(
    path: str | os.PathLike, limit: int = MAX_FILE, error: type[Exception] = ValueError
) -> bytes:
    """Read all of a regular file.

    Raises:
      FileNotFoundError: no such file.
      error: see `open_regular`; more than `limit` bytes.
    """
    parts, size = [], 0
    with open_regular(path, error) as file:
        # The reported size may be wrong (/proc), and a large read allocates its memory at once.
        while chunk := file.read(1 << 16):
            parts.append(chunk)
            if (size := size + len(chunk)) > limit:
                raise error(f"{os.fspath(path)} has more than the {limit:,} bytes that are read")
    return b"".join(parts)


def read_text(
    path: str | os.PathLike, limit: int = MAX_FILE, error: type[Exception] = ValueError
) -> str:
    """Read the text of a regular file.

    Raises:
      FileNotFoundError: no such file.
      error: see `read_bytes`; not UTF-8.
    """
    try:
        return read_bytes(path, limit, error).decode()
    except UnicodeDecodeError as trouble:
        raise error(f"{os.fspath(path)} is no text: {first_line(trouble)}") from None


def read_json(path: str | os.PathLike, error: type[Exception] = ValueError) -> Any:
    """Read a JSON file.

    Raises:
      FileNotFoundError: no such file.
      error: see `read_text` and `parse_json`; the message names the file and the place.
    """
    return parse_json(read_text(path, error=error), os.fspath(path), error)


def read_object(
    path: str | os.PathLike, error: type[Exception] = CheckpointError
) -> dict[str, Any]:
    """Read a JSON file that must contain an object; raises as `read_json`, or for other values."""
    return parse_object(read_text(path, error=error), os.fspath(path), error)


def parse_object(text: str, place: str, error: type[Exception] = ValueError) -> dict[str, Any]:
    """Parse JSON text that must be an object; raises as `parse_json`, or for other values."""
    value = parse_json(text, place, error)
    if not isinstance(value, dict):
        raise error(f"{place} is malformed: it holds a {type(value).__name__}, no object")
    return value


def lines_of(text: str) -> list[str]:
    """The lines of a file of JSON; splitlines() would cut inside of strings, too (U+2028)."""
    return text.removesuffix("\n").split("\n") if text else []


def parse_json(
    text: str, place: str, error: type[Exception] = ValueError, *, lax: bool = False
) -> Any:
    """Parse JSON text, with limits.

    Args:
      place: the file and line for messages; "" if the caller adds it.
      lax: for rows of data: allow NaN, long numbers and half surrogate pairs in unused fields.

    Raises:
      error: not JSON; NaN and infinity, which JSON does not have; a number of more than
        `MAX_DIGITS` digits; more than `MAX_DEPTH` levels or `MAX_PARTS` objects and lists; a
        duplicate name in an object; half a surrogate pair, which cannot be written to a file.
    """
    at = f"{place}: " if place else ""
    parts = text.count("[") + text.count("{")  # an upper bound
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
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {twice!r:.60} is twice in one object")
    return mapping


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
    """True if nested deeper than `MAX_DEPTH` levels; iterative, not recursive."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = list(_inner(level))
    return bool(level)


def _inner(level: list) -> Iterator[Any]:
    for value in level:
        inside = value.values() if isinstance(value, dict) else value
        yield from (one for one in inside if isinstance(one, (dict, list)))
