"""Comparison of runs: differing settings, results and curves (`scripts/report.py`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas

from ffn_heterogeneity.io.files import write_text
from ffn_heterogeneity.report import stats, tables
from ffn_heterogeneity.report.cells import Frame, last, with_cells
from ffn_heterogeneity.report.figures import draw, panels_of, save_if
from ffn_heterogeneity.report.frame import SETTINGS, everything, plain, progress
from ffn_heterogeneity.report.stats import middle
from ffn_heterogeneity.report.tables import UNKNOWN, number
from ffn_heterogeneity.wording import as_text, markdown_table

FIRST_ROWS = ("validation/", "test/", "best/", "tokens_per_second", "compile_seconds")
FIRST_PANELS = ("validation/nll", "train/loss")
MAX_PANELS = 6
NAMED = 4  # runs in a heading
DIGITS = 6
NOTE = "Curves of several seeds are means, with bands from the lowest to the highest."


class Runs(NamedTuple):
    """Several runs; runs with the same "label" are the seeds of one work directory.

    Attributes:
      settings: one row per run; "folder" is the work directory, "label" its path below the common
        parent directory.
      rows: measurements, without rows of single layers.
      curves: the same for every step.
    """

    settings: Frame
    rows: Frame
    curves: Frame


def write_report(paths: Sequence[str], output: str | os.PathLike, name: str = "compare") -> str:
    """Write `<output>/<name>.md` and, if there are curves, `<name>.png`; return the text.

    Args:
      paths: work directories; of sweeps, folders and archives every run in them.

    Raises:
      ValueError: `output` is a file; a path contains no run, or a file in it is damaged.
    """
    output, runs = tables.directory(output), read_runs(paths)
    labels = runs.settings["label"].unique()
    if name == "compare" and len(labels) < 2:
        given = ", ".join(map(os.fspath, paths))
        raise ValueError(f"--compare needs two or more runs, given: {given}")
    picture = save_if(draw_runs(runs), output / f"{name}.png")
    rows = differing_keys(runs)
    keys = markdown_table(("config key", *labels), rows) if rows else "None: the configs are equal."
    header, rows = numbers(runs)
    table = markdown_table(header, rows) if rows else "None yet."
    notes = [f"- {as_text(note)}." for note in notes_of(runs)]
    several = len(labels) > 1
    parts = [
        "# " + as_text(", ".join(labels) if len(labels) <= NAMED else f"{len(labels)} runs"),
        markdown_table(("run", "state", "directory"), list(states(runs))),
        *(["## Config keys that differ", keys] if several else []),
        *("## Numbers", table, *tables.legend(table)),
        *([f"Differences and ratios are against {labels[0]}."] if several else []),
        *("## Curves", picture or "No run has any."),
        *([NOTE] if len(runs.settings) > len(labels) else []),
        *(["## Notes", "\n".join(notes)] if notes else []),
    ]
    return write_text(output / f"{name}.md", "\n\n".join(parts) + "\n")


def read_runs(paths: Sequence[str]) -> Runs:
    """The runs in some directories, in the order of the paths."""
    places = [path if "://" in path else os.path.realpath(path) for path in map(os.fspath, paths)]
    rows, curves, settings = everything(*places)
    settings["folder"] = settings.index.str.replace(r"/seed_\d+$", "", regex=True)
    # For a run over seeds, a sweep or a job of stages, the runs in its folders.
    holders = settings.index.isin(settings.index.map(os.path.dirname))
    settings = settings[~holders | settings.index.isin(curves["run"])]
    names = settings.folder.unique()
    labels = dict(zip(names, tables.shorter(names), strict=True))
    settings = settings.assign(label=settings.folder.map(labels))
    made = (plain(one[one.layer.isna()]) for one in (rows, curves))
    return Runs(settings, *(one.assign(label=one["run"].map(settings["label"])) for one in made))


def states(runs: Runs) -> Iterator[tuple[str, str, str]]:
    """(label, progress, work directory) of each."""
    known = progress(runs.rows, runs.curves)
    for (label, folder), its in runs.settings.groupby(["label", "folder"], sort=False):
        open_ones = [run for run in its.index if known.get(run) != "finished"]
        state = known.get(open_ones[0], "not begun") if open_ones else "finished"
        yield label, f"{len(its)} seeds, {state}" if len(its) > 1 else state, folder


def differing_keys(runs: Runs) -> list[list[str]]:
    """[key, a value per run] of the config keys that are not the same in all runs.

    Values differ if their JSON does: "1" is not 1, and 1 is not true.
    """
    settings = runs.settings.drop_duplicates("label").filter(regex=f"^{SETTINGS}")
    rows = [[key.removeprefix(SETTINGS), *map(text_of, its)] for key, its in settings.items()]
    return [row for row in rows if len(set(row[1:])) > 1]


def text_of(value: Any) -> str:
    """A setting as JSON; "unset" where it is missing."""
    if pandas.api.types.is_scalar(value) and pandas.isna(value):
        return "unset"
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, default=float)


def numbers(runs: Runs) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a value per run, and difference and ratio to the first run's.

    Values are those of the last evaluation so far.
    """
    begun = runs.curves[runs.curves.what.str.startswith("validation/")]
    begun = begun[~begun["run"].isin(runs.rows["run"])]
    found = with_cells(last(pandas.concat([runs.rows, begun], ignore_index=True)))
    found["name"] = (found.task.astype(object) + " ").where(found.task.notna(), "") + found.what
    by = found.groupby(["name", "label"], sort=False)["cell"]
    cells = {key: _over_seeds(list(its)) for key, its in by}
    names = dict.fromkeys(name for name, _ in cells)
    names = sorted(names, key=lambda name: [not name.startswith(x) for x in FIRST_ROWS])
    first, *others = runs.settings["label"].unique()
    header, rows = ["", first], [[name, number(cells.get((name, first)), DIGITS)] for name in names]
    for label in others:
        header += [label, "difference", "ratio"]
        for row in rows:
            value, base = (cells.get((row[0], x)) for x in (label, first))
            row += [number(value, DIGITS), *_against(middle(value), middle(base))]
    return header, rows


