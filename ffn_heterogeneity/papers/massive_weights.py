"""Massive weights (House of Cards): its tables and figures, with what was measured here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.jreg import two_names
from ffn_heterogeneity.papers.nucl import EVALUATION, corpus
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame
from ffn_heterogeneity.report.stats import FAILS, HOLDS

PRINTED = printed("massive_weights")
TASKS, TABLE_7 = PRINTED["tasks"], PRINTED["tables"]["table_7"]["rows"]
MEAN, LONG = "mean accuracy (%)", ("ARC-Easy", "ARC-Challenge", "BoolQ", "PIQA", "WinoGrande")
TEXTS = {"wikitext": "WikiText", "c4": "C4", "pg19": "PG-19"}
ATTACKS = {"-": "-", "zero 5": "top-5 zeroing", "retain 5": "top-5 retaining"}
DROP = "trained.macdrop."
SCOPE, CURRICULUM, A, P0 = (DROP + key for key in ("scope", "curriculum", "a", "p0"))
# Settings of a curriculum that the others do not read.
READ_BY = {"macdrop.a": ["exp"], "macdrop.epochs": ["epoch_before", "epoch_after"]}
LABELS = ["model", "text", "method", "attacked", "place"]
CLAIM = ["run_on", "part"]


# ---- runs


def evaluations(runs: Frame) -> Frame:
    """Models attacked ("zero 5"), or evaluated as they are ("-")."""
    rows = c.need(runs, "attack", "k", "config.layer", "token", "prepare", *EVALUATION)
    measured = rows[rows.what == "perplexity"]["run"]
    rows = rows[rows.attack.notna() & rows["run"].isin(measured)]
    attacked = (rows.attack + " " + rows.k.astype(str)).where(rows.k != 0, "-")
    layers = c.label(rows, ", layer {:g}".format, "config.layer").fillna("")
    windows = ", windows of " + c.label(rows, "{:g}".format, "window")
    text = rows.text.where(rows.text.astype(bool), rows.token_ids).map(corpus)
    rows = rows.assign(attacked=attacked, text=text, place="here" + layers + windows)
    return rows.sort_values(["model", "text", "k"], kind="stable")


def tunings(runs: Frame) -> Frame:
    """Trainings of adapters; settings of MacDrop only where it drops and the curriculum reads
    them."""
    rows = c.need(runs, "prepare", "train_only", "macdrop.p0", "macdrop.scope", *READ_BY)
    rows = c.need(rows, "macdrop.curriculum")
    rows = rows[rows.prepare.astype(bool) & rows.prepare.notna()]
    drops = rows.prepare.map(lambda names: "macdrop" in names).astype(bool)
    drops &= rows["macdrop.p0"].fillna(0).astype(bool)
    for name in [name for name in rows if name.startswith("macdrop.")]:
        readers = READ_BY.get(name, list(rows["macdrop.curriculum"]))
        rows[name] = rows[name].where(drops & rows["macdrop.curriculum"].isin(readers), None)
    names = rows.prepare.map(lambda names: " + ".join(x for x in names if x != "macdrop"))
    leaves = rows.train_only.astype(str).str.contains("lora_")  # the adapter's, as by default
    return rows.assign(adapter=names, prepare=names, train_only=rows.train_only.mask(leaves))


def untrained(runs: Frame) -> Frame:
    """Evaluations of models as they are, not of trained ones."""
    rows = evaluations(runs)
    return rows[~rows.origin.isin(tunings(runs)["run"])]


def adapted(runs: Frame) -> Frame:
    """Evaluations of models with trained adapters; "trained.<key>" are settings of the training."""
    tuned = tunings(runs).drop_duplicates("run").set_index("run")
    rows = evaluations(runs)
    rows = rows[rows.origin.isin(tuned.index)]
    away = [*c.OWN, *c.NO_EFFECT, "model"]
    own = tuned.drop(columns=[name for name in tuned if c.among(name, away)])
    model, seed = (rows.origin.map(x).astype(object) for x in (tuned.model, tuned.seed))
    rows = rows.assign(model=model, seed=seed).join(own.add_prefix("trained."), on="origin").copy()
    names = c.label(rows, method_of, "trained.adapter", SCOPE, CURRICULUM, A, P0)
    rows = rows.assign(method=names).sort_values([CURRICULUM, P0], na_position="first")
    by = ["model", "text", "trained.adapter"]
    return rows.sort_values(by, ascending=[True, True, False], kind="stable")


def method_of(adapter: str, scope: Any, curriculum: Any, a: Any, p0: Any) -> str:
    """The paper's name of a training if it has one, else its settings."""
    name = {"lora": "LoRA", "dora": "DoRA"}.get(adapter, adapter)
    if pandas.isna(p0):
        return name
    if (scope, curriculum, p0) == ("massive", "step", 0.8):
        return f"{name} + MacDrop"
    at = f"exp, a {a}" if curriculum == "exp" else curriculum
    return f"{adapter}, {scope}, {at}, p0 {p0:.1f}"


