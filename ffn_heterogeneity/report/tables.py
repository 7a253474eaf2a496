"""Tables as text: Markdown and CSV, and numbers as cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from ffn_heterogeneity.report.runs import Spread

UNKNOWN = "-"


def number(value: Any, digits: int = 4) -> str:
    """A cell: the number with what stands in its brackets; "-" for None."""
    if value is None:
        return UNKNOWN
    if isinstance(value, Spread):
        low, high = (number(x, digits) for x in (value.low, value.high))
        return f"{number(value.mean, digits)} [{low}, {high}] {value.kind} n={value.n}"
    if isinstance(value, str):
        return value
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns: first column left, others right.

    Raises:
      ValueError: a row has another number of cells than the header.
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    wrong = [row for row in cells if len(row) != len(header)]
    if wrong:
        raise ValueError(f"the row {wrong[0]} has {len(wrong[0])} cells, the header {len(header)}")
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(cells[0]), "| " + " | ".join(rule) + " |", *map(line, cells[1:])])


def escaped_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """`markdown_table` of cells that may hold bars (patterns of paths do) and line breaks."""
    cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row]
             for row in (header, *rows)]  # fmt: skip
    return markdown_table(cells[0], cells[1:])


def csv_text(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The cells as CSV, numbers unrounded; of several runs their mean; absent ones as "-"."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        cells = [cell.mean if isinstance(cell, Spread) else cell for cell in row]
        writer.writerow([UNKNOWN if cell is None else cell for cell in cells])
    return text.getvalue()
