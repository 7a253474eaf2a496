"""Helpers of `papers/` that turn the frame of results into a paper's rows, beside plain pandas.

A record is what runs that differ in nothing but the seed have in common; a paper says which
settings have to be equal for that. All helpers take and return rows like those of `fh.results`,
settings under their own names ("ratio" for "config.ratio").
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas

from ffn_heterogeneity.io.rows import FIELDS
from ffn_heterogeneity.report import stats
from ffn_heterogeneity.report.frame import SETTINGS
from ffn_heterogeneity.report.stats import Spread

BEST_FIRST = ("acc_norm", "acc", "exact_match")  # metrics of a task, for a paper's one number
ANY = "*"  # of a match: the setting has some value
IDLE = "-"  # of a setting that does not apply to a run
ABSENT = "absent"  # in "how": asked for, and not measured
OWN = (*FIELDS, "run", "by", "record", "differs", "told")  # columns that are no setting
FORMAT = re.compile(r"\{([^:}]+):?([^}]*)\}")
Frame = Any  # a pandas.DataFrame: its hints do not tell a choice of rows from a column
Match = Mapping[str, Any]


def plain(rows: Frame) -> Frame:
    """Rows as the helpers take them: settings under their own names, "what" with its split.

    A setting that has the name of a row's field keeps the prefix ("config.layer").
    """
    taken = {SETTINGS + name for name in OWN}
    names = {name: name.removeprefix(SETTINGS) for name in rows.columns if name not in taken}
    rows = rows.drop(columns=[SETTINGS + "model", SETTINGS + "seed"], errors="ignore")
    rows = rows.copy()  # a copy holds its columns together: others may be added at little cost
    whole = rows.split.astype(object) + "/" + rows.what
    rows = rows.assign(what=whole.where(rows.split.notna(), rows.what), by=rows["run"])
    rows = rows.rename(columns=names)
    return rows.astype({name: object for name in rows.columns if name not in FIELDS})


def progress(rows: Frame, curves: Frame) -> dict[str, str]:
    """Run -> how far it is, of those that have begun."""
    states = dict.fromkeys(rows["run"], "finished")
    for run, step in curves.groupby("run", sort=False)["step"].max().items():
        states.setdefault(run, f"not finished, at step {step}")
    return states


def evaluated(rows: Frame) -> Frame:
    """The rows, and as a run's own those of the tasks that other runs asked of its model as it is;
    "by" is the run that measured."""
    whole = {"attack": [None, "zero"], "k": [None, 0], "criterion": [None, "none"]}
    asked = rows[rows.task.notna() & rows.origin.isin(rows["run"])]
    asked = matching(asked, whole)
    own = rows.drop(columns=[*FIELDS, "by"]).drop_duplicates("run").set_index("run")
    seeds = rows.drop_duplicates("run").set_index("run")["seed"]
    moved = asked[[*FIELDS, "by"]].assign(run=asked.origin, seed=asked.origin.map(seeds))
    return pandas.concat([rows, moved.join(own, on="run")], ignore_index=True)


def known(rows: Frame, defaults: Match) -> Frame:
    """The rows with these settings, of their default where a run does not say."""
    absent = [name for name in defaults if name not in rows]
    rows = rows.join(pandas.DataFrame(None, rows.index, absent, dtype=object))
    return rows.fillna({name: value for name, value in defaults.items() if value is not None})


def fits(row: Match, match: Match) -> bool:
    """True if every setting is as wanted, or one of a list; None: missing; ANY: not empty or 0."""
    for name, wanted in match.items():
        value = None if is_missing(row.get(name)) else row[name]
        value = list(value) if isinstance(value, tuple) else value
        several = wanted if isinstance(wanted, list) else [wanted]
        if not (bool(value) if wanted == ANY else value in several):
            return False
    return True


def matching(rows: Frame, match: Match) -> Frame:
    """The rows of the runs that fit."""
    runs = rows[["run", *(name for name in match if name in rows)]].drop_duplicates("run")
    chosen = [row["run"] for row in runs.to_dict("records") if fits(row, match)]
    return rows[rows["run"].isin(chosen)]


def labelled(rows: Frame, texts: Mapping[str, Any]) -> Frame:
    """The rows with a column for each label, and "from": "here" with what sets the record apart.

    Args:
      texts: of a table, "labels": {column: label}, and of "column" ("cells") and "from" ("here"),
        where it says them. A label is a format, "{steps:,d} steps", or [format, {name: settings}]:
        the name of the first settings that fit. Ordered: those names first, as they stand.
    """
    every = {**texts["labels"], "from": texts.get("here", "here: {model}")}
    every |= {"column": texts["cells"]} if "cells" in texts else {}
    made = {name: _named(rows, x) for name, x in every.items()}
    made["from"] = made["from"].astype(object) + rows["differs"]
    return rows.copy().assign(**made)  # as in `plain`


def _named(rows: Frame, label: Any) -> pandas.Series:
    default, names = (label, {}) if isinstance(label, str) else label
    read = {key for text in (default, *names) for key, _ in FORMAT.findall(text)}
    read |= {key for match in names.values() for key in match}
    runs, found = rows[["run", *sorted(read.intersection(rows.columns) - {"run"})]], {}
    for row in runs.drop_duplicates("run").to_dict("records"):
        text = next((name for name, match in names.items() if fits(row, match)), default)
        found[row["run"]] = _filled(text, row)
    labels = rows["run"].map(found).astype(object)
    order = list(dict.fromkeys([*names, *found.values()]))
    return pandas.Series(pandas.Categorical(labels, order, ordered=True), rows.index)


def _filled(text: str, row: Match) -> str:
    """The format with a row's values; "-" where one is missing."""

    def value(found: re.Match) -> str:
        value = row.get(found[1])
        if isinstance(value, tuple):
            value = ", ".join(map(str, value))
        if is_missing(value) or value == "":
            return "-"
        whole = isinstance(value, float) and value.is_integer()
        return format(int(value) if whole else value, found[2] or "")

    return FORMAT.sub(value, text)