def analyses(runs: Frame) -> Frame:
    """Massive activations of models, and in "five" the neurons of the massive layer."""
    rows = c.need(runs, "analysis", "config.layer", "token")
    rows = rows[rows.analysis == "massive"]
    for run in set(rows["run"]) - set(rows[rows.what == "h_out"]["run"]):
        raise ValueError(f"{run}/results.json is no analysis of activations: is it damaged?")
    ranks = rows[(rows.what == "massive_rank") & (rows["value"] <= 5)].sort_values("value")
    five = ranks.groupby("run").neuron.agg(lambda its: ", ".join(map(str, its)))
    found = rows[rows.what == "layer"].set_index("run")["value"].map("{:g}".format)
    rows = rows.assign(five=rows["run"].map(five), found=rows["run"].map(found))
    return rows.assign(model=two_names(rows)).sort_values("model", kind="stable")


# ---- the paper's tables


def table_1(runs: Frame) -> Frame:
    rows, index = untrained(runs), ["Models", "Attack", "place"]
    rows = rows[rows.attacked.isin(list(ATTACKS))]
    place = "here: " + rows.place.str.removeprefix("here, ")
    rows = rows.assign(Models=rows.model, Attack=rows.attacked.map(ATTACKS), place=place)
    read = rows[(rows.what == "perplexity") & rows.text.isin(list(TEXTS))]
    read = c.pivot(read.assign(column=read.text.map(TEXTS)), index)
    means = read.reindex(columns=list(TEXTS.values())).map(lambda x: getattr(x, "mean", x))
    answers = c.pivot(c.accuracies(rows, TASKS, "Avg. (accuracy)"), index, ["text"])
    means = means.astype(float).mean(axis=1, skipna=False).rename("Avg. (perplexity)")
    return pandas.concat([read, means, answers], axis=1)


def table_7(runs: Frame) -> Frame:
    rows = analyses(runs).drop_duplicates(["model", "five"]).assign(place="here")
    rows = rows.rename(columns={"model": "Models", "found": "Layer", "five": "Indices"})
    return rows.set_index(["Models", "place"])[["Layer", "Indices"]]


def answers(runs: Frame, attack: str, names: tuple[str, ...]) -> Frame:
    """Accuracies of models with adapters under one attack."""
    rows = adapted(runs)
    rows = c.accuracies(rows[rows.attacked == attack], TASKS, "Avg.")
    rows["column"] = rows["column"].replace(dict(zip(TASKS, names, strict=True)))
    rows = rows.assign(Model=rows.model, Method=rows.method)
    return c.pivot(rows, ["Model", "Method", "place"], ["text"])


table_4 = partial(answers, attack="zero 3", names=tuple(TASKS))
table_8 = partial(answers, attack="-", names=LONG)


