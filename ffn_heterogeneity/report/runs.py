"""Reads the work directories of runs: config, numbers, curves, several seeds."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from ffn_heterogeneity.io.files import read_json
from ffn_heterogeneity.io.metrics import missing_steps, read_metrics
from ffn_heterogeneity.paths import flatten_config
from ffn_heterogeneity.report.links import Facts, spell_alike
from ffn_heterogeneity.report.stats import number_of
from ffn_heterogeneity.report.tables import shorter
from ffn_heterogeneity.wording import spans


class Seed(NamedTuple):
    """The results of one seed of a run.

    Attributes:
      values: "final.validation/nll" -> number or text, as results.json has them.
      curves: metric -> step -> value, NaN where not finite.
      layers: metric with a value a layer -> step -> values.
      lost: steps whose rows a crash took; the training curves are NaN there.
    """

    values: Mapping[str, Any]
    curves: Mapping[str, Mapping[int, float]]
    layers: Mapping[str, Mapping[int, Sequence[float]]]
    lost: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a work directory.

    Attributes:
      path: as it was given.
      label: the path below the directory that all of these runs lie in.
      config: dotted key -> value; the same data under two paths has the first run's.
      seeds: by seed, those whose directories are there; of a run without seeds the config's own.
      finished: whether it has its results, of every seed.
      state: "finished", or how far it is.
      notes: what a reader has to know.
      inputs: dotted key of the config -> fingerprint of the file that it named then.
    """

    path: str
    label: str
    config: dict[str, Any]
    seeds: dict[Any, Seed]
    finished: bool
    state: str
    notes: list[str]
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def curves(self) -> list[Mapping[str, Mapping[int, float]]]:
        """Of the seeds that have any."""
        return [seed.curves for seed in self.seeds.values() if seed.curves]


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
    runs = [read_run(p, label) for p, label in zip(paths, shorter(places), strict=True)]
    spell_alike(Facts(run.config, run.inputs) for run in runs)
    return runs


def read_run(path: str, label: str) -> Run:
    """Reads one work directory, and those of its seeds in it.

    Raises:
      ValueError: it is no run, or a file in it is damaged; the message names it.
    """
    folder = epath.Path(path)
    if not (folder / "config.json").is_file():
        inside = sorted(x.parent.name for x in folder.glob("*/config.json"))
        hint = f"there are runs in it: {', '.join(inside)}" if inside else "give a run's --workdir"
        raise ValueError(f"{os.fspath(folder)!r} is no run: it holds no config.json; {hint}")
    config = flatten_config(_read_object(folder / "config.json"))
    finished = (folder / "results.json").exists()
    folders = _seed_folders(folder) or {config.get("seed"): folder}
    seeds = {seed: _read_seed(place) for seed, place in folders.items() if place.is_dir()}
    late = [place.name for place in folders.values() if not (place / "results.json").exists()]
    notes = [f"without results.json: {', '.join(late)}."] if late else []
    notes += union(map(_not_finite, seeds.values()))
    state = "finished"
    if not finished:
        steps = union(points for seed in seeds.values() for points in seed.curves.values())
        state = f"not finished, at step {max(steps)}" if steps else "not begun"
    if len(folders) > 1:
        state = f"{len(folders)} seeds, {state}"
    inputs = _read_object(folder / "inputs.json") if (folder / "inputs.json").exists() else {}
    return Run(path, label, config, seeds, finished, state, notes, inputs=inputs)


def _seed_folders(folder: epath.Path) -> dict[int, epath.Path]:
    """Those that results.json names; before there is one, those that are there."""
    path, found = folder / "results.json", folder.glob("seed_*")
    seeds = _read_object(path).get("seeds") if path.exists() else None
    if seeds is None:
        found = [x for x in found if (x / "config.json").exists() or (x / "metrics.jsonl").exists()]
        seeds = sorted(int(x.name[5:]) for x in found)
    return {seed: folder / f"seed_{seed}" for seed in seeds}


def _read_seed(folder: epath.Path) -> Seed:
    rows, path = read_metrics(folder / "metrics.jsonl"), folder / "results.json"
    curves: dict[str, dict[int, float]] = {}
    layers: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, list) and value and None not in map(number_of, value):
                layers.setdefault(name, {})[row["step"]] = list(map(number_of, value))
            elif name != "step" and (x := number_of(value)) is not None:
                # A row that was written twice: the later one holds.
                curves.setdefault(name, {})[row["step"]] = x if math.isfinite(x) else math.nan
    training = [curve for name, curve in curves.items() if name.startswith("train/")]
    lost = missing_steps(rows, range(1, rows[-1]["step"])) if training else []
    for curve in training:
        curve |= dict.fromkeys(lost, math.nan)
    evaluated = [row for row in rows if any(name.startswith("validation/") for name in row)]
    results = {"first": evaluated[0], "final": evaluated[-1]} if evaluated else {}
    results |= _read_object(path) if path.exists() else {}
    values = {k: x for k, x in flatten_config(results).items() if not isinstance(x, list)}
    values = {k: x if (n := number_of(x)) is None else n for k, x in values.items()}
    return Seed(values, curves, layers, lost)


def _not_finite(seed: Seed) -> list[str]:
    first = {
        name: next((i for i, x in points.items() if math.isnan(x) and i not in seed.lost), None)
        for name, points in seed.curves.items()
    }
    lost = [f"metrics.jsonl lacks the rows of steps {spans(seed.lost)}."] if seed.lost else []
    return lost + [f"{name} is not finite, first at step {step}."
            for name, step in first.items() if step is not None]  # fmt: skip


def _read_object(path: epath.Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {str(value)[:40]!r} where names and values should be")
    return value


def union(items: Iterable[Iterable[Any]]) -> list[Any]:
    """All of them, each once, in the order they come."""
    return list(dict.fromkeys(one for item in items for one in item))
