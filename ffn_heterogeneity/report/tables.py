"""Tables as text: Markdown, and numbers as cells."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from etils import epath

from ffn_heterogeneity.report.stats import BRACKETS, Spread

UNKNOWN = "-"


def number(value: Any, digits: int = 4) -> str:
    """A cell: the number with what stands in its brackets; "-" for None."""
    if value is None:
        return UNKNOWN
    if isinstance(value, Spread):
        low, high = (number(x, digits) for x in (value.low, value.high))
        return f"{number(value.mean, digits)} [{low}, {high}] {value.how} n={value.n}"
    if isinstance(value, (str, bool)):
        return str(value)
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def as_text(value: object, links: bool = False) -> str:
    """One line of Markdown that shows the text: no HTML, no link (unless `links`), no end of a
    cell. Names of runs and settings are whatever somebody wrote."""
    text = re.sub(r"[\\|<]", r"\\\g<0>", " ".join(str(value).split()))
    return text if links else text.replace("](", "]\\(")


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[object]], links: bool = False
) -> str:
    """A Markdown table with aligned columns: first column left, others right.

    Raises:
      ValueError: a row has another number of cells than the header.
    """
    cells = [[as_text(cell, links) for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "| " + " | ".join([row[0].ljust(widths[0]), *padded[1:]]) + " |"

    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def legend(text: str) -> list[str]:
    """The line that explains what stands in brackets, if anything does."""
    found = [why for how, why in BRACKETS.items() if f"] {how} n=" in text]
    return ["In brackets, " + "; ".join(found) + "."] if found else []


def shorter(paths: Sequence[str]) -> list[str]:
    """The paths below the directory that all of them lie in."""
    parts = [path.strip("/").split("/") for path in paths]
    common = len(os.path.commonprefix([part[:-1] for part in parts]))
    return ["/".join(part[common:]) for part in parts]


def directory(output: str | os.PathLike) -> epath.Path:
    """The directory of a report.

    Raises:
      ValueError: it is a file.
    """
    if epath.Path(output).is_file():
        raise ValueError(f"--output={output} is a file: give a directory")
    return epath.Path(output)
