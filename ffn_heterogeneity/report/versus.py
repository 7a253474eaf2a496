"""Records against each other: on seeds, windows of a text, questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas

from ffn_heterogeneity.report import stats, tidy
from ffn_heterogeneity.report.frame import units
from ffn_heterogeneity.report.stats import middle
from ffn_heterogeneity.report.tidy import ABSENT, Frame, Match, as_row, is_missing


def versus(
    every: Frame,
    what: str,
    these: Frame | Match,
    base: Match,
    same: Sequence[str],
    free: Sequence[str] = (),
    how: str | Callable[..., Any] = "difference",
    goal: Match | None = None,
) -> Frame:
    """The measurement of each of these records against that of the record of `base` with the same
    settings.

    A row a record; "how" is "absent" where one of the two was not measured.

    Args:
      these: rows, or what picks their runs; `base` and `goal` pick the others from `every`.
      same: settings that are equal; "losses.": all that begin so.
      free: those of them that are not.
      how: "difference" (seed by seed, Student's interval), "ratio", "percent" (more than the
        other), "z" (of two proportions), "units" (paired over windows or questions, with a
        bootstrap's interval), or a function of the rows of the record and of its base.
      goal: a third side of such a function.
    """
    rows = tidy.matching(every, these) if isinstance(these, Mapping) else these
    names = (name for name in rows.columns if name not in tidy.OWN)
    on = [name for name in names if tidy.among(name, same) and not tidy.among(name, free)]
    others = [tidy.matching(every, match) for match in (base, goal) if match is not None]
    # Of several records with the same settings the first.
    found = [dict(reversed(list(_groups(other, what, on)))) for other in others]
    compute, made = _HOW[how] if isinstance(how, str) else how, []
    for key, group in _groups(rows, what, on):
        sides = [groups[key] for groups in found if key in groups]
        itself = any(side["record"].iat[0] == group["record"].iat[0] for side in sides)
        if len(sides) == len(found) and (how == "ratio" or not itself):
            none = any(set(side.how) == {ABSENT} for side in (group, *sides))
            values = as_row(None if none else compute(group, *sides))
            made.append(group.iloc[0].to_dict() | {"seed": None, "units": None, **values})
    return pandas.DataFrame(made, columns=rows.columns) if made else rows.head(0)


def _groups(rows: Frame, what: str, on: Sequence[str]) -> Iterator[tuple[tuple, Frame]]:
    """(settings to be equal, rows) of each record; one that was not measured has an absent one."""
    own = tidy.last(rows[rows.what == what])
    others = rows[~rows["record"].isin(own["record"])].drop_duplicates("record")
    if len(others):
        absent = others.assign(what=what, **as_row(None))
        own = pandas.concat([own, absent], ignore_index=True)
    for _, group in own.groupby("record"):
        yield tuple(tidy.text_of(group[name].iat[0]) for name in on), group


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


def _mean(group: Frame) -> float | None:
    return middle(stats.over(list(by_seed(group).values())))


def _ratio(own: Frame, other: Frame) -> float | None:
    value, base = _mean(own), _mean(other)
    return value / base if value is not None and base else None


def _percent(own: Frame, other: Frame) -> float | None:
    ratio = _ratio(own, other)
    return None if ratio is None else 100 * (ratio - 1)


def _z(own: Frame, other: Frame) -> float | None:
    base, score = _mean(other), _mean(own)
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
    same = len({tuple(one) for one in each}) == 1
    return {x: scale * float(np.mean([one[x] for one in each])) for x in each[0] if same}


_HOW = {
    "difference": lambda own, other: stats.interval(differences(by_seed(own), by_seed(other))),
    "ratio": _ratio,
    "percent": _percent,
    "z": _z,
    "units": _paired,
}