def is_missing(value: Any) -> bool:
    """True if there is no value: None, NaN or pandas' NA."""
    return value is None or value is pandas.NA or (isinstance(value, float) and math.isnan(value))


def among(name: str, names: Sequence[str]) -> bool:
    """True if it is one of them, or begins with one that ends in "."."""
    return any(name == one or (one.endswith(".") and name.startswith(one)) for one in names)


def records(
    rows: Frame,
    same: Sequence[str],
    shown: Sequence[str] = (),
    drawn: Match | None = None,
    always: Sequence[str] = (),
) -> Frame:
    """The rows of runs as records, in the order of what is shown of them.

    A loss of weight 0 is none: its other settings are no difference, nor is the weight.

    Args:
      same: settings that runs of one record have equal; "losses.": all that begin so.
      shown: those of them that labels show.
      drawn: of the runs that the seed matters to. Of the others one a record counts, without seed;
        of runs of the same record and seed the first one that answered tasks, or else the first.
      always: settings of losses that stay where the loss has no weight.

    Returns:
      The rows with "record"; in "differs" what sets it apart from other records of its model in
      settings that are not shown (", window 128"), and in "told" {name: value} of those that are.
    """
    rows = _without_idle_losses(rows, always)
    runs = rows.drop_duplicates("run").set_index("run")
    with_tasks = set(rows.loc[rows.task.notna(), "run"])
    ranks = {
        run: [_rank(x) for x in values] for run, *values in runs.reindex(columns=shown).itertuples()
    }
    runs = runs.loc[sorted(ranks, key=lambda run: (ranks[run], run not in with_tasks))]
    texts = runs[[name for name in sorted(runs) if name not in OWN and among(name, same)]]
    texts, vary = texts.map(text_of), {}
    for model, its in texts.groupby(runs["model"]):
        vary[model] = [name for name in its if len({*its[name]} - {IDLE}) > 1]
    numbers: dict[tuple, int] = {}
    made = []
    for (run, its), row in zip(texts.T.to_dict().items(), runs.to_dict("records"), strict=True):
        number = numbers.setdefault(tuple(its.values()), len(numbers))
        # Every run without a seed is a draw of its own.
        seed = run if is_missing(row["seed"]) else row["seed"]
        seed = seed if drawn and fits(row, drawn) else None
        told = {name: its[name] for name in vary[row["model"]] if its[name] != IDLE}
        differs = [f", {name} {x}" for name, x in told.items() if not among(name, shown)]
        told = {name.removeprefix(SETTINGS): x for name, x in told.items() if among(name, shown)}
        made.append((run, number, "".join(differs), told, seed))
    own = pandas.DataFrame(made, columns=["run", "record", "differs", "told", "seed"])
    own = own[~own.astype({"seed": str}).duplicated(["record", "seed"])].set_index("run")
    rows = rows[rows["run"].isin(own.index)].drop(columns="seed").join(own, on="run")
    return rows.sort_values("record", kind="stable", ignore_index=True)


def _without_idle_losses(rows: Frame, always: Sequence[str]) -> Frame:
    rows = rows.copy()
    for weight in [name for name in rows.columns if re.fullmatch(r"losses\.\w+\.weight", name)]:
        idle = ~rows[weight].fillna(0).astype(bool)
        for name in rows.columns:
            if name.startswith(weight.removesuffix("weight")) and not among(name, always):
                rows[name] = rows[name].astype(object).mask(idle, None)
    return rows.copy()  # in one piece for new columns


def cells(rows: Frame, columns: Mapping[str, Any]) -> Frame:
    """The rows of a table's cells, "column" in this order.

    Args:
      columns: column -> the "what" of its rows (its last step's), or other rows.
    """
    parts = [
        (last(rows[rows.what == x]) if isinstance(x, str) else x).assign(column=name)
        for name, x in columns.items()
    ]
    made = [part for part in parts if len(part)] or [rows.head(0).assign(column="")]
    made = pandas.concat(made, ignore_index=True)
    return made.assign(column=pandas.Categorical(made["column"], list(columns), ordered=True))


