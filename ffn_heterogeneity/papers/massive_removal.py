"""Massive weights in NUCL's removals: what their neurons have to do with entropy's advantage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.papers import nucl, printed
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.tidy import Frame, Match
from ffn_heterogeneity.report.versus import versus

CORPORA = {"WikiText": "wikitext", "C4": "c4", "PG-19": "pg19"}  # known by the path of a text
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
LOST, OURS = printed("massive_weights")["lost"], printed("massive_weights")["ours"]["tables"]
NEEDED = ("", {"entropy": ENTROPY, "chance": CHANCE})
for lose, who in LOST.items():
    NEEDED[1][f"entropy, {who} lost"] = {**ENTROPY, "lose": lose}
# As many as a figure can hold: chance, and rules that do better at most shares.
SHOWN = ["random", "entropy", "mstd", "bos", "largest_outgoing", "mean_state", "optipfair"]


def corpus(place: Any) -> str:
    name = "" if tidy.is_missing(place) else str(place)
    return next((x for x in CORPORA.values() if x in name.lower()), os.path.basename(name))


def removals(rows: Frame) -> Frame:
    rows = nucl.removals(rows, ("model", "ratio", *nucl.REMOVAL, "window"))
    return rows.assign(calibration_corpus=rows.calibration.map(corpus))


def than(rows: Frame, base: Match, every: Frame, how: str = "difference") -> Frame:
    """The loss less that after another removal of as many neurons of the same model."""
    return versus(every, "nll", rows, base, nucl.REMOVED, nucl.REMOVAL, how)


def harm(rows: Frame, every: Frame) -> Frame:
    free = (*nucl.REMOVAL, *nucl.SIZE)
    return versus(every, "nll", rows, UNPRUNED, nucl.REMOVED, free, "units")


def of_advantage(rows: Frame, base: Match, goal: Match, every: Frame) -> Frame:
    return versus(every, "nll", rows, base, nucl.REMOVED, nucl.REMOVAL, goal=goal)


def removal(runs: Runs) -> Frame:
    every = runs["removal"]
    rows = tidy.matching(every, {"lose": ["", tidy.IDLE]})
    columns = {
        "NLL": "nll",
        "less unpruned": harm(rows, every),
        "less entropy": than(rows, ENTROPY, every, "units"),
        "less chance": than(rows, CHANCE, every),
    }
    texts = {**OURS["removal"], "labels": {**OURS["removal"]["labels"], "method": RULE}}
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


def at(rows: Frame, values: Mapping[str, Any], x: str) -> Frame:
    """Each record's mean at its setting `x`."""
    rows = tidy.cells(rows, values)
    mean = rows.groupby(["record", "column"], observed=True)["value"].transform("mean")
    rows = rows.assign(value=mean, seed=None).drop_duplicates(["record", "column"])
    return rows[rows[x] != tidy.IDLE]


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
