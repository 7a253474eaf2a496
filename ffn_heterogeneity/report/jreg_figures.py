"""Figures 1, 2 and 4 of the JREG paper as pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from etils import epath

from ffn_heterogeneity.report.compare import STYLES, save
from ffn_heterogeneity.report.figures import COLOURS
from ffn_heterogeneity.report.jreg_conditions import (
    NLL,
    RATES,
    Condition,
    conditions,
    final_psi,
    mean_over_seeds,
)
from ffn_heterogeneity.report.jreg_models import READINGS, Measured, series, whole
from ffn_heterogeneity.report.runs import Run, union

JUMPS = {RATES[name]: f"jump rate {name} (%)" for name in RATES}
PANELS = JUMPS | {NLL: "validation NLL"}
DEPTH = "depth, layer / layers"


def draw_all(runs: Sequence[Run], models: Sequence[Measured], output: epath.Path) -> dict[str, str]:
    """Writes the pictures that there are numbers for; table's key -> file name."""
    begun = conditions(runs, unfinished=True)
    figures = {
        "figure_1": models_by_depth(models),
        "figure_2": runs_by_depth(begun),
        "figure_4": by_step(begun, models),
    }
    found = {}
    for key, figure in figures.items():
        if figure is not None:
            save(figure, output / f"{key}.png")
            found[key] = f"{key}.png"
        else:
            (output / f"{key}.png").unlink(missing_ok=True)  # of runs reported here before
    return found


def models_by_depth(models: Sequence[Measured]):
    """Psi against depth: a panel for each reading, a line for each model; None without any."""
    models = whole(models)
    if not models:
        return None
    figure, grid = _grid(1, len(READINGS))
    for axis, (key, says) in zip(grid[0], READINGS.items(), strict=True):
        for i, one in enumerate(models):
            reading = one.readings[key]
            jump = f", jump {reading['zeta_L']:.2f}%" if "zeta_L" in reading else ""
            _depth_line(axis, reading["psi"], i, label=_safe(one.name) + jump)
        axis.set(xlabel=DEPTH, title=f"h_L {says} the final norm")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small", edgecolor="none", framealpha=0.7)
    grid[0][0].set_ylabel("angular displacement")
    return figure


def runs_by_depth(begun: Sequence[Condition]):
    """Psi at the last evaluation: a panel for each group, a line for each loss (mean of seeds)."""
    found = [(c, final_psi(c)) for c in begun]
    found = [(c, psi) for c, psi in found if psi]
    if not found:
        return None
    groups = union([c.group] for c, _ in found)
    figure, grid = _grid(1, len(groups))
    for axis, group in zip(grid[0], groups, strict=True):
        mine = [(c, psi) for c, psi in found if c.group == group]
        for i, (c, psi) in enumerate(mine):
            seeds = np.array(list(psi.values()))
            _depth_line(axis, seeds.mean(0), i, label=_label(c, len(seeds)))
            for line in seeds if len(seeds) > 1 else ():
                _depth_line(axis, line, i, thin=True)
        axis.set(xlabel=DEPTH, title=_safe(group))
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small", edgecolor="none", framealpha=0.7)
    grid[0][0].set_ylabel("angular displacement")
    return figure


def by_step(begun: Sequence[Condition], models: Sequence[Measured]):
    """A row for each group (jumps, loss): means of seeds and, thin, each; one of checkpoints."""
    begun = [c for c in begun if any(mean_over_seeds(c, metric)[0] for metric in PANELS)]
    groups, points = union([c.group] for c in begun), series(models)
    if not groups and not points:
        return None
    figure, grid = _grid(len(groups) + bool(points), len(PANELS))
    for axes, group in zip(grid, groups, strict=False):
        mine = [c for c in begun if c.group == group]
        for axis, (metric, says) in zip(axes, PANELS.items(), strict=True):
            for i, c in enumerate(mine):
                _step_lines(axis, c, metric, i)
            axis.set(xlabel="step", ylabel=says, title=_safe(group))
            if metric in JUMPS:
                axis.set_ylim(bottom=0)
            if axis.lines:
                axis.legend(fontsize="small", edgecolor="none", framealpha=0.7)
    if points:
        _checkpoint_lines(grid[-1], points)
    return figure


def _checkpoint_lines(axes, points: dict[str, list[Measured]]) -> None:
    """A series of checkpoints has jump rates before and after the final norm, and no loss."""
    for axis, (rate, metric) in zip(axes, RATES.items(), strict=False):
        for i, (name, its) in enumerate(points.items()):
            for (key, says), style in zip(READINGS.items(), STYLES, strict=False):
                there = [one for one in its if rate in one.readings[key]]
                axis.plot([one.step for one in there],
                          [one.readings[key][rate] for one in there],
                          style, color=COLOURS[i % len(COLOURS)], marker="o", markersize=3,
                          label=f"{_safe(name)}, {says} the final norm")  # fmt: skip
        axis.set(xlabel="step", ylabel=JUMPS[metric], title="checkpoints")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small", edgecolor="none", framealpha=0.7)
    for unused in axes[len(RATES) :]:
        unused.set_visible(False)


def _step_lines(axis, condition: Condition, metric: str, i: int) -> None:
    """The mean over seeds, and each seed thin, as far as it has come."""
    steps, values = mean_over_seeds(condition, metric)
    colour, style = _look(i)
    curves = [m.curve[metric] for m in condition.members if metric in m.curve]
    if steps:
        marker = "o" if len(steps) <= 50 else ""  # a marker shows a lone point
        axis.plot(steps, values.mean(0), style, color=colour, marker=marker, markersize=3,
                  label=_label(condition, len(curves)))  # fmt: skip
    for curve in curves if len(curves) > 1 else ():
        axis.plot(*zip(*sorted(curve.items()), strict=True), style, color=colour, linewidth=0.7,
                  alpha=0.5)  # fmt: skip


def _depth_line(axis, psi: Sequence[float], i: int, *, label: str = "", thin: bool = False) -> None:
    colour, style = _look(i)
    depth = np.arange(1, len(psi) + 1) / len(psi)
    if thin:
        axis.plot(depth, psi, style, color=colour, linewidth=0.7, alpha=0.5)
    else:
        axis.plot(depth, psi, style, color=colour, marker="o", markersize=3, label=label)


def _look(i: int) -> tuple[str, str]:
    return COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]


def _label(condition: Condition, seeds: int) -> str:
    text = f"{condition.loss}, {condition.steps:,d} steps"
    return f"{text} (mean of {seeds} seeds)" if seeds > 1 else text


def _safe(text: str) -> str:
    # matplotlib reads $ as mathematics and leaves out what begins with an underscore.
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _grid(rows: int, columns: int):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        rows, columns, figsize=(5.2 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in grid.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    return figure, grid
