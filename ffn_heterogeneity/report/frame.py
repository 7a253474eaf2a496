"""Runs as pandas frames: a row a measurement, the run's settings as columns."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from ffn_heterogeneity.io.metrics import parse_metrics
from ffn_heterogeneity.io.rows import FIELDS, RESULTS, ROWS, measurement, read_rows, rows_of
from ffn_heterogeneity.paths import flatten_config
from ffn_heterogeneity.report.links import Facts, model_names, origins, spell_alike

if TYPE_CHECKING:
    import pandas

CONFIG, INPUTS, METRICS, SETTINGS = "config.json", "inputs.json", "metrics.jsonl", "config."
SWEEP, SAMPLES = "sweep.json", "samples"
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".txz", ".tar.zst")
# What is read of a run, and how much of one file and of all files of an archive.
READ = (CONFIG, INPUTS, RESULTS, ROWS)
MAX_FILE, MAX_ARCHIVE = 64 << 20, 4 << 30
# Folders of a run that hold no runs.
_LEAVES = ("checkpoints", "checkpoints_frozen", "model", "tokens", SAMPLES, "tensorboard")
_Rows = list[dict[str, Any]]


class _Folder(NamedTuple):
    """A directory that holds files of a run: its path, and their texts by name."""

    path: str
    texts: dict[str, str]


def results(*directories: str | os.PathLike) -> pandas.DataFrame:
    """Every measurement of every finished run in some directories, one a row.

    Args:
      directories: work directories of runs, of sweeps or of runs over seeds, folders of such, and
        archives of them (.tar.xz and the like, read without being unpacked).

    Returns:
      The fields of a row (`io.rows.FIELDS`; docs/rows.md says what each name of "what" means); the
      run's path in "run", a short name of its model in "model", the run that wrote that model in
      "origin"; its settings in "config.<key>", as on the command line, but one name for data that
      several runs found to be the same. "seed" is the config's where a row has none. What does not
      apply is missing; lists of settings are tuples.

    Raises:
      ImportError: pandas is not installed.
      ValueError: there is no run in a directory, or a file is damaged; the message names it.
    """
    return _frames(directories, READ)[0]


def curves(*directories: str | os.PathLike, what: Sequence[str] = ()) -> pandas.DataFrame:
    """Measurements of runs while they train (metrics.jsonl), also of those that have not ended.

    Args:
      what: names of measurements, with their split: "validation/nll"; none: all of them.

    Returns:
      A frame like that of `results`, a row for each step, and layer where there is one a layer.

    Raises:
      ImportError, ValueError: see `results`.
    """
    return both(*directories, what=what)[1]


def both(
    *directories: str | os.PathLike, what: Sequence[str] = ()
) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """`results` and `curves`, read in one go: models and data have the same names in the two."""
    return _frames(directories, (*READ, METRICS), frozenset(what))


def _frames(
    directories: Sequence[str | os.PathLike],
    read: Sequence[str],
    what: frozenset[str] = frozenset(),
) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """(results, curves) of the runs; `read`: names of the files that are opened."""
    if importlib.util.find_spec("pandas") is None:
        raise ImportError("this needs pandas: pip install 'ffn-heterogeneity[plots]'")
    if not directories:
        raise ValueError("no run given: name the work directories of runs, or folders of them")
    runs: dict[str, Facts] = {}
    measured: _Rows = []
    steps: _Rows = []
    for directory in directories:
        folders = list(_folders(os.fspath(directory), read))
        if not folders and not (epath.Path(directory) / SWEEP).exists():
            raise ValueError(f"{directory} holds no run: no {CONFIG} is in it or below it")
        for folder, config in _runs(folders):
            if folder.path in runs:
                continue
            runs[folder.path] = _facts(folder, config)
            own = {"run": folder.path}
            if isinstance(config.get("seed"), int):
                own["seed"] = config["seed"]
            measured += [own | row for row in _measured(folder)]
            steps += [own | row for row in _steps(folder, what)]
    told = {row["run"] for row in (*measured, *steps)}
    settings = _settings({path: facts for path, facts in runs.items() if path in told})
    return _frame(measured, settings), _frame(steps, settings)


def _frame(rows: _Rows, settings: pandas.DataFrame) -> pandas.DataFrame:
    import pandas

    kinds = {str: "object", int: "Int64", float: "float64"}
    frame = pandas.DataFrame(rows, columns=[*FIELDS, "run"])
    frame = frame.astype({field: kinds[kind] for field, kind in FIELDS.items()})
    return frame.join(settings, on="run")


def _facts(folder: _Folder, config: Mapping[str, Any]) -> Facts:
    wrote = _object(folder, RESULTS).get("model_fingerprint", "") if RESULTS in folder.texts else ""
    inputs = _object(folder, INPUTS) if INPUTS in folder.texts else {}
    return Facts(flatten_config(config), inputs, wrote)


def _settings(runs: Mapping[str, Facts]) -> pandas.DataFrame:
    """A row a run: "model", "origin", and "config.<key>"."""
    import pandas

    spell_alike(runs.values())
    wrote = origins(runs)
    table = pandas.DataFrame(index=list(runs))
    table["model"] = model_names(runs.values())
    table["origin"] = pandas.Series({path: wrote.get(path) for path in runs}, dtype=object)
    values = {
        path: {SETTINGS + key: _hashable(x) for key, x in run.config.items()}
        for path, run in runs.items()
    }
    columns = pandas.DataFrame.from_dict(values, orient="index")
    return table.join(columns[sorted(columns)])


def _runs(folders: Sequence[_Folder]) -> Iterator[tuple[_Folder, dict[str, Any]]]:
    """(folder, config) of each; one of a seed, or without a config, has its parent's."""
    configs: dict[str, dict[str, Any]] = {}
    for folder in folders:
        parent, name = os.path.split(folder.path)
        own = _object(folder, CONFIG) if CONFIG in folder.texts else None
        seed = name.removeprefix("seed_")
        if parent in configs and seed != name and seed.isdigit():
            own = configs[parent] | {"seed": int(seed)} | (own or {})
        elif own is None:
            own = configs.get(parent)
        if own is not None:
            configs[folder.path] = own
        yield folder, configs.get(folder.path, {})


