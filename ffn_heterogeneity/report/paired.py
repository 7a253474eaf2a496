"""Records against each other on what both were measured on: windows of a text, questions, seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from ffn_heterogeneity.report.tables import Spread

DRAWS = 10_000


def bootstrap(values: Sequence[float]) -> Any:
    """The mean, with its 95% percentiles over resamples of the values."""
    sample = np.asarray(values, float)
    n = len(sample)
    if n < 2:
        return float(sample[0]) if n else None
    drawn = np.random.default_rng(0).integers(n, size=(DRAWS, n))
    low, high = np.nanpercentile(sample[drawn].mean(1), [2.5, 97.5])
    # Means over seeds that are equal may differ by 5e-17.
    return Spread(round(float(sample.mean()), 12) + 0.0, float(low), float(high), n, "bootstrap")


def difference(own: dict[Any, float], other: dict[Any, float]) -> Any:
    """The mean of own - other over the units that both have; None where those are not all."""
    if not own or own.keys() != other.keys():
        return None
    return bootstrap([own[unit] - other[unit] for unit in own])


def share(own: dict[Any, float], base: dict[Any, float], goal: dict[Any, float]) -> Any:
    """(base - own) / (base - goal) of the means over seeds: how far from base to goal own is.

    What has no chance in it ({None: value}) meets every seed.
    """
    sides = [own, base, goal]
    drawn = [set(side) for side in sides if None not in side]
    seeds = sorted(set.intersection(*drawn), key=str) if drawn else [None]
    if not seeds:
        return None
    each = [[side.get(seed, side.get(None)) for seed in seeds] for side in sides]
    at, start, end = (np.asarray(values, float) for values in each)
    return fieller(start - at, start - end)


def fieller(above: np.ndarray, below: np.ndarray) -> Any:
    """The ratio of two means of n pairs, with Fieller's 95% interval.

    r is in it where Student's t does not tell mean(above - r below) from 0:
    (b^2 - q v_bb) r^2 - 2 (a b - q v_ab) r + (a^2 - q v_aa) <= 0, a and b the means, v their
    variances and covariance, q = t^2_{0.975, n-1}. Unlike a bootstrap's it may hold 0 where every
    pair has the same sign; without bounds where b is not told from 0.
    """
    from scipy.special import stdtrit

    n, a, b = len(above), float(np.mean(above)), float(np.mean(below))
    if n < 2 or not b:
        return a / b if b else None
    v = np.cov(above, below) / n
    q = float(stdtrit(n - 1, 0.975)) ** 2
    square, linear, constant = b * b - q * v[1, 1], a * b - q * v[0, 1], a * a - q * v[0, 0]
    if square <= 0:
        return Spread(a / b, -np.inf, np.inf, n, "Fieller")
    half = max(linear * linear - square * constant, 0.0) ** 0.5
    return Spread(a / b, (linear - half) / square, (linear + half) / square, n, "Fieller")


def questions(path: str, task: str) -> dict[Any, float]:
    """{question: its score in percent}, by acc_norm, acc or exact_match, of a run's own samples."""
    found = sorted(epath.Path(path).glob(f"samples/{task}.jsonl"))
    rows = [json.loads(line) for file in found for line in file.read_text().splitlines()]
    names = [name for name in ("acc_norm", "acc", "exact_match") if rows and name in rows[0]]
    return {row["doc_id"]: 100 * float(row[names[0]]) for row in rows} if names else {}
