"""The NUCL paper's tables and figures from run directories (`scripts/report.py --paper=nucl`).

Runs find their places by their configs, whoever started them: a sweep, a script, a job.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from ffn_heterogeneity.io.files import atomic_path, read_json
from ffn_heterogeneity.report import nucl_figures, nucl_removal, nucl_training
from ffn_heterogeneity.report import paper_nucl as paper
from ffn_heterogeneity.report.paper_table import NOT_RUN, Table
from ffn_heterogeneity.report.runs import Run, read_runs
from ffn_heterogeneity.report.tables import markdown_table

LEGEND = (
    'Cells: "-" the paper\'s number is not known here; "not run": no finished run was given; '
    '"closed weights": nobody outside can run it. A number over several seeds is its mean '
    "[low, high]."
)


class Given(NamedTuple):
    """What a report is made of."""

    runs: list[Run]
    missing: list[tuple[str, str]]  # (sweep directory, point) that has not begun


def write_paper(paths: Sequence[str], output: str | os.PathLike) -> str:
    """Writes every table (Markdown, CSV), every figure (PNG, CSV) and `nucl.md`; returns its text.

    Args:
      paths: work directories of runs, or of sweeps (which stand for their points); those of
        scripts/evaluate.py give their accuracies to the run whose model they evaluated.

    Raises:
      ValueError: `output` is a file, or a path is no run; the message names it.
    """
    output = epath.Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output={output} is a file: give a directory")
    given = gather(paths)
    tables = [*nucl_training.tables(given.runs), *nucl_removal.tables(given.runs)]
    tables += [*nucl_training.curves(given.runs), *nucl_removal.pairs(given.runs)]
    for table in tables:
        _write(output / f"{table.key}.csv", csv_text(table))
        _write(output / f"{table.key}.md", markdown(table))
    pictures = nucl_figures.draw_all(given.runs, tables, output)
    text = document(given, tables, pictures)
    _write(output / "nucl.md", text)
    return text


def gather(paths: Sequence[str]) -> Given:
    """The runs at `paths`; a sweep stands for its points, in its order.

    Raises:
      ValueError: see `read_runs`.
    """
    places, missing = [], []
    for path in paths:
        listing = epath.Path(path) / "sweep.json"
        if not listing.exists():
            places.append(path)
            continue
        for point in read_json(listing)["points"]:
            folder = epath.Path(path) / point["name"]
            if (folder / "config.json").exists():
                places.append(os.fspath(folder))
            else:
                missing.append((os.fspath(path), point["name"]))
    runs = read_runs(places) if places or not missing else []
    return Given(with_tasks(runs), missing)


def with_tasks(runs: Sequence[Run]) -> list[Run]:
    """Task accuracies of a model that another of the runs wrote are given to that run as well."""
    found = []
    for run in runs:
        mine = os.path.join(os.path.realpath(run.path), "model")
        extra = {}
        for other in runs:
            if other is not run and os.path.realpath(str(other.config.get("model", ""))) == mine:
                extra |= {k: v for k, v in other.values.items() if k.startswith("tasks.")}
        found.append(dataclasses.replace(run, values={**run.values, **extra}) if extra else run)
    return found


def document(given: Given, tables: Sequence[Table], pictures: Mapping[str, str]) -> str:
    """The whole report in Markdown."""
    parts = ["# NUCL: tables and figures", LEGEND]
    # Tables first; those of one number stay in their order.
    for table in sorted(tables, key=lambda table: (table.key[0] != "t", table.key.split("_")[1])):
        parts.append(_section(table))
        if table.key in pictures:
            parts.append(f"![{table.title}]({pictures[table.key]})")
    used = {path for table in tables for path in table.used}
    rows = [(run.label, run.state, "yes" if run.path in used else "no") for run in given.runs]
    rows += [(f"{os.path.basename(sweep)}/{name}", NOT_RUN, "no") for sweep, name in given.missing]
    parts += ["## Runs", markdown_table(("run", "state", "used above"), rows) if rows else NOT_RUN]
    return "\n\n".join(parts) + "\n"


def markdown(table: Table) -> str:
    """One table as a file of its own."""
    return _section(table) + "\n"


def _section(table: Table) -> str:
    title = table.title
    if "_".join(table.key.split("_")[:2]) in paper.OUR_READING:
        title += " (our reading of its number)"
    rows = [[_escaped(cell) for cell in row] for row in table.rows]
    parts = [f"## {title}", markdown_table([*map(_escaped, table.header)], rows)]
    return "\n\n".join([*parts, *table.notes])


def csv_text(table: Table) -> str:
    """The cells as CSV; numbers keep all their digits where the table rounds them."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.header)
    writer.writerows(table.exact or table.rows)
    return text.getvalue()


def _escaped(cell: Any) -> str:
    return " ".join(str(cell).split()).replace("|", "\\|")


def _write(path: epath.Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text)
