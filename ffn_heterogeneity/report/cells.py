"""Helpers for reports in plain pandas: settings that must exist or agree, cells, comparisons.

Rows are those of `fh.results`, with settings under their own names ("ratio" for "config.ratio"),
and "cell": a row's value, with its interval where it has one.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from ffn_heterogeneity.io.rows import FIELDS
from ffn_heterogeneity.io.runs import SEEDS_APART
from ffn_heterogeneity.report import stats
from ffn_heterogeneity.report.frame import units
from ffn_heterogeneity.report.tables import UNKNOWN

Names = Sequence[str]
Frame = Any  # a pandas.DataFrame: its type hints do not separate rows from columns
CLAIM = ["run_on", "part"]  # index of a claim's cells
PARTS = [*CLAIM, "value", "verdict"]  # columns of a claim
BEST_FIRST = {"acc_norm": 0, "acc": 1, "exact_match": 2}  # metrics, for a paper's one number
# Columns that are no setting: a row's fields, where it is from, and what reports add.
OWN = {*FIELDS, "run", "by", "origin", "cell", "column", "panel", "line", "part", "run_on", "place"}
OWN |= {"x", "y", "unit_scale"}
SEEDS = re.compile(r"(.*\.)?seeds?")
AGAIN = "retries"  # the number of attempts of a run that failed
# Settings of what is asked or saved, where, and on which devices: no measurement depends on them.
NO_EFFECT = ("tasks", "num_fewshot", "data_root", "save_samples", "save_model", "push", "workdir")
NO_EFFECT += ("checkpoint.", "mesh.", "remat", "unroll", "profile", "tensorboard", "wandb")
NO_EFFECT += ("calibrations", "models")  # what a sweep goes through
FOLDERS = ("_bundled/configs", "../configs")  # of an installed package; of its repository


# ---- settings


@functools.cache
def config_words() -> frozenset[str]:
    """Names that the code in `configs/` uses: attributes, keywords, parts of "dotted.keys"."""
    package, words = Path(__file__).parents[1], set()
    for path in (path for one in FOLDERS for path in (package / one).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
            text = text or getattr(node, "attr", None) or getattr(node, "arg", None)
            words |= set(text.split(".")) if isinstance(text, str) else set()
    return frozenset(words)


def need(frame: Frame, *names: str) -> Frame:
    """Return the frame with these settings as columns, empty where no run has them yet.

    Raises:
      ValueError: neither a run nor a config in `configs/` has the setting, as after a renaming.
    """
    absent = [name for name in names if name not in frame]
    for name in absent:  # a sweep of stages numbers them: "mask_1"
        parts = [{part, part.rstrip("0123456789")} for part in name.split(".")]
        if not all(part & config_words() for part in parts):
            raise ValueError(f"setting {name!r} is in no run and no config of configs/: renamed?")
    return frame.join(pandas.DataFrame(None, frame.index, absent, dtype=object))


def among(name: str, names: Names) -> bool:
    """True if a setting is one of these, or begins with one that ends in "."."""
    return any(name == one or (one.endswith(".") and name.startswith(one)) for one in names)


def one_setting(frame: Frame, by: Names = (), except_for: Names = ()) -> None:
    """Check that runs with equal `by` (by default all runs) have equal settings except seeds.

    Args:
      except_for: settings that may differ; "losses.": all that begin so.

    Raises:
      ValueError: names the settings that differ, and their values.
    """
    away = [*except_for, *NO_EFFECT, *by, *OWN]
    names = [x for x in frame if not (among(x, away) or SEEDS.fullmatch(x))]
    runs = frame.drop_duplicates(["run", *by])
    runs = runs[[*by]].join(runs[names].fillna(np.nan))  # None: null in a config, as if not there
    names = [x for x in names if runs[x].nunique(dropna=False) > 1]
    for key, its in runs.groupby(list(by), sort=False, dropna=False) if by else [((), runs)]:
        differ = {x: its[x].unique() for x in names if its[x].nunique(dropna=False) > 1}
        if differ:
            named = [f"{x} ({', '.join(map(str, y[:3]))})" for x, y in differ.items()]
            values = "; ".join(named[:8]) + (f"; and {len(named) - 8} more" if named[8:] else "")
            place = ", ".join(map(str, key)) or "this table"
            raise ValueError(f"runs of one cell ({place}) differ in {values}: report them apart")


def without_idle_losses(rows: Frame, but: Names = ()) -> Frame:
    """Remove the settings of losses whose weight is 0, except those of `but`."""
    for weight in [name for name in rows if re.fullmatch(r"losses\.\w+\.weight", name)]:
        idle = ~rows[weight].fillna(0).astype(bool)
        names = [x for x in rows if x.startswith(weight[:-6]) and not x.startswith(tuple(but))]
        rows = rows.assign(**{name: rows[name].where(~idle, None) for name in names})
    return rows.copy()  # in one piece for further columns


def with_last_seeds(rows: Frame) -> Frame:
    """The rows with the seeds of the last attempts of runs whose loss was no number at first."""
    again = rows["run"].map(rows[rows.what == AGAIN].set_index("run")["value"]).fillna(0)
    return rows.assign(seed=rows.seed + (SEEDS_APART * again).astype(int))


def evaluated(rows: Frame, setting: str) -> Frame:
    """The rows of evaluations on text, of runs that have this setting."""
    measured = rows[rows.what == "perplexity"]["run"]
    return rows[rows[setting].notna() & rows["run"].isin(measured)].copy()


# ---- cells


def spread(values: Any) -> Any:
    """Mean, lowest and highest of a cell's runs (`aggfunc` of a pivot table).

    One run, or runs that agree, keep the value's own interval; NaN is the text "nan".
    """
    value = stats.over(list(values))
    return "nan" if isinstance(value, float) and np.isnan(value) else value


def cells(rows: Frame, index: Names) -> Any:
    """A column of a table: the `spread` of the rows with equal `index`, in their order."""
    return rows.groupby(list(index), sort=False, dropna=False)["cell"].agg(spread)


def table(rows: Frame, index: Names, columns: Mapping[str, Any]) -> Frame:
    """A table of measurements side by side.

    Args:
      index: labels of a row; runs with equal labels have equal settings, or this raises.
      columns: heading -> the "what" of the rows, other rows, or a column made by `against`.
    """
    one_setting(rows, index)
    made = {x: last(rows[rows.what == y]) if isinstance(y, str) else y for x, y in columns.items()}
    return pandas.concat({x: cells(y, index) if y.ndim > 1 else y for x, y in made.items()}, axis=1)


def pivot(rows: Frame, labels: Mapping[str, Any], column: Any = None) -> Frame:
    """A table with a column for each value of `column` (default: of the rows' own "column").

    Args:
      labels: level of the index -> a value for each row; settings as in `one_setting`.
    """
    rows = rows.copy().assign(**labels, column=rows["column"] if column is None else column)
    rows = rows.fillna(dict.fromkeys([*labels, "column"], "-"))  # a pivot leaves missing ones out
    one_setting(rows, [*labels, "column"])
    return rows.pivot_table("cell", list(labels), "column", aggfunc=spread, sort=False)


def points(
    rows: Frame, value: Any, panel: Any, line: Any, x: str = "step", free: Names = (), least=1
) -> Frame:
    """Points of a figure; runs on one line have equal settings, but for `x` and `free`.

    Args:
      value: what the y axis shows; the rows' own "value" is y.
      free: settings in which runs on one line may differ.
      least: the number of x values that a seed needs; others would shift the mean over seeds.
    """
    made = rows.copy().assign(panel=panel, line=line, x=rows[x], y=rows["value"])
    places = made.groupby(["panel", "line", "seed"], dropna=False)["x"].transform("nunique")
    made = made[places >= least]
    one_setting(made, ["panel", "line"], [x, *free])
    return made.assign(value=value)


def label(rows: Frame, text: Callable[..., str], *columns: str) -> Any:
    """A text for each row from the values of these columns; missing if a single one is missing."""
    values = rows[list(columns)].itertuples(index=False)
    made = [None if len(x) == 1 and pandas.isna(x[0]) else text(*x) for x in values]
    return pandas.Series(made, rows.index, dtype=object)


def last(rows: Frame) -> Frame:
    """The last step's row of each measurement of a run."""
    names = ["run", "what", "task", "shots", "layer", "neuron"]
    return rows.sort_values("step", kind="stable").drop_duplicates(names, keep="last")


def final_scores(rows: Frame) -> Frame:
    """The metric of classifiers at the last evaluation, in percent.

    Not at the best one: that would choose a step on the rows that are reported.
    """
    best = rows[rows.what.str.startswith("validation/best/")]
    names = best.set_index("run").what.str.replace("best/", "")
    return in_percent(last(rows[rows.what == rows["run"].map(names).astype(object)]))


def with_cells(rows: Frame) -> Frame:
    """The rows with "cell": the value, or a `Spread` of the value and its interval."""
    made = rows["value"].astype(object)
    own = rows[rows.low.notna()]
    for i, value, low, high, n, how in own[["value", "low", "high", "n", "how"]].itertuples():
        made[i] = stats.Spread(value, low, high, 0 if n is pandas.NA else int(n), how)
    return rows.copy().assign(cell=made)  # in one piece


def in_percent(rows: Frame) -> Frame:
    """The rows with values, intervals, cells and what `paired_units` reads in percent."""
    ends = {end: 100 * rows[end] for end in ("value", "low", "high")}
    return with_cells(rows.assign(**ends, unit_scale=100.0))


def over_layers(rows: Frame, by: Names) -> Frame:
    """One row for each of `by`, its value the mean over the layers."""
    rows = rows.assign(value=rows.groupby(list(by))["value"].transform("mean"))
    return with_cells(rows.drop_duplicates(list(by)))


def accuracies(rows: Frame, tasks: Mapping[str, Sequence], mean: str = "") -> Frame:
    """Accuracies in percent; "column" is the task's name in a table.

    Args:
      tasks: column -> (task, examples in the prompt; None: any number).
      mean: column of the mean of a run that answered all of them.
    """
    rows = rows[rows.task.notna() & rows.low.notna()]
    rows = rows.sort_values("what", key=lambda x: x.map(BEST_FIRST).fillna(9), kind="stable")
    rows = in_percent(rows.assign(units="samples/" + rows.task + ".jsonl:" + rows.what))
    named = [(column, *asked) for column, asked in tasks.items()]
    named = pandas.DataFrame(named, columns=["column", "task", "asked"])
    found: Frame = named.merge(rows, on="task")  # in the order of the columns
    asked = found.shots.isna() | found.asked.isna() | (found.shots == found.asked)
    found = found[asked].drop(columns="asked").drop_duplicates(["run", "column"])
    if mean:
        by = found.groupby("run")["value"]
        own = found.assign(value=by.transform("mean"), low=np.nan, column=mean)
        own = own[by.transform("size") == len(tasks)].drop_duplicates("run")
        found = pandas.concat([found, with_cells(own)], ignore_index=True)
    return found


def with_answers(rows: Frame, tasks: Mapping[str, Sequence], mean: str) -> Frame:
    """The rows, and `accuracies` with the name of their column as "what"."""
    asked = accuracies(rows, tasks, mean)
    return pandas.concat([rows, asked.assign(what=asked.column, task=None)], ignore_index=True)


def every_task(rows: Frame) -> dict[str, Frame]:
    """Columns of all accuracies, as fractions: "piqa acc, 0 shots" -> rows."""
    rows = rows[rows.task.notna() & rows.low.notna()]
    shots = (", " + rows.shots.astype(str) + " shots").where(rows.shots.notna(), "")
    return dict(iter(rows.groupby(rows.task + " " + rows.what + shots, sort=False)))


# ---- comparisons


def against(
    rows: Frame, base: Frame, index: Names, on: Names, free: Names = (), how: Any = None
) -> Any:
    """A column of a table: the rows with equal `index` against those of `base` with equal `on`,
    at the last step.

    Args:
      on: labels that both sides share; groups without a base have no value.
      free: settings that may differ between the sides; all others except `index` must be equal.
      how: a function of the two sides; default: `difference`, seed by seed.
    """
    rows, base = (x[x.index.isin(last(x).index)] for x in (rows, base))  # in their order
    one_setting(rows, index)
    one_setting(base, on)
    one_setting(pandas.concat([rows, base]), on, (*free, *index))
    rows, base = (x.fillna(dict.fromkeys(on, UNKNOWN)) for x in (rows, base))  # NaN != NaN
    bases = dict(iter(base.groupby(list(on), sort=False)))
    found = {}
    for key, its in rows.groupby(list(index), sort=False, dropna=False):
        other = bases.get(tuple(its[list(on)].iloc[0]))
        if other is not None and (how is ratio or not set(its["run"]) & set(other["run"])):
            found[key] = (how or difference)(its, other)
    keys = pandas.MultiIndex.from_tuples(found or [("",) * len(index)], names=index)
    return pandas.Series([*found.values()] or [None], keys, dtype=object)[: len(found)]


def by_seed(rows: Frame) -> dict[Any, float]:
    """{seed: value} of one side; {None: value} where the seed does not matter.

    Several runs of one seed (`one_setting` has seen that their settings are equal) count as their
    mean.
    """
    means = rows["value"].groupby(rows["seed"], sort=False, dropna=False).mean()
    return {None if pandas.isna(seed) else seed: value for seed, value in means.items()}


def difference(own: Frame, other: Frame) -> Any:
    """Mean of the differences paired by seed, with Student's interval (`differences`).

    It is infinite where both sides have several seeds, but at most one in common.
    """
    sides = by_seed(own), by_seed(other)
    found = differences(*sides)
    several = len(found) == 1 and min(map(len, sides)) > 1
    return stats.student(found) if several else stats.interval(found)


def differences(own: Mapping[Any, float], other: Mapping[Any, float]) -> list[float]:
    """Differences for the seeds that both sides have.

    A side without seeds (None) is compared with every seed of the other. Without a common seed, it
    is the difference of the means, one value.
    """
    if not own or not other:
        return []
    own = dict.fromkeys(other, own[None]) if None in own else own
    other = dict.fromkeys(own, other[None]) if None in other else other
    common = [own[seed] - other[seed] for seed in own if seed in other]
    return common or [float(np.mean(list(own.values())) - np.mean(list(other.values())))]


def ratio(own: Frame, other: Frame) -> float | None:
    """Ratio of the means."""
    value, base = own["value"].mean(), other["value"].mean()
    return value / base if base else None


def percent(own: Frame, other: Frame) -> float | None:
    """Relative difference of the means, in percent."""
    value = ratio(own, other)
    return None if value is None else 100 * (value - 1)


def z(own: Frame, other: Frame) -> float | None:
    """z = (p2 - p1) / sqrt(2 p (1 - p) / n), p their mean, where one run answered n questions."""
    n = own.n.iat[0] if len(own) == 1 and own.how.iat[0] == "Wilson" else 0
    apart = (own["value"].mean() - other["value"].mean()) / 100
    p = other["value"].mean() / 100 + apart / 2
    return apart / (2 * p * (1 - p) / n) ** 0.5 if n and 0 < p < 1 else None


def paired_units(own: Frame, other: Frame) -> Any:
    """Mean difference over windows or questions with a bootstrap's interval, which draws documents
    where they are known; None unless both sides have the same ones."""
    one, base = _units(own), _units(other)
    if not one or one.keys() != base.keys():
        return None
    documents = [unit[0] for unit in one if isinstance(unit, tuple)]
    return stats.bootstrap([one[unit] - base[unit] for unit in one], documents)


def _units(rows: Frame) -> dict[Any, float]:
    """{window or question: mean over the seeds}; empty where the seeds' units differ."""
    places = zip(rows["by"], rows["units"], strict=True)
    each = [units(run, place) if isinstance(place, str) else {} for run, place in places]
    scale = rows["unit_scale"].fillna(1.0).iat[0] if "unit_scale" in rows else 1.0
    same = len({tuple(one) for one in each}) == 1
    return {x: scale * float(np.mean([one[x] for one in each])) for x in each[0] if same}


def judged(values: Any, sign: int = 1) -> Frame:
    """Parts of a claim: each holds if its value is above 0 (`sign` 1), or below 0 (-1).

    Args:
      values: cells, indexed by "run_on" and "part".
    """
    told = [stats.verdict(value, sign) for value in values]
    return values.rename("value").to_frame().assign(verdict=told).reset_index()


def claim(rows: Frame, ours: Any, base: Any, on: Names, free: Names = (), sign: int = 1) -> Frame:
    """Parts of a claim: some of the rows against others, seed by seed (`against`, `judged`).

    Args:
      ours, base: for each row, whether it is on that side.
    """
    return judged(against(rows[ours], rows[base], CLAIM, on, free), sign)
