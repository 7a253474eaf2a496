"""Records against each other: on seeds, windows of a text, questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas

from ffn_heterogeneity.report import stats
from ffn_heterogeneity.report.frame import units
from ffn_heterogeneity.report.stats import middle
from ffn_heterogeneity.report.tidy import (
    ABSENT,
    OWN,
    Frame,
    among,
    as_row,
    is_missing,
    last,
    text_of,
)


def versus(
    rows: Frame,
    what: str,
    base: Frame,
    same: Sequence[str],
    free: Sequence[str] = (),
    how: str = "difference",
    goal: Frame | None = None,
) -> Frame:
    """Each record's measurement against that of the record in `base` with the same settings.

    A row a record; "how" is "absent" where one of the two was not measured.

    Args:
      same: settings that are equal; "losses.": all that begin so.
      free: those of them that are not.
      how: "difference" (seed by seed, Student's interval), "ratio", "percent" (more than the
        other), "z" (of two proportions), "windows" or "questions" (paired over those, with a
        bootstrap's interval).
      goal: how far it is on the way from the base's value to one of these, in place of `how`.
    """
    if goal is not None:
        return _against(rows, what, [base, goal], same, free, _share)
    return _against(rows, what, [base], same, free, _HOW[how], itself=how == "ratio")


def _against(
    rows: Frame,
    what: str,
    others: Sequence[Frame],
    same: Sequence[str],
    free: Sequence[str],
    compute: Callable[..., Any],
    *,
    itself: bool = False,
) -> Frame:
    every = (name for name in rows.columns if name not in OWN)
    on = [name for name in every if among(name, same) and not among(name, free)]
    found: list[dict[tuple, Frame]] = []
    for other in others:
        found.append({})
        for key, group in _groups(other, what, on):
            found[-1].setdefault(key, group)
    made = []
    for key, group in _groups(rows, what, on):
        sides = [groups[key] for groups in found if key in groups]
        if len(sides) < len(found):
            continue
        if itself or all(side["record"].iat[0] != group["record"].iat[0] for side in sides):
            none = any(set(side.how) == {ABSENT} for side in (group, *sides))
            values = as_row(None if none else compute(group, *sides))
            made.append(group.iloc[0].to_dict() | {"seed": None, "units": None, **values})
    return pandas.DataFrame(made, columns=rows.columns) if made else rows.head(0)


def _groups(rows: Frame, what: str, on: Sequence[str]) -> Iterator[tuple[tuple, Frame]]:
    """(settings to be equal, rows) of each record; one that was not measured has an absent one."""
    own = last(rows[rows.what == what])
    others = rows[~rows["record"].isin(own["record"])].drop_duplicates("record")
    if len(others):
        absent = others.assign(what=what, **as_row(None))
        own = pandas.concat([own, absent], ignore_index=True)
    for _, group in own.groupby("record"):
        yield tuple(text_of(group[name].iat[0]) for name in on), group


def by_seed(group: Frame) -> dict[Any, float]:
    """{seed: value} of a record's rows; None where no chance is in it."""
    rows = zip(group["seed"], group["value"], group["how"], strict=True)
    return {None if is_missing(seed) else seed: x for seed, x, how in rows if how != ABSENT}


def differences(own: Mapping[Any, float], other: Mapping[Any, float]) -> list[float]:
    """Differences seed by seed, of the seeds that both have.

    A side without chance (None) meets every seed of the other. Where the two have no seed in
    common: of the means, one value.
    """
    if not own or not other:
        return []
    if None in own:
        own = dict.fromkeys(other, own[None])
    if None in other:
        other = dict.fromkeys(own, other[None])
    common = [own[seed] - other[seed] for seed in own if seed in other]
    return common or [float(np.mean(list(own.values())) - np.mean(list(other.values())))]


def _ratio(own: Frame, other: Frame) -> float | None:
    sides = [list(by_seed(side).values()) for side in (own, other)]
    means = [middle(stats.over(side)) for side in sides]
    return means[0] / means[1] if None not in means and means[1] else None


def _share(*sides: Frame) -> Any:
    return stats.share(*map(by_seed, sides))


def _percent(own: Frame, other: Frame) -> float | None:
    ratio = _ratio(own, other)
    return None if ratio is None else 100 * (ratio - 1)


def _z(own: Frame, other: Frame) -> float | None:
    base, score = (middle(stats.over(list(by_seed(side).values()))) for side in (other, own))
    n = own.n.iat[0] if len(own) == 1 and own.how.iat[0] == "Wilson" else None
    return None if None in (base, score) else stats.two_proportions(base, score, n)


def _paired(own: Frame, other: Frame) -> Any:
    """Over the units (windows, questions) that both have; None where those are not all."""
    one, base = _units(own), _units(other)
    if not one or one.keys() != base.keys():
        return None
    return stats.bootstrap([one[unit] - base[unit] for unit in one])


def _units(group: Frame) -> dict[Any, float]:
    """{window or question: mean over the seeds}; empty where the seeds' units differ."""
    places = zip(group["by"], group["units"], strict=True)
    each = [{} if is_missing(place) else units(run, place) for run, place in places]
    scale = 100 if str(group["units"].iat[0]).startswith("samples/") else 1
    if len({tuple(one) for one in each}) != 1:
        return {}
    return {unit: scale * float(np.mean([one[unit] for one in each])) for unit in each[0]}


_HOW = {
    "difference": lambda own, other: stats.interval(differences(by_seed(own), by_seed(other))),
    "ratio": _ratio,
    "percent": _percent,
    "z": _z,
    "windows": _paired,
    "questions": _paired,
}