def table_5(runs: Frame) -> Frame:
    rows = adapted(runs)
    rows = rows[(rows.attacked == "-") & (rows["trained.adapter"] == "lora")]
    rows = c.accuracies(rows[rows[SCOPE] == "massive"], TASKS, MEAN)
    exp = "exp, a = " + c.label(rows, "{:.2f}".format, A)
    names = rows[CURRICULUM].where(rows[CURRICULUM] != "exp", exp)
    columns = c.label(rows, "{:.1f}".format, P0)
    rows = rows[rows.column == MEAN].assign(column=columns, Curriculum=names)
    return c.pivot(rows.assign(place="here: " + rows.model), ["Curriculum", "place"], ["text"])


# ---- ours


def with_answers(rows: Frame) -> Frame:
    """The rows, and accuracies with the name of their column as "what"."""
    asked = c.accuracies(rows, TASKS, MEAN)
    return pandas.concat([rows, asked.assign(what=asked.column, task=None)], ignore_index=True)


def alone(rows: Frame, what: str, index: list[str], how: Any = None) -> Any:
    """Adapters trained with MacDrop against those without it."""
    rows = rows[rows.what == what]
    base, on = rows[rows[P0].isna()], ["model", "text", "trained.adapter", "attacked", "place"]
    return c.against(rows, base, index, on, (DROP, "method", "limit"), how)


def unattacked(rows: Frame, what: str, index: list[str], how: Any = None, only: str = "") -> Any:
    """Models under every attack, or one, against the same models as they are."""
    rows = rows[rows.what == what]
    ours = rows[rows.attacked == only] if only else rows
    on = [x for x in ("model", "text", "method", "window") if x in rows]
    free = ("attack", "k", "attacked", "config.layer", "limit", "place")
    return c.against(ours, rows[rows.attacked == "-"], index, on, free, how)


def macdrop(runs: Frame) -> Frame:
    rows = with_answers(adapted(runs))
    columns = {"NLL": "nll", "Δ vs adapter alone": alone(rows, "nll", LABELS)}
    columns |= {"Δ vs unattacked": unattacked(rows, "nll", LABELS), "accuracy": MEAN}
    columns |= {"Δ accuracy vs adapter alone": alone(rows, MEAN, LABELS)}
    return c.table(rows, LABELS, columns)


def macdrop_questions(runs: Frame) -> Frame:
    rows = with_answers(adapted(runs))
    return c.table(rows, LABELS, {x: alone(rows, x, LABELS, c.paired_units) for x in TASKS})


def attacks(runs: Frame) -> Frame:
    rows, index = with_answers(untrained(runs)), ["model", "text", "attack", "k", "place"]
    columns = {"perplexity": "perplexity"}
    columns["Δ NLL vs unattacked"] = unattacked(rows, "nll", index, c.paired_units)
    for name in TASKS:
        columns[f"Δ {name} vs unattacked"] = unattacked(rows, name, index, c.paired_units)
    return c.table(rows, index, columns)


# ---- figures


def at(rows: Frame, value: str, panel: Any, line: Any, x: str) -> Frame:
    """Points of means over seeds."""
    made = c.points(rows.drop(columns="attacked", errors="ignore"), value, panel, line, x)
    by = ["panel", "value", "line", "x"]
    return made.groupby(by, sort=False)["y"].mean().reset_index().assign(seed=None)


def figure_3(runs: Frame) -> Frame:
    states = {"h_out": "hidden state", "intermediate": "intermediate state"}
    rows = analyses(runs)
    ranked = rows[rows.what.isin(list(states))]
    place = ranked.groupby(["run", "what", "layer"]).cumcount()
    ranked = ranked.assign(line=place.map({0: "1st", 1: "2nd", 2: "3rd"}))
    middle = rows[rows.what.isin([f"{x}/median" for x in states])].assign(line="median")
    rows = pandas.concat([ranked, middle], ignore_index=True)
    value = rows.what.str.removesuffix("/median").map(states)
    return c.points(rows, value, rows.model, rows.line, "layer")


def figure_4(runs: Frame) -> Frame:
    rows = with_answers(untrained(runs))
    rows = rows[rows.what == MEAN]
    return at(rows, MEAN, rows.model, rows.attack + rows.place.str[4:], "k")


