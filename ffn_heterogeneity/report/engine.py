"""Draws a paper's tables, curves and claims from run directories: Markdown, CSV and PNG.

Runs find their places by their configs, whoever started them: a sweep, a script, a job.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import read_json
from ffn_heterogeneity.papers import jreg, massive_weights, nucl
from ffn_heterogeneity.papers.specs import (
    Against,
    Cell,
    Curves,
    Mean,
    Paper,
    Scored,
    Share,
    Table,
    printed,
)
from ffn_heterogeneity.report import tables
from ffn_heterogeneity.report.claims import COMPUTE, OPEN, whole
from ffn_heterogeneity.report.figures import Panel, draw, of_seeds, save_if
from ffn_heterogeneity.report.records import Record, fill, fits, label, records, value_of
from ffn_heterogeneity.report.runs import Run, read_runs, union
from ffn_heterogeneity.report.tables import markdown_table, middle, number

PAPERS = {paper.name: paper for paper in (nucl.PAPER, jreg.PAPER, massive_weights.PAPER)}
BRACKETS = {
    "range": "range: lowest and highest of n runs or seeds",
    "t": "t: Student's 95% interval over n seeds (of differences: seed by seed)",
    "Wilson": "Wilson: Wilson's 95% interval over n questions",
    "bootstrap": "bootstrap: 95% percentiles over resamples of n questions or windows",
    "Fieller": "Fieller: Fieller's 95% interval of a ratio over n seeds",
}


class Drawn(NamedTuple):
    """One table, its cells unrounded, or the points of one figure."""

    key: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str]
    figure: Any = None  # shows the rows


def write_paper(name: str, paths: Sequence[str], output: str | os.PathLike) -> str:
    """Writes each table and figure (Markdown, CSV, PNG) and `<name>.md`; returns its text.

    Args:
      paths: work directories of runs, or of sweeps (which stand for their points); those of
        scripts/evaluate.py give their accuracies to the run whose model they evaluated.

    Raises:
      ValueError: `output` is a file, a path is no run, or an analysis is damaged; the message
        names it.
    """
    output, paper = tables.directory(output), PAPERS[name]
    runs, missing = gather(paths)
    done, begun = ({name: records(runs, kind, begun=flag) for name, kind in paper.kinds.items()}
                   for flag in (False, True))  # fmt: skip
    parts = [f"# {name.upper()}: tables and figures", printed(name)["paper"] + "."]
    for one in draw_all(paper, done, begun):
        parts.append(_section(one, save_if(one.figure, output / f"{one.key}.png")))
        tables.write_text(output / f"{one.key}.csv", tables.csv_text(one.header, one.rows))
        tables.write_text(output / f"{one.key}.md", parts[-1] + "\n")
    used = {path for chosen in begun.values() for record in chosen for path in record.used}
    rows = [(run.label, run.state, "yes" if run.path in used else "no") for run in runs]
    rows += [(name, "not run", "no") for name in missing]
    parts += ["## Runs", markdown_table(("run", "state", "used"), rows)]
    return tables.write_text(output / f"{name}.md", "\n\n".join(parts) + "\n")


def gather(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs at `paths`; a sweep stands for its points, in its order; and those not begun.

    Raises:
      ValueError: see `read_runs`.
    """
    places, missing = [], []
    for path in map(epath.Path, paths):
        listing = path / "sweep.json"
        if not listing.exists():
            places.append(os.fspath(path))
            continue
        for point in read_json(listing)["points"]:
            if (path / point["name"] / "config.json").exists():
                places.append(os.fspath(path / point["name"]))
            else:
                missing.append(f"{path.name}/{point['name']}")
    return (read_runs(places) if places or not missing else []), missing


def draw_all(paper: Paper, done: dict, begun: dict) -> Iterator[Drawn]:
    """The claims, the paper's tables and figures in their order, then ours.

    Curves are of the runs that have begun, all else of those that are done.
    """
    specs = {key: Table(key) for key in printed(paper.name)["tables"]}
    specs |= {spec.key: spec for spec in paper.tables}
    yield draw_claims(paper, done)
    for spec in sorted([*specs.values(), *paper.curves], key=lambda spec: bool(spec.title)):
        chosen = done if isinstance(spec, Table) else begun
        chosen = [r for kind in spec.kinds for r in chosen[kind] if fits(r, spec.where)]
        if isinstance(spec, Table):
            yield draw_table(spec, paper, chosen)
        else:
            yield draw_curves(spec, paper, chosen)


