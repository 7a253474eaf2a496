"""A paper's tables, figures and claims, drawn of runs beside what it prints: Markdown, CSV, PNG.

Runs find their places by their settings, whoever started them: a sweep, a script, a job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas
from etils import epath

from ffn_heterogeneity.io.files import write_text
from ffn_heterogeneity.io.runs import SWEEP, read_listing
from ffn_heterogeneity.report import frame, stats, tables, tidy
from ffn_heterogeneity.report.figures import Panel, draw, heat, of_seeds, save_if
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN, middle
from ffn_heterogeneity.report.tables import UNKNOWN, number
from ffn_heterogeneity.report.tidy import Frame, is_missing, spread
from ffn_heterogeneity.wording import markdown_table

Runs = Mapping[str, Frame]
MEASURED = ("value", "low", "high", "n", "how")  # fields that `tidy.spread` reads
BEGUN = ("train/loss",)  # of a report without curves: it tells which runs have begun
UNTOLD = (
    "Of several seeds, compared seed by seed, the 95% interval decides: a claim cannot be told "
    "where it holds 0. Of one seed its number decides, which says nothing of other seeds."
)


class Paper(NamedTuple):
    """A report: what it draws, in this order, from functions of runs (kind -> rows).

    A function's name is its key in the JSON, which has its texts: "tables" and "figures" under the
    paper's captions, "ours" under titles, "claims".

    Attributes:
      printed: {"paper": its title, "tables": {key: {caption, labels, cells, here, columns, rows,
        notes}}, "figures": {key: {caption, panel, line, x, xlabel, log, heat}}, "ours": {"tables":
        {key: {title, ..}}, "figures": {key: {title, ..}}}, "claims": {key: {statement, stated,
        run on, part, sign}}}; null is not printed, or cut off in the copy at hand.
      functions: by name. Of a table: runs -> rows, the name of their cell in "column" (else
        "what"); `tidy.labelled` gives them the labels, unless they have "from". Several rows of a
        cell are its seeds. Rows whose labels are those of a printed row stand below it; the others
        follow. A printed table without a function is one that nobody can measure here. Of a
        figure: runs -> rows that `tidy.points` gives their place. Of a claim: runs -> rows that
        `tidy.claimed` gives their verdict.
        And KINDS, name -> what picks its runs from the rows of all. Where they are needed:
        CURVE_KINDS, likewise from their curves; CURVES, the measurements of metrics.jsonl that are
        read; SETTINGS, what a setting is in runs whose config does not have it.
    """

    name: str
    printed: Mapping[str, Any]
    functions: Mapping[str, Any]


class Drawn(NamedTuple):
    """One table, its cells unrounded, or the points of one figure."""

    key: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()
    figure: Any = None  # shows the rows


def write_paper(paper: Paper, paths: Sequence[str], output: str | os.PathLike) -> str:
    """Writes each table and figure (Markdown, CSV, PNG) and `<name>.md`; returns its text.

    Args:
      paths: work directories of runs and sweeps, folders and archives of them; those of
        scripts/evaluate.py give their accuracies to the run whose model they evaluated.

    Raises:
      ValueError: `output` is a file, a path holds no run, or a file is damaged; the message names
        it.
    """
    output = tables.directory(output)
    states, runs = gather(paper, paths)
    parts = [f"# {paper.name.upper()}: tables and figures", paper.printed["paper"] + "."]
    for one in list(draw_all(paper, runs)):
        parts.append(_section(one, save_if(one.figure, output / f"{one.key}.png")))
        write_text(output / f"{one.key}.csv", _csv(one))
        write_text(output / f"{one.key}.md", parts[-1] + "\n")
    used = set().union(*(one[name] for one in runs.values() for name in ("run", "by")))
    names = dict(zip(states, tables.shorter(list(states)), strict=True))
    rows = [(names[run], state, "yes" if run in used else "no") for run, state in states.items()]
    rows += [(name, "not run", "no") for name in _not_begun(paths)]
    parts += ["## Runs", markdown_table(("run", "state", "used"), rows)]
    return write_text(output / f"{paper.name}.md", "\n\n".join(parts) + "\n")


def gather(paper: Paper, paths: Sequence[str]) -> tuple[dict[str, str], Runs]:
    """(run -> its state, kind -> rows) of the runs at `paths`."""
    of = paper.functions
    read = frame.everything(*paths, what=of.get("CURVES", BEGUN))[:2]
    rows, curves = (tidy.known(tidy.plain(one), of.get("SETTINGS", {})) for one in read)
    rows, curves = tidy.evaluated(rows).copy(), curves.copy()  # in one piece for new columns
    runs = {name: make(rows) for name, make in of["KINDS"].items()}
    runs |= {name: make(curves) for name, make in of.get("CURVE_KINDS", {}).items()}
    return tidy.progress(rows, curves), runs


def _not_begun(paths: Sequence[str]) -> Iterator[str]:
    """The points of sweeps that are not there."""
    for path in map(epath.Path, paths):
        listing = path / SWEEP
        for point in read_listing(listing)["points"] if listing.exists() else ():
            if not (path / point["name"] / "config.json").exists():
                yield f"{path.name}/{point['name']}"


def draw_all(paper: Paper, runs: Runs) -> Iterator[Drawn]:
    """The claims, the paper's tables and figures, then ours."""
    yield draw_claims(paper, runs)
    for source in (paper.printed, paper.printed.get("ours", {})):
        for key, texts in source.get("tables", {}).items():
            make = paper.functions.get(key)
            yield draw_table(key, texts, make(runs) if make else None)
        for key, texts in source.get("figures", {}).items():
            yield draw_figure(key, texts, paper.functions[key](runs))


