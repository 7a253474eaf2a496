"""Figures: panels of lines, and bars, with color-blind-safe colors."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import atomic_path
from ffn_heterogeneity.report.tables import number

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", ":", "-.")  # for more lines than colours
MANY = 50  # points; a marker shows a lone one, many of them hide the line
DPI = 150


class Line(NamedTuple):
    """One line of a panel: a mean over seeds with a band from the lowest to the highest.

    Attributes:
      x: where all seeds have a value; empty: nothing is drawn, the colour stays the line's.
      y: values [seeds, len(x)].
    """

    label: str
    x: Sequence[float]
    y: np.ndarray


class Panel(NamedTuple):
    """One pair of axes.

    `log`: use a log scale if values span more than a decade; `dots`: points without lines.
    """

    title: str
    lines: Sequence[Line]
    xlabel: str = "step"
    ylabel: str = ""
    log: bool = False
    dots: bool = False


def of_seeds(label: str, curves: Sequence[Mapping[int, float]]) -> Line:
    """The line of the seeds of a run or record, at x values where every curve has a value.

    (A mean over different seeds at different x would jump where a seed ends.)
    """
    x = sorted(set.intersection(*map(set, curves))) if curves else []
    more = f" (mean of {len(curves)} seeds)" if len(curves) > 1 else ""
    return Line(label + more, x, np.array([[curve[i] for i in x] for curve in curves]))


def panels_of(rows, xlabel: str = "step", log: bool = False, lines: Iterable[str] = ()):
    """Panels of points.

    Args:
      rows: a pandas.DataFrame with panel, value (what y is), line, seed, x and y.
      lines: names of the lines of every panel, in order; a line without points keeps its color.
        Default: the lines that the panel has.
    """
    panels, every = [], list(lines)
    for (title, ylabel), its in rows.groupby(["panel", "value"], sort=False):
        made = []
        for name in every or its["line"].unique():
            seeds = its[its["line"] == name].groupby("seed", sort=False, dropna=False)
            lone = len(seeds) == 1 and its["seed"].notna().any() and not every
            curves = [dict(zip(x["x"], x["y"], strict=True)) for _, x in seeds]
            made.append(of_seeds(f"{name} (1 seed)" if lone else name, curves))
        panels.append(Panel(title, made, xlabel, ylabel, log))
    return panels


def draw(panels: Sequence[Panel], columns: int = 3):
    """The matplotlib figure of some panels."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    # A legend of many lines would hide them.
    beside = any(len(panel.lines) >= len(COLOURS) for panel in panels)
    longest = max((len(line.label) for panel in panels for line in panel.lines), default=0)
    lines = max(len(panel.lines) for panel in panels)
    size = (7, 3.4) if beside else (min(max(4.6, 0.6 + 0.08 * longest), 8), 3 + 0.2 * lines)
    figure, axes = _axes(rows, columns, size[0] * columns, size[1] * rows)
    for axis, panel in zip(axes, panels, strict=False):
        for i, line in enumerate(panel.lines):
            if len(line.x):
                _draw_line(axis, line, i, panel.dots)
        values = [y for line in panel.lines for y in line.y.ravel() if math.isfinite(y)]
        if panel.log and values and 0 < 10 * min(values) < max(values):
            axis.set_yscale("log")
            if max(values) < 100 * min(values):
                axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
                axis.yaxis.set_minor_formatter("")
            axis.yaxis.set_major_formatter("{x:,g}")  # its own writes 0.3 as 3 x 10^-1
        span = _plain_scale(axis, values) if values and axis.get_yscale() == "linear" else ""
        if all(float(x).is_integer() for line in panel.lines for x in line.x):
            axis.xaxis.get_major_locator().set_params(integer=True)  # no layer 2.5, no step 0.5
        axis.set(xlabel=panel.xlabel, ylabel=panel.ylabel + span, title=_safe(panel.title))
        if any(axis.get_legend_handles_labels()):
            # Outside of the axes (the pad clears the label of x): nothing is drawn over.
            look = {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": 4.5}
            if beside:
                look = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}
            axis.legend(fontsize="small", frameon=False, **look)
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    return figure


def heat(panels: Sequence[Panel]):
    """The matplotlib figure of heat maps: a row a line, normalised to its own range."""
    import pandas

    rows = max(len(panel.lines) for panel in panels)
    figure, axes = _axes(1, len(panels), 6.5 * len(panels), 1.6 + 0.4 * rows)
    for axis, panel in zip(axes, panels, strict=True):
        means = {_safe(line.label): pandas.Series(line.y.mean(0), line.x) for line in panel.lines}
        image = pandas.DataFrame(means).sort_index().transpose()
        low, high = image.min(axis=1), image.max(axis=1)
        image = image.sub(low, axis=0).div((high - low).replace(0, 1), axis=0)
        shown = axis.pcolormesh(image.columns, image.index, image, cmap="cividis", vmin=0, vmax=1)
        axis.invert_yaxis()
        axis.set(xlabel=panel.xlabel, title=_safe(panel.title))
        figure.colorbar(shown, ax=axis, label=f"{panel.ylabel} in its row's range")
    return figure