# ---- tables


def draw_table(spec: Table, paper: Paper, chosen: Sequence[Record]) -> Drawn:
    """The paper's rows, below each what was measured here; then what the paper has not."""
    source = printed(paper.name)["tables"].get(spec.key, {})
    title = _title(spec, source.get("caption"))
    columns = dict(spec.columns or dict.fromkeys(source["columns"]))
    if columns.pop("*", False):
        tasks = union(m.tasks for r in chosen for m in r.members.values())
        columns |= {name: Scored(name) for name in tasks}
    labels = source.get("labels", list(spec.labels))
    # Labels of a row -> where it is from -> cells.
    rows: dict[tuple, dict[str, list]] = {}
    for row in source.get("rows", ()):
        origins = {"paper": row[len(labels) :]}
        if spec.kinds:
            origins["here"] = [None] * len(columns)
        rows[tuple(row[: len(labels)])] = origins
    for row in spec.rows:
        rows.setdefault(row[: len(labels)], {})["paper"] = list(row[len(labels) :])
    for (name, origin), group in _groups(spec, columns.values(), chosen).items():
        cells = [_cell(spec, column, group) for column in columns.values()]
        if any(cell is not None for cell in cells):
            rows.setdefault(name, {}).pop("here", None)
            rows[name][origin] = cells
    table = [(*name, origin, *cells) for name, origins in rows.items()
             for origin, cells in origins.items()]  # fmt: skip
    if not source:  # a column of ours that nobody measured is none
        measured = [any(x is not None for x in column) for column in zip(*table, strict=True)]
        columns = [x for x, own in zip(columns, measured[len(labels) + 1 :], strict=False) if own]
        keep = [True] * (len(labels) + 1) + measured[len(labels) + 1 :]
        table = [tuple(itertools.compress(row, keep)) for row in table]
    notes = (*spec.notes, *source.get("notes", ()), *filter(None, [source.get("unit")]))
    return Drawn(spec.key, title, (*labels, "from", *columns), table, notes)


def _groups(
    spec: Table, columns: Iterable[Any], chosen: Sequence[Record]
) -> dict[tuple, list[Record]]:
    """(labels, from) -> the records of a row, in the order of the labels' names.

    Where the labels leave a cell two values, each record has a row, and "from" says what it is.
    """
    names = [[*x.names, *(label(r, x) for r in chosen)] for x in spec.labels.values()]
    groups: dict[tuple, list[Record]] = {}
    for record in chosen:
        name = tuple(label(record, x) for x in spec.labels.values())
        groups.setdefault((name, fill(record, spec.here) + record.differs), []).append(record)
    for (name, origin), group in list(groups.items()):
        if not spec.best and any(_values(column, group) > 1 for column in columns):
            del groups[name, origin]
            for record in group:
                own = [k for k in record.kind.shown if len({r.key.get(k) for r in group}) > 1]
                told = ", ".join([origin, *(f"{k} {record.config.get(k)}" for k in own)])
                groups.setdefault((name, told), []).append(record)
    return dict(sorted(groups.items(), key=lambda item: [
        known.index(x) for known, x in zip(names, item[0][0], strict=True)
    ]))  # fmt: skip


def _values(column: Any, group: Sequence[Record]) -> int:
    """How many different values the records have for one cell."""
    if isinstance(column, Mean):
        return max(_values(cell, group) for cell in column.cells)
    path, where = column if isinstance(column, Cell) else (column, {})
    path = path.path if isinstance(path, (Against, Share)) else path
    values = [value_of(record, path) for record in group if fits(record, where)]
    return len({repr(value) for value in values if value is not None})


def _cell(spec: Table, column: Any, group: Sequence[Record]) -> Any:
    """The value of the first record that has it; `best`: of the one where that is lowest."""
    if isinstance(column, Mean):
        cells = [middle(_cell(spec, one, group)) for one in column.cells]
        return None if None in cells else float(np.mean(cells))
    path, where = column if isinstance(column, Cell) else (column, {})
    group = [record for record in group if fits(record, where)]
    if spec.best:
        ranked = [(middle(value_of(r, spec.best)), i) for i, r in enumerate(group)]
        group = [group[i] for value, i in sorted(x for x in ranked if x[0] is not None)[:1]]
    values = [value_of(record, path) for record in group]
    return next((value for value in values if value is not None), None)


