"""Massive weights (House of Cards): its tables and figures, beside what was measured here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas

from ffn_heterogeneity.papers import nucl, printed
from ffn_heterogeneity.papers.jreg import two_names
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.stats import FAILS, HOLDS
from ffn_heterogeneity.report.tidy import Frame, Match
from ffn_heterogeneity.report.versus import versus

CORPORA = {"WikiText": "wikitext", "C4": "c4", "PG-19": "pg19"}  # known by the path of a text
PRINTED = printed("massive_weights")
ATTACK = ("attack", "k", "config.layer", "token")
ATTACKED = ("model", *ATTACK, *nucl.EVALUATION)
SCOPE, CURRICULUM, A, P0 = (f"trained.macdrop.{key}" for key in ("scope", "curriculum", "a", "p0"))
ADAPTED = (*ATTACKED, "trained.")
TASKS = PRINTED["tasks"]
MEAN, LONG = "mean accuracy (%)", ("ARC-Easy", "ARC-Challenge", "BoolQ", "PIQA", "WinoGrande")

WHOLE = {"attack": "zero", "k": 0}
ALONE, ITS_STEP = {P0: tidy.IDLE}, {SCOPE: "massive", CURRICULUM: "step", P0: 0.8}
# Of a training what its evaluations carry, as "trained.<key>".
CARRIED = re.compile(
    r"adapter|steps|batch_size|seq_len|dropout|freeze|export\.weights|train_only|"
    r"(data|optimizer|losses|lora|dora|nf4|macdrop)\..*"
)
# Settings of a curriculum that the others do not read.
READ_BY = {"macdrop.a": ["exp"], "macdrop.epochs": ["epoch_before", "epoch_after"]}
SETTINGS = nucl.SETTINGS | dict.fromkeys((*ATTACK, "analysis", "prepare", "train_only"))
SETTINGS |= dict.fromkeys(f"macdrop.{key}" for key in ("p0", "scope", "curriculum", "a"))


# ---- runs


def corpus(place: Any) -> str:
    name = "" if tidy.is_missing(place) else str(place)
    return next((x for x in CORPORA.values() if x in name.lower()), os.path.basename(name))


def evaluations(rows: Frame) -> Frame:
    """Models attacked, or evaluated as they are; of trained ones see `adapted`."""
    measured = rows[rows.what == "perplexity"]["run"]
    rows = rows[rows.attack.notna() & rows["run"].isin(measured)]
    place = rows.text.where(rows.text.astype(bool), rows.token_ids)
    return rows.assign(corpus=place.map(corpus))


def untrained(rows: Frame) -> Frame:
    own = evaluations(rows)
    own = own[~own.origin.isin(tunings(rows)["run"])]
    own = tidy.records(own, ATTACKED, ("model", *ATTACK, "text"))
    return tidy.scored(own, TASKS, MEAN)


def tunings(rows: Frame) -> Frame:
    """Trainings of adapters."""
    return rows[rows.prepare.astype(bool) & rows.prepare.notna()]


def adapter_of(prepared: Sequence[str]) -> str:
    """The surgeries before a training but MacDrop: "lora", "nf4 + dora"."""
    return " + ".join(name for name in prepared if name != "macdrop")


def adapted(rows: Frame) -> Frame:
    """Models with trained adapters, attacked or as they are, with "trained.<key>" of how.

    "trained.adapter" is "lora" or "nf4 + dora"; "macdrop.<key>" are idle where nothing was dropped.
    """
    tuned = tunings(rows).drop_duplicates("run").set_index("run").copy()
    tuned["adapter"] = tuned.prepare.map(adapter_of)
    prepared = tuned.prepare.map(lambda names: "macdrop" in names).astype(bool)
    drops = prepared & tuned["macdrop.p0"].fillna(0).astype(bool)
    for name in tuned.filter(regex=r"^macdrop\."):
        readers = READ_BY.get(name, list(tuned["macdrop.curriculum"]))
        tuned[name] = tuned[name].where(
            drops & tuned["macdrop.curriculum"].isin(readers), tidy.IDLE
        )
    # The adapter's leaves, unless somebody says otherwise.
    leaves = tuned.train_only.astype(str).str.contains("lora_")
    tuned["train_only"] = tuned.train_only.mask(leaves)
    own = evaluations(rows)
    own = own[own.origin.isin(tuned.index)]
    carried = tuned[[name for name in tuned.columns if CARRIED.fullmatch(name)]].fillna(tidy.IDLE)
    own = own.assign(model=own.origin.map(tuned.model), seed=own.origin.map(tuned.seed))
    own = own.join(carried.add_prefix("trained."), on="origin")
    shown = ("model", "text", "trained.adapter", SCOPE, CURRICULUM, A, P0, *ATTACK)
    own = tidy.records(own, ADAPTED, shown, {"trained.adapter": tidy.ANY})
    return tidy.scored(own, TASKS, MEAN)


def analyses(rows: Frame) -> Frame:
    """Massive activations of models, and in "five" the neurons of the massive layer."""
    rows = rows[rows.analysis == "massive"]
    for run in set(rows["run"]) - set(rows[rows.what == "h_out"]["run"]):
        raise ValueError(f"{run}/results.json is no analysis of activations: is it damaged?")
    ranks = rows[(rows.what == "massive_rank") & (rows["value"] <= 5)].sort_values("value")
    five = ranks.groupby("run").neuron.agg(lambda all: ", ".join(map(str, all)))
    found = rows[rows.what == "layer"].set_index("run")["value"]
    rows = rows.assign(model=two_names(rows))
    rows["five"], rows["found"] = (rows["run"].map(x).astype(object) for x in (five, found))
    return tidy.records(rows, ("model", "config.layer", "token", "five"), ("model", "five"))


def dropping(rows: Frame) -> Frame:
    """Trainings with MacDrop: the share that is dropped, step by step."""
    rows = tunings(rows)
    rows = rows[rows["macdrop.p0"].fillna(0).astype(bool)]
    shown = ("model", *(f"macdrop.{key}" for key in ("scope", "curriculum", "a", "p0")))
    return tidy.records(rows, ("model", "steps", "macdrop."), shown)


# ---- the paper's tables


def table_1(runs: Runs) -> Frame:
    rows = tidy.matching(runs["attack"], {"k": [0, 5]})
    rows = tidy.labelled(rows, PRINTED["tables"]["table_1"])
    texts = {
        name: rows[(rows.corpus == x) & (rows.what == "perplexity")] for name, x in CORPORA.items()
    }
    asked = {**{name: name for name in TASKS}, "Avg. (accuracy)": MEAN}
    made = tidy.cells(rows, {**texts, **asked})
    by = ["Models", "Attack", "from"]
    measured = made[made["column"].isin(list(CORPORA))]
    means = measured.groupby(by, observed=True, as_index=False).agg(
        value=("value", "mean"), texts=("column", "nunique")
    )
    whole = means[means.texts == len(CORPORA)].assign(column="Avg. (perplexity)")
    return pandas.concat([made, whole], ignore_index=True)


def table_7(runs: Runs) -> Frame:
    first = runs["analysis"].drop_duplicates("record")
    layer = first.found.map(lambda x: str(int(x))).astype(object)
    columns = {"Layer": first.assign(value=layer), "Indices": first.assign(value=first.five)}
    return tidy.cells(first, columns)


def accuracies(runs: Runs, names: Iterable[str], attack: Match) -> Frame:
    columns = dict(zip((*names, "Avg."), (*TASKS, MEAN), strict=True))
    return tidy.cells(tidy.matching(runs["adapted"], attack), columns)


table_4 = partial(accuracies, names=TASKS, attack={"attack": "zero", "k": 3})
table_8 = partial(accuracies, names=LONG, attack=WHOLE)


def table_5(runs: Runs) -> Frame:
    rows = tidy.matching(runs["adapted"], {**WHOLE, "trained.adapter": "lora", SCOPE: "massive"})
    rows = rows[rows.what == MEAN]
    return tidy.cells(rows, {f"{p0}": tidy.matching(rows, {P0: p0}) for p0 in (0.2, 0.5, 0.8, 1.0)})


# ---- ours


# Less the adapter that was trained without MacDrop; less the model without an attack.
alone = partial(versus, these={}, base=ALONE, same=ADAPTED, free=("trained.macdrop.",))
unattacked = partial(versus, these={}, base=WHOLE, free=("attack", "k"))


def macdrop(runs: Runs) -> Frame:
    rows = runs["adapted"]
    columns = {
        "NLL": "nll",
        "less adapter alone": alone(rows, "nll"),
        "less unattacked": unattacked(rows, "nll", same=ADAPTED),
        "accuracy": MEAN,
        "accuracy less adapter alone": alone(rows, MEAN),
    }
    return tidy.cells(rows, columns)


def macdrop_questions(runs: Runs) -> Frame:
    rows = runs["adapted"]
    return tidy.cells(rows, {name: alone(rows, name, how="units") for name in TASKS})


def attacks(runs: Runs) -> Frame:
    rows = runs["attack"]
    against = partial(unattacked, same=ATTACKED, how="units")
    columns = {"perplexity": "perplexity"}
    columns["NLL less unattacked"] = against(rows, "nll")
    for name in TASKS:
        columns[f"{name} less unattacked"] = against(rows, name)
    return tidy.cells(rows, columns)


# ---- figures


def at(rows: Frame, values: Mapping[str, Any], x: str) -> Frame:
    """Each record's mean at its setting `x`."""
    rows = tidy.cells(rows, values)
    mean = rows.groupby(["record", "column"], observed=True)["value"].transform("mean")
    rows = rows.assign(value=mean, seed=None).drop_duplicates(["record", "column"])
    return rows[rows[x] != tidy.IDLE]


