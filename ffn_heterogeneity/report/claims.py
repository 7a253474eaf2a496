"""Whether a paper's statements hold in records: every function gives (measured, verdict).

Of several seeds, compared seed by seed, Student's 95% interval decides; of one, its number. A claim
over several records holds if it does for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ffn_heterogeneity.papers.specs import Against, Label
from ffn_heterogeneity.report.records import (
    Record,
    by_seed,
    differences,
    interval,
    label,
    middle,
    over,
    reference_of,
    value_of,
)
from ffn_heterogeneity.report.runs import Spread
from ffn_heterogeneity.report.tables import number

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
Verdict = tuple[str, str]


def verdict_of(differences: Sequence[float], sign: int) -> str:
    """Whether they lie on the side of `sign`."""
    if not differences or not all(map(math.isfinite, differences)):
        return OPEN
    found = interval([sign * x for x in differences])
    low, high = (found.low, found.high) if isinstance(found, Spread) else (found, found)
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN


def _all(parts: Sequence[tuple[str, Any, str]]) -> Verdict:
    """(name, number, verdict) of each: which of them decide against the whole."""
    measured = "; ".join(f"{name} {number(value)}".strip() for name, value, _ in parts)
    for bad in (FAILS, OPEN):
        names = [name for name, _, verdict in parts if verdict == bad]
        if names:
            whole = len(names) == len(parts)
            return measured, bad if whole else f"{bad} ({', '.join(names)})"
    return (measured, HOLDS) if parts else ("-", OPEN)


def compare(
    records: Sequence[Record], others: Sequence[Record], value: Against, sign: int, label: Label
) -> Verdict:
    """Each record lies above (sign 1) or below (-1) the one that it stands against."""
    return _all([_one(record, others, value, sign, label) for record in records])


def _one(record: Record, others: Sequence[Record], value: Against, sign: int, name: Label):
    base = reference_of(record, value, others)
    apart = differences(record, base, value.path) if base else []
    return label(record, name), interval(apart), verdict_of(apart, sign)


def between(
    records: Sequence[Record], others: Sequence[Record], value: Any, low: float, high: float,
    label: Label, at_least: tuple[str, float] = ("", 0.0),
) -> Verdict:  # fmt: skip
    """Each record's value lies in low .. high, of every seed; `at_least`: (key, value) who counts."""
    parts = []
    for record in records:
        if record.config.get(at_least[0], at_least[1]) >= at_least[1]:
            values = [middle(x) for x in by_seed(record, value).values()]
            known = bool(values) and all(map(math.isfinite, values))
            inside = all(low <= x <= high for x in values)
            verdict = (HOLDS if inside else FAILS) if known else OPEN
            parts.append((_named(record, label), value_of(record, value), verdict))
    return _all(parts)


_named = label


def rising(records: Sequence[Record], others: Sequence[Record], metric: str) -> Verdict:
    """A metric grows from each fifth of training to the next, or between all evaluated steps."""
    (record,) = records[:1]
    curves = {seed: m.curves.get(metric, {}) for seed, m in record.members.items()}
    steps = sorted(set.intersection(*map(set, curves.values())))
    fifths = [round(x * max(steps, default=0) / 5) for x in range(1, 6)]
    steps = fifths if set(fifths) <= set(steps) else [step for step in steps if step]
    values = [[curve[step] for curve in curves.values()] for step in steps]
    pairs = [[b - a for a, b in zip(*two, strict=True)] for two in zip(values, values[1:])]
    verdicts = [verdict_of(x, 1) if any(x) else FAILS for x in pairs]
    parts = zip(steps[1:], map(over, values[1:]), verdicts, strict=True)
    first = [("step", "", HOLDS)] if not steps else []
    return _all([*first, *((f"step {s:,d}", v, how) for s, v, how in parts)])


COMPUTE = {function.__name__: function for function in (compare, between, rising)}
