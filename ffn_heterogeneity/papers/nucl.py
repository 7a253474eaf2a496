"""NUCL (Stahlberg and Kumar): its tables and figures, beside what was measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.stats import two_proportions
from ffn_heterogeneity.report.tidy import Frame, Match
from ffn_heterogeneity.report.versus import versus

PRINTED = printed("nucl")
NUCL = "losses.nucl."
WEIGHT, VARIANT, TARGETS = NUCL + "weight", NUCL + "variant", NUCL + "targets"
SCORE, NLL = "score", "validation/nll"
ENTROPY_OF_WEIGHTS = "validation/entropy/ent/ffn_out/mean"
REMOVAL = ("criterion", "reverse", "compensation", "layers", "protect", "lose", "calibration")
REMOVAL += ("calibration_tokens", "sequential")
SIZE = ("ratio", "count", "budget")
EVALUATION = ("text", "token_ids", "window", "max_windows", "bos", "compute_dtype")
REMOVED = ("model", *REMOVAL, *SIZE, *EVALUATION)  # equal in the runs of a removal
TUNED = ["model", "revision", "seq_len", "batch_size", "steps", "dropout", "freeze", "train_only"]
TUNED += ["data.", "optimizer.", "losses."]

TABLES, TASKS = PRINTED["tables"], PRINTED["tasks"]
GAINS = PRINTED["ours"]["tables"]["gains"]
METHODS = PRINTED["names"]["method"][1]
OUTGOING = PRINTED["names"]["connections"][1]["FFN outgoing"]
UNPRUNED, ENTROPY = METHODS["Pre-trained baseline"], METHODS["Entropy-based"]
STANDARD, MSTD = {WEIGHT: [0, None]}, {WEIGHT: tidy.ANY, VARIANT: "mstd"}
FREELY = {"reverse": False, "protect": ""}
PLAIN = {"compensation": "none", "lose": "", **FREELY}
WEAK = {"criterion": ["similarity", "magnitude"], **FREELY}
WEAK["compensation"] = ["none", "sum", "least_squares"]
QUESTIONS = {"GSM8K": 1319, "MBPP": 500}  # of the test sets
# In runs whose config does not have them.
SETTINGS = dict.fromkeys((*REMOVAL, *SIZE, *EVALUATION, WEIGHT, VARIANT, TARGETS))
SETTINGS |= dict.fromkeys(("shape.layers", "data.task", "data.path"))
SETTINGS |= dict.fromkeys(("protect", "lose", "calibration"), "") | {"sequential": False}


# ---- runs


def removals(rows: Frame, shown: Sequence[str] = ("model", *REMOVAL[:4])) -> Frame:
    """Neurons removed, and the perplexity after it; none removed is that of any rule and size."""
    measured = rows[rows.what == "perplexity"]
    rows = rows[rows.criterion.notna() & rows["run"].isin(measured["run"])].copy()
    idle = rows.criterion == "none"
    rows.loc[idle, [*REMOVAL[1:], *SIZE]] = tidy.IDLE
    rows.loc[idle, "layers"] = "all"
    rows["draws"] = (rows.criterion == "random") | rows.lose.str.startswith("random:")
    return tidy.records(rows, REMOVED, shown, {"draws": True})


def trainings(rows: Frame) -> Frame:
    """Fine-tuning with and without NUCL; its own task's accuracy is "score"."""
    rows = rows[rows[TARGETS].notna() & rows["shape.layers"].isna()]
    shown = ("model", "data.task", "data.path", VARIANT, WEIGHT, TARGETS)
    rows = tidy.records(rows, TUNED, shown, {TARGETS: tidy.ANY}, (NUCL,))
    own = tidy.scores(rows, {task: (task, None) for task in rows["data.task"].dropna().unique()})
    own = own[own.what == own["data.task"]].assign(what=SCORE)
    return pandas.concat([rows, own], ignore_index=True)


def lowest(rows: Frame, texts: Mapping[str, Any]) -> Frame:
    """The records whose last validation loss is lowest among those with their labels."""
    rows = tidy.labelled(rows, texts)
    losses = tidy.cells(rows, {NLL: NLL}).groupby("record")["value"].mean()
    found = rows.drop_duplicates("record")
    found = found.assign(loss=found["record"].map(losses)).sort_values("loss", kind="stable")
    labels = [*texts["labels"], "from", *(["column"] if "cells" in texts else [])]
    found = found[found.loss.notna()].drop_duplicates(labels)
    return rows[rows["record"].isin(found["record"])]


def against_standard(rows: Frame, what: str, every: Frame, how: str = "difference") -> Frame:
    return versus(every, what, rows, STANDARD, TUNED, (NUCL,), how)


def times_unpruned(rows: Frame, every: Frame) -> Frame:
    return versus(every, "perplexity", rows, UNPRUNED, REMOVED, (*REMOVAL, *SIZE), "ratio")


# ---- tables


def table_2(runs: Runs) -> Frame:
    rows = lowest(tidy.matching(runs["training"], MSTD | OUTGOING), TABLES["table_2"])
    return against_standard(rows, SCORE, runs["training"], "percent")