def figure_3(runs: Runs) -> Frame:
    states = {"hidden state": "h_out", "intermediate state": "intermediate"}
    rows = runs["analysis"]
    ranked = rows[rows.what.isin(states.values())]
    place = ranked.groupby(["run", "what", "layer"]).cumcount()
    parts = [ranked.assign(line=place.map({0: "1st", 1: "2nd", 2: "3rd"}))]
    middle = rows[rows.what.isin([f"{x}/median" for x in states.values()])]
    parts.append(middle.assign(line="median", what=middle.what.str.removesuffix("/median")))
    rows = pandas.concat(parts, ignore_index=True)
    return tidy.cells(rows, {name: rows[rows.what == what] for name, what in states.items()})


def figure_4(runs: Runs) -> Frame:
    return at(runs["attack"], {MEAN: MEAN}, "k")


def figure_6(runs: Runs) -> Frame:
    rows = tidy.matching(runs["adapted"], {CURRICULUM: "constant"})
    return at(rows, {MEAN: MEAN, "perplexity": "perplexity"}, P0)


def figure_7(runs: Runs) -> Frame:
    rows = tidy.matching(runs["tuning"], {"macdrop.scope": "massive"})
    return rows[rows.what == "train/macdrop"].assign(column="p")


def perplexity_by_k(runs: Runs) -> Frame:
    return at(runs["attack"], {"perplexity": "perplexity"}, "k")


