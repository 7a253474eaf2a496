"""A table of a paper, beside what was measured here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ffn_heterogeneity.report.runs import Spread

NOT_RUN = "not run"
UNKNOWN = "-"
CLOSED = "closed weights"


@dataclasses.dataclass(frozen=True)
class Table:
    """One table or the data of one figure.

    Attributes:
      key: "table_4", "figure_4", with "_<model>" where there is one a model: the files' name.
      rows: cells as they are shown.
      notes: paragraphs below.
      exact: the same rows with unrounded numbers, for the CSV; empty: as shown.
      used: paths of the runs in it.
    """

    key: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    exact: tuple[tuple[Any, ...], ...] = ()
    used: tuple[str, ...] = ()


def number(value: Any, digits: int = 4) -> str:
    """A cell: the number, "mean [low, high] n=3", or "not run" for None."""
    if value is None:
        return NOT_RUN
    if isinstance(value, Spread):
        low, high = (number(x, digits) for x in (value.low, value.high))
        return f"{number(value.mean, digits)} [{low}, {high}] n={value.n}"
    if isinstance(value, str):
        return value
    return f"{value:,.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def middle(value: Any) -> float | None:
    """The number itself; the mean of several."""
    return value.mean if isinstance(value, Spread) else value


def spread(values: Sequence[float]) -> Any:
    """Mean, least and greatest of several; the one, where they are the same."""
    if not values:
        return None
    if len(set(values)) == 1:
        return values[0]
    return Spread(sum(values) / len(values), min(values), max(values), len(values))
