"""NUCL (Stahlberg and Kumar): its tables and figures, with what was measured here."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame

TASKS, NAMES = (printed("nucl")[key] for key in ("tasks", "names"))
METHODS = NAMES["methods"]  # "criterion, compensation" -> the paper's name, or ours
LAYERS = NAMES["layers"]  # a config's count from 0, the paper's from 1
NUCL = "losses.nucl."
WEIGHT, VARIANT, TARGETS = NUCL + "weight", NUCL + "variant", NUCL + "targets"
SCORE, NLL = "score", "validation/nll"
ENTROPY_OF_WEIGHTS = "validation/entropy/ent/ffn_out/mean"
REMOVAL = ("criterion", "reverse", "compensation", "layers", "protect", "lose", "calibration")
REMOVAL += ("calibration_tokens", "sequential")
SIZE = ("ratio", "count", "budget")
EVALUATION = ("text", "token_ids", "window", "max_windows", "bos", "compute_dtype")
EVALUATION += ("window_every", "document")
CORPORA = ("wikitext", "c4", "pg19")  # known by the path of a text
SIZES = {f"gemma{x}{n}b": f"{n}B" for n in (2, 9, 27) for x in ("2_", "-2-")}
DATA = {"gsm8k": "GSM8K", "mbpp": "MBPP"}
LOSS = ("loss", "alpha", "connections")


# ---- runs


def corpus(place: Any) -> str:
    """Short name of a text: a known corpus, "own 0" of self-generated text, or its file."""
    name = place if isinstance(place, str) else ""
    own = re.search(r"-(\d+)(?:/own_text)?\.jsonl$", name)
    known = [x for x in CORPORA if x in name.lower()]
    return f"own {own[1]}" if own else (known or [os.path.basename(name)])[0]


def read_text(rows: Frame) -> Any:
    """Short name of the text that each run read."""
    return rows.text.where(rows.text.astype(bool), rows.token_ids).map(corpus)


def windows(rows: Frame) -> Any:
    """Text of the length of the windows that each run read, and of their distance."""
    spread = rows.window_every.fillna(1).gt(1)
    every = (", every " + rows.window_every.astype(str) + "th").where(spread, "")
    return ", windows of " + c.label(rows, "{:g}".format, "window") + every


def method_of(criterion, reverse, compensation, protect, lose, calibration, tokens, ordered) -> str:
    """Name of a removal: the paper's if it has one, with further settings."""
    plain = criterion if compensation in (None, "none") else f"{criterion}, {compensation}"
    parts = [METHODS.get(plain, plain)]
    parts += ["reversed"] if reverse else []
    parts += [f"{protect} spared"] if protect else []
    parts += [f"{lose} lost"] if lose else []
    # Archives of before the setting have no amount.
    amount = f", {tokens:g} tokens" if pandas.notna(tokens) else ""
    parts += [f"on {corpus(calibration)}{amount}"] if calibration else []
    return ", ".join([*parts, "layer after layer"] if ordered else parts)


def size_of(ratio: Any, count: Any, budget: Any) -> str:
    """Text of a removal's size: a number of neurons, else "25%"; and of a global budget."""
    size = "-" if pandas.isna(ratio) else f"{100 * ratio:g}%"
    if pandas.notna(count):
        size = f"{count:g} neurons"
    return f"{size}, global" if budget == "global" else size


def removals(runs: Frame) -> Frame:
    """Models after a removal: "method", "removed" (its size), "place" (the text that was read).

    The settings of a removal have no effect on the dense model, nor the seed on rules that do not
    draw.
    """
    rows = c.evaluated(c.need(runs, *REMOVAL, *SIZE, *EVALUATION, "surgery"), "criterion")
    rows = rows[rows.surgery.fillna("prune") == "prune"]  # whole blocks: docs/studies/shrink.py
    rows = rows.fillna({"protect": "", "lose": "", "calibration": "", "sequential": False})
    whole = rows.criterion == "none"
    rows.loc[whole, [*REMOVAL[1:], *SIZE]] = None
    rows.loc[whole, "layers"], rows.loc[whole, "ratio"] = "all", 0.0
    rows.loc[rows.calibration == "", ["calibration_tokens", "sequential"]] = None
    draws = (rows.criterion == "random") | rows.lose.astype(str).str.startswith("random:")
    rows = rows.assign(seed=rows.seed.where(draws), removed=c.label(rows, size_of, *SIZE))
    rows["method"] = c.label(rows, method_of, *(x for x in REMOVAL if x != "layers"))
    rows["place"] = "here: " + read_text(rows) + windows(rows)
    return rows.sort_values(["model", "layers", "removed", "method"], kind="stable")


