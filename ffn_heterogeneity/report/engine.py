"""Draws a paper's tables, curves and claims from run directories: Markdown, CSV and PNG.

Runs find their places by their configs, whoever started them: a sweep, a script, a job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import atomic_path, read_json
from ffn_heterogeneity.papers import jreg, nucl
from ffn_heterogeneity.papers.specs import Cell, Curves, Paper, Table, printed
from ffn_heterogeneity.report import records
from ffn_heterogeneity.report.claims import COMPUTE, OPEN, whole
from ffn_heterogeneity.report.figures import Line, Panel, common_points, draw, save
from ffn_heterogeneity.report.records import Record, fill, fits, label, middle, over, value_of
from ffn_heterogeneity.report.runs import Run, Spread, read_runs, union
from ffn_heterogeneity.report.tables import UNKNOWN, csv_text, escaped_table, number

PAPERS = {paper.name: paper for paper in (nucl.PAPER, jreg.PAPER)}
BRACKETS = {
    "range": "range: lowest and highest of n runs or seeds",
    "t": "t: Student's 95% interval over n seeds (of differences: seed by seed)",
    "Wilson": "Wilson: Wilson's 95% interval over n questions",
}


class Drawn(NamedTuple):
    """One table, its cells unrounded, or the points of one figure."""

    key: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str]
    used: Sequence[str]
    shown: Sequence[Sequence[Any]] = ()  # other rows for Markdown
    shown_header: Sequence[str] = ()
    figure: Any = None


class Given(NamedTuple):
    """What a report is made of."""

    runs: list[Run]
    missing: list[tuple[str, str]]  # (sweep directory, point) that has not begun


def write_paper(name: str, paths: Sequence[str], output: str | os.PathLike) -> str:
    """Writes each table and figure (Markdown, CSV, PNG) and `<name>.md`; returns its text.

    Args:
      paths: work directories of runs, or of sweeps (which stand for their points); those of
        scripts/evaluate.py give their accuracies to the run whose model they evaluated.

    Raises:
      ValueError: `output` is a file, a path is no run, or an analysis is damaged; the message
        names it.
    """
    output, paper = epath.Path(output), PAPERS[name]
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output={output} is a file: give a directory")
    given = gather(paths)
    everything = list(draw_all(paper, given.runs))
    parts = [f"# {name.upper()}: tables and figures", printed(name)["paper"] + "."]
    for one in everything:
        section, picture = _section(one), output / f"{one.key}.png"
        _write(output / f"{one.key}.csv", csv_text(one.header, one.rows))
        if one.figure is not None:
            save(one.figure, picture)
            section += f"\n\n![{one.key}]({picture.name})"
        else:
            picture.unlink(missing_ok=True)  # of runs that were reported here before
        _write(output / f"{one.key}.md", section + "\n")
        parts.append(section)
    used = {path for one in everything for path in one.used}
    rows = [(run.label, run.state, "yes" if run.path in used else "no") for run in given.runs]
    rows += [(f"{os.path.basename(sweep)}/{x}", "not run", "no") for sweep, x in given.missing]
    parts += ["## Runs", escaped_table(("run", "state", "used above"), rows)]
    text = "\n\n".join(parts) + "\n"
    _write(output / f"{name}.md", text)
    return text


def gather(paths: Sequence[str]) -> Given:
    """The runs at `paths`; a sweep stands for its points, in its order.

    Raises:
      ValueError: see `read_runs`.
    """
    places, missing = [], []
    for path in paths:
        listing = epath.Path(path) / "sweep.json"
        for point in read_json(listing)["points"] if listing.exists() else ({"name": ""},):
            folder = epath.Path(path) / point["name"]
            if not point["name"] or (folder / "config.json").exists():
                places.append(os.fspath(folder))
            else:
                missing.append((os.fspath(path), point["name"]))
    return Given(read_runs(places) if places or not missing else [], missing)


def draw_all(paper: Paper, runs: Sequence[Run]) -> Iterator[Drawn]:
    """The claims, the paper's tables and figures in their order, then ours."""
    done, begun = (
        {name: records.records(runs, kind, begun=flag) for name, kind in paper.kinds.items()}
        for flag in (False, True)
    )
    specs = [*paper.tables, *paper.curves]
    yield draw_claims(paper, done)
    for spec in sorted(specs, key=lambda spec: bool(spec.title)):
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
    if spec.settings:
        return _settings(spec, source, chosen)
    labels = source.get("labels", list(spec.labels))
    columns = [x for x in spec.columns if x != "*"] or source["columns"]
    tasks = (
        union(m.tasks for r in chosen for m in r.members.values()) if "*" in spec.columns else []
    )
    rows: dict[tuple, list] = {}
    for row in source.get("rows", ()):
        name = tuple(row[: len(labels)])
        rows[(*name, "paper")] = row[len(labels) :]
        if spec.kinds:
            rows[(*name, "here")] = [None] * len(columns)
    rows |= {row[: len(labels) + 1]: list(row[len(labels) + 1 :]) for row in spec.rows}
    groups: dict[tuple, list[Record]] = {}
    known = [[*x.names, *(label(r, x) for r in chosen)] for x in spec.labels.values()]
    for record in sorted(chosen, key=lambda r: [
        names.index(label(r, x)) for x, names in zip(spec.labels.values(), known, strict=True)
    ]):  # fmt: skip
        name = (*(label(record, x) for x in spec.labels.values()), fill(record, spec.here))
        groups.setdefault((*name[:-1], name[-1] + record.differs), []).append(record)
    used = []
    for name, group in groups.items():
        cells = [_cell(spec, spec.columns[x], group) for x in spec.columns if x != "*"]
        cells += [over([m.tasks[x] for r in group for m in r.members.values() if x in m.tasks])
                  for x in tasks]  # fmt: skip
        if any(cell is not None for cell in cells):
            rows.pop((*name[:-1], "here"), None) if name[-1] != "here" else None
            rows[name] = cells
            used += [path for record in group for path in record.used]
    order = {name: i for i, name in enumerate(union([key[:-1]] for key in rows))}
    table = [(*key, *rows[key]) for key in sorted(rows, key=lambda key: order[key[:-1]])]
    header = (*labels, "from", *columns, *tasks)
    if not source and len({row[len(labels)] for row in table}) < 2:  # one origin, no column for it
        table = [(*row[: len(labels)], *row[len(labels) + 1 :]) for row in table]
        header = (*labels, *columns, *tasks)
    notes = [*spec.notes, *source.get("notes", ()), *_apart(paper, chosen)]
    notes += [source["unit"]] if "unit" in source else []
    return Drawn(spec.key, _title(spec, source.get("caption")), header, table, notes, used)