def _measured(folder: _Folder) -> _Rows:
    """The measurements; none yet, or none but those of the folders below, of which this one only
    tells the mean."""
    if not {RESULTS, ROWS} & set(folder.texts):
        return []
    values: dict[str, Any] = {}
    if RESULTS in folder.texts:
        values = _object(folder, RESULTS)
        if "seeds" in values or "stages" in values:
            return []
    if ROWS in folder.texts:
        return read_rows(folder.texts[ROWS], os.path.join(folder.path, ROWS))
    rows = rows_of(values)
    if not rows:
        place = os.path.join(folder.path, RESULTS)
        raise ValueError(f"{place} holds no measurement: is it damaged?")
    return rows


def _steps(folder: _Folder, names: frozenset[str]) -> _Rows:
    """Of a step that was written twice the later row holds."""
    lines = parse_metrics(folder.texts.get(METRICS, ""), os.path.join(folder.path, METRICS))
    values = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and (not names or name in names):
                values[line["step"], name] = value
    rows: _Rows = []
    for (step, name), value in values.items():
        rows += measurement(name, value, {"step": step})
    return rows


def units(run: str, spec: str) -> dict[Any, float]:
    """The value of each window or question behind a measurement of a run; none where it kept none.

    Args:
      run: the frame's column of that name.
      spec: the frame's: "results.json:nll_windows", or "samples/<task>.jsonl:<metric>".
    """
    name, _, key = spec.partition(":")
    text = _file(os.path.join(run, name))
    if name.endswith(".jsonl"):
        rows = map(json.loads, (text or "").splitlines())
        return {row["doc_id"]: float(row[key]) for row in rows if key in row}
    return dict(enumerate(json.loads(text or "{}").get(key, ())))


def _file(path: str) -> str | None:
    """The text of a file of a run, in a folder or an archive; None: it is not there."""
    for end in ARCHIVES:
        archive, found, member = path.partition(f"{end}/")
        if found and os.path.isfile(archive + end):
            place = archive + end
            return _members(place, os.path.getmtime(place)).get(os.path.normpath(member))
    place = epath.Path(path)
    return _text(place) if place.exists() else None


@functools.lru_cache(maxsize=2)
def _members(archive: str, written: float) -> dict[str, str]:
    """The texts of an archive that hold units; `written`: when, to tell it from a newer one."""
    texts = {}
    with tarfile.open(archive) as file:
        for member in file:
            path = os.path.normpath(member.name)
            folder, name = os.path.split(path)
            holds = name == RESULTS or os.path.basename(folder) == SAMPLES
            if holds and member.isfile() and member.size <= MAX_FILE:
                texts[path] = file.extractfile(member).read().decode()
    return texts


def _folders(directory: str, read: Sequence[str]) -> Iterator[_Folder]:
    """Those that hold a file that is read, parents first."""
    if directory.endswith(ARCHIVES):
        yield from _archived(directory, read)
        return
    root = epath.Path(directory)
    if not root.is_dir():
        raise ValueError(f"{directory} is no directory of runs, nor an archive of some")
    places = [root]
    while places:
        place = places.pop()
        files = {path.name: path for path in place.iterdir()}
        texts = {name: _text(files[name]) for name in read if name in files}
        if texts:
            yield _Folder(os.fspath(place), texts)
        below = (files[name] for name in sorted(files, reverse=True) if name not in _LEAVES)
        places += [path for path in below if path.is_dir()]


def _archived(path: str, read: Sequence[str]) -> Iterator[_Folder]:
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
                if name not in read or not member.isfile():
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
