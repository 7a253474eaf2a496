"""What the reports of all papers share: runs gathered from paths, tables and documents as text."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etils import epath

from ffn_heterogeneity.io.files import atomic_path, read_json
from ffn_heterogeneity.report.paper_table import NOT_RUN, Table
from ffn_heterogeneity.report.runs import Run, read_runs, union, written_models
from ffn_heterogeneity.report.tables import markdown_table

OUR_READING = " (our reading of its number)"


class Given(NamedTuple):
    """What a report is made of."""

    runs: list[Run]
    missing: list[tuple[str, str]]  # (sweep directory, point) that has not begun


def check_output(output: str | os.PathLike) -> epath.Path:
    """The directory to write.

    Raises:
      ValueError: it is a file.
    """
    output = epath.Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output={output} is a file: give a directory")
    return output


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
    """Task accuracies of a model that another of the runs wrote are given to that run as well.

    Of a run over seeds: their mean, from the lowest to the highest end of their intervals.
    """
    found = []
    for run in runs:
        models: dict[str, dict[str, Any]] = {}
        for other in users_of(run, runs):
            mine = models.setdefault(os.path.realpath(other.config["model"]), {})
            mine |= {k: v for k, v in other.values.items() if k.startswith("tasks.")}
        extra = _over_models(list(models.values()))
        found.append(dataclasses.replace(run, values={**run.values, **extra}) if extra else run)
    return found


def _over_models(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {}
    for key in union(models):
        values = [model[key] for model in models if key in model]
        if len(values) == 1 or any(isinstance(value, str) for value in values):
            found[key] = values[0]
        elif key.endswith(("_low", "_high")):
            found[key] = (min if key.endswith("_low") else max)(values)
        else:
            found[key] = values[0] if len(set(values)) == 1 else sum(values) / len(values)
    return found


def users_of(run: Run, runs: Sequence[Run]) -> list[Run]:
    """The runs that were given the model which `run` wrote."""
    mine = written_models(run)
    return [
        other for other in runs
        if other is not run and os.path.realpath(str(other.config.get("model", ""))) in mine
    ]  # fmt: skip


def write_tables(
    tables: Sequence[Table], output: epath.Path, our_reading: Sequence[str] = ()
) -> None:
    """Each as <key>.csv and <key>.md; `our_reading`: see `section`."""
    for table in tables:
        write(output / f"{table.key}.csv", csv_text(table))
        write(output / f"{table.key}.md", section(table, our_reading) + "\n")


def document(
    heading: str,
    given: Given,
    tables: Sequence[Table],
    pictures: Mapping[str, str],
    our_reading: Sequence[str] = (),
) -> str:
    """The whole report in Markdown: `heading`, the tables in their order, what each run is.

    Args:
      pictures: table's key -> file name.
    """
    parts = [heading]
    for table in tables:
        parts.append(section(table, our_reading))
        if table.key in pictures:
            parts.append(f"![{table.title}]({pictures[table.key]})")
    used = {path for table in tables for path in table.used}
    rows = [(run.label, run.state, "yes" if run.path in used else "no") for run in given.runs]
    rows += [(f"{os.path.basename(sweep)}/{name}", NOT_RUN, "no") for sweep, name in given.missing]
    parts += ["## Runs", markdown_table(("run", "state", "used above"), rows) if rows else NOT_RUN]
    return "\n\n".join(parts) + "\n"


def section(table: Table, our_reading: Sequence[str] = ()) -> str:
    """One table in Markdown.

    Args:
      our_reading: "table_2" ..: numbers of the paper that are our reading; the title says so.
    """
    title = table.title
    if "_".join(table.key.split("_")[:2]) in our_reading:
        title += OUR_READING
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


def write(path: epath.Path, text: str) -> None:
    """Writes the file whole."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def _escaped(cell: Any) -> str:
    return " ".join(str(cell).split()).replace("|", "\\|")
