"""Whether a paper's statements hold in records.

Every function gives (name, number, verdict) of each record, or step, that decides it; none where
nothing can be compared. Of several seeds, compared seed by seed, Student's 95% interval decides; of
one, its number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ffn_heterogeneity.papers.specs import Against, Label, printed
from ffn_heterogeneity.report import records as values
from ffn_heterogeneity.report.records import Record, by_seed
from ffn_heterogeneity.report.records import label as label_of
from ffn_heterogeneity.report.tables import Spread, interval, middle, number, over

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
Parts = list[tuple[str, Any, str]]


def whole(parts: Parts) -> tuple[str, str]:
    """(measured, verdict) of a claim: it holds if every part does; else which do not."""
    measured = "; ".join(f"{name} {number(value)}" for name, value, _ in parts)
    for verdict in (FAILS, OPEN):
        names = [name for name, _, its in parts if its == verdict]
        if names:
            return measured, verdict + (f" ({'; '.join(names)})" if len(parts) > 1 else "")
    return measured, HOLDS


def verdict_of(differences: Sequence[float], sign: int) -> str:
    """Whether they lie above 0 (sign 1), or below (-1)."""
    if not differences or not all(map(math.isfinite, differences)):
        return OPEN
    result = interval([sign * x for x in differences])
    low, high = (result.low, result.high) if isinstance(result, Spread) else (result, result)
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN


def compare(records: Sequence[Record], value: Against, sign: int, label: Label) -> Parts:
    """Each record lies above (sign 1) or below (-1) the one that it stands against."""
    parts = []
    for record in records:
        if base := values.reference_of(record, value):
            apart = values.differences(record, base, value.path)
            name = values.label(record, label)
            parts.append((name, interval(apart), verdict_of(apart, sign)))
    return parts


def between(
    records: Sequence[Record], value: Any, low: float, high: float, label: Label,
    at_least: tuple[str, float] = ("", 0.0),
) -> Parts:  # fmt: skip
    """The value lies in low .. high, of every seed; `at_least`: records with less do not count."""
    parts = []
    for record in records:
        seeds = [middle(x) for x in by_seed(record, value).values()]
        if seeds and record.config.get(*at_least) >= at_least[1]:
            known = all(map(math.isfinite, seeds))
            verdict = HOLDS if all(low <= x <= high for x in seeds) else FAILS
            parts.append((values.label(record, label), over(seeds), verdict if known else OPEN))
    return parts


def rising(records: Sequence[Record], metric: str) -> Parts:
    """It grows from each fifth of training to the next; else between all evaluated steps."""
    curves = [member.seed.curves.get(metric, {}) for member in records[0].members.values()]
    steps = sorted(set.intersection(*map(set, curves)))
    fifths = [round(x * max(steps, default=0) / 5) for x in range(1, 6)]
    steps = fifths if set(fifths) <= set(steps) else [step for step in steps if step]
    parts = []
    for before, step in pairwise(steps):
        apart = [curve[step] - curve[before] for curve in curves]
        verdict = verdict_of(apart, 1) if any(apart) else FAILS
        parts.append((f"step {step:,d}", interval(apart), verdict))
    return parts


def as_printed(records: Sequence[Record], paper: str, table: str, label: Label,
               values: Sequence[str]) -> Parts:  # fmt: skip
    """The values of a record are those that the paper prints of the row of its name."""
    rows = {row[0]: tuple(map(str, row[1:])) for row in printed(paper)["tables"][table]["rows"]}
    found: dict[str, tuple] = {}
    for record in records:
        found[label_of(record, label)] = tuple(str(record.config.get(key)) for key in values)
    return [(name, "; ".join(its), HOLDS if its == rows[name] else FAILS)
            for name, its in found.items() if name in rows]  # fmt: skip


COMPUTE = {function.__name__: function for function in (compare, between, rising, as_printed)}
