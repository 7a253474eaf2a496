"""What the numbers of a JREG report say about the paper's claims, computed from them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from ffn_heterogeneity.report import paper_jreg as paper
from ffn_heterogeneity.report.jreg_conditions import (
    NLL,
    RATES,
    Condition,
    baseline_of,
    conditions,
    differences,
    number_over_seeds,
    trained,
    values_of,
)
from ffn_heterogeneity.report.jreg_models import READINGS, Measured, whole
from ffn_heterogeneity.report.paper_table import NOT_RUN, UNKNOWN, Table, middle, number, spread
from ffn_heterogeneity.report.runs import Run, written_models

ABOUT_ZERO = 0.5  # percent: the paper gives no bound
HOLDS, FAILS, OPEN = "holds", "does not hold", "not known"
ZETA = RATES["zeta_L"]
Row = tuple[str, str, str, str, str]  # statement, paper, run on, measured, verdict
STATEMENTS = {
    "published": (
        "a model's zeta_L lies between 7 and 28%",
        "between 7 and 28 over its published models",
    ),
    "rises": ("the baseline's zeta_L is larger at the end than at first", UNKNOWN),
    "zero": (f"JREG's zeta_L ends at about 0 (below {ABOUT_ZERO:g}%)", UNKNOWN),
    "loss": ("JREG's validation NLL is not above the baseline's", UNKNOWN),
    "best": ("of the sharpnesses at weight 1, alpha 1 has the lowest validation NLL",
             "alpha 1 is best; by which measure is not known here"),
}  # fmt: skip


def claims(runs: Sequence[Run], models: Sequence[Measured]) -> Table:
    """Every statement, where it could be looked at, with the numbers and the verdict."""
    done = conditions(runs)
    rows = _published(runs, models)
    rows += [_rises(c) for c in done if not c.weight] or [_absent("rises")]
    jreg = [c for c in done if c.weight]
    rows += [_zero(c, baseline_of(c, done)) for c in jreg] or [_absent("zero")]
    rows += [_loss(c, baseline_of(c, done)) for c in jreg] or [_absent("loss")]
    rows += _best(done) or [_absent("best")]
    notes = (
        "Computed from the finished runs. A verdict is about these runs and is no proof; one over "
        "a single seed says nothing of how much seeds differ. Losses count as no worse within the "
        "seeds' spread: the larger of the two distances from the lowest to the highest seed.",
    )
    header = ("statement", "paper", "run on", "measured", "verdict")
    used = tuple(path for c in done for path in c.paths)
    return Table("claims", paper.TITLES["claims"], header, tuple(rows), notes, (), used)


def _absent(name: str) -> Row:
    return (*STATEMENTS[name], UNKNOWN, NOT_RUN, NOT_RUN)


def _published(runs: Sequence[Run], models: Sequence[Measured]) -> list[Row]:
    """Of each reading, all models but those that the given runs wrote."""
    ours = {place for run in trained(runs) for place in written_models(run)}
    others = [one for one in whole(models)
              if os.path.realpath(str(one.run.config.get("model", ""))) not in ours]  # fmt: skip
    low, high = paper.PUBLISHED
    rows = []
    for key, says in READINGS.items():
        rates = {one.name: one.readings[key].get("zeta_L") for one in others}
        rates = {name: rate for name, rate in rates.items() if rate is not None}
        if not rates:
            continue
        inside = sum(low <= rate <= high for rate in rates.values())
        text = ", ".join(f"{name} {number(rate)}" for name, rate in rates.items())
        verdict = HOLDS if inside == len(rates) else f"{FAILS}: {inside} of {len(rates)} do"
        rows.append((*STATEMENTS["published"], f"{says} the final norm", text, verdict))
    return rows or [_absent("published")]


def _rises(c: Condition) -> Row:
    first, last = (number_over_seeds(c, ZETA, when) for when in (min, max))
    measured = f"{_shown(first)} at first, {_shown(last)} at the end"
    verdict = _verdict((first, last), lambda a, b: b > a)
    return (*STATEMENTS["rises"], _where(c), measured, verdict)


def _zero(c: Condition, base: Condition | None) -> Row:
    mine = number_over_seeds(c, ZETA)
    theirs = number_over_seeds(base, ZETA) if base else None
    measured = f"{_shown(mine)}; baseline {_shown(theirs)}"
    verdict = _verdict((mine,), lambda x: x < ABOUT_ZERO)
    if theirs is not None and middle(theirs) < ABOUT_ZERO and verdict == HOLDS:
        verdict = "holds, but the baseline's is about 0 as well"
    return (*STATEMENTS["zero"], _where(c), measured, verdict)


def _loss(c: Condition, base: Condition | None) -> Row:
    if base is None:
        return (*STATEMENTS["loss"], _where(c), "no baseline of this setup", OPEN)
    found = differences(c, base, NLL)
    mine, theirs = values_of(c, NLL), values_of(base, NLL)
    difference = spread(found)
    measured = f"{_shown(difference)} (baseline {_shown(spread(theirs))})"
    known = min(len(mine), len(theirs)) > 1
    ranges = max(max(x) - min(x) for x in (mine, theirs)) if known else None
    measured += f", seeds' spread {ranges:.4g}" if known else ", one seed: spread not known"
    verdict = _verdict((difference,), lambda x: x <= 0)
    # Above in every seed, compared with its own baseline, is above whatever seeds differ by.
    above = len(found) > 1 and min(found) > 0
    if verdict == FAILS and known and not above and middle(difference) <= ranges:
        verdict = "holds within the seeds' spread"
    return (*STATEMENTS["loss"], _where(c), measured, verdict)


def _best(done: Sequence[Condition]) -> list[Row]:
    """Where at least one other sharpness was run beside the paper's best."""
    rows = []
    at_weight = [c for c in done if c.weight == paper.WEIGHT]
    for group, steps in dict.fromkeys((c.group, c.steps) for c in at_weight):
        mine = [c for c in at_weight if (c.group, c.steps) == (group, steps)]
        nll = {c.alpha: number_over_seeds(c, NLL) for c in mine}
        if len(nll) < 2 or paper.BEST_ALPHA not in nll:
            continue
        text = ", ".join(f"alpha {alpha:g} {_shown(value)}" for alpha, value in nll.items())
        best = list(nll).index(paper.BEST_ALPHA)
        verdict = _verdict(tuple(nll.values()), lambda *x, i=best: x[i] == min(x))
        rows.append((*STATEMENTS["best"], f"{group}, {steps:,d} steps", text, verdict))
    return rows


def _verdict(values: Sequence, test) -> str:
    """Of means over seeds; a value that is absent or not finite decides nothing."""
    means = [middle(value) for value in values]
    if any(mean is None for mean in means):
        return OPEN
    if not all(map(math.isfinite, means)):
        return f"{OPEN}: not finite"
    return HOLDS if test(*means) else FAILS


def _shown(value) -> str:
    return UNKNOWN if value is None else number(value, 5)


def _where(c: Condition) -> str:
    return f"{c.group}, {c.loss}, {c.steps:,d} steps"