def _cell(spec: Table, column: Any, group: Sequence[Record]) -> Any:
    """The value of the first record that has it; `best`: of the one where that is lowest."""
    path, where = column if isinstance(column, Cell) else (column, {})
    group = [record for record in group if fits(record, where)]
    if spec.best:
        ranked = [(middle(value_of(r, spec.best)), i) for i, r in enumerate(group)]
        group = [group[i] for value, i in sorted(x for x in ranked if x[0] is not None)[:1]]
    values = [value_of(record, path) for record in group]
    return next((value for value in values if value is not None), None)


def _settings(spec: Table, source: dict, chosen: Sequence[Record]) -> Drawn:
    rows = []
    for name, *cells in source["rows"]:
        key = spec.settings.get(name, "")
        values = [r.config.get(key, m.run.values.get(key)) for r in chosen
                  for m in r.members.values()]  # fmt: skip
        here = ", ".join(union([str(x)] for x in values if x is not None))
        rows.append((name, *cells, here or None))
    header = (*source["labels"], *source["columns"], "here")
    used = [path for record in chosen for path in record.used]
    return Drawn(spec.key, _title(spec, source["caption"]), header, rows, source.get("notes", ()),
                 used)  # fmt: skip


def _title(spec: Table | Curves, caption: str | None) -> str:
    if caption is None:
        return spec.title
    name = spec.key.replace("_", " ").capitalize()
    return f"{name}: {caption.rstrip('.')}"


def _apart(paper: Paper, chosen: Sequence[Record]) -> list[str]:
    """What keeps the numbers of these records from being compared."""
    result = []
    for key in paper.comparable:
        values = union([str(m.run.config[key])] for r in chosen for m in r.members.values()
                       if key in m.run.config and r.config.get(key) is not None)  # fmt: skip
        if len(values) > 1:
            result.append(f"These runs differ in {key} ({', '.join(values)}): not comparable.")
    return result


