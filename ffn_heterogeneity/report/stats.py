"""Statistics over seeds, windows and questions: means and intervals, with scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

DRAWS = 10_000
HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
TOLD = {True: HOLDS, False: FAILS}
# Explanation of the brackets of a number, by its `Spread.how`.
BRACKETS = {
    "range": "range: lowest and highest of n runs or seeds",
    "t": "t: Student's 95% interval over n seeds (of differences: seed by seed)",
    "Wilson": "Wilson: Wilson's 95% interval over n questions",
    "bootstrap": "bootstrap: 95% percentiles over resamples of n questions, windows or rows",
    "by document": "by document: the same over n documents, each with all of its windows",
    "Fieller": "Fieller: Fieller's 95% interval of a ratio over n seeds",
}


class Spread(NamedTuple):
    """A number with its interval.

    Attributes:
      n: number of seeds, questions or windows behind it.
      how: method of the interval (`BRACKETS`).
    """

    mean: float
    low: float
    high: float
    n: int
    how: str = "range"


def middle(value: Any) -> Any:
    """The number itself; the mean of several."""
    return value.mean if isinstance(value, Spread) else value


def over(values: Sequence[Any]) -> Any:
    """Mean, lowest and highest of several values; the value if all are equal; None for none."""
    if len(set(map(middle, values))) < 2:
        return values[0] if values else None
    values = [middle(value) for value in values]
    return Spread(float(np.mean(values)), float(np.min(values)), float(np.max(values)), len(values))


def interval(values: Sequence[float]) -> Any:
    """Mean and Student's 95% interval of several values; a single value has no interval."""
    return student(values) if len(values) > 1 else values[0] if values else None


def student(values: Sequence[float]) -> Spread:
    """The mean and its 95% interval, -+ t_{0.975, n-1} s / sqrt(n): infinite for one value."""
    from scipy.special import stdtrit

    n, mean = len(values), float(np.mean(values))
    mean = 0.0 if abs(mean) < 1e-12 else mean  # sums that are equal may differ by 5e-17
    half = stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / n**0.5 if n > 1 else math.inf
    return Spread(mean, float(mean - half), float(mean + half), n, "t")


def resamples(n: int, draws: int, seed: Any = 0) -> np.ndarray:
    """The bootstrap: n of the places 0 .. n - 1 drawn with replacement, int [draws, n].

    Args:
      seed: or a generator.
    """
    return np.random.default_rng(seed).integers(0, n, (draws, n))


def ends(drawn: Any, method: Any = "linear") -> tuple[float, float]:
    """The middle 95% of the draws."""
    low, high = np.percentile(drawn, [2.5, 97.5], method=method)
    return float(low), float(high)


def bootstrap(values: Sequence[float], documents: Sequence[Any] = ()) -> Any:
    """The mean, with its 95% percentiles over resamples of the values.

    Args:
      documents: the document of each value; then documents are drawn, each with all its values.
    """
    sample = np.asarray(values, float)
    groups = np.unique(documents or np.arange(len(sample)), return_inverse=True)[1]
    sums, counts = np.bincount(groups, sample), np.bincount(groups)
    n = len(sums)
    if n < 2:
        return float(sample.mean()) if n else None
    generator, means = np.random.default_rng(0), []
    for start in range(0, DRAWS, 256):  # in pieces: all would take gigabytes for 10,000 questions
        drawn = resamples(n, min(256, DRAWS - start), generator)
        means.append(sums[drawn].sum(-1) / counts[drawn].sum(-1))
    low, high = ends(np.concatenate(means))
    # Means over seeds that are equal may differ by 5e-17.
    mean = round(float(sample.mean()), 12) + 0.0
    return Spread(mean, low, high, n, "by document" if documents else "bootstrap")


def verdict(value: Any, sign: int) -> str:
    """Verdict whether a number (or its whole interval) is above 0 (sign 1) or below (-1)."""
    if value is None or isinstance(value, str) or not math.isfinite(middle(value)):
        return OPEN
    ends = value[1:3] if isinstance(value, Spread) else (value, value)
    low, high = sorted(sign * end for end in ends)
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN
