"""Tables 2, 3 and 7 and the data of Figures 2 and 4: pre-training without and with JREG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.report import paper_jreg as paper
from ffn_heterogeneity.report.jreg_conditions import (
    ENTROPY,
    NLL,
    RATES,
    Condition,
    Member,
    baseline_of,
    conditions,
    differences,
    final_psi,
    finished,
    mean_over_seeds,
    number_over_seeds,
    trained,
)
from ffn_heterogeneity.report.jreg_models import READINGS, Measured, ends, series
from ffn_heterogeneity.report.nucl_removal import task_values
from ffn_heterogeneity.report.paper_report import users_of
from ffn_heterogeneity.report.paper_table import NOT_RUN, UNKNOWN, Table, middle, number, spread
from ffn_heterogeneity.report.runs import Run, Spread, union

POINTS = 6  # of a curve, in Table 7
CURVES = {**RATES, "validation NLL": NLL}


def tables(runs: Sequence[Run], models: Sequence[Measured]) -> list[Table]:
    """Tables 2, 3, 7 and the data of Figures 2 and 4; `models`: with checkpoints over training."""
    done, begun = conditions(runs), conditions(runs, unfinished=True)
    return [
        _losses(runs, done),
        _rates(runs, done),
        _by_step(begun, models),
        _depths(begun),
        _curves(begun, models),
    ]


# ---- Tables 2 and 3


def _losses(runs: Sequence[Run], done: Sequence[Condition]) -> Table:
    tasks = union(task_values(m.run) for c in done for m in c.members)
    values = []
    for c in done:
        base = baseline_of(c, done) if c.weight else None
        config = c.members[0].run.config
        tokens = c.steps * config.get("batch_size", 0) * config.get("seq_len", 0)
        values.append([
            tokens or None, _same(c, "parameters"), number_over_seeds(c, NLL),
            (spread(differences(c, base, NLL)) if base else None) if c.weight else UNKNOWN,
            number_over_seeds(c, ENTROPY), *(_task(c, task) for task in tasks),
        ])  # fmt: skip
    header = ("tokens", "parameters", "validation NLL", "above baseline", "entropy", *tasks)
    notes = [
        "Tokens: steps x batch x length. Above baseline: the loss minus that of the baseline of "
        "the same seed, steps and setup. Entropy: of a neuron's outgoing weights, in nats.",
        paper.SETTINGS,
    ]
    if not tasks:
        notes.append(f"Tasks of the paper, without examples: {', '.join(paper.TASKS)}: {NOT_RUN}.")
    scored = [r.path for c in done for m in c.members for r in users_of(m.run, runs)
              if r.config.get("evaluation") == "tasks"]  # fmt: skip
    return _table("table_2", done, header, values, [*notes, *_left_out(runs, done)], scored)


def _rates(runs: Sequence[Run], done: Sequence[Condition]) -> Table:
    metrics = [*RATES.values(), NLL]
    values = [[number_over_seeds(c, metric) for metric in metrics] for c in done]
    notes = (
        "Jump rates in percent, of the displacement averaged over the tokens of the validation "
        "text, at the end of training. Paper: its text says that 170M has no jump from alpha 0.5 "
        "on; one number of its own table is against that.",
    )
    return _table("table_3", done, (*RATES, "validation NLL"), values, notes)


def _table(
    key: str,
    done: Sequence[Condition],
    header: Sequence[str],
    values: Sequence[Sequence[Any]],
    notes: Sequence[str],
    used: Sequence[str] = (),
) -> Table:
    """A row a condition, and one for each of the paper's that nobody ran."""
    labels = [
        (c.group, "JREG" if c.weight else "baseline", f"{c.weight:g}", _cell(c.alpha), c.steps,
         paper_cell(c) if key == "table_3" else UNKNOWN)
        for c in done
    ]  # fmt: skip
    rest = [NOT_RUN] * len(header)
    absent = [
        (*label, paper.STEPS, known if key == "table_3" else UNKNOWN, *rest)
        for *label, known in missing(done)
    ]
    shown = [(*a, *map(_shown, b)) for a, b in zip(labels, values, strict=True)] + absent
    shown = [tuple(f"{x:,d}" if isinstance(x, int) else x for x in row) for row in shown]
    exact = [
        (*a, *(NOT_RUN if x is None else middle(x) for x in b))
        for a, b in zip(labels, values, strict=True)
    ]
    used = (*(path for c in done for path in c.paths), *used)
    header = ("run on", "loss", "weight", "alpha", "steps", "paper", *header)
    return Table(
        key, paper.TITLES[key], header, tuple(shown), tuple(notes), (*exact, *absent), used
    )


