"""Tables as text: Markdown and CSV, and numbers as cells."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import atomic_path

UNKNOWN = "-"
NOT_FINITE = ("nan", "inf", "-inf")  # as metrics.jsonl and results.json hold them


class Spread(NamedTuple):
    """A number over several seeds."""

    mean: float
    low: float
    high: float
    n: int
    # Of what low and high are: "range", or 95% by "t", "Wilson", "bootstrap", "Fieller".
    kind: str = "range"


def middle(value: Any) -> Any:
    """The number itself; the mean of several."""
    return value.mean if isinstance(value, Spread) else value


def over(values: Sequence[Any]) -> Any:
    """Mean, lowest and highest of several; the one where they are the same; None of none."""
    if len(set(map(middle, values))) < 2:
        return values[0] if values else None
    values = [middle(value) for value in values]
    return Spread(float(np.mean(values)), float(np.min(values)), float(np.max(values)), len(values))


def interval(values: Sequence[float]) -> Any:
    """Mean and Student's 95% interval of several; one value alone has none."""
    return student(values) if len(values) > 1 else values[0] if values else None


def student(values: Sequence[float]) -> Spread:
    """The mean and its 95% interval, -+ t_{0.975, n-1} s / sqrt(n): infinite for one value."""
    from scipy.special import stdtrit

    n, mean, half = len(values), float(np.mean(values)), float("inf")
    if n > 1:
        half = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / n**0.5
    return Spread(mean, mean - half, mean + half, n, "t")


def number_of(value: Any) -> int | float | None:
    """The number, also where it is written as "nan"; None: it is none."""
    if isinstance(value, str) and value in NOT_FINITE:
        return float(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def number(value: Any, digits: int = 4) -> str:
    """A cell: the number with what stands in its brackets; "-" for None."""
    if value is None:
        return UNKNOWN
    if isinstance(value, Spread):
        low, high = (number(x, digits) for x in (value.low, value.high))
        return f"{number(value.mean, digits)} [{low}, {high}] {value.kind} n={value.n}"
    if isinstance(value, (str, bool)):
        return str(value)
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns: first column left, others right.

    Raises:
      ValueError: a row has another number of cells than the header.
    """
    # Patterns of paths hold bars.
    cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row]
             for row in (header, *rows)]  # fmt: skip
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "| " + " | ".join([row[0].ljust(widths[0]), *padded[1:]]) + " |"

    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def csv_text(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The cells as CSV, numbers unrounded; of several runs their mean; absent ones as "-"."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        cells = [cell.mean if isinstance(cell, Spread) else cell for cell in row]
        writer.writerow([UNKNOWN if cell is None else cell for cell in cells])
    return text.getvalue()


def directory(output: str | os.PathLike) -> epath.Path:
    """Where a report goes.

    Raises:
      ValueError: it is a file.
    """
    if epath.Path(output).is_file():
        raise ValueError(f"--output={output} is a file: give a directory")
    return epath.Path(output)


def write_text(path: epath.Path, text: str) -> str:
    """Writes the text whole, and returns it."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)
    return text
