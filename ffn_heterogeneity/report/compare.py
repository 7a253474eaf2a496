"""Runs side by side: what was set, what came out, and the curves (`scripts/report.py`)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import atomic_path
from ffn_heterogeneity.report import figures
from ffn_heterogeneity.report.figures import Line, Panel, common_points, save
from ffn_heterogeneity.report.runs import Run, Spread, read_runs, union
from ffn_heterogeneity.report.tables import UNKNOWN, escaped_table

FIRST_ROWS = ("first ", "final ", "best ", "tokens_per_second", "compile_seconds")
FIRST_PANELS = ("validation/nll", "train/loss")
MAX_PANELS = 6
OF_SEEDS = (
    "A number over n seeds is its mean [low, high] as the run's results.json gives it, else the "
    "mean [min, max] of the seeds' own results. Curves are means over the seeds, as far as all of "
    "them have come, with bands from min to max."
)


def write_report(paths: Sequence[str], output: str | os.PathLike, name: str = "compare") -> str:
    """Writes `<output>/<name>.md` and, where there are curves, `<name>.png`; returns the text.

    Raises:
      ValueError: `output` is a file; none of the runs is given, one is given twice or is no run, or
        a file in it is damaged.
    """
    output = epath.Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output={output} is a file: give a directory")
    runs = read_runs(paths)
    panels, left_out = choose_panels(runs)
    picture = output / f"{name}.png"
    if panels:
        save(draw(runs, panels), picture)
    else:
        picture.unlink(missing_ok=True)  # of runs that were reported here before
    text = report_text(runs, picture.name if panels else None, left_out)
    with atomic_path(output / f"{name}.md") as temporary:
        temporary.write_text(text)
    return text


# ---- tables


def report_text(runs: Sequence[Run], picture: str | None, left_out: Sequence[str]) -> str:
    """The whole of it in Markdown; `left_out` are the metrics that have no panel."""
    parts = ["# " + ", ".join(run.label for run in runs)]
    parts.append(
        escaped_table(("run", "state", "directory"), [(r.label, r.state, r.path) for r in runs])
    )
    if len(runs) > 1:
        rows = differing_keys(runs)
        table = escaped_table(("config key", *(run.label for run in runs)), rows)
        parts += ["## Config keys that differ", table if rows else "None: the configs are equal."]
    header, rows = numbers(runs)
    parts += ["## Numbers", escaped_table(header, rows) if rows else "None yet."]
    if len(runs) > 1:
        parts.append(f"Differences and ratios are against {runs[0].label}.")
    if any(isinstance(value, Spread) for run in runs for value in run.values.values()):
        parts.append(OF_SEEDS)
    parts += ["## Curves", f"![curves]({picture})" if picture else "No run has any."]
    if left_out:
        parts.append(f"Without a panel: {', '.join(left_out)}.")
    notes = [f"- {run.label}: {note}" for run in runs for note in run.notes]
    parts += ["## Notes", "\n".join(notes)] if notes else []
    return "\n\n".join(parts) + "\n"


def differing_keys(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """(key, a value per run) of the config keys that are not the same in all runs."""

    def same(a: Any, b: Any) -> bool:
        # True == 1, but a switch is no count.
        return a == b and isinstance(a, bool) == isinstance(b, bool)

    rows = []
    for key in sorted(union(run.config for run in runs)):
        there = [run.config[key] for run in runs if key in run.config]
        if len(there) < len(runs) or not all(same(there[0], value) for value in there):
            # As JSON: "1" and 1 are told apart.
            cells = [json.dumps(r.config[key]) if key in r.config else UNKNOWN for r in runs]
            rows.append((key, *cells))
    return rows


def numbers(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows): a value per run, and after each but the first what it is to the first's."""
    header = ["", runs[0].label]
    for run in runs[1:]:
        header += [run.label, "difference", "ratio"]
    names = union(run.values for run in runs)
    names.sort(key=lambda name: [not name.startswith(start) for start in FIRST_ROWS])  # stable
    rows = []
    for name in names:
        first, row = runs[0].values.get(name), [name, _cell(runs[0].values.get(name))]
        for run in runs[1:]:
            value = run.values.get(name)
            row += [_cell(value), *_against(value, first)]
        rows.append(tuple(row))
    return tuple(header), rows


def _against(value: Any, first: Any) -> tuple[str, str]:
    """(difference, ratio) of numbers; of means over seeds."""
    a, b = (x.mean if isinstance(x, Spread) else x for x in (value, first))
    if any(x is None or isinstance(x, str) for x in (a, b)):
        return UNKNOWN, UNKNOWN
    difference = a - b
    sign = "+" if difference > 0 else ""  # NaN and 0 have none
    shown = _cell(difference) if isinstance(difference, int) else f"{difference:,.4g}"
    return sign + shown, f"{a / b:,.5g}" if b else UNKNOWN


def _cell(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, Spread):
        return f"{value.mean:,.6g} [{value.low:,.6g}, {value.high:,.6g}] n={value.n}"
    if isinstance(value, str):
        return value
    return f"{value:,d}" if isinstance(value, int) else f"{value:,.6g}"


# ---- figure


def choose_panels(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """(metrics to draw, validation metrics that are left out).

    Validation NLL and training loss where any run has them; then the validation metrics that all
    runs with curves have, at most six together.
    """
    having = [union(run.curves) for run in runs]
    having = [names for names in having if names]
    names = union(having)
    common = [name for name in names if all(name in other for other in having)]
    wanted = [name for name in FIRST_PANELS if name in names]
    wanted += [x for x in common if x.startswith("validation/") and x not in wanted]
    panels = wanted[:MAX_PANELS]
    return panels, [x for x in names if x.startswith("validation/") and x not in panels]


def mean_curve(run: Run, metric: str) -> tuple[list[int], np.ndarray]:
    """(steps, values [seeds, steps]) at the steps that every seed with this metric has."""
    return common_points([curve[metric] for curve in run.curves if metric in curve])


def draw(runs: Sequence[Run], panels: Sequence[str]):
    """The matplotlib figure: a panel per metric, a colour per run; bands from min to max."""
    found = [Panel(name, [Line(_legend(r), *mean_curve(r, name)) for r in runs]) for name in panels]
    return figures.draw(found, one_legend=True)


def _legend(run: Run) -> str:
    seeds = len(run.curves)
    return f"{run.label} (mean of {seeds} seeds)" if seeds > 1 else run.label
