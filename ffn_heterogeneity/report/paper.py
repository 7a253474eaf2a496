"""A paper's tables, figures and claims, from its printed numbers and our runs."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas
from etils import epath

from ffn_heterogeneity.io.files import write_text
from ffn_heterogeneity.io.runs import SWEEP, read_listing
from ffn_heterogeneity.report import frame, tables
from ffn_heterogeneity.report.cells import NO_EFFECT, Frame, among, with_cells
from ffn_heterogeneity.report.figures import draw, heat, panels_of, save_if
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN, middle
from ffn_heterogeneity.report.tables import UNKNOWN, number
from ffn_heterogeneity.wording import markdown_table

BEGUN = ("train/loss",)  # of a report without curves: it shows which runs have begun
UNTOLD = (
    "With several seeds a claim holds if the paired 95% interval excludes 0, and is open if it "
    "includes 0. With one seed only the sign decides."
)
# Settings of tasks that change their scores (configs/parts/tasks.py).
ASKED = ("limit", "chat_template", "fewshot_seed", "fewshot_from", "add_bos", "stop", "max_length")
NAMES = ("panel", "value", "line", "seed")  # columns of a figure's points, before x and y


class Paper(NamedTuple):
    """A report: the texts of its tables, figures and claims, and the functions that make them.

    A function's name is its key in the texts. Its parameters name what it reads: "runs" (a row a
    measurement, as `fh.results`), "curves" (a row a step, as `fh.curves`), with settings under
    their own names and "cell", a value with its interval; or another function, for its result.

    Attributes:
      printed: {"paper": its title, "tables": {key: {caption, index, columns, rows, notes}},
        "figures": {key: {caption, x, xlabel, log, heat}}, "ours": {"tables": {key: {title,
        notes}}, "figures": {key: {title, ..}}}, "claims": {key: {statement, stated, rows}}}. A
        printed row holds its labels (`index`), then its numbers; null is not printed, or cut off
        in the copy that was read. A claim's rows are what the paper's own numbers say of it:
        [run on, measured, verdict].
      functions: by name. A table: a DataFrame, its index the labels of the rows and, if wanted,
        "place" (shown as "from"); its values the cells. Rows with the labels of a printed row are
        shown below that row, others at the end. A figure: rows with panel, line, seed, x, y and
        "value", what y is. A claim: rows with "run_on", "part", value and verdict
        (`cells.judged`). CURVES: the measurements of metrics.jsonl that are read.
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
    """Write each table and figure (Markdown, CSV, PNG) and `<name>.md`; return its text.

    Args:
      paths: work directories of runs and sweeps, folders and archives of them.

    Raises:
      ValueError: `output` is a file, a path holds no run, a file is damaged, or runs with
        different settings fall into one cell; the message names it.
    """
    output = tables.directory(output)
    states, frames = gather(paper, paths)
    parts = [f"# {paper.name.upper()}: tables and figures", paper.printed["paper"] + "."]
    for one in list(draw_all(paper, frames)):
        parts.append(_section(one, save_if(one.figure, output / f"{one.key}.png")))
        write_text(output / f"{one.key}.csv", _csv(one))
        write_text(output / f"{one.key}.md", parts[-1] + "\n")
    rows = list(zip(tables.shorter(list(states)), states.values(), strict=True))
    rows += [(name, "not run") for name in _not_begun(paths)]
    parts += ["## Runs", markdown_table(("run", "state"), rows)]
    return write_text(output / f"{paper.name}.md", "\n\n".join(parts) + "\n")


def gather(paper: Paper, paths: Sequence[str]) -> tuple[dict[str, str], dict[str, Frame]]:
    """(run -> its state, {"runs": measurements, "curves": steps}) of the runs at `paths`."""
    read = frame.everything(*paths, what=paper.functions.get("CURVES", BEGUN))[:2]
    rows, curves = (frame.plain(one).copy() for one in read)
    states = frame.progress(rows, curves)
    made, finished = {"runs": with_evaluations(rows), "curves": curves}, {*rows["run"]}
    return states, {name: with_cells(once(one, finished)) for name, one in made.items()}