def draw_claims(paper: Paper, done: dict) -> Drawn:
    """Every claim wherever it can be looked at."""
    rows, used = [], []
    for claim in paper.claims:
        groups: dict[str, list[Record]] = {}
        for record in done[claim.kind]:
            if fits(record, claim.where):
                groups.setdefault(label(record, claim.run_on) + record.differs, []).append(record)
        for name, chosen in groups.items():
            parts = COMPUTE[claim.compute](chosen, **claim.settings)
            if parts:
                rows.append((claim.statement, claim.stated, name, *whole(parts)))
                used += [path for record in chosen for path in record.used]
        if claim.statement not in [row[0] for row in rows]:
            rows.append((claim.statement, claim.stated, None, None, OPEN))
    notes = (
        "Of several seeds, compared seed by seed, the 95% interval decides: a claim cannot be told "
        "where it holds 0. Of one seed its number decides, which says nothing of other seeds.",
    )
    header = ("statement", "stated", "run on", "measured", "verdict")
    return Drawn("claims", "Claims: what the numbers below say", header, rows, notes, used)


# ---- curves


def draw_curves(spec: Curves, paper: Paper, chosen: Sequence[Record]) -> Drawn:
    """A figure, and its points as (panel, line, seed, x, y)."""
    panels: dict[tuple[str, str], dict[str, dict[Any, dict[float, float]]]] = {}
    used = []
    for record in chosen:
        for ylabel, path in spec.y.items():
            for line, points in _lines(spec, record, path).items():
                panel = label(record, spec.panel) + record.differs * spec.by_step
                lines = panels.setdefault((panel, ylabel), {})
                for seed, values in points.items():
                    lines.setdefault(line, {}).setdefault(seed, {}).update(values)
                used += record.used
    rows = [(panel, ylabel, line, seed, x, y) for (panel, ylabel), lines in panels.items()
            for line, points in lines.items() for seed, values in points.items()
            for x, y in sorted(values.items())]  # fmt: skip
    ends, drawn = [], []
    for (panel, ylabel), lines in panels.items():
        shapes = []
        for line, points in lines.items():
            x, y = common_points(list(points.values()))
            more = f" (mean of {len(points)} seeds)" if len(points) > 1 else ""
            shapes.append(Line(line + more, x, y))
            cells = [f"{x[i]}: {number(over(list(map(float, y[:, i]))), 6)}" for i in (0, -1) if x]
            ends.append((panel, line, ylabel, *(cells or (UNKNOWN, UNKNOWN))))
        drawn.append(Panel(panel, shapes, spec.xlabel or spec.x, ylabel, spec.log))
    caption = printed(paper.name)["figures"].get(spec.key)
    notes = ["First and last point of each line, x: y; the CSV holds them all."]
    return Drawn(
        spec.key, _title(spec, caption), ("panel", "value", "line", "seed", spec.x, "y"), rows,
        [*notes, *_apart(paper, chosen)], used, ends, ("panel", "line", "value", "first", "last"),
        draw(drawn, columns=max(len(spec.y), min(3, len(drawn)))) if drawn else None,
    )  # fmt: skip


def _lines(spec: Curves, record: Record, path: Any) -> dict[str, dict]:
    """line -> seed -> x -> y."""
    name, members = label(record, spec.line) + record.differs, record.members.items()
    if spec.x == "step":
        result = {seed: dict(m.curves[path]) for seed, m in members if m.curves.get(path)}
        return {name: result} if result else {}
    if spec.x != "layer":
        x, y = record.config.get(spec.x), middle(value_of(record, path))
        return {name: {None: {x: y}}} if None not in (x, y) else {}
    layers = {seed: m.layers[path] for seed, m in members if m.layers.get(path)}
    steps = sorted(set.intersection(*map(set, layers.values()))) if layers else []
    some = [steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(5, len(steps)))]
    chosen = some * (len(steps) > 1) if spec.by_step else steps[-1:]
    return {f"step {step:,d}" if spec.by_step else name:
            {seed: dict(enumerate(values[step], 1)) for seed, values in layers.items()}
            for step in chosen}  # fmt: skip


# ---- text


def _section(one: Drawn) -> str:
    rows = [[x if isinstance(x, str) else number(x) for x in row] for row in one.shown or one.rows]
    kinds = {x.kind for row in one.rows for x in row if isinstance(x, Spread)}
    text = " ".join(str(cell) for row in rows for cell in row)
    legend = [why for kind, why in BRACKETS.items() if kind in kinds or f"] {kind} n=" in text]
    notes = list(one.notes)
    notes += ["In brackets, " + "; ".join(legend) + "."] if legend else []
    notes += ['"-": not measured here, or not printed.'] if any("-" in row for row in rows) else []
    header = one.shown_header or one.header
    table = escaped_table(header, rows) if rows else "Nothing was measured."
    return "\n\n".join([f"## {one.title}", table, *notes])


def _write(path: epath.Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text)