def _over_seeds(values: list[Any]) -> Any:
    means = list(map(middle, values))
    return stats.interval(means) if len(set(means)) > 1 else values[0]


def _against(value: float | None, first: float | None) -> tuple[str, str]:
    """(difference, ratio) of two numbers, or of means over seeds."""
    if value is None or first is None:
        return UNKNOWN, UNKNOWN
    sign = "+" if value > first else ""
    return sign + number(value - first), number(value / first, 5) if first else UNKNOWN


def notes_of(runs: Runs) -> Iterator[str]:
    """Notes about missing and non-finite results."""
    for run, label in runs.settings[~runs.settings.index.isin(runs.rows["run"])]["label"].items():
        yield f"{label}: without results: {os.path.basename(run)}"
    bad = runs.curves[~np.isfinite(runs.curves["value"])]
    for (label, what), its in bad.groupby(["label", "what"], sort=False):
        yield f"{label}: {what} is not finite, first at step {its['step'].min()}"
    for (label, run), its in lost(runs.curves).groupby(["label", "run"], sort=False):
        steps = [f"{x} to {y}" if x < y else f"{x}" for x, y in its[["step", "end"]].values]
        yield f"{label}: {run}/metrics.jsonl lacks the rows of steps {', '.join(steps)}"


def lost(curves: Frame) -> Frame:
    """Training steps of which a crash took the rows: label, run, the first ("step") and the last
    ("end") of each gap."""
    gaps = []
    for name, its in curves.groupby(["label", "run"], sort=False):
        there = sorted(set(its[its.what.str.startswith("train/")]["step"]))
        for before, step in pairwise([0, *there, its["step"].max()] if there else []):
            gaps += [(*name, before + 1, step - 1)] if step > before + 1 else []
    return pandas.DataFrame(gaps, columns=["label", "run", "step", "end"])


def choose_panels(runs: Runs) -> list[str]:
    """Metrics to draw: validation and training loss, then what most runs have."""
    having = runs.curves.groupby("what", sort=False)["label"].nunique()
    names = having.sort_values(ascending=False, kind="stable").index
    names = [x for x in names if x.startswith("validation/") or x in FIRST_PANELS]
    return [*dict.fromkeys([*(x for x in FIRST_PANELS if x in names), *names])][:MAX_PANELS]


def draw_runs(runs: Runs):
    """The matplotlib figure: a panel per metric, a colour per run; None where nothing has begun.

    Lines have gaps where a value is not finite, or its row is lost.
    """
    rows = pandas.concat([runs.curves, lost(runs.curves).assign(what="train/loss")])
    rows = rows.assign(y=rows["value"].where(np.isfinite(rows["value"])), value="", x=rows["step"])
    rows = rows.assign(panel=rows.what, line=rows.label, seed=rows["run"])
    panels = [rows[rows.what == name] for name in choose_panels(runs)]
    labels = runs.settings["label"].unique()
    return draw(panels_of(pandas.concat(panels), lines=labels)) if panels else None
