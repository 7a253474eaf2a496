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
from ffn_heterogeneity.report.stats import two_proportions

TABLES, TASKS = printed("nucl")["tables"], printed("nucl")["tasks"]
NUCL = "losses.nucl."
WEIGHT, VARIANT, TARGETS = NUCL + "weight", NUCL + "variant", NUCL + "targets"
SCORE, NLL = "score", "validation/nll"
ENTROPY_OF_WEIGHTS = "validation/entropy/ent/ffn_out/mean"
REMOVAL = ("criterion", "reverse", "compensation", "layers", "protect", "lose", "calibration")
REMOVAL += ("calibration_tokens", "sequential")
SIZE = ("ratio", "count", "budget")
EVALUATION = ("text", "token_ids", "window", "max_windows", "bos", "compute_dtype")
CORPORA = ("wikitext", "c4", "pg19")  # known by the path of a text

# (criterion, compensation) -> the paper's name, or ours
METHODS = {("none", None): "Pre-trained baseline", ("random", "none"): "Random"}
METHODS |= {("magnitude", "none"): "Magnitude-based", ("entropy", "none"): "Entropy-based"}
METHODS |= {("similarity", "sum"): "Srinivas and Babu (2015)"}
METHODS |= {("similarity", "least_squares"): "Stahlberg and Byrne (2017)"}
METHODS |= {("similarity", "ridge"): "Stahlberg and Byrne (2017), ridge"}
WEAK = ["Srinivas and Babu (2015)", "Stahlberg and Byrne (2017)", "Magnitude-based", "similarity"]
WEAK += ["magnitude, sum", "magnitude, least_squares"]
# A config's layers count from 0, the paper's from 1.
LAYERS = {"bottom": "Bottom half of the layers", "top": "Top half of the layers"}
LAYERS |= {"odd": "Even layers (after global attention)"}
LAYERS |= {"even": "Odd layers (after local attention)"}
CONNECTIONS = {("ffn_out",): "FFN outgoing", ("attention_out",): "Attention outgoing"}
CONNECTIONS |= {("ffn_in_linear",): "FFN incoming (linear)"}
CONNECTIONS |= {("ffn_in_gated",): "FFN incoming (gated)"}
SIZES = {f"gemma{x}{n}b": f"{n}B" for n in (2, 9, 27) for x in ("2_", "-2-")}
DATA = {"gsm8k": "GSM8K", "mbpp": "MBPP"}
QUESTIONS = {"GSM8K": 1319, "MBPP": 500}  # of the test sets
LOSS = ("loss", "alpha", "connections")
UNITS = {"gsm8k": "GSM8K (accuracy in %)", "mbpp": "MBPP (3-shot success rate in %)"}


# ---- runs


def corpus(place: Any) -> str:
    """Short name of a text: a known corpus, "own 0" of self-generated text, or its file."""
    name = place if isinstance(place, str) else ""
    own = re.search(r"-(\d+)(?:/own_text)?\.jsonl$", name)
    known = [x for x in CORPORA if x in name.lower()]
    return f"own {own[1]}" if own else (known or [os.path.basename(name)])[0]


def method_of(criterion, reverse, compensation, protect, lose, calibration, tokens, ordered) -> str:
    """Name of a removal: the paper's if it has one, and what it does besides."""
    plain = criterion if compensation == "none" else f"{criterion}, {compensation}"
    parts = [METHODS.get((criterion, compensation), plain)]
    parts += ["reversed"] if reverse else []
    parts += [f"{protect} spared"] if protect else []
    parts += [f"{lose} lost"] if lose else []
    parts += [f"on {corpus(calibration)}, {tokens:g} tokens"] if calibration else []
    return ", ".join([*parts, "layer after layer"] if ordered else parts)


def size_of(ratio: Any, count: Any, budget: Any) -> str:
    """Text of a removal's size: "25%", a number of neurons per layer, or a budget."""
    return f"{100 * ratio:g}%" if ratio == ratio and ratio is not None else f"{count or budget}"


