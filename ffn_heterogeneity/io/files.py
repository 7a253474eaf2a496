"""Files that are whole or absent: written under a temporary name, then moved."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

from etils import epath


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike, *, overwrite: bool = True) -> Iterator[epath.Path]:
    """Yields a temporary sibling of `path`; on success it is moved over `path`, else removed.

    The caller may make a file or a directory of it. A directory replaces an existing one only
    with `overwrite`.

    Raises:
      FileExistsError: `path` exists and `overwrite` is False.
    """
    path = epath.Path(path)
    if not overwrite and path.exists():
        raise FileExistsError(f"{path} exists already: choose another name or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix is kept last because some writers (matplotlib) choose the format by it.
    temporary = path.parent / f".{path.stem}.{uuid.uuid4().hex[:8]}.partial{path.suffix}"
    try:
        yield temporary
        if path.is_dir() and temporary.is_dir():
            old = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.old"
            path.rename(old)
            temporary.rename(path)
            old.rmtree()
        else:
            temporary.replace(path)
    finally:
        if temporary.exists():
            temporary.rmtree() if temporary.is_dir() else temporary.unlink()


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, atomically. NaN and infinity are written as strings."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(_plain(value), indent=1, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike) -> Any:
    """Reads JSON.

    Raises:
      ValueError: the file is not JSON; the message names the file and the place.
    """
    text = epath.Path(path).read_text()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _plain(value: Any) -> Any:
    """Arrays to lists, numpy scalars to Python's, non-finite floats to their names."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value
