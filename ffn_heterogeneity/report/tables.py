"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


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
