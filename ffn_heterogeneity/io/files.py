"""Atomic files: written under a temporary name, then moved."""

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

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.read import read_json
from ffn_heterogeneity.wording import first_line

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota, a limit


def user_cache() -> Path | None:
    """`ffn_heterogeneity` in the user's cache directory; None if there is no such directory."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        return None
    return base / "ffn_heterogeneity" if base.is_absolute() else None


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike, *, directory: bool = False) -> Iterator[epath.Path]:
    """Yield a temporary sibling of `path`; on success it is moved over `path`, else removed.

    The sibling is an empty file or directory. In a bucket it is `path` itself, a file: objects
    appear there atomically, and a move would be a copy. Leftovers of killed processes for the same
    path are removed first.
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
        if error.errno in FULL and not error.filename:  # the error does not name the file
            error.filename = os.fspath(path)
        raise
    finally:
        if temporary.exists():
            temporary.rmtree() if temporary.is_dir() else temporary.unlink()
        os.close(handle)


def _temporary(path: epath.Path, directory: bool) -> tuple[epath.Path, int]:
    """Create a sibling and lock it, which shows other processes that its owner is alive."""
    while True:
        # The suffix stays last because some writers (matplotlib) choose the format by it.
        temporary = path.parent / f".{path.stem}.{uuid.uuid4().hex[:8]}.partial{path.suffix}"
        temporary.mkdir() if directory else temporary.touch()
        with contextlib.suppress(FileNotFoundError):  # removed as a leftover before it was locked
            handle = os.open(temporary, os.O_RDONLY)
            if lock(handle) is not False and temporary.exists():
                return temporary, handle
            os.close(handle)


def _remove_leftovers(path: epath.Path) -> None:
    """Remove temporary siblings of `path` that killed processes left behind.

    Siblings that a running process writes are locked and stay; without file locks, all stay.
    """
    name = re.compile(
        rf"\.{re.escape(path.stem)}\.[0-9a-f]{{8}}\.partial{re.escape(path.suffix)}"
        rf"|\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.old"
    )
    for entry in filter(name.fullmatch, os.listdir(path.parent)):
        left = path.parent / entry
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if os.path.islink(left):  # not made here, and it may point anywhere
                os.unlink(left)
                continue
            handle = os.open(left, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait
            if lock(handle):
                left.rmtree() if left.is_dir() else left.unlink()
            os.close(handle)


def lock(handle: int) -> bool | None:
    """Take the kernel's lock on an open file or directory; it is released when the process ends.

    Returns:
      True if locked, False if another process holds it, None if the file system has no locks.
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


def reject_bucket(path: str | os.PathLike) -> None:
    """Raise CheckpointError for a path in a bucket, for writers that need a local disk."""
    if is_bucket(path):
        raise CheckpointError(f"{os.fspath(path)}: write it to a local disk, then copy it there")


def is_bucket(path: str | os.PathLike) -> bool:
    """True for a path in an object store ("gs://..."), which cannot move or append to files."""
    return "://" in os.fspath(path)


def paths_in(text: str) -> list[tuple[str, str]]:
    """(name, path) pairs of "<name>=<path>,<name>=<path>"; [("", path)] of one path, or a file."""
    parts = [entry.partition("=") for entry in text.split(",")]
    named = all(mark and label.isidentifier() for label, mark, _ in parts)
    if not named or epath.Path(text).expanduser().exists():
        return [("", os.path.expanduser(text))]
    return [(label, os.path.expanduser(path)) for label, _, path in parts]


def check_opens(path: str | os.PathLike) -> None:
    """Check that the package for an object store's path is installed.

    Raises:
      ImportError: it is missing; the message names the path, the package and how to install it.
    """
    # If TensorFlow is installed, epath opens buckets with it.
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
    """Copy every file of a directory; the file `last`, which marks it complete, comes last."""
    names = sorted(walk(source), key=lambda path: path.name == last)
    for path in names:
        to = target / os.fspath(path.relative_to(source))
        to.parent.mkdir(parents=True, exist_ok=True)
        path.copy(to, overwrite=True)


def walk(folder: epath.Path) -> Iterator[epath.Path]:
    """Iterate over all files under a folder, sorted by name."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from walk(path)
        else:
            yield path


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are written as strings."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> str:
    """Write the text atomically and return it."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)
    return text


def once(folder: str | os.PathLike | None, name: str, function: Callable[[], Any]) -> Any:
    """Return `function()` as plain data, cached in `<folder>/<name>.json`.

    A result is identified only by its name: the caller ensures that all settings are the same
    (`io.workdir.prepare_workdir`). Without a folder nothing is cached.
    """
    if folder is None:
        return plain(function())
    path = epath.Path(folder) / (re.sub(r"[^\w.-]+", "_", name) + ".json")
    # Two names may map to the same file: then the file belongs to the other.
    if path.exists() and read_json(path).get("name") == name:
        print(f"{name}: done before, read from {path}", file=sys.stderr)
    else:
        write_json(path, {"name": name, "value": function()})
    return read_json(path)["value"]


def plain(value: Any) -> Any:
    """Convert `value` to plain JSON data: arrays and tuples to lists, NaN and infinity to strings.

    Raises:
      TypeError: a value that is not plain data.
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
