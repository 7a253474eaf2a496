"""Files of runs as texts, in folders and in archives (.tar.xz and the like), read bounded.

Nothing of an archive is written anywhere.
"""

from __future__ import annotations

import functools
import os
import tarfile
from collections.abc import Iterator, Sequence

from etils import epath

from ffn_heterogeneity.io.read import MAX_FILE
from ffn_heterogeneity.io.read import read_text as _read
from ffn_heterogeneity.io.rows import RESULTS, ROWS

CONFIG, INPUTS, METRICS = "config.json", "inputs.json", "metrics.jsonl"
SWEEP, SAMPLES = "sweep.json", "samples"
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.zst")
# Files that are read of a run, and how much all files of an archive may hold.
READ = (CONFIG, INPUTS, RESULTS, ROWS)
MAX_ARCHIVE = 4 << 30
# Folders of a run that hold no runs.
_LEAVES = ("checkpoints", "checkpoints_frozen", "model", "tokens", SAMPLES, "tensorboard")
Texts = dict[str, str]  # file's name -> text


def read_text(path: str) -> str:
    """The text of a file of a run, in a folder or an archive; "" if it is not there."""
    for end in ARCHIVES:
        archive, found, member = path.partition(f"{end}/")
        if found and os.path.isfile(archive + end):
            return _members(archive + end).get(os.path.normpath(member), "")
    place = epath.Path(path)
    return _read(place, MAX_FILE) if place.exists() else ""


def folders(directory: str, read: Sequence[str]) -> Iterator[tuple[str, Texts]]:
    """(path, texts) of those that hold a file that is read, parents first."""
    if directory.endswith(ARCHIVES):
        found: dict[str, Texts] = {}
        for member, text in _members(directory).items():
            folder, name = os.path.split(member)
            if name in read:
                found.setdefault(os.path.normpath(os.path.join(directory, folder)), {})[name] = text
        yield from sorted(found.items())
        return
    root = epath.Path(directory)
    if not root.is_dir():
        raise ValueError(f"{directory} is no directory of runs, nor an archive of some")
    places = [root]
    while places:
        place = places.pop()
        files = {path.name: path for path in place.iterdir()}
        texts = {name: _read(files[name], MAX_FILE) for name in read if name in files}
        if texts:
            yield os.fspath(place), texts
        below = (files[name] for name in sorted(files, reverse=True) if name not in _LEAVES)
        places += [path for path in below if path.is_dir()]


def _members(archive: str) -> Texts:
    """Path in an archive -> text, of what is read of runs. Nothing is written anywhere."""
    if not os.path.isfile(archive):
        raise ValueError(f"{archive} is no archive: there is no such file")
    return _read_archive(archive, os.path.getmtime(archive))


@functools.lru_cache(maxsize=2)
def _read_archive(path: str, written: float) -> Texts:
    """`written`: when the archive was, to tell it from a newer one."""
    texts, total = {}, 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                total += member.size
                if total > MAX_ARCHIVE:
                    raise ValueError(f"{path} holds more than {MAX_ARCHIVE >> 30} GiB")
                folder, name = os.path.split(member.name)
                wanted = name in (*READ, METRICS) or os.path.basename(folder) == SAMPLES
                if wanted and member.isfile():
                    if member.size > MAX_FILE:
                        raise ValueError(f"{path}: {member.name} has {member.size:,} bytes")
                    text = archive.extractfile(member).read().decode()
                    texts[os.path.normpath(member.name)] = text
    except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no archive that can be read: {error}") from None
    return texts