def table_3(runs: Runs) -> Frame:
    rows = tidy.matching(runs["training"], MSTD | {"data.task": "gsm8k"})
    gains = against_standard(lowest(rows, TABLES["table_3"]), SCORE, runs["training"], "percent")
    return gains.assign(column="Relative gain (in %)")


def table_4(runs: Runs) -> Frame:
    rows = tidy.matching(runs["removal"], {"layers": "all", "ratio": [0.25, tidy.IDLE]})
    return tidy.scores(rows, TASKS, "Average")


def table_5(runs: Runs) -> Frame:
    rows = tidy.matching(runs["removal"], {**ENTROPY, "layers": ["bottom", "top", "odd", "even"]})
    rows = tidy.scores(rows, TASKS, "Average accuracy")
    return rows[rows.what == "Average accuracy"]


def table_8(runs: Runs) -> Frame:
    rows = tidy.matching(runs["training"], {**OUTGOING, "data.task": ["gsm8k", "mbpp"]})
    best = lowest(rows, TABLES["table_8"])
    return best[best.what == SCORE]


def gains(runs: Runs) -> Frame:
    """Gains and their z, of the paper's Tables 7 and 8 and of ours."""
    sides = (tidy.matching(runs["training"], {**OUTGOING, **match}) for match in (STANDARD, MSTD))
    standard, ours = (lowest(rows, GAINS) for rows in sides)
    own = [x[x.what == SCORE] for x in (standard, ours)]
    hows = ("difference", "percent", "z")
    apart = [against_standard(ours, SCORE, runs["training"], how) for how in hows]
    made = tidy.cells(ours, dict(zip(GAINS["columns"], (*own, *apart), strict=True)))
    printed_ones = [gains_of(TABLES[key]) for key in ("table_7", "table_8")]
    return pandas.concat([*printed_ones, made], ignore_index=True)


def gains_of(table: dict) -> Frame:
    """The paper's gains, from the scores that a table prints."""
    rows: Frame = pandas.DataFrame(table["rows"], columns=["task", "how", *table["columns"]])
    rows["task"] = rows.task.str.split().str[0]
    rows = rows.set_index(["how", "task"]).stack()
    a, b = (rows[f"{x} fine-tuning"] for x in ("Standard", "NUCL"))
    z = [two_proportions(a[x], b[x], QUESTIONS.get(x[0])) for x in a.index]
    parts = [a, b, b - a, 100 * (b / a - 1), pandas.Series(z, a.index, float)]
    made = pandas.concat(parts, axis=1, keys=GAINS["columns"]).rename_axis(["task", "model"])
    made = made.reset_index().melt(["task", "model"], var_name="column").dropna()
    return made.assign(**{"from": "paper"})


def finetuning(runs: Runs) -> Frame:
    rows = runs["training"]
    columns = {"validation NLL": NLL, "less standard": against_standard(rows, NLL, rows)}
    columns |= dict(iter(tidy.scores(rows[rows.task.notna()]).groupby("what", sort=False)))
    return tidy.cells(rows, columns)


def removal(runs: Runs) -> Frame:
    rows = runs["removal"]
    columns = {"perplexity": "perplexity", "x unpruned": times_unpruned(rows, rows)}
    columns["% of parameters"] = "parameters_removed_percent"
    columns |= {"norm of lambda": "largest_lambda_norm", "condition": "largest_condition"}
    columns |= dict(iter(tidy.scores(rows).groupby("what", sort=False)))
    return tidy.cells(rows, columns)


# ---- figures and claims


def over_training(runs: Runs, name: str, what: str) -> Frame:
    """A panel for each model and variant."""
    rows = tidy.matching(runs["curves"], OUTGOING)
    return rows[rows.what == what].assign(column=name)


figure_2 = partial(over_training, name="entropy a neuron (nats)", what=ENTROPY_OF_WEIGHTS)
figure_3 = partial(over_training, name="validation NLL", what=NLL)


def figure_4(runs: Runs) -> Frame:
    rows = tidy.matching(runs["removal"], ENTROPY)
    rows = times_unpruned(rows[rows.layers.str.startswith("pair:")], runs["removal"])
    pair = rows.layers.str.removeprefix("pair:").astype(int)
    return rows.assign(pair=pair, column="perplexity x unpruned")


def mstd_against_gini(runs: Runs, what: str) -> Frame:
    ours, base = MSTD | OUTGOING, {VARIANT: "gini"}
    return versus(runs["training"], what, ours, base, TUNED, (VARIANT,))


def against_chance(runs: Runs, settings: Match) -> Frame:
    base = METHODS["Random"]
    return versus(runs["removal"], "perplexity", settings, base, REMOVED, REMOVAL[:3])


entropy_of_mstd = partial(mstd_against_gini, what=ENTROPY_OF_WEIGHTS)
loss_of_mstd = partial(mstd_against_gini, what=NLL)
by_entropy = partial(against_chance, settings=ENTROPY)
by_weak_criteria = partial(against_chance, settings=WEAK)


KINDS, CURVE_KINDS = {"removal": removals, "training": trainings}, {"curves": trainings}
CURVES = (NLL, ENTROPY_OF_WEIGHTS)