def text_of(value: Any) -> str:
    """A setting as text, equal where the settings are: JSON, "unset" where it is missing."""
    if isinstance(value, str) and value == IDLE:
        return IDLE
    if is_missing(value):
        return "unset"
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, default=float)


def _rank(value: Any) -> tuple:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    return (not number, value if number else 0, str(value))


# ---- accuracies


def scores(rows: Frame, tasks: Mapping[str, Sequence] | None = None, mean: str = "") -> Frame:
    """Accuracies, "what" their column of a table.

    Args:
      tasks: column -> (task, examples in the prompt; None: however many), in percent. None: all
        that were asked, as shares: "piqa acc, 0 shots".
      mean: column of the mean of a run that answered all of them.
    """
    asked = rows[rows.task.notna() & rows.low.notna()]
    if tasks is None:
        shots = (", " + asked.shots.astype(str) + " shots").where(asked.shots.notna(), "")
        return asked.assign(what=asked.task + " " + asked.what + shots)
    asked = asked.assign(rank=[(*BEST_FIRST, x).index(x) for x in asked.what])
    asked = asked.drop_duplicates(["run", "task", "shots", "what"], keep="last")
    asked = asked.sort_values("rank", kind="stable").assign(
        units="samples/" + asked.task + ".jsonl:" + asked.what,
        **{end: 100 * asked[end] for end in ("value", "low", "high")},
    )
    parts = []
    for column, (task, shots) in tasks.items():
        its = asked[asked.task == task]
        if shots is not None:
            its = its[its.shots.isna() | (its.shots == shots).fillna(False)]
        parts.append(its.drop_duplicates("run").assign(what=column, task=None))
    found: Frame = pandas.concat(parts, ignore_index=True) if parts else asked
    if mean:
        values = found.groupby("run").value.agg(["mean", "size"])
        whole = values[values["size"] == len(tasks)]["mean"]
        means = found[found["run"].isin(whole.index)].drop_duplicates("run")
        own = {**as_row(0.0), "value": means["run"].map(whole), "what": mean, "units": None}
        found = pandas.concat([found, means.assign(**own)], ignore_index=True)
    return found.drop(columns="rank")


def scored(rows: Frame, tasks: Mapping[str, Sequence], mean: str) -> Frame:
    """The rows, and those of `scores`."""
    return pandas.concat([rows, scores(rows, tasks, mean)], ignore_index=True)


def last(rows: Frame) -> Frame:
    """The last step's row of each measurement of a run."""
    names = ["run", "what", "task", "shots", "layer", "neuron"]
    return rows.sort_values("step", kind="stable").drop_duplicates(names, keep="last")


def points(rows: Frame, texts: Mapping[str, Any]) -> Frame:
    """Points of a figure: a panel for each label "panel" and each "column", a line for each "line"
    and what sets its record apart; as the rows have them, if they do."""
    x = texts.get("x", "step")
    rows = rows[rows[x].notna()]
    rows = rows.assign(value=rows["column"], x=rows[x], y=rows["value"])
    made = labelled(rows, {"labels": {"panel": texts["panel"]}, "here": texts["line"]})
    own = rows[rows.columns.intersection(["panel", "line"])]
    return made.assign(line=made["from"]).assign(**own)


def claimed(rows: Frame, texts: Mapping[str, Any]) -> Frame:
    """Parts of a claim: a value above 0 ("sign" 1), or below, says that a part holds, unless
    "verdict" does."""
    made = labelled(rows, {"labels": {"part": texts["part"]}, "here": texts["run on"]})
    values = map(spread, rows[["value", "low", "high", "n", "how"]].to_dict("records"))
    told = [stats.verdict(value, texts.get("sign", 1)) for value in values]
    own = rows[rows.columns.intersection(["part", "verdict"])]
    return made.assign(verdict=told).assign(**own).rename(columns={"from": "run on"})


def spread(row: Match) -> Any:
    """A row's value, with its interval if it has one; None where it is absent."""
    if row.get("how") == ABSENT:
        return None
    if is_missing(row.get("low")):
        return row["value"]
    n = 0 if is_missing(row["n"]) else int(row["n"])
    return Spread(row["value"], row["low"], row["high"], n, row["how"])


def as_row(value: Any) -> dict[str, Any]:
    """The fields of a row that hold a number, its interval, or that it is absent (None)."""
    if isinstance(value, Spread):
        return dict(zip(("value", "low", "high", "n", "how"), value, strict=True))
    absent = {"value": np.nan, "how": ABSENT} if value is None else {"value": value, "how": None}
    return {"low": np.nan, "high": np.nan, "n": pandas.NA, **absent}
