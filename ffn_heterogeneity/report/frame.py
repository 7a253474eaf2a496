"""Runs as pandas frames: one row per measurement, with the run's settings as columns."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from ffn_heterogeneity.io import rows as io_rows
from ffn_heterogeneity.io import runs as files
from ffn_heterogeneity.io.metrics import parse_metrics
from ffn_heterogeneity.io.read import lines_of, parse_object
from ffn_heterogeneity.io.rows import FIELDS
from ffn_heterogeneity.report.links import Facts, model_names, origins, spell_alike

if TYPE_CHECKING:
    import pandas

SETTINGS = "config."


def results(*directories: str | os.PathLike) -> pandas.DataFrame:
    """Return all measurements of all finished runs in some directories, one per row.

    Args:
      directories: work directories of runs, of sweeps or of runs over seeds, folders of such, and
        archives of them (.tar.xz and the like, read without being unpacked).

    Returns:
      The fields of a row (`io.rows.FIELDS`; docs/rows.md documents the names in "what"); the run's
      path in "run", a short name of its model in "model", the run that wrote that model in
      "origin"; its settings in "config.<key>", as on the command line, except that data with the
      same content have the same name. "seed" is the config's if a row has none. Values that do not
      apply are missing; lists of settings are tuples.

    Raises:
      ImportError: pandas is not installed.
      ValueError: a directory without runs, or a damaged file; the message names it.
    """
    return everything(*directories, read=files.READ)[0]


def curves(*directories: str | os.PathLike, what: Sequence[str] = ()) -> pandas.DataFrame:
    """Return the measurements during training (metrics.jsonl), also of unfinished runs.

    Args:
      what: names of measurements, with their split: "validation/nll"; none: all of them.

    Returns:
      A frame like that of `results`, with one row per step (and per layer, for such measurements).

    Raises:
      ImportError, ValueError: see `results`.
    """
    return everything(*directories, what=what)[1]


def everything(
    *directories: str | os.PathLike,
    what: Sequence[str] = (),
    read: Sequence[str] = (*files.READ, files.METRICS),
) -> tuple[pandas.DataFrame, pandas.DataFrame, pandas.DataFrame]:
    """(results, curves, settings), read together, with the same names of models and data.

    `settings` has one row per run (index: its path), also for runs that have not begun; `read` are
    the names of the files that are opened.
    """
    if importlib.util.find_spec("pandas") is None:
        raise ImportError("this needs pandas: pip install 'ffn-heterogeneity[plots]'")
    if not directories:
        raise ValueError("no run given: name the work directories of runs, or folders of them")
    runs: dict[str, Facts] = {}
    measured, steps = [], []
    for directory in _without_files(*map(os.fspath, directories)):
        found = dict(files.folders(directory, read))
        if not found and not (epath.Path(directory) / files.SWEEP).exists():
            raise ValueError(f"{directory} holds no run: no {files.CONFIG} is in it or below it")
        for path, config in _configs(found).items():
            if path not in runs:
                texts = found[path]
                names = (files.INPUTS, io_rows.RESULTS)
                inputs, said = (_object(path, texts, name) for name in names)
                fingerprint = said.get("model_fingerprint", "")
                runs[path] = Facts(io_rows.flatten_config(config), inputs, fingerprint)
                seed = config.get("seed")
                own = {"run": path, "seed": seed if io_rows.is_count(seed) else None}
                measured += [own | row for row in _measured(path, texts)]
                steps += [own | row for row in _steps(path, texts, what)]
    settings = _settings(runs)
    return _frame(measured, settings), _frame(steps, settings), settings


def plain(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Rows for reports: settings under their own names, "what" with its split, "by" the run.

    A setting that has the name of a row's field keeps its prefix ("config.layer").
    """
    import pandas

    taken = {SETTINGS + name for name in (*FIELDS, "run", "by")}
    rows = rows.drop(columns=[SETTINGS + "model", SETTINGS + "seed"], errors="ignore")
    rows = rows.rename(columns=lambda x: x if x in taken else x.removeprefix(SETTINGS))
    whole = rows.split.astype(object) + "/" + rows.what
    rows = rows.copy().assign(what=whole.where(rows.split.notna(), rows.what), by=rows["run"])
    own = [name for name in rows.columns if name not in FIELDS]
    made = {x: pandas.Series([*map(_whole, rows[x])], rows.index, dtype=object) for x in own}
    return pandas.concat([rows[list(FIELDS)], pandas.DataFrame(made, rows.index)], axis="columns")


def _whole(value: Any) -> Any:
    """Undo pandas' floats for integers in columns with missing values; null counts as missing."""
    if value is None:
        return float("nan")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def progress(rows: pandas.DataFrame, curves: pandas.DataFrame) -> dict[str, str]:
    """{run: its progress}, for the runs that have begun."""
    states = dict.fromkeys(rows["run"], "finished")
    for run, step in curves.groupby("run", sort=False)["step"].max().items():
        states.setdefault(str(run), f"not finished, at step {step}")
    return states