# ---- claims


def as_printed(runs: Runs) -> Frame:
    rows = runs["analysis"].drop_duplicates("record")
    rows["text"] = [f"{x:.0f}; {five}" for x, five in zip(rows.found, rows.five, strict=True)]
    table = {name: f"{layer}; {five}" for name, layer, five in PRINTED["tables"]["table_7"]["rows"]}
    rows = rows[rows.model.isin(list(table))]
    told = (rows.text == rows.model.map(table)).map({True: HOLDS, False: FAILS})
    return rows.assign(verdict=told, value=rows.text, low=None)


def zeroing_and_retaining(runs: Runs) -> Frame:
    five, retain = ({"attack": x, "k": 5, "config.layer": None} for x in ("zero", "retain"))
    return versus(runs["attack"], "nll", five, retain, ATTACKED, ("attack",))


def zeroing_three(runs: Runs) -> Frame:
    return unattacked(runs["attack"], "nll", same=ATTACKED, these={"attack": "zero", "k": 3})


def macdrop_under_attack(runs: Runs) -> Frame:
    return alone(runs["adapted"], "nll", these={"attack": "zero", "k": 3, **ITS_STEP})


def macdrop_on_tasks(runs: Runs) -> Frame:
    return alone(runs["adapted"], MEAN, these={**WHOLE, **ITS_STEP})


def always_dropped(runs: Runs) -> Frame:
    """The positive control. It need not stand the attack: LoRA beside gate and up keeps those
    neurons alive in training."""
    always = {SCOPE: "massive", CURRICULUM: "constant", P0: 1.0}
    return alone(runs["adapted"], "nll", these={"attack": "zero", "k": 3, **always})


KINDS = {"attack": untrained, "analysis": analyses, "adapted": adapted}
CURVE_KINDS = {"tuning": dropping}
CURVES = ("train/macdrop",)
