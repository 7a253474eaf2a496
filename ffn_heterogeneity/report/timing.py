"""Interleaved timing: ratios inside one run, medians with bootstrap intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np


def interleave(
    cases: Mapping[str, Callable[[], object]], repetitions: int, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call, all cases in turn, the order turned round every other time.

    Args:
      cases: name -> a call that returns only when its work is done.
      repetitions: measured rounds, after `warm_up` unmeasured ones (compilation).
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_index in range(-warm_up, repetitions):
        names = list(cases) if round_index % 2 else list(reversed(cases))
        for name in names:
            start = time.perf_counter()
            cases[name]()
            elapsed = time.perf_counter() - start
            if round_index >= 0:
                times[name].append(elapsed)
    return times


def median_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, samples: int = 10_000
) -> tuple[float, float, float]:
    """(median of the paired ratios, lower, upper end of its 95% bootstrap interval)."""
    ratios = np.asarray(numerators, float) / np.asarray(denominators, float)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (samples, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(ratios)), float(low), float(high)