def paper_cell(condition: Condition) -> str:
    """The jump rates that the paper has for this row; of its own steps, batch and weight alone."""
    if condition.weight != paper.WEIGHT or not condition.published:
        return UNKNOWN
    return _known(paper.SIZES.get(condition.size, ""), condition.alpha)


def _known(name: str, alpha: float) -> str:
    parts = ["text: no jump"] if name == "170M" and alpha >= paper.NO_JUMP_FROM else []
    parts += [f"{rate} {x}" for rate, x in paper.TABLE_3.get((name, alpha), {}).items()]
    return ", ".join(parts) or UNKNOWN


def missing(done: Sequence[Condition]) -> list[tuple[str, ...]]:
    """Size, loss, weight, alpha and the paper's jump rates, of its rows that nobody ran."""
    rows = []
    for size, name in paper.SIZES.items():
        label = f"{size} ({name})"
        mine = [c for c in done if c.size == size and c.published]
        if not any(c.weight == 0 for c in mine):
            rows.append((label, "baseline", "0", UNKNOWN, UNKNOWN))
        jreg = {c.alpha for c in mine if c.weight == paper.WEIGHT}
        if name == "170M":
            rows += [(label, "JREG", f"{paper.WEIGHT:g}", f"{alpha:g}", _known(name, alpha))
                     for alpha in paper.ALPHAS if alpha not in jreg]  # fmt: skip
        elif not jreg:
            rows.append((label, "JREG", f"{paper.WEIGHT:g}", "each", UNKNOWN))
    return rows


def _left_out(runs: Sequence[Run], done: Sequence[Condition]) -> list[str]:
    open_ = [f"{run.label} ({run.state})" for run in trained(runs) if not finished(run)]
    notes = [f"Not finished, in no row: {', '.join(open_)}."] if open_ else []
    again = [run.label for c in done for run in c.again]
    if again:
        notes.append(
            "The settings and seed of a run that is in a row already, so not counted: "
            f"{', '.join(again)}."
        )
    return notes


def _same(condition: Condition, name: str) -> Any:
    values = [m.run.values[name] for m in condition.members if name in m.run.values]
    return values[0] if len(set(values)) == 1 else spread([middle(v) for v in values])


def _task(condition: Condition, task: str) -> Any:
    """The accuracy with its interval over questions; of several seeds their mean and its ends."""
    runs = {m.run.path: m.run for m in condition.members}.values()
    found = [task_values(run)[task] for run in runs if task in task_values(run)]
    return found[0] if len(found) == 1 else spread([value.mean for value in found])


def _cell(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:g}"


def _shown(value: Any) -> str:
    return number(value, 5)


# ---- Table 7 and the data of Figures 2 and 4


def _by_step(begun: Sequence[Condition], models: Sequence[Measured]) -> Table:
    """Means over seeds at a few of the evaluated steps."""
    rows, used = [], []
    for c in begun:
        steps, _ = mean_over_seeds(c, NLL)
        for step in _some(steps):
            cells = [_shown(_at(c, metric, step)) for metric in CURVES.values()]
            rows.append((label_of(c), f"{step:,d}", UNKNOWN, *cells))
        used += c.paths if steps else ()
    for label, points in _checkpoint_rows(models).items():
        kept = _some(range(len(points)))
        rows += [(label, f"{points[i][0]:,d}", UNKNOWN, *map(_shown, points[i][1:])) for i in kept]
    used += [one.run.path for one in models if one.checkpoint]
    rows = rows or [(UNKNOWN, UNKNOWN, UNKNOWN, *[NOT_RUN] * len(CURVES))]
    notes = (
        f"At most {POINTS} of the evaluated steps; figure_4.csv holds all, of every seed. A line "
        "over several seeds ends where the first of them does.",
    )
    header = ("curve", "step", "paper", *CURVES)
    return Table("table_7", paper.TITLES["table_7"], header, tuple(rows), notes, (), tuple(used))


