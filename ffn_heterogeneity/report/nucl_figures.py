"""Figures 2, 3 and 4 of the NUCL paper as pictures."""

from __future__ import annotations

from collections.abc import Sequence

from etils import epath

from ffn_heterogeneity.report.compare import mean_curve, save
from ffn_heterogeneity.report.figures import COLOURS
from ffn_heterogeneity.report.nucl_training import FIGURES, alpha_of, with_curves
from ffn_heterogeneity.report.paper_table import Table
from ffn_heterogeneity.report.runs import Run, union

WORDS = {"figure_2": "outgoing entropy a neuron (nats)", "figure_3": "validation NLL"}


def draw_all(runs: Sequence[Run], tables: Sequence[Table], output: epath.Path) -> dict[str, str]:
    """Writes the pictures that there are numbers for; table's key -> file name."""
    found = {}
    for key, metric in FIGURES.items():
        mine = with_curves(runs, metric)
        if mine:
            save(lines(mine, metric, WORDS[key]), output / f"{key}.png")
            found[key] = f"{key}.png"
    for table in tables:
        if table.key.startswith("figure_4") and table.exact:
            save(bars(table), output / f"{table.key}.png")
            found[table.key] = f"{table.key}.png"
    return found


def lines(runs: Sequence[Run], metric: str, says: str):
    """A panel for each model and variant, a line for each alpha; bands over seeds."""
    panels = union([(run.model, str(run.config["nucl.variant"]))] for run in runs)
    figure, axes = _subplots(len(panels), 4.6, 3.4)
    for axis, (model, variant) in zip(axes, panels, strict=True):
        mine = [run for run in runs if (run.model, run.config["nucl.variant"]) == (model, variant)]
        for i, run in enumerate(mine):
            steps, values = mean_curve(run, metric)
            marker = "o" if len(steps) <= 50 else ""
            style = ("-", "--", ":")[i // len(COLOURS) % 3]
            colour = COLOURS[i % len(COLOURS)]
            axis.plot(steps, values.mean(0), style, color=colour, marker=marker, markersize=3,
                      label=f"alpha = {alpha_of(run):g}")  # fmt: skip
            if len(values) > 1:
                low, high = values.min(0), values.max(0)
                axis.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set(xlabel="step", title=f"{model}, {variant}")
        axis.legend(frameon=False)
    axes[0].set_ylabel(says)
    return figure


def bars(table: Table):
    """Perplexity over the unpruned one's (or itself, without it) against the pair of layers."""
    figure, (axis,) = _subplots(1, max(4.6, 0.32 * len(table.exact)), 3.4)
    labels, ratios = [row[0] for row in table.exact], [row[4] for row in table.exact]
    relative = all(isinstance(value, float) for value in ratios)
    heights = ratios if relative else [row[3] for row in table.exact]
    base = 1.0 if relative else 0.0  # bars stand on the unpruned model
    axis.bar(range(len(labels)), [x - base for x in heights], bottom=base, color=COLOURS[0])
    axis.set_xticks(range(len(labels)), labels, rotation=90)
    if relative:
        axis.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--")
    if min(heights) > 0 and max(heights) > 10 * min(heights):
        axis.set_yscale("log")
    axis.set(
        xlabel="layers removed from, counted from 0",
        ylabel="perplexity" + (" x unpruned" if relative else ""),
        title=table.title,
    )
    return figure


def _subplots(columns: int, width: float, height: float):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(
        1, columns, figsize=(width * columns, height), squeeze=False, layout="constrained"
    )
    for axis in grid[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, grid[0]
