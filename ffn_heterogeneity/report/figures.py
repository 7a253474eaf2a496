"""Figures. Colours are a colour-blind-safe set, one colour per thing throughout."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from etils import epath

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def _save(figure, path: str | os.PathLike) -> None:
    from matplotlib import pyplot as plt

    path = epath.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.stem}.partial{path.suffix}"
    with temporary.open("wb") as file:
        figure.savefig(file, format=path.suffix.lstrip("."), dpi=150, bbox_inches="tight")
    temporary.replace(path)
    plt.close(figure)


def _axes(columns: int, width: float = 4.6, height: float = 3.4):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width * columns, height), squeeze=False)
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def connectivity_figure(layers: Sequence[Mapping], d_model: int, path: str | os.PathLike) -> None:
    """Per-neuron means of entropy, gini and mstd against the layer."""
    figure, axes = _axes(3)
    bounds = {"entropy": math.log(d_model), "gini": 1 - 1 / d_model, "mstd": 0.0}
    for axis, (name, bound), colour in zip(axes, bounds.items(), COLOURS, strict=False):
        means = [layer[name] / layer["neurons"] for layer in layers]
        axis.plot(range(len(means)), means, marker="o", markersize=3, color=colour)
        axis.axhline(bound, color="0.6", linewidth=0.8, linestyle="--")
        axis.set(xlabel="layer", title=f"{name}, mean over neurons (dashed: uniform)")
    _save(figure, path)


def training_figure(
    runs: Mapping[str, Sequence[Mapping]], panels: Mapping[str, str], path: str | os.PathLike
) -> None:
    """Metrics against steps, one panel per metric, one line per run (NUCL, Figures 2 and 3).

    Args:
      runs: label -> rows with "step" and metrics; a row without a panel's metric is left out.
      panels: metric name -> title.
    """
    figure, axes = _axes(len(panels))
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for (label, rows), colour in zip(runs.items(), COLOURS, strict=False):
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label,
                          color=colour)  # fmt: skip
        axis.set(xlabel="step", title=title)
        axis.legend(frameon=False)
    _save(figure, path)


def bar_figure(
    values: Mapping[str, float], title: str, path: str | os.PathLike, *, log: bool = False
) -> None:
    """Labelled horizontal bars, the first on top."""
    figure, (axis,) = _axes(1, width=6.5, height=0.5 + 0.42 * len(values))
    labels = list(values)
    bars = axis.barh(labels, [values[label] for label in labels], color=COLOURS[0])
    axis.bar_label(bars, [f"{values[label]:,.4g}" for label in labels], padding=3)
    axis.invert_yaxis()
    axis.set(title=title)
    if log:
        axis.set_xscale("log")
    axis.margins(x=0.18)
    _save(figure, path)


def displacement_figure(
    panels: Mapping[str, Mapping[str, Mapping]], path: str | os.PathLike
) -> None:
    """Psi against depth, a line a reading or checkpoint (JREG, Figures 2 and 4), and its zeta_L.

    Args:
      panels: title -> {label: {"psi": [L values], "zeta_L": percent}}.
    """
    from matplotlib import colormaps

    figure, axes = _axes(len(panels))
    for axis, (title, readings) in zip(axes, panels.items(), strict=True):
        ordered = colormaps["viridis"].resampled(len(readings)).colors  # of many: first to last
        colours = COLOURS if len(readings) <= len(COLOURS) else ordered
        for (label, reading), colour in zip(readings.items(), colours, strict=False):
            psi = reading["psi"]
            jump = f", jump {reading['zeta_L']:.2f}%" if "zeta_L" in reading else ""
            axis.plot(range(1, len(psi) + 1), psi, marker="o", markersize=3, color=colour,
                      label=label + jump)  # fmt: skip
        axis.set(xlabel="layer", ylabel="angular displacement", title=title)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
    _save(figure, path)
