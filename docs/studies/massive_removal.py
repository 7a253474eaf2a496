"""Massive weights in NUCL's removals: what their neurons have to do with entropy's advantage.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/massive_removal.py runs/rivals-* runs/needed-* \
      --out=runs/removal
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.papers import nucl, printed
from ffn_heterogeneity.papers.massive_weights import at, corpus
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.stats import Spread
from ffn_heterogeneity.report.tidy import Frame, Match
from ffn_heterogeneity.report.versus import by_seed, versus

PRINTED = printed(__file__)
UNPRUNED, ENTROPY = {"criterion": "none"}, nucl.METHODS["Entropy-based"]
CHANCE = nucl.METHODS["Random"]
RULE = (
    "{criterion}, {compensation}, reverse {reverse}, {protect} spared, on {calibration_corpus}",
    nucl.METHODS
    | {
        "Random, {protect} spared": {**CHANCE, "protect": tidy.ANY},
        "{criterion}, on {calibration_corpus}": {**nucl.PLAIN, "calibration": tidy.ANY},
        "{criterion}": nucl.PLAIN,
        "{criterion}, reversed": {**nucl.PLAIN, "reverse": True},
        "{criterion}, {compensation}": nucl.FREELY,
    },
)
# What a figure shows of entropy made to lose neurons; the loudest have the largest |h| on bos.
LOST = PRINTED["lost"]
NEEDED = ("", {"entropy": ENTROPY, "chance": CHANCE})
for lose, who in LOST.items():
    NEEDED[1][f"entropy, {who} lost"] = {**ENTROPY, "lose": lose}
# As many as a figure can hold: chance, and rules that do better at most shares.
SHOWN = ["random", "entropy", "mstd", "bos", "largest_outgoing", "mean_state", "optipfair"]


def removals(rows: Frame) -> Frame:
    rows = nucl.removals(rows, ("model", "ratio", *nucl.REMOVAL, "window"))
    return rows.assign(calibration_corpus=rows.calibration.map(corpus))


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


def than(rows: Frame, base: Match, every: Frame, how: str = "difference") -> Frame:
    """The loss less that after another removal of as many neurons of the same model."""
    return versus(every, "nll", rows, base, nucl.REMOVED, nucl.REMOVAL, how)


def harm(rows: Frame, every: Frame) -> Frame:
    free = (*nucl.REMOVAL, *nucl.SIZE)
    return versus(every, "nll", rows, UNPRUNED, nucl.REMOVED, free, "units")


def of_advantage(rows: Frame, base: Match, goal: Match, every: Frame) -> Frame:
    """The share of the way from one removal's loss to another's."""

    def of_way(*sides: Frame) -> Any:
        return share(*map(by_seed, sides))

    return versus(every, "nll", rows, base, nucl.REMOVED, nucl.REMOVAL, of_way, goal)


def removal(runs: Runs) -> Frame:
    every = runs["removal"]
    rows = tidy.matching(every, {"lose": ["", tidy.IDLE]})
    columns = {
        "NLL": "nll",
        "less unpruned": harm(rows, every),
        "less entropy": than(rows, ENTROPY, every, "units"),
        "less chance": than(rows, CHANCE, every),
    }
    texts = PRINTED["tables"]["removal"]
    texts = {**texts, "labels": {**texts["labels"], "method": RULE}}
    return tidy.labelled(tidy.cells(rows, columns), texts)


def needed(runs: Runs) -> Frame:
    every = runs["removal"]
    rows = tidy.matching(every, {"criterion": "entropy", "compensation": "none", **nucl.FREELY})
    fixed = tidy.matching(rows, {"draws": False})
    columns = {
        "NLL": "nll",
        "less entropy": than(rows, ENTROPY, every, "units"),
        "of entropy's advantage": of_advantage(fixed, ENTROPY, CHANCE, every),
    }
    return tidy.cells(rows, columns)


def explained(runs: Runs) -> Frame:
    every = runs["removal"]
    rows = tidy.matching(every, {"criterion": "random", "reverse": False, "compensation": "none"})
    columns = {"NLL": "nll", "less chance": than(rows, CHANCE, every)}
    columns["of entropy's advantage"] = of_advantage(rows, CHANCE, ENTROPY, every)
    return tidy.cells(rows, columns)


def removal_by_ratio(runs: Runs) -> Frame:
    return by_ratio(runs, {"criterion": SHOWN}, RULE)


def needed_by_ratio(runs: Runs) -> Frame:
    return by_ratio(runs, {"criterion": SHOWN[:2], "lose": ["", *LOST]}, NEEDED)


def by_ratio(runs: Runs, settings: Match, line: Any) -> Frame:
    rows = harm(tidy.matching(runs["removal"], {**nucl.PLAIN, **settings}), runs["removal"])
    rows = at(rows, {"NLL less unpruned": rows}, "ratio")
    return rows.assign(line=tidy.labelled(rows, {"labels": {}, "here": line})["from"])


def by_entropy(runs: Runs) -> Frame:
    rows = tidy.matching(runs["removal"], ENTROPY)
    return than(rows, CHANCE | {"protect": "bos:5"}, runs["removal"])


KINDS, SETTINGS = {"removal": removals}, nucl.SETTINGS