def trainings(runs: Frame) -> Frame:
    """Fine-tuning with and without NUCL; the accuracy on its own task, in percent, is "score"."""
    rows = c.need(runs, WEIGHT, VARIANT, TARGETS, "shape.layers", "data.task", "data.path")
    rows = c.without_idle_losses(rows[rows[TARGETS].notna() & rows["shape.layers"].isna()], [NUCL])
    rows = rows.assign(loss=rows[VARIANT], data=rows["data.task"], place="here")
    rows["alpha"] = rows[WEIGHT].fillna(0).map("{:g}".format)
    rows["connections"] = rows[TARGETS].map(", ".join).replace(NAMES["connections"])
    own = c.accuracies(rows, {task: (task, None) for task in rows.data.dropna().unique()})
    return pandas.concat([rows, own[own.column == own.data].assign(what=SCORE)], ignore_index=True)


def outgoing(trainings: Frame) -> Frame:
    """Fine-tuning with or without NUCL on the FFN's outgoing connections."""
    return trainings[trainings.connections == "FFN outgoing"]


def ours(rows: Frame) -> Frame:
    """Fine-tuning with mstd."""
    return rows.query("alpha != '0' and loss == 'mstd'")


def lowest(rows: Frame, by: list[str]) -> Frame:
    """The rows of the alpha that has the lowest last validation loss, for each `by`."""
    losses = c.last(rows[rows.what == NLL]).groupby([*by, "alpha"], sort=False)["value"].mean()
    best = losses.sort_values(kind="stable").reset_index().drop_duplicates(by)
    return rows.merge(best[[*by, "alpha"]], on=[*by, "alpha"])


def vs_standard(rows: Frame, every: Frame, what: str, index: list[str], how: Any = None) -> Any:
    """These runs against those without NUCL, of the same model and data."""
    rows, base = rows[rows.what == what], every[(every.what == what) & (every.alpha == "0")]
    base = base.drop(columns=[x for x in base if x.startswith(NUCL) or x in LOSS])  # weight 0
    return c.against(rows, base, index, ["model", "data"], (NUCL, *LOSS), how)


def times_unpruned(rows: Frame, every: Frame, index: list[str]) -> Any:
    """Perplexity as a multiple of the dense model's on the same text."""
    rows, every = (x[x.what == "perplexity"] for x in (rows, every))
    base, free = every[every.criterion == "none"], (*REMOVAL, *SIZE, "limit", "method", "removed")
    return c.against(rows, base, index, ["model", "place"], free, c.ratio)


# ---- the paper's tables


def table_2(outgoing: Frame) -> Frame:
    rows = lowest(ours(outgoing), ["model", "data"])
    rows["Model size"] = rows.model.replace(SIZES)
    gains = vs_standard(rows, outgoing, SCORE, ["Model size", "place", "data"], c.percent)
    return gains.unstack("data", sort=False).rename(columns=DATA)


def table_3(trainings: Frame) -> Frame:
    every = trainings.query("data == 'gsm8k'")
    every = every.assign(place="here: " + every.model, **{"Weight matrices": every.connections})
    rows = lowest(ours(every), ["model", "connections"])
    gains = vs_standard(rows, every, SCORE, ["Weight matrices", "place"], c.percent)
    return gains.to_frame("Relative gain (in %)")


def table_4(removals: Frame) -> Frame:
    rows = removals.query("layers == 'all' and removed in ['0%', '25%']")
    rows = c.accuracies(rows, TASKS, "Average")
    place = "here: " + rows.model
    return c.pivot(rows, {"Pruning": rows.removed, "Method": rows.method, "place": place})


def table_5(removals: Frame) -> Frame:
    rows = removals.query("method == 'Entropy-based' and layers in @LAYERS")
    rows = c.accuracies(rows, TASKS, "Average accuracy")
    place = "here: " + rows.model + ", " + rows.removed
    return c.pivot(rows, {"Layers": rows.layers.map(LAYERS), "place": place})


def table_8(outgoing: Frame) -> Frame:
    rows = outgoing.query("data in @DATA")
    names = ("NUCL " + rows.loss).where(rows.loss != "mstd", "NUCL fine-tuning")
    names = names.where(rows.alpha != "0", "Standard fine-tuning")
    rows = rows.assign(Method=names, Task=rows.data.map(NAMES["units"]))
    rows = lowest(rows, ["Task", "Method", "model"]).query("what == @SCORE")
    rows = rows.drop(columns=["loss", "alpha", VARIANT, WEIGHT])
    column = rows.model.replace({name: f"Gemma-{size}" for name, size in SIZES.items()})
    return c.pivot(rows, {x: rows[x] for x in ("Task", "Method", "place")}, column)


