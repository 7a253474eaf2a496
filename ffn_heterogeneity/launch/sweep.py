"""Sweeps: the points of a config to run, defined next to its `get_config`.

A config file may define `SWEEPS`, a dict from the name of a sweep to its points or to a function of
the config that returns them (e.g. if they depend on the model), and `KIND`, the command that runs
them (`commands.COMMANDS`). Combinators make points from tables of config keys and values:

    KIND = "train"
    SWEEPS = {
        "weight": product({"seed": (0, 1), "losses.nucl.weight": (0.0, 1.0, 10.0)}),
        "length": chain(point("plain", {"losses.nucl.weight": 0.0}), {"steps": (100, 1000)}),
    }

A point's name is that of its directory and table row. It is given, or made from its settings
("seed=0,weight=10").
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep: its name, and the config keys that it sets."""

    name: str
    settings: Mapping[str, Any]


Sweep = tuple[Point, ...]
# Arguments of combinators: points, or config keys with their values.
Part = Sweep | Mapping[str, Sequence[Any]]


def point(name: str, settings: Mapping[str, Any] | None = None) -> Sweep:
    """One point with a given name; without settings it is the unchanged config."""
    return (Point(name, dict(settings or {})),)


def product(*parts: Part) -> Sweep:
    """All combinations; the last part (or key) changes fastest.

    Raises:
      ValueError: two parts set the same key, or a key has no values.
    """
    axes = [axis for sweep in parts for axis in _axes(sweep)]
    return tuple(_merged(points) for points in itertools.product(*axes))


def chain(*parts: Part) -> Sweep:
    """Concatenate parts (for a table: vary one key at a time, the others unchanged)."""
    return tuple(itertools.chain.from_iterable(axis for sweep in parts for axis in _axes(sweep)))


def check_sweep(points: Sequence[Point]) -> None:
    """Check the points of a sweep.

    Raises:
      ValueError: no points, duplicate names, or a name that is not a plain directory name.
    """
    if not points:
        raise ValueError("the sweep has no point")
    names = [one.name for one in points]
    for one in names:
        if not re.fullmatch(r"\w[\w.,=+-]*", one):
            raise ValueError(f"point {one!r}: a name is made of letters, digits and _ . , = + -")
        if names.count(one) > 1:
            raise ValueError(f"two points are named {one!r}: give each its own name")


def _axes(sweep: Part) -> list[Sweep]:
    """Axes of a part: each key of a table, as points; or the given points as one axis."""
    if not isinstance(sweep, Mapping):
        return [tuple(sweep)]
    for key, values in sweep.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"sweep over {key}={values!r}: give a tuple of values")
    return [
        tuple(Point(f"{key.rpartition('.')[2]}={_text(value)}", {key: value}) for value in values)
        for key, values in sweep.items()
    ]


def _merged(points: Sequence[Point]) -> Point:
    def merge(first: Point, second: Point) -> Point:
        both = sorted(set(first.settings) & set(second.settings))
        if both:
            raise ValueError(f"two parts of a sweep set {both[0]!r}")
        return Point(f"{first.name},{second.name}", {**first.settings, **second.settings})

    return functools.reduce(merge, points)


def _text(value: Any) -> str:
    """A value as part of a directory's name."""
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, (list, tuple)):
        return "+".join(map(_text, value)) or "none"
    return re.sub(r"[^\w.+-]+", "_", str(value))