def _plain_scale(axis, values: Sequence[float]) -> str:
    """Set ticks to plain numbers; values that hardly differ look level.

    Returns:
      Text for the label of an axis that covers less than 1% of its values: a small difference would
      look large.
    """
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low < 0.001 * size:
        axis.set_ylim(low - 0.001 * size, high + 0.001 * size)
    axis.yaxis.get_major_formatter().set_useOffset(False)
    if size >= 1e4:
        axis.yaxis.set_major_formatter("{x:,.15g}")
    span = float(np.ptp(axis.get_ylim())) / (size or 1)
    return f"\n(the axis spans {span:.2%} of it)" if 0 < span < 0.01 else ""


def _draw_line(axis, line: Line, i: int, dots: bool) -> None:
    colour, style = COLOURS[i % len(COLOURS)], STYLES[i // len(COLOURS) % len(STYLES)]
    style, marker = ("none", ".") if dots else (style, "o" if len(line.x) <= MANY else "")
    look = {"color": colour, "linestyle": style, "marker": marker, "markersize": 3}
    axis.plot(line.x, line.y.mean(0), label=_safe(line.label), **look)
    if len(line.y) > 1:
        low, high = line.y.min(0), line.y.max(0)
        axis.fill_between(line.x, low, high, color=colour, alpha=0.2, linewidth=0)


def _safe(text: str) -> str:
    # matplotlib reads $ as mathematics and leaves out what begins with an underscore.
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _axes(rows: int, columns: int, width: float, height: float):
    # Not pyplot: it would take a notebook's figures away with them.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axis in grid.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    return figure, grid.ravel()


def save(figure, path: str | os.PathLike) -> None:
    """Write the figure as PNG, atomically."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png", dpi=DPI, bbox_inches="tight")


def save_if(figure, path: epath.Path) -> str:
    """Save the figure and return Markdown that shows it; without a figure remove the file."""
    if figure is None:
        path.unlink(missing_ok=True)  # of runs that were reported here before
        return ""
    save(figure, path)
    return f"![{path.stem}]({path.name})"


def curves_figure(
    panels: Mapping[str, Mapping[str, Mapping[int, float]]], path: str | os.PathLike,
    *, xlabel: str = "step", ylabel: str = "", bounds: Sequence[float] = (),
) -> None:  # fmt: skip
    """Draw one line per curve; NUCL's Figures 2 and 3, JREG's 2 and 4.

    Without matplotlib nothing is drawn and a message is printed: the numbers are in other files.

    Args:
      panels: title -> label -> {x: y}.
      bounds: of each panel the value that a dashed line marks.
    """
    if not _can_draw(path):
        return
    lines = [[of_seeds(x, [its]) for x, its in curves.items()] for curves in panels.values()]
    figure = draw([Panel(*one, xlabel, ylabel) for one in zip(panels, lines, strict=True)])
    for axis, bound in zip(figure.axes, bounds, strict=False):
        axis.axhline(bound, color="0.6", linewidth=0.8, linestyle="--")
    save(figure, path)


def probabilities_figure(
    panels: Mapping[str, Sequence[Sequence[float]]],
    path: str | os.PathLike,
    names: Sequence[str] = (),
    label: str = "probability",
) -> None:
    """Save heat maps: a row for each layer (from 1), or for each name, a column for each expert.

    Without matplotlib: as `curves_figure`.

    Args:
      panels: title -> rows, which may be of unequal lengths.
      names: of the rows; then colors end at the largest value, else at 1.
    """
    if not _can_draw(path):
        return
    every = [row for rows in panels.values() for row in rows]
    columns, top = max(map(len, every)), max(map(max, every)) if names else 1
    size = max(4.0, 1.5 + 0.3 * columns) * len(panels), 1.5 + 0.25 * len(every) / len(panels)
    figure, axes = _axes(1, len(panels), *size)
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        image = np.array([[*row, *[np.nan] * (columns - len(row))] for row in rows])
        places = range(columns), range(1, len(rows) + 1)
        shown = axis.pcolormesh(*places, image, cmap="cividis", vmin=0, vmax=top)
        axis.invert_yaxis()
        axis.set(xlabel="router column (from 0)", title=_safe(title))
        if names:
            axis.set_yticks(places[1], map(_safe, names))
        else:
            axis.set_ylabel("layer (from 1)")
    figure.colorbar(shown, ax=list(axes), label=label)
    save(figure, path)


def _can_draw(path: str | os.PathLike) -> bool:
    """True if matplotlib is there; else stderr says that the figure is left out."""
    drawn = importlib.util.find_spec("matplotlib") is not None
    if not drawn:
        print(f"{path} is not drawn: pip install 'ffn-heterogeneity[plots]'", file=sys.stderr)
    return drawn


def bar_figure(values: Mapping[str, float], title: str, path: str | os.PathLike) -> None:
    """Labelled horizontal bars on a log scale, the first on top."""
    figure, (axis,) = _axes(1, 1, 6.5, 0.5 + 0.42 * len(values))
    bars = axis.barh(list(values), list(values.values()), color=COLOURS[0])
    axis.bar_label(bars, [number(value) for value in values.values()], padding=3)
    axis.invert_yaxis()
    axis.set(title=title, xscale="log")
    axis.margins(x=0.18)
    save(figure, path)
