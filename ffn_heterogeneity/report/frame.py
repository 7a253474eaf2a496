"""Runs as one pandas frame: a row a measurement, the run's settings as columns."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from ffn_heterogeneity.io.rows import FIELDS, RESULTS, ROWS, read_rows, rows_of
from ffn_heterogeneity.paths import flatten_config

if TYPE_CHECKING:
    import pandas

CONFIG, SETTINGS = "config.json", "config."
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.zst")
# What is read of a run, and how much of one file and of all files of an archive.
READ = (CONFIG, RESULTS, ROWS)
MAX_FILE, MAX_ARCHIVE = 64 << 20, 4 << 30
# Folders of a run that hold no runs.
_LEAVES = ("checkpoints", "checkpoints_frozen", "model", "tokens", "samples", "tensorboard")


class _Folder(NamedTuple):
    """A directory that holds files of a run: its path, and their texts by name."""

    path: str
    texts: dict[str, str]


def results(*directories: str | os.PathLike) -> pandas.DataFrame:
    """Every measurement of every run in some directories, one a row.

    Args:
      directories: work directories of runs, of sweeps or of runs over seeds, folders of such, and
        archives of them (.tar.xz and the like, read without being unpacked).

    Returns:
      The fields of a row (`io.rows.FIELDS`; docs/rows.md says what each name of "what" means), the
      run's path in "run", and its settings in "config.<key>", as on the command line. "seed" is the
      config's where a row has none. What does not apply is missing; lists of settings are tuples.

    Raises:
      ImportError: pandas is not installed.
      ValueError: there is no run in a directory, or a file is damaged; the message names it.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError(
            "fh.results needs pandas: pip install 'ffn-heterogeneity[plots]'"
        ) from None
    rows: list[dict[str, Any]] = []
    settings: dict[str, dict[str, Any]] = {}
    for directory in directories:
        before = len(settings)
        for folder, config in _runs(_folders(os.fspath(directory))):
            own = _rows(folder)
            if own is None:
                continue
            flat = flatten_config(config)
            settings[folder.path] = {SETTINGS + key: _hashable(x) for key, x in flat.items()}
            seed = {"seed": config["seed"]} if isinstance(config.get("seed"), int) else {}
            rows += [{**seed, **row, "run": folder.path} for row in own]
        if len(settings) == before:
            raise ValueError(f"{directory} holds no run: no {RESULTS} is in it or below it")
    frame = pandas.DataFrame(rows, columns=[*FIELDS, "run"])
    for field, kind in FIELDS.items():
        if kind is not str:
            frame[field] = frame[field].astype("Int64" if kind is int else "float64")
    columns = pandas.DataFrame.from_dict(settings, orient="index")
    return frame.join(columns[sorted(columns)], on="run") if len(columns.columns) else frame


def _runs(folders: Iterator[_Folder]) -> Iterator[tuple[_Folder, dict[str, Any]]]:
    """(folder, config) of those with results; a folder without a config has its parent's."""
    configs: dict[str, dict[str, Any]] = {}
    for folder in folders:
        parent = os.path.dirname(folder.path)
        if CONFIG in folder.texts:
            configs[folder.path] = _object(folder, CONFIG)
        elif parent in configs:
            name = os.path.basename(folder.path)
            seed = name.removeprefix("seed_")
            own = {"seed": int(seed)} if seed != name and seed.isdigit() else {}
            configs[folder.path] = configs[parent] | own
        if {RESULTS, ROWS} & set(folder.texts):
            yield folder, configs.get(folder.path, {})


def _rows(folder: _Folder) -> list[dict[str, Any]] | None:
    """The measurements; None: those of the folders below, of which this one only tells the mean."""
    if RESULTS in folder.texts:
        values = _object(folder, RESULTS)
        if "seeds" in values or "stages" in values:
            return None
    if ROWS in folder.texts:
        return read_rows(folder.texts[ROWS], os.path.join(folder.path, ROWS))
    return rows_of(values)


def _folders(directory: str) -> Iterator[_Folder]:
    """Those that hold a file that is read, parents first."""
    if directory.endswith(ARCHIVES):
        yield from _archived(directory)
        return
    root = epath.Path(directory)
    if not root.is_dir():
        raise ValueError(f"{directory} is no directory of runs, nor an archive of some")
    places = [root]
    while places:
        place = places.pop()
        files = {path.name: path for path in place.iterdir()}
        texts = {name: _text(files[name]) for name in READ if name in files}
        if texts:
            yield _Folder(os.fspath(place), texts)
        below = (files[name] for name in sorted(files, reverse=True) if name not in _LEAVES)
        places += [path for path in below if path.is_dir()]


def _archived(path: str) -> Iterator[_Folder]:
    """The folders of an archive, as <archive>/<folder>. Nothing is written anywhere."""
    found: dict[str, dict[str, str]] = {}
    total = 0
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                total += member.size
                if total > MAX_ARCHIVE:
                    raise ValueError(f"{path} holds more than {MAX_ARCHIVE >> 30} GiB")
                folder, name = os.path.split(member.name)
                if name not in READ or not member.isfile():
                    continue
                _check_size(member.size, f"{path}: {member.name}")
                text = archive.extractfile(member).read().decode()
                found.setdefault(os.path.normpath(folder), {})[name] = text
    except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no archive that can be read: {error}") from None
    for folder in sorted(found):
        yield _Folder(os.path.normpath(os.path.join(path, folder)), found[folder])


def _text(path: epath.Path) -> str:
    _check_size(path.stat().length, os.fspath(path))
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from None


def _check_size(size: int, name: str) -> None:
    if size > MAX_FILE:
        raise ValueError(f"{name} has {size:,} bytes, more than the {MAX_FILE:,} that are read")


def _object(folder: _Folder, name: str) -> dict[str, Any]:
    path = Path(folder.path) / name
    try:
        value = json.loads(folder.texts[name])
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} holds {str(value)[:40]!r} where names and values should be")
    return dict(value)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
