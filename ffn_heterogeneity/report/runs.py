"""Reads the work directories of runs: config, numbers, curves, several seeds."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import read_json
from ffn_heterogeneity.report.writer import read_metrics

NOT_FINITE = ("nan", "inf", "-inf")  # as metrics.jsonl and results.json hold them
CURVES = ("history", "seeds")  # shown otherwise
# Keys of inputs.json (their last parts) that name no data: two runs may write the same model.
NO_DATA = ("model", "tokenizer")


class Spread(NamedTuple):
    """A number over several seeds."""

    mean: float
    low: float
    high: float
    n: int
    kind: str = "range"  # of what low and high are: "range", "t" (95%), "Wilson" (95%)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a work directory holds.

    Attributes:
      path: as it was given.
      label: the shortest end of the path that no other run has.
      config: dotted key -> value; the same data under two paths has the first run's.
      values: "final validation/nll" -> number, text or `Spread`.
      curves: one per seed (one without seeds): metric -> step -> value, NaN where not finite; of a
        metric with a value a layer the list, in `layers`.
      state: "finished", "3 seeds", or how far it is.
      notes: what a reader has to know.
      model: a short name of the config's model that no other model of these runs has.
    """

    path: str
    label: str
    config: dict[str, Any]
    values: dict[str, Any]
    curves: list[dict[str, dict[int, float]]]
    state: str
    notes: list[str]
    model: str = "model"
    layers: list[dict[str, dict[int, list[float]]]] = dataclasses.field(default_factory=list)


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Reads work directories.

    Raises:
      ValueError: none is given, one is given twice or is no run, a file in it is damaged.
    """
    if not paths:
        raise ValueError("no run given: python scripts/report.py <workdir> [<workdir> ..]")
    places = [path if "://" in path else os.path.realpath(path) for path in map(os.fspath, paths)]
    for i, place in enumerate(places):
        if (j := places.index(place)) < i:
            raise ValueError(f"{paths[i]!r} and {paths[j]!r} are the same run: name each once")
    runs = [read_run(p, label) for p, label in zip(paths, _labels(places), strict=True)]
    _spell_alike(runs)
    return [
        dataclasses.replace(run, model=name)
        for run, name in zip(runs, _model_names(runs), strict=True)
    ]


def read_run(path: str, label: str) -> Run:
    """Reads one work directory, and those of its seeds in it.

    Raises:
      ValueError: it is no run, or a file in it is damaged; the message names it.
    """
    folder = epath.Path(path)
    _check_is_run(folder)
    config, results = flat(_read_object(folder / "config.json")), _results(folder)
    values, *curves = _read_folder(folder, config)
    curves, state, notes = [curves], "", []
    if seeds := _seed_folders(folder, results or {}):
        there = [seed for seed in seeds if seed.is_dir()]
        found = [_read_folder(seed, config) for seed in there]
        summary = (results or {}).get("summary")
        values = _over_seeds([v for v, *_ in found]) | values
        values |= _spreads(summary) if isinstance(summary, dict) else {}
        curves = [c for _, *c in found if c[0]] or curves
        state = f"{len(seeds)} seeds, "
        for why, names in (
            ("missing", [seed.name for seed in seeds if seed not in there]),
            ("without results.json", [seed.name for seed in there if _results(seed) is None]),
        ):
            notes += [f"{why}: {', '.join(names)}."] if names else []
    curves, layers = map(list, zip(*curves, strict=True))
    if results is None:
        steps = [step for curve in curves for points in curve.values() for step in points]
        state += f"not finished, at step {max(steps)}" if steps else "not begun"
        notes.append("no results.json yet: its final numbers are those of its last evaluation.")
    else:
        state += "finished"
        lists = [k for k, v in flat(results).items() if isinstance(v, list) and k not in CURVES]
        lists = list(dict.fromkeys(name.split(".")[0] for name in lists))
        notes += [f"lists in results.json, in no table: {', '.join(lists)}."] if lists else []
    notes += _not_finite(curves)
    return Run(path, label, config, values, curves, state, notes, layers=layers)


def _spell_alike(runs: Sequence[Run]) -> None:
    """Data that the runs found to be the same (`inputs.json`) gets one name, the first one's."""
    first: dict[tuple[str, str], Any] = {}
    for run in runs:
        path = epath.Path(run.path) / "inputs.json"
        for key, mark in (_read_object(path) if path.exists() else {}).items():
            if key.split(".")[-1] not in NO_DATA and key in run.config:
                run.config[key] = first.setdefault((key, str(mark)), run.config[key])