def _without_files(*paths: str) -> list[str]:
    """The paths (for example of a shell's *) without stray files, which are reported."""
    stray = [x for x in paths if os.path.isfile(x) and not x.endswith(files.ARCHIVES)]
    if not stray or len(stray) == len(paths):
        return list(paths)
    print(f"no runs, left out: {', '.join(stray)}", file=sys.stderr)
    return [path for path in paths if path not in stray]


def _frame(rows: Sequence[Mapping[str, Any]], settings: pandas.DataFrame) -> pandas.DataFrame:
    import pandas

    kinds = {str: "object", int: "Int64", float: "float64"}
    frame = pandas.DataFrame(rows, columns=[*FIELDS, "run"])
    frame = frame.astype({field: kinds[kind] for field, kind in FIELDS.items()})
    return frame.join(settings, on="run")


def _settings(runs: Mapping[str, Facts]) -> pandas.DataFrame:
    """One row per run: "model", "origin", and "config.<key>"."""
    import pandas

    spell_alike(runs.values())
    values = [{SETTINGS + k: _hashable(x) for k, x in run.config.items()} for run in runs.values()]
    columns = pandas.DataFrame(values, list(runs))
    table = pandas.DataFrame({"model": model_names(runs.values())}, list(runs))
    table["origin"] = pandas.Series(origins(runs), list(runs), dtype=object)
    return table.join(columns[sorted(columns)])


def _configs(found: Mapping[str, files.Texts]) -> dict[str, dict[str, Any]]:
    """The config of each folder; folders of seeds, or without a config, have their parent's.

    The config of a stage also has the groups of all stages.
    """
    configs: dict[str, dict[str, Any]] = {}
    for path, texts in found.items():
        parent, name = os.path.split(path)
        seed = name.removeprefix("seed_")
        above = configs.get(parent, {})
        if above and seed != name and seed.isdigit():
            above = above | {"seed": int(seed)}
        elif files.CONFIG in texts:
            stages = above.get("stages")
            groups = ["stages", *stages] if isinstance(stages, list) else []
            above = {key: value for key, value in above.items() if key in groups}
        configs[path] = above | _object(path, texts, files.CONFIG)
    return configs


def _measured(path: str, texts: files.Texts) -> list[dict[str, Any]]:
    """The measurements of a folder; none if it has no results yet, or only means over its
    folders of seeds or stages."""
    values = _object(path, texts, io_rows.RESULTS)
    if "seeds" in values or "stages" in values:
        return []
    if io_rows.ROWS in texts:
        return io_rows.read_rows(texts[io_rows.ROWS], os.path.join(path, io_rows.ROWS))
    place = os.path.join(path, io_rows.RESULTS)
    rows = io_rows.read_results(values, place)
    if io_rows.RESULTS in texts and not rows:
        raise ValueError(f"{place} holds no measurement: is it damaged?")
    return rows


def _steps(path: str, texts: files.Texts, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl; if a step was written twice, the later values count."""
    values = {}
    place = os.path.join(path, files.METRICS)
    for line in parse_metrics(texts.get(files.METRICS, ""), place):
        for name, value in line.items():
            if name != "step" and (not names or name in names):
                values[line["step"], name] = value
    for (step, name), value in values.items():
        yield from io_rows.measurement(name, value, {"step": step})


def units(run: str, spec: str) -> dict[Any, float]:
    """The value of each window or question of a measurement; empty if the run saved none.

    Windows are named by their places; where their documents are known, (document, place).

    Args:
      run: the frame's column of that name.
      spec: the frame's: "results.json:nll_windows", of one text of several with the range of its
        windows ("nll_windows[3:9]"), or "samples/<task>.jsonl:<metric>".
    """
    name, _, key = spec.partition(":")
    place = os.path.join(run, name)
    text = files.read_text(place)
    try:
        if name.endswith(".jsonl"):
            rows = [parse_object(line, place) for line in lines_of(text)]
            named = ((row["doc_id"], row.get(_metric(row, key))) for row in rows)
            return {question: float(value) for question, value in named if value is not None}
        results = parse_object(text or "{}", place)
        part = re.fullmatch(r"(\w+)\[(\d+):(\d+)\]", key)
        its = slice(int(part[2]), int(part[3])) if part else slice(None)
        numbers = map(float, results.get(part[1] if part else key, ()))
        values = dict([*enumerate(numbers)][its])
        documents = results.get("window_documents")
        return {(documents[i], i): x for i, x in values.items()} if documents else values
    except (TypeError, LookupError, OverflowError) as error:
        raise ValueError(f"{place}: {key} is no number a row ({error})") from None


def _metric(row: Mapping[str, Any], key: str) -> str:
    """The metric of a sample that `key` names: of the harness's filters each has its own samples.

    "exact_match_strict-match" is exact_match in the samples of the filter strict-match.
    """
    made_by = row.get("filter", "none")
    if made_by == "none":
        return key
    metric = key.removesuffix(f"_{made_by}")
    return metric if metric != key else ""


def _object(path: str, texts: files.Texts, name: str) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return parse_object(texts.get(name, "{}"), os.path.join(path, name))


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):  # of a list, or empty
        return json.dumps(value)
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