def removals(runs: Frame) -> Frame:
    """Models after a removal: "method", "removed" (its size), "place" (the text that was read).

    The settings of a removal have no effect on the dense model, nor the seed on rules that do not
    draw.
    """
    rows = c.need(runs, *REMOVAL, *SIZE, *EVALUATION)
    measured = rows[rows.what == "perplexity"]["run"]
    rows = rows[rows.criterion.notna() & rows["run"].isin(measured)].copy()
    rows = rows.fillna({"protect": "", "lose": "", "calibration": "", "sequential": False})
    whole = rows.criterion == "none"
    rows.loc[whole, [*REMOVAL[1:], *SIZE]] = None
    rows.loc[whole, "layers"], rows.loc[whole, "ratio"] = "all", 0.0
    rows.loc[rows.calibration == "", ["calibration_tokens", "sequential"]] = None
    draws = (rows.criterion == "random") | rows.lose.astype(str).str.startswith("random:")
    place = rows.text.where(rows.text.astype(bool), rows.token_ids).map(corpus)
    rows = rows.assign(
        method=c.label(rows, method_of, *(x for x in REMOVAL if x != "layers")),
        removed=c.label(rows, size_of, *SIZE),
        seed=rows.seed.where(draws),
        place="here: " + place + ", windows of " + c.label(rows, "{:g}".format, "window"),
    )
    return rows.sort_values(["model", "layers", "removed", "method"], kind="stable")


def trainings(runs: Frame) -> Frame:
    """Fine-tuning with and without NUCL; the accuracy on its own task, in percent, is "score"."""
    rows = c.need(runs, WEIGHT, VARIANT, TARGETS, "shape.layers", "data.task", "data.path")
    rows = rows[rows[TARGETS].notna() & rows["shape.layers"].isna()]
    rows = c.without_idle_losses(rows, [NUCL])
    rows = rows.assign(
        loss=rows[VARIANT],
        alpha=rows[WEIGHT].fillna(0).map("{:g}".format),
        connections=rows[TARGETS].map(lambda x: CONNECTIONS.get(x, ", ".join(x))),
        data=rows["data.task"],
        place="here",
    )
    own = c.accuracies(rows, {task: (task, None) for task in rows.data.dropna().unique()})
    return pandas.concat([rows, own[own.column == own.data].assign(what=SCORE)], ignore_index=True)


def ours(rows: Frame, connections: str = "FFN outgoing") -> Frame:
    """Fine-tuning with mstd on these connections."""
    return rows[(rows.alpha != "0") & (rows.loss == "mstd") & (rows.connections == connections)]


def lowest(rows: Frame, by: list[str]) -> Frame:
    """The rows of the alpha that has the lowest last validation loss, for each `by`."""
    losses = c.last(rows[rows.what == NLL]).groupby([*by, "alpha"], sort=False)["value"].mean()
    best = losses.sort_values(kind="stable").reset_index().drop_duplicates(by)
    return rows.merge(best[[*by, "alpha"]], on=[*by, "alpha"])


def against_standard(
    rows: Frame, every: Frame, what: str, index: list[str], how: Any = None
) -> Any:
    """These runs against those without NUCL, of the same model and data."""
    base = c.last(every[(every.what == what) & (every.alpha == "0")])
    idle = [x for x in base if x.startswith(NUCL) or x in LOSS]
    base = base.drop(columns=idle)  # of a loss of weight 0
    rows, free = c.last(rows[rows.what == what]), (NUCL, *LOSS)
    return c.against(rows, base, index, ["model", "data"], free, how)


def times_unpruned(rows: Frame, every: Frame, index: list[str]) -> Any:
    """Perplexity as a multiple of the dense model's on the same text."""
    rows, every = (x[x.what == "perplexity"] for x in (rows, every))
    base, free = every[every.criterion == "none"], (*REMOVAL, *SIZE, "limit", "method", "removed")
    return c.against(rows, base, index, ["model", "place"], free, c.ratio)