def _curves(begun: Sequence[Condition], models: Sequence[Measured]) -> Table:
    exact, shown, used = [], [], []
    for c in begun:
        for member in c.members:
            rows = _rows(member)
            seed = UNKNOWN if member.seed is None else member.seed
            exact += [(label_of(c), seed, *row) for row in rows]
            shown += [(label_of(c), str(seed), f"{row[0]:,d}", *map(_shown, row[1:]))
                      for row in (rows[0], rows[-1])] if rows else []  # fmt: skip
            used += [member.run.path] if rows else []
    for label, rows in _checkpoint_rows(models).items():
        exact += [(label, UNKNOWN, *row) for row in rows]
        shown += [(label, UNKNOWN, f"{row[0]:,d}", *map(_shown, row[1:]))
                  for row in (rows[0], rows[-1])]  # fmt: skip
    used += [one.run.path for one in models if one.checkpoint]
    shown = shown or [(UNKNOWN, UNKNOWN, UNKNOWN, *[NOT_RUN] * len(CURVES))]
    note = "First and last value of each curve; figure_4.csv holds them all. Paper: a picture."
    header = ("curve", "seed", "step", *CURVES)
    return Table(
        "figure_4", paper.TITLES["figure_4"], header, tuple(shown), (note,), tuple(exact),
        tuple(union([used])),
    )  # fmt: skip


def _depths(begun: Sequence[Condition]) -> Table:
    exact, shown, used = [], [], []
    for c in begun:
        found = final_psi(c)
        for seed, psi in found.items():
            label = (label_of(c), UNKNOWN if seed is None else seed)
            exact += [(*label, layer, value) for layer, value in enumerate(psi, 1)]
            shown += [(*map(str, label), str(layer), number(psi[layer - 1]))
                      for layer in ends(len(psi))]  # fmt: skip
        used += c.paths if found else ()
    header = ("curve", "seed", "layer", "Psi")
    shown = shown or [(UNKNOWN, UNKNOWN, UNKNOWN, NOT_RUN)]
    note = (
        "At the last evaluation; the first and the last three layers, from 1; figure_2.csv holds "
        "all of them."
    )
    return Table(
        "figure_2", paper.TITLES["figure_2"], header, tuple(shown), (note,), tuple(exact),
        tuple(used),
    )  # fmt: skip


def label_of(condition: Condition) -> str:
    """Of a curve: "6x128/344, weight 1, alpha 3, 300 steps"."""
    return f"{condition.group}, {condition.loss}, {condition.steps:,d} steps"


def _rows(member: Member) -> list[tuple]:
    """(step, rates, loss) of one seed; UNKNOWN where a rate was not measured."""
    curves = [member.curve.get(metric, {}) for metric in CURVES.values()]
    steps = sorted(set().union(*curves))
    return [(step, *(curve.get(step, UNKNOWN) for curve in curves)) for step in steps]


def _checkpoint_rows(models: Sequence[Measured]) -> dict[str, list[tuple]]:
    """Label -> (step, rates, UNKNOWN as the loss) of each checkpoint."""
    return {
        f"{name}, {says} the final norm": [
            (one.step, *(one.readings[key].get(rate, UNKNOWN) for rate in RATES), UNKNOWN)
            for one in points
        ]
        for name, points in series(models).items()
        for key, says in READINGS.items()
    }


def _at(condition: Condition, metric: str, step: int) -> float | Spread | str:
    """Over the seeds, at a step that all of them have; else UNKNOWN."""
    steps, values = mean_over_seeds(condition, metric)
    return spread(list(map(float, values[:, steps.index(step)]))) if step in steps else UNKNOWN


def _some(items: Sequence[int]) -> list[int]:
    """At most `POINTS` of them, evenly, with the first and the last."""
    if len(items) <= POINTS:
        return list(items)
    return [items[int(round(i))] for i in np.linspace(0, len(items) - 1, POINTS)]
