"""Runs side by side: what was set, what came out, and the curves (`scripts/report.py`)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ffn_heterogeneity.report import stats, tables
from ffn_heterogeneity.report.figures import Panel, draw, of_seeds, save_if
from ffn_heterogeneity.report.runs import Run, read_runs, union
from ffn_heterogeneity.report.stats import middle, number_of
from ffn_heterogeneity.report.tables import UNKNOWN, markdown_table, number

FIRST_ROWS = ("first.", "final.", "best.", "tokens_per_second", "compile_seconds")
FIRST_PANELS = ("validation/nll", "train/loss")
MAX_PANELS = 6
DIGITS = 6
NOTE = "In brackets: Student's 95% interval over n seeds. Curves: means, bands lowest to highest."


def write_report(paths: Sequence[str], output: str | os.PathLike, name: str = "compare") -> str:
    """Writes `<output>/<name>.md` and, where there are curves, `<name>.png`; returns the text.

    Raises:
      ValueError: `output` is a file; none of the runs is given, one is given twice or is no run, or
        a file in it is damaged.
    """
    output, runs = tables.directory(output), read_runs(paths)
    labels = [run.label for run in runs]
    picture = save_if(draw_runs(runs), output / f"{name}.png")
    states = [(run.label, run.state, run.path) for run in runs]
    parts = ["# " + ", ".join(labels), markdown_table(("run", "state", "directory"), states)]
    if len(runs) > 1:
        rows = differing_keys(runs)
        table = markdown_table(("config key", *labels), rows)
        parts += ["## Config keys that differ", table if rows else "None: the configs are equal."]
    header, rows = numbers(runs)
    parts += ["## Numbers", markdown_table(header, rows) if rows else "None yet."]
    if len(runs) > 1:
        parts.append(f"Differences and ratios are against {labels[0]}.")
    if any(len(run.seeds) > 1 for run in runs):
        parts.append(NOTE)
    parts += ["## Curves", picture or "No run has any."]
    notes = [f"- {run.label}: {note}" for run in runs for note in run.notes]
    parts += ["## Notes", "\n".join(notes)] if notes else []
    return tables.write_text(output / f"{name}.md", "\n\n".join(parts) + "\n")


def differing_keys(runs: Sequence[Run]) -> list[list[str]]:
    """[key, a value per run] of the config keys that are not the same in all runs.

    As JSON: "1" and 1 are told apart, and so are 1 and true.
    """
    rows = []
    for key in sorted(union(run.config for run in runs)):
        cells = [json.dumps(r.config[key]) if key in r.config else UNKNOWN for r in runs]
        if len(set(cells)) > 1:
            rows.append([key, *cells])
    return rows


def numbers(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): a value per run, and after each but the first what it is to the first's."""
    header = ["", runs[0].label]
    for run in runs[1:]:
        header += [run.label, "difference", "ratio"]
    names = union(seed.values for run in runs for seed in run.seeds.values())
    names.sort(key=lambda name: [not name.startswith(start) for start in FIRST_ROWS])  # stable
    rows = []
    for name in names:
        first, *others = (_value(run, name) for run in runs)
        row = [name, number(first, DIGITS)]
        for value in others:
            row += [number(value, DIGITS), *_against(middle(value), middle(first))]
        rows.append(row)
    return header, rows


def _value(run: Run, name: str) -> Any:
    """The number, text, or the interval over the seeds that have it; None: none has."""
    found = [seed.values[name] for seed in run.seeds.values() if name in seed.values]
    if len(set(found)) < 2:
        return found[0] if found else None
    if any(number_of(value) is None for value in found):
        return ", ".join(union([str(value)] for value in found))
    return stats.interval(found)


def _against(value: Any, first: Any) -> tuple[str, str]:
    """(difference, ratio) of numbers; of means over seeds."""
    if None in (number_of(value), number_of(first)):
        return UNKNOWN, UNKNOWN
    sign = "+" if value > first else ""
    return sign + number(value - first), number(value / first, 5) if first else UNKNOWN


def choose_panels(runs: Sequence[Run]) -> list[str]:
    """Metrics to draw: validation and training loss, then what most runs have."""
    having = [union(run.curves) for run in runs]
    names = [x for x in union(having) if x.startswith("validation/") or x in FIRST_PANELS]
    names.sort(key=lambda name: -sum(name in others for others in having))
    return union([[x for x in FIRST_PANELS if x in names], names])[:MAX_PANELS]


def draw_runs(runs: Sequence[Run]):
    """The matplotlib figure: a panel per metric, a colour per run; None where nothing has begun."""
    panels = [
        Panel(name, [of_seeds(r.label, [x[name] for x in r.curves if name in x]) for r in runs])
        for name in choose_panels(runs)
    ]
    return draw(panels) if panels else None