def once(rows: Frame, finished: Collection[str]) -> Frame:
    """The rows of one run of each setting and seed: the first that is finished, else the longest.

    A run without tasks repeats another if they differ only in settings of tasks (`limit`).
    """
    longest = rows.groupby("run")["step"].max().fillna(-1)
    runs = rows.drop_duplicates("run").copy()
    order = runs.assign(begun=~runs["run"].isin(finished), steps=-runs["run"].map(longest))
    runs = runs.loc[order.sort_values(["begun", "steps"], kind="stable").index]
    asked = runs["run"].isin(rows[rows.task.notna()]["run"])
    runs, asked = (pandas.concat([x[asked], x[~asked]]) for x in (runs, asked))
    measured = ["tasks", "num_fewshot"]  # by runs with tasks, in which others may differ
    away = {*frame.FIELDS, "run", "by", "origin", *NO_EFFECT} - {"seed", *measured}
    texts = runs[[name for name in runs if not among(name, list(away))]].map(repr)
    texts.loc[~asked, [name for name in measured if name in texts]] = ""
    texts["of"] = runs.origin.where(runs.origin.isin(rows["run"]), "")  # equal paths, other models
    texts["stage"] = runs["run"].str.extract(r"/(\d+_\w+)$", expand=False)  # all of one config
    again = texts.drop(columns=["limit", *measured], errors="ignore").duplicated() & ~asked
    kept = runs[~texts.duplicated() & ~again]["run"]
    return rows[rows["run"].isin(kept)].reset_index(drop=True)


def with_evaluations(rows: Frame) -> Frame:
    """Add the tasks that other runs evaluated on a run's unattacked, uncompressed model.

    "by" is the run that evaluated, and settings of its tasks are the rows' own.
    """
    asked = rows[rows.task.notna() & rows.origin.isin(rows["run"])]
    for name, whole in (("attack", "zero"), ("criterion", "none"), ("k", 0)):
        asked = asked[asked[name].isna() | (asked[name] == whole)] if name in asked else asked
    if {"method", "ratio"} <= {*asked}:  # configs/fuse_table.py
        asked = asked[asked.method.isna() | (asked.ratio == 0)]
    how = [name for name in ASKED if name in asked]
    each = asked.groupby(["origin", "task", "shots"], dropna=False)
    for (run, task, _), its in each:
        asks = [name for name in how if name not in ("tasks", "num_fewshot")]
        differ = [name for name in asks if its[name].map(repr).nunique() > 1]
        if differ:
            values = "; ".join(f"{x} ({', '.join(its[x].map(str).unique())})" for x in differ)
            raise ValueError(
                f"evaluations of {run} on {task} differ in {values}: report them apart"
            )
    asked = asked[asked["by"] == each["by"].transform("first")]
    own = rows.drop_duplicates("run").set_index("run")
    moved = asked[[*frame.FIELDS, "by", *how]]
    moved = moved.assign(run=asked.origin, seed=asked.origin.map(own.seed))
    own = own.drop(columns=[*frame.FIELDS, "by", *how])
    return pandas.concat([rows, moved.join(own, on="run")], ignore_index=True)


def _not_begun(paths: Sequence[str]) -> Iterator[str]:
    """The points of sweeps that have not begun."""
    for path in map(epath.Path, paths):
        listing = path / SWEEP
        for point in read_listing(listing)["points"] if listing.exists() else ():
            if not (path / point["name"] / "config.json").exists():
                yield f"{path.name}/{point['name']}"


def draw_all(paper: Paper, frames: dict[str, Any]) -> Iterator[Drawn]:
    """The claims, the paper's tables and figures, then ours."""
    frames = dict(frames)  # with what functions returned, for others that name them
    yield draw_claims(paper, frames)
    for source in (paper.printed, paper.printed.get("ours", {})):
        for kind, drawn in (("tables", draw_table), ("figures", draw_figure)):
            for key, texts in source.get(kind, {}).items():
                yield drawn(key, texts, _made(paper, key, texts, frames))


def _made(paper: Paper, key: str, texts: Mapping[str, Any], frames: dict[str, Any]) -> Frame | None:
    """Result of the function of this name; None for a table or claim of printed numbers alone."""
    if "rows" in texts and key not in paper.functions:
        return None
    try:
        return _result(paper, key, frames)
    except ValueError as error:
        raise ValueError(f"{paper.name}, {key}: {error}") from error


def _result(paper: Paper, name: str, frames: dict[str, Any]) -> Any:
    """Result of a function; its parameters name frames, or functions whose results it reads."""
    if name not in paper.functions:
        raise ValueError(f"no function is named {name!r}")
    function = paper.functions[name]
    asked = inspect.signature(function).parameters.values()
    names = [one.name for one in asked if one.default is one.empty]
    for other in names:
        if other not in frames:
            frames[other] = _result(paper, other, frames)
    return function(**{other: copy.copy(frames[other]) for other in names})