# ---- the paper's tables


def table_2(runs: Frame) -> Frame:
    every = trainings(runs)
    rows = lowest(ours(every), ["model", "data"])
    rows["Model size"] = rows.model.map(lambda name: SIZES.get(name, name))
    gains = against_standard(rows, every, SCORE, ["Model size", "place", "data"], c.percent)
    return gains.unstack("data", sort=False).rename(columns=DATA)


def table_3(runs: Frame) -> Frame:
    every = trainings(runs)
    every = every[every.data == "gsm8k"]
    every = every.assign(place="here: " + every.model, **{"Weight matrices": every.connections})
    rows = lowest(every[(every.alpha != "0") & (every.loss == "mstd")], ["model", "connections"])
    gains = against_standard(rows, every, SCORE, ["Weight matrices", "place"], c.percent)
    return gains.to_frame("Relative gain (in %)")


def table_4(runs: Frame) -> Frame:
    rows = removals(runs)
    rows = rows[(rows.layers == "all") & rows.removed.isin(["0%", "25%"])]
    rows = c.accuracies(rows, TASKS, "Average")
    rows = rows.assign(Pruning=rows.removed, Method=rows.method, place="here: " + rows.model)
    return c.pivot(rows, ["Pruning", "Method", "place"])


def table_5(runs: Frame) -> Frame:
    rows = removals(runs)
    rows = rows[(rows.method == "Entropy-based") & rows.layers.isin(list(LAYERS))]
    rows = c.accuracies(rows, TASKS, "Average accuracy")
    place = "here: " + rows.model + ", " + rows.removed
    return c.pivot(rows.assign(Layers=rows.layers.map(LAYERS), place=place), ["Layers", "place"])


def table_8(runs: Frame) -> Frame:
    rows = trainings(runs)
    rows = rows[rows.data.isin(list(DATA)) & (rows.connections == "FFN outgoing")]
    names = ("NUCL " + rows.loss).where(rows.loss != "mstd", "NUCL fine-tuning")
    names = names.where(rows.alpha != "0", "Standard fine-tuning")
    rows = lowest(rows.assign(Method=names, Task=rows.data.map(UNITS)), ["Task", "Method", "model"])
    rows = rows[rows.what == SCORE].drop(columns=["loss", "alpha", VARIANT, WEIGHT])
    column = rows.model.map(lambda name: f"Gemma-{SIZES[name]}" if name in SIZES else name)
    return c.pivot(rows.assign(column=column), ["Task", "Method", "place"])


# ---- ours


def gains(runs: Frame) -> Frame:
    """Gains and their z, of the paper's Tables 7 and 8 and of ours."""
    every, index = trainings(runs), ["task", "model", "place"]
    every = every[every.connections == "FFN outgoing"].assign(task=every.data.map(DATA))
    sides = (every[every.alpha == "0"], ours(every))
    standard, rows = (lowest(x, ["model", "task"]) for x in sides)
    own = [c.cells(x[x.what == SCORE], index) for x in (standard, rows)]
    own += [against_standard(rows, every, SCORE, index, x) for x in (None, c.percent, c.z)]
    parts = [*map(printed_gains, ("table_7", "table_8"))]
    return pandas.concat([*parts, pandas.concat(own, axis=1, keys=parts[0].columns)])


def printed_gains(key: str) -> Frame:
    """The paper's gains, from the scores that a table prints."""
    rows: Frame = pandas.DataFrame(
        TABLES[key]["rows"], columns=["task", "how", *TABLES[key]["columns"]]
    )
    rows["task"] = rows.task.str.split().str[0]
    rows = rows.set_index(["how", "task"]).rename_axis(columns="model").stack()
    a, b = (rows[f"{x} fine-tuning"] for x in ("Standard", "NUCL"))
    z = [two_proportions(a[x], b[x], QUESTIONS.get(x[0])) for x in a.index]
    parts = [a, b, b - a, 100 * (b / a - 1), pandas.Series(z, a.index, object)]
    names = ["standard", "NUCL", "absolute gain", "relative gain (in %)", "z (ours)"]
    made = pandas.concat(parts, axis=1, keys=names)
    return made.assign(place="paper").set_index("place", append=True)


