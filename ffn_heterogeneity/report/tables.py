"""Tables as text: Markdown, and numbers as cells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from etils import epath

from ffn_heterogeneity.report.stats import BRACKETS, Spread

UNKNOWN = "-"


def number(value: Any, digits: int = 4) -> str:
    """A cell: the number with its interval in brackets; "-" for None."""
    if value is None:
        return UNKNOWN
    if isinstance(value, Spread):
        low, high = (number(x, digits) for x in (value.low, value.high))
        return f"{number(value.mean, digits)} [{low}, {high}] {value.how} n={value.n}"
    if isinstance(value, (str, bool)):
        return str(value)
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def legend(text: str) -> list[str]:
    """The line that explains the brackets, if there are any."""
    found = [why for how, why in BRACKETS.items() if f"] {how} n=" in text]
    return ["In brackets, " + "; ".join(found) + "."] if found else []


def shorter(paths: Sequence[str]) -> list[str]:
    """The paths relative to their common parent directory."""
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