def written_models(run: Run) -> list[str]:
    """Where the models lie that the run wrote, if it did: its own, and those of its seeds."""
    seeds = run.config.get("seeds") or ()
    folders = [run.path, *(os.path.join(run.path, f"seed_{seed}") for seed in seeds)]
    return [os.path.join(os.path.realpath(folder), "model") for folder in folders]


def _model_names(runs: Sequence[Run]) -> list[str]:
    """ "smollm2-135m" of a path or hub id, a run's name for that run's own; the whole path where
    two models would have one name."""
    keys = [(_normal(str(r.config.get("model") or "")), r.config.get("revision")) for r in runs]
    short = {key: _short(key[0]) for key in keys}
    names = {}
    for (path, revision), name in short.items():
        others = {other for (other, _), found in short.items() if found == name}
        name = name if len(others) == 1 else path
        names[path, revision] = f"{name} {revision}" if revision else name
    return [names[key] for key in keys]


def _normal(path: str) -> str:
    return os.path.normpath(path) if path and "://" not in path else path.rstrip("/")


def _short(path: str) -> str:
    parts = [part for part in path.split("/") if part]
    if len(parts) > 1 and parts[-1] in ("model", "checkpoints"):
        parts = parts[:-1]
    return parts[-1].removesuffix(".gguf") if parts else "model"


def _labels(places: Sequence[str]) -> list[str]:
    parts = [place.strip("/").split("/") for place in places]
    for depth in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-depth:]) for part in parts]
        if len(set(labels)) == len(labels):
            break
    return labels


def _check_is_run(folder: epath.Path) -> None:
    if (folder / "config.json").is_file():
        return
    reason, inside = "there is no such directory", []
    if folder.is_dir():
        reason = "it holds no config.json"
        inside = sorted(x.name for x in folder.iterdir() if (x / "config.json").is_file())
    hint = f"there are runs in it: {', '.join(inside)}" if inside else "give a run's --workdir"
    raise ValueError(f"{os.fspath(folder)!r} is no run: {reason}; {hint}")


def _results(folder: epath.Path) -> dict[str, Any] | None:
    path = folder / "results.json"
    return _read_object(path) if path.exists() else None


def _read_object(path: epath.Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text: is it damaged?") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {str(value)[:40]!r} where names and values should be")
    return value


def _seed_folders(folder: epath.Path, results: Mapping[str, Any]) -> list[epath.Path]:
    """Those that results.json names; before there is one, those that are there."""
    if isinstance(results.get("seeds"), list):
        return [folder / f"seed_{seed}" for seed in results["seeds"]]
    found = [x for x in folder.iterdir() if x.name[:5] == "seed_" and x.name[5:].isdecimal()]
    found = [x for x in found if (x / "config.json").exists() or (x / "metrics.jsonl").exists()]
    return sorted(found, key=lambda x: int(x.name[5:]))


def _read_folder(folder: epath.Path, config: Mapping[str, Any]) -> tuple[dict, dict, dict]:
    """(values, curves, layers) of one directory."""
    path, curves, layers = folder / "metrics.jsonl", {}, {}
    try:
        rows = read_metrics(path)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text: is it damaged?") from None
    for number, row in enumerate(rows, 1):
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(step, int):
            raise ValueError(f"{path}, line {number} has no step: {str(row)[:60]}")
        for name, value in row.items():
            if isinstance(value, list) and value and None not in (x := list(map(number_of, value))):
                layers.setdefault(name, {})[step] = x
            value = number_of(value)
            if name != "step" and value is not None:
                # A row that was written twice: the later one holds.
                curves.setdefault(name, {})[step] = value if math.isfinite(value) else math.nan
    known = _so_far(rows, config.get("eval.best_metric") or "validation/nll")
    return _named(known | (_results(folder) or {})), curves, layers