def finetuning(runs: Frame) -> Frame:
    rows, index = trainings(runs), ["model", "data", "connections", "loss", "alpha"]
    columns = {"validation NLL": NLL, "Δ vs standard": against_standard(rows, rows, NLL, index)}
    tasks = c.every_task(rows[rows.what != SCORE])
    return c.table(rows, index, columns | {x: c.cells(y, index) for x, y in tasks.items()})


def removal(runs: Frame) -> Frame:
    rows, index = removals(runs), ["model", "method", "layers", "removed", "place"]
    rows = rows.assign(layers=rows.layers.map(lambda x: LAYERS.get(x, x)))
    columns = {"perplexity": "perplexity", "x unpruned": times_unpruned(rows, rows, index)}
    columns["% of parameters"] = "parameters_removed_percent"
    columns |= {"norm of lambda": "largest_lambda_norm", "condition": "largest_condition"}
    columns |= {x: c.cells(y, index) for x, y in c.every_task(rows).items()}
    return c.table(rows, index, columns)


# ---- figures and claims


def over_training(curves: Frame, name: str, what: str) -> Frame:
    """A panel for each model and variant, a line for each alpha."""
    rows = trainings(curves)
    rows = rows[(rows.connections == "FFN outgoing") & (rows.what == what)]
    return c.points(rows, name, rows.model + ", " + rows.loss, "alpha = " + rows.alpha)


figure_2 = partial(over_training, name="entropy a neuron (nats)", what=ENTROPY_OF_WEIGHTS)
figure_3 = partial(over_training, name="validation NLL", what=NLL)


def figure_4(runs: Frame) -> Frame:
    every, index = removals(runs), ["model", "layers", "place"]
    rows = every[(every.method == "Entropy-based") & every.layers.str.startswith("pair:")]
    c.one_setting(rows, index)
    made = times_unpruned(rows, every, index).rename("y").reset_index()
    made["x"] = made.layers.str.removeprefix("pair:").astype(int)
    texts = {"panel": "by perplexity (ours)", "value": "perplexity x unpruned", "seed": None}
    return made.assign(line=made.model, **texts)


def mstd_against_gini(runs: Frame, what: str) -> Frame:
    rows, index = trainings(runs), ["run_on", "part"]
    rows = c.last(rows[(rows.connections == "FFN outgoing") & (rows.what == what)])
    rows = rows.assign(part="alpha = " + rows.alpha, run_on=rows.model + ", " + rows.data)
    gini, free = rows[rows.loss == "gini"], (VARIANT, "loss")
    return c.judged(c.against(ours(rows), gini, index, index, free), -1)


entropy_of_mstd = partial(mstd_against_gini, what=ENTROPY_OF_WEIGHTS)
loss_of_mstd = partial(mstd_against_gini, what=NLL)


def against_chance(runs: Frame, methods: list[str]) -> Any:
    """Perplexity after these removals against that after random ones of the same size."""
    rows = removals(runs)
    rows = rows[rows.what == "perplexity"].assign(part=rows.method)
    rows["run_on"] = rows.model + ", " + rows.layers + ", " + rows.removed
    sides = (rows[rows.method.isin(methods)], rows[rows.method == "Random"])
    return c.against(*sides, ["run_on", "part"], ["run_on", "place"], (*REMOVAL, "method", "limit"))


def by_entropy(runs: Frame) -> Frame:
    return c.judged(against_chance(runs, ["Entropy-based"]), -1)


def by_weak_criteria(runs: Frame) -> Frame:
    return c.judged(against_chance(runs, WEAK))


CURVES = (NLL, ENTROPY_OF_WEIGHTS)