# ---- tables


def draw_table(key: str, texts: Mapping[str, Any], made: Frame) -> Drawn:
    """The paper's rows, below each what was measured here (`made`, or None); then ours."""
    labels, columns = list(texts["labels"]), texts.get("columns", [])
    # Labels of a row -> where it is from -> column -> cell.
    rows: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in texts.get("rows", ()):
        origins = rows.setdefault(tuple(row[: len(labels)]), {})
        origins[texts.get("source", "paper")] = dict(zip(columns, row[len(labels) :], strict=True))
        if made is not None:
            origins["here"] = {}
    if made is not None:
        made = made if "from" in made.columns else tidy.labelled(made, texts)
        made = made if "column" in made.columns else made.assign(column=made["what"])
        columns = columns or _order(made["column"])
        for name, origin, cells in _measured(made, labels):
            if any(cells.get(column) is not None for column in columns):
                rows.setdefault(name, {}).pop("here", None)
                rows[name][origin] = cells
    table = [
        (*name, origin, *map(cells.get, columns))
        for name, origins in rows.items()
        for origin, cells in origins.items()
    ]
    header = (*labels, "from", *columns)
    return Drawn(key, _title(key, texts), header, table, texts.get("notes", ()))


def _order(values: Any) -> list:
    """The values, in the order of a label, or of their first rows."""
    known = values.cat.categories if hasattr(values, "cat") else values.drop_duplicates()
    return list(known[known.isin(values)])


def _measured(made: Frame, labels: Sequence[str]) -> Iterator[tuple[tuple, str, dict[str, Any]]]:
    """(labels, from, column -> cell) of each row, in the order of the labels.

    Where the labels leave a cell two values, each record has a row, and "from" says what it is.
    """
    made = made.reindex(columns=[*labels, "from", "column", "record", "told", *MEASURED])
    cells = list(map(spread, made.to_dict("records")))
    made = made.assign(cell=pandas.Series(cells, made.index, object), column=list(made["column"]))
    for name in labels:
        made[name] = pandas.Categorical(made[name], _order(made[name]))
    made = made.loc[[cell is not None for cell in cells]]
    made = made.sort_values(labels, kind="stable") if labels else made
    for key, its in made.groupby([*labels, "from"], sort=False, observed=True):
        each = {
            record: {x: stats.over(list(y)) for x, y in own.groupby("column", sort=False)["cell"]}
            for record, own in its.groupby("record", sort=False, dropna=False)
        }
        told = dict(zip(its["record"], its["told"], strict=True))
        first = {column: x for cells in reversed(each.values()) for column, x in cells.items()}
        if all(repr(x) == repr(first[name]) for one in each.values() for name, x in one.items()):
            yield key[:-1], key[-1], first
            continue
        for record, cells in each.items():
            # What others have otherwise: ", layer 2".
            apart = [
                f", {name} {x}"
                for name, x in told[record].items()
                if any(told[one].get(name) != x for one in each)
            ]
            yield key[:-1], key[-1] + "".join(apart), cells