# ---- ours


def gains(outgoing: Frame) -> Frame:
    """Gains and their z; those of the paper's Tables 7 and 8 are its own numbers (JSON)."""
    every, index = outgoing.assign(task=outgoing.data.map(DATA)), ["task", "model", "place"]
    sides = (every[every.alpha == "0"], ours(every))
    standard, rows = (lowest(x, ["model", "task"]) for x in sides)
    columns = {x: y[y.what == SCORE] for x, y in (("standard", standard), ("NUCL", rows))}
    kinds = {"absolute gain": None, "relative gain (in %)": c.percent, "z (ours)": c.z}
    columns |= {x: vs_standard(rows, every, SCORE, index, how) for x, how in kinds.items()}
    return c.table(rows, index, columns)


def finetuning(trainings: Frame) -> Frame:
    index = ["model", "data", "connections", "loss", "alpha"]
    columns = {"validation NLL": NLL}
    columns["Δ vs standard"] = vs_standard(trainings, trainings, NLL, index)
    tasks = c.every_task(trainings[trainings.what != SCORE])
    return c.table(trainings, index, columns | tasks)


def removal(removals: Frame) -> Frame:
    index = ["model", "method", "layers", "removed", "place"]
    rows = removals.assign(layers=removals.layers.replace(LAYERS))
    columns = {"perplexity": "perplexity", "x unpruned": times_unpruned(rows, rows, index)}
    columns["% of parameters"] = "parameters_removed_percent"
    columns |= {"norm of lambda": "largest_lambda_norm", "condition": "largest_condition"}
    return c.table(rows, index, columns | c.every_task(rows))


# ---- figures and claims


def over_training(curves: Frame, name: str, what: str) -> Frame:
    """A panel for each model and variant, a line for each alpha."""
    rows = outgoing(trainings(curves)).query("what == @what")
    return c.points(rows, name, rows.model + ", " + rows.loss, "alpha = " + rows.alpha)


figure_2 = partial(over_training, name="entropy a neuron (nats)", what=ENTROPY_OF_WEIGHTS)
figure_3 = partial(over_training, name="validation NLL", what=NLL)


def figure_4(removals: Frame) -> Frame:
    rows = removals.query("method == 'Entropy-based'")
    rows = rows[rows.layers.str.startswith("pair:")]
    made = times_unpruned(rows, removals, ["model", "layers", "place"]).rename("y").reset_index()
    made["x"] = made.layers.str.removeprefix("pair:").astype(int)
    texts = {"panel": "by perplexity (ours)", "value": "perplexity x unpruned", "seed": None}
    several = made.place.groupby(made.model).transform("nunique") > 1
    line = made.model + made.place.str.removeprefix("here").where(several, "")
    return made.assign(line=line, **texts)


def mstd_against_gini(outgoing: Frame, what: str) -> Frame:
    rows = outgoing.query("what == @what")
    rows = rows.assign(part="alpha = " + rows.alpha, run_on=rows.model + ", " + rows.data)
    sides = ((rows.loss == "mstd") & (rows.alpha != "0"), rows.loss == "gini")
    return c.claim(rows, *sides, on=c.CLAIM, free=(VARIANT, "loss"), sign=-1)


entropy_of_mstd = partial(mstd_against_gini, what=ENTROPY_OF_WEIGHTS)
loss_of_mstd = partial(mstd_against_gini, what=NLL)


def against_chance(removals: Frame, methods: list[str], sign: int) -> Frame:
    """Perplexity after these removals against that after random ones of the same size."""
    rows = removals.query("what == 'perplexity'")
    place = rows.model + ", " + rows.layers + ", " + rows.removed
    texts = rows.place.groupby(place).transform("nunique") > 1
    place += rows.place.str.removeprefix("here").where(texts, "")
    rows = rows.assign(part=rows.method, run_on=place)
    ours, on, free = rows.method.isin(methods), ["run_on", "place"], (*REMOVAL, "method", "limit")
    return c.claim(rows, ours, rows.method == "Random", on, free, sign)


by_entropy = partial(against_chance, methods=["Entropy-based"], sign=-1)
by_weak_criteria = partial(against_chance, methods=NAMES["weak"], sign=1)
CURVES = (NLL, ENTROPY_OF_WEIGHTS)
