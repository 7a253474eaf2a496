"""Massive weights in NUCL's removals: what their neurons have to do with entropy's advantage.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/massive_removal.py runs/rivals-* runs/needed-* \
      --out=runs/removal
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.papers import nucl
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame, by_seed
from ffn_heterogeneity.report.stats import Spread, middle

LABELS = ["model", "share of neurons", "method", "place"]
ON = ["model", "share of neurons", "place"]
# What a figure shows of entropy made to lose neurons; the loudest have the largest |h| on bos.
LOST = {
    "massive:2": "massive layer's 2 loudest",
    "bos:5": "each layer's 5 loudest",
    "entropy:0.01": "each layer's lowest 1%",
    "random:0.01": "any other 1%",
}
# As many as a figure can hold: chance, and rules that do better at most shares.
SHOWN = ["random", "entropy", "mstd", "bos", "largest_outgoing", "mean_state", "optipfair"]


def removals(runs: Frame) -> Frame:
    rows = nucl.removals(runs)
    share = c.label(rows, "{:g}".format, "ratio").where(rows.criterion != "none", "-")
    return rows.assign(**{"share of neurons": share})


def share(own: Mapping, base: Mapping, goal: Mapping) -> Any:
    """(base - own) / (base - goal) of the means over seeds: how far from base to goal own is.

    Each side is {seed: value}; what has no chance in it ({None: value}) meets every seed.
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


def of(rows: Frame, method: str, what: str = "nll") -> Frame:
    return rows[(rows.method == method) & (rows.what == what)]


def than(rows: Frame, base: str, every: Frame, index: list[str], how: Any = None) -> Any:
    """The loss against that after another removal of as many neurons of the same model."""
    free = (*nucl.REMOVAL, "method")
    return c.against(rows[rows.what == "nll"], of(every, base), index, ON, free, how)


def harm(rows: Frame, every: Frame, index: list[str]) -> Any:
    """The loss against the dense model's, window by window."""
    free = (*nucl.REMOVAL, *nucl.SIZE, "method", "removed", "share of neurons")
    base, on = of(every, "Pre-trained baseline"), ["model", "place"]
    return c.against(rows[rows.what == "nll"], base, index, on, free, c.paired_units)


def of_advantage(rows: Frame, base: str, goal: str, every: Frame, index: list[str]) -> Any:
    """The share of the way from one removal's loss to another's."""
    goals = dict(iter(of(every, goal).groupby(ON, sort=False)))

    def of_way(own: Frame, other: Frame) -> Any:
        end = goals.get(tuple(own[ON].iloc[0]))
        return None if end is None else share(*map(by_seed, (own, other, end)))

    return than(rows, base, every, index, of_way)


def removal(removals: Frame) -> Frame:
    rows = removals[removals.lose.isna() | (removals.lose == "")]
    columns = {"NLL": "nll", "Δ vs unpruned": harm(rows, removals, LABELS)}
    columns["Δ vs entropy"] = than(rows, "Entropy-based", removals, LABELS, c.paired_units)
    columns["Δ vs chance"] = than(rows, "Random", removals, LABELS)
    return c.table(rows, LABELS, columns)


def needed(removals: Frame) -> Frame:
    index = ["model", "share of neurons", "lost", "place"]
    plain = removals.method.str.startswith("Entropy-based") & (removals.protect == "")
    rows = removals[plain & ~removals.reverse.astype(bool) & (removals.calibration == "")]
    rows = rows.assign(lost=rows.lose.replace("", "none"))
    fixed = rows[~rows.lost.str.startswith("random:")]
    columns = {"NLL": "nll"}
    columns["Δ vs entropy"] = than(rows, "Entropy-based", removals, index, c.paired_units)
    columns["of entropy's advantage"] = of_advantage(
        fixed, "Entropy-based", "Random", removals, index
    )
    return c.table(rows, index, columns)


def explained(removals: Frame) -> Frame:
    index = ["model", "share of neurons", "spared", "place"]
    rows = removals[(removals.criterion == "random") & (removals.compensation == "none")]
    rows = rows.assign(spared=rows.protect.replace("", "nobody"))
    columns = {"NLL": "nll", "Δ vs chance": than(rows, "Random", removals, index)}
    columns["of entropy's advantage"] = of_advantage(
        rows, "Random", "Entropy-based", removals, index
    )
    return c.table(rows, index, columns)


def by_ratio(rows: Frame, every: Frame, line: Any) -> Frame:
    rows = rows.assign(line=line)
    made = harm(rows, every, ["model", "line", "ratio"]).rename("y").reset_index()
    made = made.assign(panel=made.model, x=made.ratio, value="NLL Δ vs unpruned", seed=None)
    return made.assign(y=made.y.map(middle)).sort_values(["panel", "line", "x"])


def removal_by_ratio(removals: Frame) -> Frame:
    plain = (removals.compensation == "none") & (removals.lose == "") & (removals.protect == "")
    rows = removals[plain & removals.criterion.isin(SHOWN) & ~removals.reverse.astype(bool)]
    return by_ratio(rows, removals, rows.method)


def needed_by_ratio(removals: Frame) -> Frame:
    names = {f"Entropy-based, {lose} lost": f"entropy, {who} lost" for lose, who in LOST.items()}
    names |= {"Entropy-based": "entropy", "Random": "chance"}
    rows = removals[removals.method.isin(list(names))]
    return by_ratio(rows, removals, rows.method.map(names))


def by_entropy(removals: Frame) -> Frame:
    rows = of(removals, "Entropy-based")
    place = rows.model + ", " + rows["share of neurons"]
    rows = rows.assign(part="entropy", run_on=place)
    return c.judged(than(rows, "Random, bos:5 spared", removals, ["run_on", "part"]), -1)