def _title(key: str, texts: Mapping[str, Any]) -> str:
    caption = texts.get("caption", "").rstrip(".")
    return texts.get("title", f"{key.replace('_', ' ').capitalize()}: {caption}")


def draw_claims(paper: Paper, runs: Runs) -> Drawn:
    """Every claim wherever it can be looked at."""
    rows = []
    for key, texts in paper.printed.get("claims", {}).items():
        stated = (texts["statement"], texts["stated"])
        made = paper.functions[key](runs)
        made = made if "run on" in made else tidy.claimed(made, texts)
        for name, its in made.groupby("run on", sort=False, observed=True):
            told = []
            for part, own in its.groupby("part", sort=False, observed=True):
                values = [x for x in map(spread, own.to_dict("records")) if x is not None]
                told.append((part, stats.over(values), own["verdict"].iat[0]))
            rows.append((*stated, name, *whole(told)))
        if not len(made):
            rows.append((*stated, None, None, OPEN))
    header = ("statement", "stated", "run on", "measured", "verdict")
    return Drawn("claims", "Claims: what the numbers below say", header, rows, (UNTOLD,))


def whole(parts: Sequence[tuple[str, Any, str]]) -> tuple[str, str]:
    """(measured, verdict) of a claim: it holds if every part does; else which do not."""
    measured = "; ".join(f"{name} {number(value)}" for name, value, _ in parts)
    for verdict in (FAILS, OPEN):
        names = [name for name, _, its in parts if its == verdict]
        if names:
            return measured, verdict + (f" ({'; '.join(names)})" if len(parts) > 1 else "")
    return measured, HOLDS


# ---- figures


def draw_figure(key: str, texts: Mapping[str, Any], made: Frame) -> Drawn:
    """A figure, and its points."""
    made, x_name = tidy.points(made, texts), texts.get("x", "step")
    rows, panels, figure = [], [], None
    label, log = texts.get("xlabel", x_name), texts.get("log", False)
    for (title, ylabel), its in made.groupby(["panel", "value"], sort=False, observed=True):
        lines = []
        for line, of_line in its.groupby("line", sort=False, observed=True):
            seeds = []
            for seed, of_seed in of_line.groupby("seed", sort=False, dropna=False):
                seeds.append(dict(sorted(zip(of_seed["x"], of_seed["y"], strict=True))))
                name = None if is_missing(seed) else seed
                rows += [(title, ylabel, line, name, *point) for point in seeds[-1].items()]
            lines.append(of_seeds(line, seeds))
        panels.append(Panel(title, lines, label, ylabel, log))
    if panels:
        several = made["value"].nunique()
        columns = several if several > 1 else 3
        figure = heat(panels) if texts.get("heat") else draw(panels, columns=columns)
    header = ("panel", "value", "line", "seed", x_name, "y")
    return Drawn(key, _title(key, texts), header, rows, (), figure)


# ---- text


def _csv(one: Drawn) -> str:
    """The cells as CSV, numbers unrounded; of several runs their mean; absent ones as "-"."""
    cells = [[UNKNOWN if cell is None else middle(cell) for cell in row] for row in one.rows]
    table = pandas.DataFrame(cells, columns=list(one.header), dtype=object)
    return table.to_csv(index=False, lineterminator="\n", na_rep="nan")


def _section(one: Drawn, picture: str) -> str:
    title = f"## {one.title}"
    if not one.rows:
        return "\n\n".join([title, "Nothing was measured.", *one.notes])
    if picture:
        return "\n\n".join([title, *one.notes, f"Points: {one.key}.csv.", picture])
    rows = [[number(x) for x in row] for row in one.rows]
    text = " ".join(cell for row in rows for cell in row)
    notes = [*one.notes, *tables.legend(text)]
    notes += ['"-": not measured here, or not printed.'] if any("-" in row for row in rows) else []
    return "\n\n".join([title, markdown_table(one.header, rows), *notes])
