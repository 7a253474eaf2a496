"""Records against each other on what both were measured on: windows of a text, questions, seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath

from ffn_heterogeneity.report.tables import Spread

DRAWS = 10_000


def bootstrap(columns: Sequence[Sequence[float]], statistic: Callable = lambda x: x) -> Any:
    """`statistic` of the columns' means, with its 95% percentiles over resamples of the rows.

    Args:
      columns: equally long; row i of all of them is drawn together.
      statistic: array [columns, ...] of means -> [...]; by default that of one column.
    """
    values = np.asarray(columns, float)
    n = values.shape[1]
    if n < 2:
        return float(np.squeeze(statistic(values.mean(1)))) if n else None
    drawn = np.random.default_rng(0).integers(n, size=(DRAWS, n))
    low, high = np.nanpercentile(np.squeeze(statistic(values[:, drawn].mean(2))), [2.5, 97.5])
    middle = float(np.squeeze(statistic(values.mean(1))))
    # Means over seeds that are equal may differ by 5e-17.
    return Spread(round(middle, 12) + 0.0, float(low), float(high), n, "bootstrap")


def difference(own: dict[Any, float], other: dict[Any, float]) -> Any:
    """The mean of own - other over the units that both have; None where those are not all."""
    if not own or own.keys() != other.keys():
        return None
    return bootstrap([[own[unit] - other[unit] for unit in own]])


def share(own: dict[Any, float], base: dict[Any, float], goal: dict[Any, float]) -> Any:
    """(base - own) / (base - goal) of the means over seeds: how far from base to goal own is.

    A goal without chance ({None: value}) meets every seed.
    """
    if len(goal) == 1 and None in goal:
        goal = dict.fromkeys(own, goal[None])
    seeds = [seed for seed in own if seed in base and seed in goal]
    if not seeds:
        return None
    columns = [[values[seed] for seed in seeds] for values in (own, base, goal)]
    with np.errstate(all="ignore"):
        return bootstrap(columns, lambda x: (x[1] - x[0]) / (x[1] - x[2]))


def questions(path: str, task: str) -> dict[Any, float]:
    """{question: its score in percent}, by acc_norm, acc or exact_match, of a run's own samples."""
    found = sorted(epath.Path(path).glob(f"samples/{task}.jsonl"))
    rows = [json.loads(line) for file in found for line in file.read_text().splitlines()]
    names = [name for name in ("acc_norm", "acc", "exact_match") if rows and name in rows[0]]
    return {row["doc_id"]: 100 * float(row[names[0]]) for row in rows} if names else {}