def _title(spec: Table | Curves, caption: str | None) -> str:
    if caption is None:
        return spec.title
    name = spec.key.replace("_", " ").capitalize()
    return f"{name}: {caption.rstrip('.')}"


def draw_claims(paper: Paper, done: dict) -> Drawn:
    """Every claim wherever it can be looked at."""
    rows = []
    for claim in paper.claims:
        groups: dict[str, list[Record]] = {}
        for record in done[claim.kind]:
            if fits(record, claim.where):
                groups.setdefault(label(record, claim.run_on) + record.differs, []).append(record)
        for name, chosen in groups.items():
            parts = COMPUTE[claim.compute](chosen, **claim.settings)
            if parts:
                rows.append((claim.statement, claim.stated, name, *whole(parts)))
        if claim.statement not in [row[0] for row in rows]:
            rows.append((claim.statement, claim.stated, None, None, OPEN))
    notes = (
        "Of several seeds, compared seed by seed, the 95% interval decides: a claim cannot be told "
        "where it holds 0. Of one seed its number decides, which says nothing of other seeds.",
    )
    header = ("statement", "stated", "run on", "measured", "verdict")
    return Drawn("claims", "Claims: what the numbers below say", header, rows, notes)


# ---- curves


def draw_curves(spec: Curves, paper: Paper, chosen: Sequence[Record]) -> Drawn:
    """A figure, and its points as (panel, line, seed, x, y)."""
    panels: dict[tuple[str, str], dict[str, dict[Any, dict[float, float]]]] = {}
    for record in chosen:
        panel = label(record, spec.panel) + record.differs * spec.by_step
        for ylabel, path in spec.y.items():
            for line, points in _lines(spec, record, path).items():
                lines = panels.setdefault((panel, ylabel), {}).setdefault(line, {})
                for seed, values in points.items():
                    lines.setdefault(seed, {}).update(values)
    rows, drawn = [], []
    for (panel, ylabel), lines in panels.items():
        shapes = []
        for line, points in lines.items():
            rows += [(panel, ylabel, line, seed, x, y) for seed, values in points.items()
                     for x, y in sorted(values.items())]  # fmt: skip
            shapes.append(of_seeds(line, list(points.values())))
        drawn.append(Panel(panel, shapes, spec.xlabel or spec.x, ylabel, spec.log))
    title = _title(spec, printed(paper.name)["figures"].get(spec.key))
    columns = len(spec.y) if len(spec.y) > 1 else min(3, len(drawn))
    figure = draw(drawn, columns=columns) if drawn else None
    header = ("panel", "value", "line", "seed", spec.x, "y")
    return Drawn(spec.key, title, header, rows, (), figure)


def _lines(spec: Curves, record: Record, path: Any) -> dict[str, dict]:
    """line -> seed -> x -> y."""
    name, members = label(record, spec.line) + record.differs, record.members.items()
    if spec.x == "step":
        result = {seed: m.seed.curves[path] for seed, m in members if m.seed.curves.get(path)}
        return {name: result} if result else {}
    if spec.x != "layer":
        x, y = record.config.get(spec.x), middle(value_of(record, path))
        return {name: {None: {x: y}}} if None not in (x, y) else {}
    layers = {seed: m.seed.layers[path] for seed, m in members if m.seed.layers.get(path)}
    steps = sorted(set.intersection(*map(set, layers.values()))) if layers else []
    some = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(5, len(steps)))]
    chosen = some * (len(steps) > 1) if spec.by_step else steps[-1:]
    return {f"step {step:,d}" if spec.by_step else name:
            {seed: dict(enumerate(values[step], 1)) for seed, values in layers.items()}
            for step in chosen}  # fmt: skip


# ---- text


def _section(one: Drawn, picture: str) -> str:
    title = f"## {one.title}"
    if not one.rows:
        return "\n\n".join([title, "Nothing was measured.", *one.notes])
    if picture:
        return "\n\n".join([title, *one.notes, f"Points: {one.key}.csv.", picture])
    rows = [[number(x) for x in row] for row in one.rows]
    text = " ".join(cell for row in rows for cell in row)
    legend = [why for kind, why in BRACKETS.items() if f"] {kind} n=" in text]
    notes = list(one.notes)
    notes += ["In brackets, " + "; ".join(legend) + "."] if legend else []
    notes += ['"-": not measured here, or not printed.'] if any("-" in row for row in rows) else []
    return "\n\n".join([title, markdown_table(one.header, rows), *notes])
