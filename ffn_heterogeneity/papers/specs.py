"""Tables, curves and claims as plain data; `report/engine.py` draws them.

A path names a value of a record (`report/records.py`): a config key, a number of its results, or
one of `Accuracy`, `Scored`, `At`, `Against`, `Share` (a tuple of them: their mean). A match is
{config key: value}; a tuple of values is one of them, `bool` any that is true of itself.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

NONE: Mapping[str, Any] = {}


class Accuracy(NamedTuple):
    """An accuracy in percent: a task of the harness ("{data.task}": the run's own), and how many
    examples the prompt holds (None: however many)."""

    name: str
    shots: int | None = 0


class Scored(NamedTuple):
    """An accuracy under the name that the results give it: "piqa acc, 0 shots"."""

    name: str


class At(NamedTuple):
    """A metric after this share of the training steps."""

    metric: str
    share: float


class Against(NamedTuple):
    """A value against that of the record which fits `where` and is equal but for the keys `free`.

    `how`: "difference" (paired over seeds, with its t interval), "ratio", "percent" (of the other,
    above it), "z" (of two proportions), "windows" or "questions" (paired over those, with a
    bootstrap's interval).
    """

    path: Any
    where: Mapping[str, Any]
    free: tuple[str, ...]
    how: str = "difference"


class Cell(NamedTuple):
    """A value of the records that fit `where`, among those of a row."""

    path: Any
    where: Mapping[str, Any]


class Share(NamedTuple):
    """How far a value is on the way from a base's to a goal's, both found as `Against` finds."""

    path: Any
    base: Mapping[str, Any]
    goal: Mapping[str, Any]
    free: tuple[str, ...]


class Mean(NamedTuple):
    """The mean of several cells of a row."""

    cells: tuple[Cell, ...]


class Label(NamedTuple):
    """A format of keys that names a record: the first of `names` that matches, else `default`."""

    default: str
    names: Mapping[str, Mapping[str, Any]] = NONE


class Kind(NamedTuple):
    """Which runs make a kind of record: those that fit `where`, one record for equal `same`.

    Attributes:
      same: config keys, or beginnings of them that end in "."; runs may differ in the others.
      shown: those of them that labels show; where others differ, the record's name says so.
      name: of a record, "{name}" in formats.
      chance: whether the seed matters; without it one run meets every seed of another record.
      always: keys under "losses.<name>." that stay where the loss has no weight; the others go.
    """

    where: Mapping[str, Any]
    same: tuple[str, ...]
    shown: tuple[str, ...]
    name: Label
    chance: Mapping[str, Any] = NONE
    always: tuple[str, ...] = ()


class Table(NamedTuple):
    """One table: the paper's, under its own caption, or ours.

    Records whose labels are those of a printed row stand below it; the others follow.

    Attributes:
      key: "table_4": its name in the paper's JSON, and of the files. Ours is not in the JSON.
      kinds: of records; none: nobody can measure it here.
      labels: header -> label; the printed headers where the table is a paper's.
      columns: header -> path, `Cell` or `Mean`; "*", True: and a column for each scored task.
      where: a match of the records that count.
      best: of records with equal labels the one where this path is lowest; "": all of them.
      here: a format: what the column "from" says of a record.
      rows: labels and a paper's numbers, in a table of ours.
    """

    key: str
    kinds: tuple[str, ...] = ()
    labels: Mapping[str, Label] = NONE
    columns: Mapping[str, Any] = NONE
    where: Mapping[str, Any] = NONE
    best: str = ""
    here: str = "here: {model}"
    title: str = ""
    notes: tuple[str, ...] = ()
    rows: tuple[tuple, ...] = ()


class Curves(NamedTuple):
    """One figure: a panel for each of `y` and each name of `panel`, a line for each `line`.

    Attributes:
      y: label of the axis -> metric.
      x: "step"; "layer": of a metric that has a value a layer, at the last step; or a path, and `y`
        then are paths: each record is a point.
      by_step: a line for each evaluated step (at most five), its name ending in the step.
    """

    key: str
    kinds: tuple[str, ...]
    panel: Label
    line: Label
    y: Mapping[str, Any]
    x: str = "step"
    xlabel: str = ""
    where: Mapping[str, Any] = NONE
    title: str = ""
    by_step: bool = False
    log: bool = False


class Claim(NamedTuple):
    """A statement, where the paper makes it, and the function of `report/claims.py` that tells."""

    statement: str
    stated: str
    compute: str
    kind: str
    where: Mapping[str, Any]
    run_on: Label
    settings: Mapping[str, Any]


class Paper(NamedTuple):
    """A report: what it draws, in this order."""

    name: str
    kinds: Mapping[str, Kind]
    tables: tuple[Table, ...]
    curves: tuple[Curves, ...]
    claims: tuple[Claim, ...]


@functools.cache
def printed(name: str) -> dict[str, Any]:
    """{"tables": {key: {caption, labels, columns, rows, notes}}, "figures": {key: caption}}.

    A row holds its labels, then its numbers (null: not printed, or cut off in the copy at hand).
    """
    return json.loads((resources.files(__package__) / f"{name}.json").read_text())


def two_proportions(first: float, second: float, n: int | None) -> float | None:
    """z = (p2 - p1) / sqrt(2 p (1 - p) / n), p their mean; both in percent, of n questions each."""
    p = (first + second) / 200
    return (second - first) / 100 / (2 * p * (1 - p) / n) ** 0.5 if n and 0 < p < 1 else None
