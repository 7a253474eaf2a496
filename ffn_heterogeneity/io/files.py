"""Files that are whole or absent: written under a temporary name, then moved."""

import contextlib
import errno
import fcntl
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from ffn_heterogeneity.io.read import read_json
from ffn_heterogeneity.wording import first_line

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota, a limit


def user_cache() -> Path | None:
    """`ffn_heterogeneity` in the user's cache directory; None where there is none."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        return None
    return base / "ffn_heterogeneity" if base.is_absolute() else None


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike, *, directory: bool = False) -> Iterator[epath.Path]:
    """Yields a temporary sibling of `path`; on success it is moved over `path`, else removed.

    It is an empty file, or an empty directory. In a bucket it is `path` itself, and a file: an
    object appears whole there or not at all, and moving it would be a copy. What killed processes
    left of the same path goes first.
    """
    path = epath.Path(path)
    if is_bucket(path):
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary, handle = _temporary(path, directory)
    try:
        yield temporary
        if path.is_dir() and directory:
            old = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.old"
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old, ignore_errors=True)  # another process may be removing it, too
        else:
            temporary.replace(path)
    except OSError as error:
        if error.errno in FULL and not error.filename:  # it does not say whose file it was
            error.filename = os.fspath(path)
        raise
    finally:
        if temporary.exists():
            temporary.rmtree() if temporary.is_dir() else temporary.unlink()
        os.close(handle)


def _temporary(path: epath.Path, directory: bool) -> tuple[epath.Path, int]:
    """A new sibling and the handle that locks it: by that others know that its process lives."""
    while True:
        # The suffix is kept last because some writers (matplotlib) choose the format by it.
        temporary = path.parent / f".{path.stem}.{uuid.uuid4().hex[:8]}.partial{path.suffix}"
        temporary.mkdir() if directory else temporary.touch()
        with contextlib.suppress(FileNotFoundError):  # taken for a leftover before it was locked
            handle = os.open(temporary, os.O_RDONLY)
            if lock(handle) is not False and temporary.exists():
                return temporary, handle
            os.close(handle)


def _remove_leftovers(path: epath.Path) -> None:
    """Removes what `atomic_path` of `path` left behind in processes that were killed.

    What a living process writes is locked and stays; where there are no locks all of it stays.
    """
    name = re.compile(
        rf"\.{re.escape(path.stem)}\.[0-9a-f]{{8}}\.partial{re.escape(path.suffix)}"
        rf"|\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.old"
    )
    for found in filter(name.fullmatch, os.listdir(path.parent)):
        left = path.parent / found
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if os.path.islink(left):  # nobody here made it, and it may lead anywhere
                os.unlink(left)
                continue
            handle = os.open(left, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait
            if lock(handle):
                left.rmtree() if left.is_dir() else left.unlink()
            os.close(handle)


def lock(handle: int) -> bool | None:
    """Takes the kernel's lock on an open file or directory, gone with the process however it ends.

    Returns:
      Whether it could: False where another has it, None where the file system knows no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems.
        if error.errno not in (errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return None
    return True


def is_bucket(path: str | os.PathLike) -> bool:
    """True if it is an object store's ("gs://..."): nothing can be moved or appended to there."""
    return "://" in os.fspath(path)


def check_opens(path: str | os.PathLike) -> None:
    """Refuses an object store's path whose package is not installed.

    Raises:
      ImportError: names the path, the package and the way to it.
    """
    # Where TensorFlow is, epath opens buckets with it.
    if not is_bucket(path) or importlib.util.find_spec("tensorflow"):
        return
    import fsspec

    try:
        fsspec.get_filesystem_class(os.fspath(path).partition("://")[0])
    except (ImportError, ValueError) as error:
        raise ImportError(
            f"{os.fspath(path)} cannot be opened ({first_line(error)}): for gs:// pip install "
            "'ffn-heterogeneity[gcs]'"
        ) from None


def copy_tree(source: epath.Path, target: epath.Path, *, last: str = "") -> None:
    """Copies every file of a directory; the one named `last`, which makes it whole, at the end."""
    names = sorted(walk(source), key=lambda path: path.name == last)
    for path in names:
        to = target / os.fspath(path.relative_to(source))
        to.parent.mkdir(parents=True, exist_ok=True)
        path.copy(to, overwrite=True)


def walk(folder: epath.Path) -> Iterator[epath.Path]:
    """Every file under it, in order of names."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from walk(path)
        else:
            yield path


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes `value` as indented JSON, atomically. NaN and infinity are written as strings."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> str:
    """Writes the text whole or not at all, and returns it."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)
    return text


def once(folder: str | os.PathLike | None, name: str, function: Callable[[], Any]) -> Any:
    """The result of `function()`, as plain data; kept in `<folder>/<name>.json`, where it is found.

    A result is known by its name alone: whoever gives the folder sees to it that all settings are
    the same (`io.workdir.prepare_workdir`). Without a folder nothing is kept.
    """
    if folder is None:
        return plain(function())
    path = epath.Path(folder) / (re.sub(r"[^\w.-]+", "_", name) + ".json")
    # Two names may share a file's: then the file is the other's.
    if path.exists() and read_json(path).get("name") == name:
        print(f"{name}: done before, read from {path}", file=sys.stderr)
    else:
        write_json(path, {"name": name, "value": function()})
    return read_json(path)["value"]


def plain(value: Any) -> Any:
    """`value` as JSON gives it back: arrays and tuples as lists, NaN and infinity as their names.

    Raises:
      TypeError: it holds what is not plain data.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{value!r} of type {type(value).__name__} is not plain data")
