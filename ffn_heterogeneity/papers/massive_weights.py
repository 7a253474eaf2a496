"""Massive weights (House of Cards): its tables and figures, with what was measured here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.jreg import two_names
from ffn_heterogeneity.papers.nucl import EVALUATION, read_text, windows
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame
from ffn_heterogeneity.report.stats import TOLD, middle

PRINTED = printed("massive_weights")
TASKS, TABLE_7 = PRINTED["tasks"], PRINTED["tables"]["table_7"]["rows"]
TEXTS, ATTACKS = PRINTED["names"]["texts"], PRINTED["names"]["attacks"]
MEAN = "mean accuracy (%)"
DROP = "trained.macdrop."
SCOPE, CURRICULUM, A, P0 = (DROP + key for key in ("scope", "curriculum", "a", "p0"))
# Settings of a curriculum that the others do not read.
READ_BY = {"macdrop.a": ["exp"], "macdrop.epochs": ["epoch_before", "epoch_after"]}
LABELS = ["model", "text", "method", "attacked", "place"]
LABELS_1 = ["Models", "Attack", "place"]
# MacDrop's scope, curriculum and p0: the paper's, and a control.
ITS_STEP, ALWAYS = ("massive", "step", 0.8), ("massive", "constant", 1.0)


# ---- runs


def evaluations(runs: Frame) -> Frame:
    """Models attacked ("zero 5"), or evaluated as they are ("-", which zeroes 0 neurons; "retain
    0" zeroes all of them); "what" may be a task's name, or the mean of the tasks."""
    names = ("attack", "k", "config.layer", "expert", "token", "prepare", *EVALUATION)
    rows = c.evaluated(c.need(runs, *names), "attack")
    attacked = rows.attack + " " + rows.k.astype(str)
    attacked = attacked.where(attacked != "zero 0", "-")
    layers = c.label(rows, ", layer {:g}".format, "config.layer").fillna("")
    layers += c.label(rows, ", expert {:g}".format, "expert").fillna("")
    place = "here" + layers + windows(rows)
    rows = rows.assign(attacked=attacked, text=read_text(rows), place=place)
    rows = rows.sort_values(["model", "text", "k"], kind="stable")
    return c.with_answers(rows, TASKS, MEAN)


def tunings(runs: Frame) -> Frame:
    """Trainings of adapters; MacDrop's settings only if it drops and its curriculum uses them."""
    own = [f"macdrop.{key}" for key in ("p0", "scope", "curriculum", "a", "epochs")]
    rows = c.need(runs, "prepare", "train_only", *own)
    rows = rows[rows.prepare.astype(bool) & rows.prepare.notna()]
    drops = rows.prepare.map(lambda names: "macdrop" in names).astype(bool)
    drops &= rows["macdrop.p0"].fillna(0).astype(bool)
    for name in [name for name in rows if name.startswith("macdrop.")]:
        readers = READ_BY.get(name, list(rows["macdrop.curriculum"]))
        rows[name] = rows[name].where(drops & rows["macdrop.curriculum"].isin(readers), None)
    names = rows.prepare.map(lambda names: " + ".join(x for x in names if x != "macdrop"))
    leaves = rows.train_only.astype(str).str.contains("lora_")  # the adapter's, as by default
    return rows.assign(adapter=names, prepare=names, train_only=rows.train_only.mask(leaves))


def untrained(evaluations: Frame, tunings: Frame) -> Frame:
    """Evaluations of models as they are, not of trained ones."""
    return evaluations[~evaluations.origin.isin(tunings["run"])]


def adapted(evaluations: Frame, tunings: Frame) -> Frame:
    """Evaluations of models with trained adapters; "trained.<key>" are settings of the training."""
    tuned = tunings.drop_duplicates("run").set_index("run")
    rows = evaluations[evaluations.origin.isin(tuned.index)]
    away = [*c.OWN, *c.NO_EFFECT, "model"]
    own = tuned[[name for name in tuned if not c.among(name, away)]].add_prefix("trained.")
    theirs = {name: rows.origin.map(tuned[name]).astype(object) for name in ("model", "seed")}
    rows = rows.assign(**theirs).join(own, on="origin").copy()
    rows["method"] = c.label(rows, method_of, "trained.adapter", SCOPE, CURRICULUM, A, P0)
    by = ["model", "text", "trained.adapter"]
    rows = rows.sort_values([CURRICULUM, P0], na_position="first")
    return rows.sort_values(by, ascending=[True, True, False], kind="stable")


def method_of(adapter: str, scope: Any, curriculum: Any, a: Any, p0: Any) -> str:
    """The paper's name of a training if it has one, else its settings."""
    name = {"lora": "LoRA", "dora": "DoRA"}.get(adapter, adapter)
    if pandas.isna(p0):
        return name
    if (scope, curriculum, p0) == ITS_STEP:
        return f"{name} + MacDrop"
    at = f"exp, a {a}" if curriculum == "exp" else curriculum
    return f"{adapter}, {scope}, {at}, p0 {p0:.1f}"


def analyses(runs: Frame) -> Frame:
    """Massive activations of models; "five" are the neurons of the massive layer ("found") and of
    its massive "expert" (from 1)."""
    rows = c.need(runs, "analysis", "config.layer", "token").query("analysis == 'massive'")
    for run in set(rows["run"]) - set(rows[rows.what == "h_out"]["run"]):
        raise ValueError(f"{run}/results.json is no analysis of activations: is it damaged?")
    ranks = rows[(rows.what == "massive_rank") & (rows["value"] <= 5)].sort_values("value")
    five = ranks.groupby("run").neuron.agg(lambda its: ", ".join(map(str, its)))
    at = {x: rows[rows.what == x].set_index("run")["value"] for x in ("layer", "expert")}
    rows = rows.assign(five=rows["run"].map(five), expert=rows["run"].map(at["expert"]))
    rows = rows.assign(found=rows["run"].map(at["layer"].map("{:g}".format)))
    return rows.assign(model=two_names(rows)).sort_values("model", kind="stable")


def experts(rows: Frame, text: str) -> Any:
    """`text` with the massive expert counted from 1 as {0} and from 0 as {1}; "" without experts.

    The paper does not say how it counts.
    """
    return c.label(rows, lambda n: text.format(int(n), int(n) - 1), "expert").fillna("")


# ---- the paper's tables


def answers(rows: Frame, mean: str) -> Frame:
    """Accuracies and their mean, whichever text the run read besides."""
    rows = rows[rows["column"].notna()].drop(columns="text")
    return rows.assign(column=rows["column"].replace(MEAN, mean))


def table_1(untrained: Frame) -> Frame:
    rows = untrained.query("attacked in @ATTACKS")
    rows = rows.assign(Attack=rows.attacked.map(ATTACKS), Models=rows.model)
    rows["place"] = "here: " + rows.place.str.removeprefix("here, ")
    read = rows.query("what == 'perplexity' and text in @TEXTS")
    read = c.pivot(read, read[LABELS_1], read.text.map(TEXTS))
    rows = answers(rows, "Avg. (accuracy)")
    means = read.reindex(columns=list(TEXTS.values())).map(middle).astype(float)
    means = means.mean(axis=1, skipna=False).rename("Avg. (perplexity)")
    return pandas.concat([read, means, c.pivot(rows, rows[LABELS_1])], axis=1)


def table_7(analyses: Frame) -> Frame:
    rows = analyses.drop_duplicates(["model", "five"]).assign(place="here")
    layer = rows.found + experts(rows, " (expert {0} from 1, {1} from 0)")
    rows = rows.assign(Layer=layer).rename(columns={"model": "Models", "five": "Indices"})
    return rows.set_index(["Models", "place"])[["Layer", "Indices"]]


def table_4(adapted: Frame, attack: str = "zero 3", names: dict[str, str] | None = None) -> Frame:
    """Accuracies of models with adapters under one attack."""
    rows = answers(adapted.query("attacked == @attack"), "Avg.")
    labels = {"Model": rows.model, "Method": rows.method, "place": rows.place}
    return c.pivot(rows, labels, rows["column"].replace(names or {}))


table_8 = partial(table_4, attack="-", names=PRINTED["names"]["table_8"])


def schedule(rows: Frame, prefix: str = DROP) -> Any:
    """Name of a curriculum, with a of "exp"."""
    exp = "exp, a = " + c.label(rows, "{:.2f}".format, prefix + "a")
    return rows[prefix + "curriculum"].where(rows[prefix + "curriculum"] != "exp", exp)


def table_5(adapted: Frame) -> Frame:
    rows = adapted.query("attacked == '-' and `trained.adapter` == 'lora' and what == @MEAN")
    rows = answers(rows[rows[SCOPE] == "massive"], MEAN)
    labels = {"Curriculum": schedule(rows), "place": "here: " + rows.model}
    return c.pivot(rows, labels, c.label(rows, "{:.1f}".format, P0))


# ---- ours


def alone(rows: Frame, what: str, index: list[str], how: Any = None) -> Any:
    """Paired differences of adapters trained with MacDrop from those without it."""
    rows = rows[rows.what == what]
    base, on = rows[rows[P0].isna()], ["model", "text", "trained.adapter", "attacked", "place"]
    # Losses are of all windows, whatever the tasks' limit.
    free = (DROP, "method", *(("limit",) if what == "nll" else ()))
    return c.against(rows, base, index, on, free, how)


def unattacked(rows: Frame, what: str, index: list[str], how: Any = None) -> Any:
    """Paired differences of attacked models from the unattacked ones."""
    rows = rows[rows.what == what]
    on = [x for x in ("model", "text", "method", "window") if x in rows]
    free = ("attack", "k", "attacked", "config.layer", "expert", "limit", "place")
    return c.against(rows, rows[rows.attacked == "-"], index, on, free, how)


def macdrop(adapted: Frame) -> Frame:
    columns = {"NLL": "nll", "Δ vs adapter alone": alone(adapted, "nll", LABELS)}
    columns |= {"Δ vs unattacked": unattacked(adapted, "nll", LABELS), "accuracy": MEAN}
    columns |= {"Δ accuracy vs adapter alone": alone(adapted, MEAN, LABELS)}
    return c.table(adapted, LABELS, columns)


def macdrop_questions(adapted: Frame) -> Frame:
    columns = {task: alone(adapted, task, LABELS, c.paired_units) for task in TASKS}
    return c.table(adapted, LABELS, columns)


def attacks(untrained: Frame) -> Frame:
    index, columns = ["model", "text", "attack", "k", "place"], {"perplexity": "perplexity"}
    for name, what in {"NLL": "nll", **{x: x for x in TASKS}}.items():
        apart = unattacked(untrained, what, index, c.paired_units)
        columns[f"Δ {name} vs unattacked"] = apart
    return c.table(untrained, index, columns)


# ---- figures


def at(rows: Frame, value: Any, panel: Any, line: Any, x: str) -> Frame:
    """Points of means over seeds."""
    made = c.points(rows, value, panel, line, x, ("attacked", "method", "place"))
    by = ["panel", "value", "line", "x"]
    return made.groupby(by, sort=False)["y"].mean().reset_index().assign(seed=None)


def figure_3(analyses: Frame) -> Frame:
    """States of each layer: the three largest, by their rank, and the median."""
    rows, states = analyses, {"h_out": "hidden state", "intermediate": "intermediate state"}
    value = rows.what.str.removesuffix("/median").map(states)
    rank = rows.groupby(["run", "what", "layer"]).cumcount().map({0: "1st", 1: "2nd", 2: "3rd"})
    line = rank.where(~rows.what.str.endswith("/median"), "median")
    return c.points(rows[value.notna()], value, rows.model, line, "layer")


def figure_4(untrained: Frame) -> Frame:
    rows = untrained.query("what == @MEAN")
    return at(rows, MEAN, rows.model, rows.attack + rows.place.str[4:], "k")


def perplexity_by_k(untrained: Frame) -> Frame:
    rows = untrained.query("what == 'perplexity'")
    line = rows.attack + ", " + rows.text + rows.place.str[4:]
    return at(rows, "perplexity", rows.model, line, "k")


def figure_6(adapted: Frame) -> Frame:
    rows = adapted.query("what in [@MEAN, 'perplexity']").sort_values("what", kind="stable")
    rows = rows[rows[CURRICULUM] == "constant"]
    line = rows["trained.adapter"] + ", " + rows[SCOPE] + ", " + rows.attack + " "
    return at(rows, rows.what, rows.model, line + rows.k.astype(str) + ", " + rows.text, P0)


def figure_7(curves: Frame) -> Frame:
    """Trainings with MacDrop: the share that is dropped, step by step."""
    rows = tunings(curves).query("what == 'train/macdrop' and `macdrop.scope` == 'massive'")
    panel = "p0 " + c.label(rows, "{:.1f}".format, "macdrop.p0")
    line = rows.model + ", " + rows.adapter + ", " + schedule(rows, "macdrop.")
    return c.points(rows.assign(seed=None), "p", panel, line)


# ---- claims


def as_printed(analyses: Frame) -> Frame:
    """Verdicts on the printed places; experts may be counted from 1 or from 0."""
    table = {name: f"{layer}; {five}" for name, layer, five in TABLE_7}
    rows = analyses.drop_duplicates(["model", "five"]).query("model in @table")
    wanted = rows.model.map(table)
    from_1, from_0 = (
        rows.found + experts(rows, f" (expert {{{i}}})") + "; " + rows.five for i in (0, 1)
    )
    text = (from_1 + experts(rows, ", experts from 1")).where(
        from_0 != wanted, from_0 + experts(rows, ", experts from 0")
    )
    told = ((from_1 == wanted) | (from_0 == wanted)).map(TOLD)
    return rows.assign(part=rows.model, value=text, verdict=told, run_on=rows.model)


def of_attacks(untrained: Frame, attack: str, base: str) -> Frame:
    """The loss under one attack against that under another, or under none ("-")."""
    rows = untrained.query("what == 'nll' and `config.layer`.isna()")
    rows = rows.assign(part=rows.text, run_on=rows.model + ", " + rows.text)
    on, free = ["model", "text", "window"], ("attack", "k", "attacked", "limit")
    return c.claim(rows, rows.attacked == attack, rows.attacked == base, on, free)


zeroing_and_retaining = partial(of_attacks, attack="zero 5", base="retain 5")
zeroing_three = partial(of_attacks, attack="zero 3", base="-")


def of_adapters(adapted: Frame, what: str, attack: str, drop: tuple, sign: int) -> Frame:
    """A training with this MacDrop (scope, curriculum, p0) against the adapter alone."""
    mine = (adapted[[SCOPE, CURRICULUM, P0]] == list(drop)).all(axis="columns")
    rows = adapted[(adapted.attacked == attack) & (adapted[P0].isna() | mine)]
    place = c.label(rows, "{}, {}, {}".format, "model", "trained.adapter", "text")
    return c.judged(alone(rows.assign(part=rows.method, run_on=place), what, c.CLAIM), sign)


macdrop_under_attack = partial(of_adapters, what="nll", attack="zero 3", drop=ITS_STEP, sign=-1)
macdrop_on_tasks = partial(of_adapters, what=MEAN, attack="-", drop=ITS_STEP, sign=1)
# The positive control. It need not withstand the attack: LoRA on gate and up keeps those neurons
# active in training.
always_dropped = partial(of_adapters, what="nll", attack="zero 3", drop=ALWAYS, sign=-1)

CURVES = ("train/macdrop",)