# ---- tables


def draw_table(key: str, texts: Mapping[str, Any], made: Frame) -> Drawn:
    """The paper's rows, below each what was measured here (`made`, or None); then the others."""
    labels = texts.get("index") or [x for x in made.index.names if x != "place"]
    columns = texts.get("columns") or list(made.dropna(axis="columns", how="all"))
    rows: dict[tuple, list[tuple]] = {}
    n, source = len(labels), texts.get("source", "paper")
    for row in texts.get("rows", ()):
        rows.setdefault(tuple(row[:n]), []).append((source, *row[n:]))
    printed = list(rows) if made is not None and "caption" in texts else []
    if made is not None and len(made):
        made = made.reindex(columns=columns).reset_index()
        made = made if "place" in made else made.assign(place="here")
        for row in made[[*labels, "place", *columns]].itertuples(index=False, name=None):
            values = [None if is_missing(x) else x for x in row[n + 1 :]]
            if any(x is not None for x in values):
                rows.setdefault(tuple(map(str, row[:n])), []).append((row[n], *values))
    for name in printed:
        rows[name] += [("here", *[None] * len(columns))] if len(rows[name]) == 1 else []
    table = [(*name, *row) for name, its in rows.items() for row in its]
    header = (*labels, "from", *columns)
    return Drawn(key, _title(key, texts), header, table, texts.get("notes", ()))


def is_missing(value: Any) -> bool:
    """True if a cell has no value; what was measured as NaN is the text "nan" (`cells.spread`)."""
    return value is None or value is pandas.NA or (isinstance(value, float) and value != value)


def _title(key: str, texts: Mapping[str, Any]) -> str:
    caption = texts.get("caption", "").rstrip(".")
    return texts.get("title", f"{key.replace('_', ' ').capitalize()}: {caption}")


def draw_claims(paper: Paper, frames: dict[str, Any]) -> Drawn:
    """Every claim: the verdicts on the paper's own numbers, then a row for all that was run."""
    rows = []
    for key, texts in paper.printed.get("claims", {}).items():
        found = list(texts.get("rows", ()))
        made = _made(paper, key, texts, frames)
        for name, its in made.groupby("run_on", sort=False) if made is not None else ():
            found.append((name, *whole(its[["part", "value", "verdict"]].values)))
        stated = (texts["statement"], texts["stated"])
        rows += [(*stated, *row) for row in found or [(None, None, OPEN)]]
    header = ("statement", "stated", "run on", "measured", "verdict")
    return Drawn("claims", "Claims: what the numbers below say", header, rows, (UNTOLD,))


def whole(parts: Sequence[tuple[str, Any, str]]) -> tuple[str, str]:
    """(measured, verdict) of a claim: it holds if every part holds; else it names the others."""
    measured = "; ".join(f"{x} {number(None if is_missing(y) else y)}" for x, y, _ in parts)
    for verdict in (FAILS, OPEN):
        names = [name for name, _, its in parts if its == verdict]
        if names:
            return measured, verdict + (f" ({'; '.join(names)})" if len(parts) > 1 else "")
    return measured, HOLDS


# ---- figures


def draw_figure(key: str, texts: Mapping[str, Any], made: Frame) -> Drawn:
    """A figure, and its points; several values of one seed at one place are their mean."""
    x = texts.get("x", "step")
    made = made.groupby([*NAMES, "x"], sort=False, dropna=False, as_index=False)["y"].mean()
    panels = panels_of(made, texts.get("xlabel", x), texts.get("log", False))
    rows, several = [], made["value"].nunique()
    for name, its in made.groupby(list(NAMES), sort=False, dropna=False):
        points = dict(sorted(zip(its["x"], its["y"], strict=True)))
        name = [None if pandas.isna(label) else label for label in name]
        rows += [(*name, *point) for point in points.items()]
    shown = None
    if panels:
        shown = heat(panels) if texts.get("heat") else draw(panels, several if several > 1 else 3)
    return Drawn(key, _title(key, texts), (*NAMES, x, "y"), rows, (), shown)


# ---- text


def _csv(one: Drawn) -> str:
    """The cells as CSV with unrounded numbers, means of several runs, and "-" for missing ones."""
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