def perplexity_by_k(runs: Frame) -> Frame:
    rows = untrained(runs)
    rows = rows[rows.what == "perplexity"]
    line = rows.attack + ", " + rows.text + rows.place.str[4:]
    return at(rows, "perplexity", rows.model, line, "k")


def figure_6(runs: Frame) -> Frame:
    rows = with_answers(adapted(runs))
    rows, parts = rows[rows[CURRICULUM] == "constant"], []
    for what in (MEAN, "perplexity"):
        its = rows[rows.what == what].drop(columns="method")
        line = its["trained.adapter"] + ", " + its[SCOPE] + ", "
        line += its.attack + " " + its.k.astype(str) + ", " + its.text
        parts.append(at(its, what, its.model, line, P0))
    return pandas.concat(parts)


def figure_7(curves: Frame) -> Frame:
    """Trainings with MacDrop: the share that is dropped, step by step."""
    rows = tunings(curves)
    rows = rows[(rows.what == "train/macdrop") & (rows["macdrop.scope"] == "massive")]
    exp = "exp, a = " + c.label(rows, "{:.2f}".format, "macdrop.a")
    line = rows["macdrop.curriculum"].where(rows["macdrop.curriculum"] != "exp", exp)
    panel = "p0 " + c.label(rows, "{:.1f}".format, "macdrop.p0")
    line = rows.model + ", " + rows.adapter + ", " + line
    return c.points(rows.assign(seed=None), "p", panel, line)


# ---- claims


def as_printed(runs: Frame) -> Frame:
    rows = analyses(runs).drop_duplicates(["model", "five"])
    table = {name: f"{layer}; {five}" for name, layer, five in TABLE_7}
    rows = rows[rows.model.isin(list(table))]
    rows = rows.assign(text=c.label(rows, "{}; {}".format, "found", "five"))
    told = (rows.text == rows.model.map(table)).map({True: HOLDS, False: FAILS})
    return rows.assign(part=rows.model, value=rows.text, verdict=told, run_on=rows.model)


def zeroing_and_retaining(runs: Frame) -> Frame:
    rows = untrained(runs)
    rows = rows[(rows.what == "nll") & rows["config.layer"].isna()]
    rows = rows.assign(part=rows.text, run_on=rows.model + ", " + rows.text)
    five, retain = (rows[rows.attacked == x] for x in ("zero 5", "retain 5"))
    on = ["model", "text", "window"]
    return c.judged(c.against(five, retain, CLAIM, on, ("attack", "attacked", "limit")))


def zeroing_three(runs: Frame) -> Frame:
    rows = untrained(runs)
    rows = rows.assign(part=rows.text, run_on=rows.model + ", " + rows.text)
    return c.judged(unattacked(rows, "nll", CLAIM, only="zero 3"))


def of_adapters(runs: Frame, what: str, attack: str, drop: tuple, sign: int) -> Frame:
    """A training with this MacDrop (scope, curriculum, p0) against the adapter alone."""
    rows = with_answers(adapted(runs))
    mine = (rows[[SCOPE, CURRICULUM, P0]] == list(drop)).all(axis="columns")
    rows = rows[(rows.attacked == attack) & (rows[P0].isna() | mine)]
    place = c.label(rows, "{}, {}, {}".format, "model", "trained.adapter", "text")
    found = alone(rows.assign(part=rows.method, run_on=place), what, CLAIM)
    return c.judged(found, sign)


ITS_STEP, ALWAYS = ("massive", "step", 0.8), ("massive", "constant", 1.0)
macdrop_under_attack = partial(of_adapters, what="nll", attack="zero 3", drop=ITS_STEP, sign=-1)
macdrop_on_tasks = partial(of_adapters, what=MEAN, attack="-", drop=ITS_STEP, sign=1)
# The positive control. It need not withstand the attack: LoRA on gate and up keeps those neurons
# active in training.
always_dropped = partial(of_adapters, what="nll", attack="zero 3", drop=ALWAYS, sign=-1)

CURVES = ("train/macdrop",)
