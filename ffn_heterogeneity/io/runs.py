"""Reading of runs' text files from folders and archives (.tar.xz and the like), with limits.

Archives are never extracted to disk.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from ffn_heterogeneity.io import child
from ffn_heterogeneity.io.read import MAX_FILE, MAX_METRICS, read_object
from ffn_heterogeneity.io.read import read_text as _read
from ffn_heterogeneity.io.rows import RESULTS, ROWS

CONFIG, INPUTS, METRICS = "config.json", "inputs.json", "metrics.jsonl"
SWEEP, SAMPLES = "sweep.json", "samples"
SEEDS_APART = 1_000  # between the seeds of successive attempts of a run
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.zst")
# Files of a run that are read; limits in seconds and bytes for reading an archive.
READ = (CONFIG, INPUTS, RESULTS, ROWS)
SECONDS, MAX_ARCHIVE = 120.0, 2 << 30
# Folders of a run that contain no runs.
_LEAVES = ("checkpoints", "checkpoints_frozen", "model", "tokens", SAMPLES, "tensorboard")
Texts = dict[str, str]  # file's name -> text


def read_text(path: str) -> str:
    """Read a file of a run, in a folder or an archive; "" if it does not exist."""
    for end in ARCHIVES:
        archive, separator, member = path.partition(f"{end}/")
        if separator and os.path.isfile(archive + end):
            return _members(archive + end).get(os.path.normpath(member), "")
    place = epath.Path(path)
    return _read(place, _limit(place.name)) if place.exists() else ""


def _limit(name: str) -> int:
    return MAX_METRICS if name == METRICS else MAX_FILE


def read_listing(path: str | os.PathLike) -> dict[str, Any]:
    """Read a sweep.json: an object with "sweep", "kind" and "points", each with its "name".

    Raises:
      ValueError: not JSON, or points whose names are not distinct folder names.
    """
    listing = read_object(path, ValueError)
    points = listing.get("points")
    for one in points if isinstance(points, list) else [None]:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str) or name in ("", "..") or name != os.path.basename(name):
            raise ValueError(f"{os.fspath(path)} is malformed: {name!r:.80} names no folder")
    return listing


def folders(directory: str, read: Sequence[str]) -> Iterator[tuple[str, Texts]]:
    """Iterate over (path, texts) of the folders that contain such a file, parents first."""
    if directory.endswith(ARCHIVES):
        runs: dict[str, Texts] = {}
        for member, text in _members(directory).items():
            folder, name = os.path.split(member)
            if name in read:
                runs.setdefault(os.path.normpath(os.path.join(directory, folder)), {})[name] = text
        yield from sorted(runs.items())
        return
    root = epath.Path(directory)
    if not root.is_dir():
        raise ValueError(f"{directory} is neither a directory nor an archive of runs")
    places, seen = [root], set()
    while places:
        place = places.pop()
        if (real := os.path.realpath(place)) in seen:  # a link to a visited folder
            continue
        seen.add(real)
        files = {path.name: path for path in place.iterdir()}
        texts = {name: _read(files[name], _limit(name)) for name in read if name in files}
        if texts:
            yield os.fspath(place), texts
        below = (files[name] for name in sorted(files, reverse=True) if name not in _LEAVES)
        places += [path for path in below if path.is_dir()]


def _members(archive: str) -> Texts:
    """{path in an archive: text} of the runs' files that are read."""
    if not os.path.isfile(archive):
        raise ValueError(f"{archive} is no archive: there is no such file")
    return _read_archive(archive, os.path.getmtime(archive))


@functools.lru_cache(maxsize=2)
def _read_archive(path: str, written: float) -> Texts:
    """Read an archive; `written`, its modification time, distinguishes it from a newer one."""
    request = [os.path.abspath(path), [*READ, METRICS], SAMPLES, MAX_FILE]
    reply = child.ask("archive", request, SECONDS, MAX_ARCHIVE)
    if "texts" in reply:
        return reply["texts"]
    why = reply.get("refused") or f"it {reply['runaway']}"
    raise ValueError(f"{path} is not a readable archive: {why}")