def _so_far(rows: Sequence[Mapping], metric: str) -> dict[str, Any]:
    """What metrics.jsonl says, in the words of results.json, which a running one has not."""
    history = [row for row in rows if any(key.startswith("validation/") for key in row)]
    scored = [(number_of(row.get(metric)), row["step"]) for row in history]
    scored = [(value, step) for value, step in scored if value is not None and value == value]
    found: dict[str, Any] = {"steps": rows[-1]["step"]} if rows else {}
    if history:
        found |= {"first": history[0], "final": history[-1]}
    if scored:
        value, step = min(scored)
        found["best"] = {"step": step, "metric": metric, "value": value}
    return found


def _named(results: Mapping[str, Any]) -> dict[str, Any]:
    """results.json as rows of a table, lists left out."""
    found: dict[str, Any] = {}
    for key, value in results.items():
        if key in ("first", "final") and isinstance(value, dict):
            found |= {f"{key} {name}": item for name, item in flat(value).items()}
        elif key == "best" and isinstance(value, dict) and "metric" in value:
            found[f"best {value['metric']}"] = value.get("value")
            found["best step"] = value.get("step")
        elif key != "summary" or "seeds" not in results:
            found |= flat({key: value})
    return {name: _scalar(x) for name, x in found.items() if not isinstance(x, list)}


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"optimizer.name": "adamw"}`."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            found |= flat(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = item
    return found


def number_of(value: Any) -> int | float | None:
    """The number, also where it is written as "nan"; None: it is none."""
    if isinstance(value, str) and value in NOT_FINITE:
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _scalar(value: Any) -> Any:
    """A number or a text."""
    number = number_of(value)
    if number is not None:
        return number
    return value if isinstance(value, str) else json.dumps(value)


def _over_seeds(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean, least and greatest over the seeds; what is the same in all of them stays as it is."""
    merged: dict[str, Any] = {}
    for name in union(seeds):
        found = [values[name] for values in seeds if name in values]
        if len(found) == len(seeds) and len(set(found)) == 1:
            merged[name] = found[0]
        elif any(isinstance(value, str) for value in found):
            merged[name] = ", ".join(dict.fromkeys(map(str, found)))
        else:
            low, high = float(np.min(found)), float(np.max(found))  # NaN if any is
            merged[name] = Spread(sum(found) / len(found), low, high, len(found))
    return merged


def _spreads(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary over seeds; its validation metrics are those of the end, and named so."""
    found: dict[str, Any] = {}
    for key, value in summary.items():
        name = f"final {key}" if key.startswith("validation/") else key
        if isinstance(value, dict) and "mean" in value:
            parts = [number_of(value.get(part)) for part in ("mean", "low", "high")]
            parts = [math.nan if part is None else part for part in parts]
            found[name] = Spread(*parts, value.get("n", 0), "t")
        else:
            found |= {k: _scalar(v) for k, v in flat({name: value}).items()}
    return found


def _not_finite(curves: Sequence[Mapping[str, Mapping[int, float]]]) -> list[str]:
    first: dict[str, int] = {}
    for curve in curves:
        for name, points in curve.items():
            bad = [step for step, value in points.items() if math.isnan(value)]
            if bad:
                first[name] = min([*bad, first.get(name, bad[0])])
    return [f"{name} is not finite, first at step {step}." for name, step in first.items()]


def union(items: Iterable[Iterable[str]]) -> list[str]:
    """All names, each once, in the order they come."""
    return list(dict.fromkeys(name for item in items for name in item))
