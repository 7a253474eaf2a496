"""JREG (Shibata et al.): its tables and figures, with what was measured here."""

from __future__ import annotations

import os
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.nucl import EVALUATION, windows
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN, interval, verdict

JREG = "losses.jreg."
WEIGHT, ALPHA = JREG + "weight", JREG + "alpha"
NLL, PSI, ENTROPY = "validation/nll", "validation/jreg/psi", "validation/entropy/ent/ffn_out/mean"
RATES = {rate: f"validation/jreg/{rate}" for rate in ("zeta_L", "zeta_L-1", "zeta_L-2")}
ZETA, METRICS = RATES["zeta_L"], {**RATES, "validation NLL": NLL}
DEPTH, MEAN = "angular displacement", "avg"
READINGS = {"before_final_norm/": "before", "after_final_norm/": "after"}
SHAPE = ["shape.layers", "shape.d_model", "shape.ffn_width"]
SIZES = {"12x768/2048": "170M", "16x2048/5376": "1B", "30x3072/8192": "3.4B"}  # the paper's
TABLE_1 = (7.16, 22.2)  # zeta_L of its models: the lowest, the highest
TASKS = printed("jreg")["tasks"]
SETUP = [JREG + key for key in ("weight", "final_norm", "positions", "term")]
RATE = "optimizer.learning_rate"
LABELS, ROW = ["size", "loss", "steps", "place"], ["Size", "Method", "alpha", "place"]
OURS = "JREG (ours)"


# ---- runs


def displacements(runs: Frame) -> Frame:
    """Analyses of models or series of checkpoints, separately for each reading of h_L."""
    rows = c.need(runs, "analysis", "positions", *SHAPE, *EVALUATION)
    trained = rows[rows["shape.layers"].notna()]["run"]
    rows = rows[rows.analysis == "displacement"]
    place, parts = rows.text.where(rows.text.astype(bool), rows.token_ids), []
    rows = rows.assign(model=two_names(rows), trained=rows.origin.isin(trained))
    rows = rows.assign(text=[os.path.basename(str(x)) for x in place], windows=windows(rows))
    for start, reading in READINGS.items():
        its = rows[rows.what.str.startswith(start) | (rows.what == "tokens")]
        name, h_l = its.what.str.replace(start, "validation/jreg/"), f"{reading} the final norm"
        steps = its[name == PSI].groupby("run")["step"].count()
        for path in set(rows["run"]) - set(steps.index):
            raise ValueError(f"{path}/results.json is no analysis of h_L: is it damaged?")
        series = its["run"].map(steps) > 0
        parts.append(its.assign(what=name, run=its["run"] + f" ({h_l})", h_L=h_l, series=series))
    rows = pandas.concat(parts, ignore_index=True)
    read = rows.h_L + rows.windows
    return rows.assign(curve=rows.model + ", h_L " + read, place="here: h_L " + read)


def two_names(rows: Frame) -> Any:
    """Names of models, made unique if a model has two analyses."""
    runs = rows.drop_duplicates("run")
    several = runs[runs.model.duplicated(keep=False)].model
    names = rows.model + " (" + rows["run"].map(os.path.basename) + ")"
    return rows.model.where(~rows.model.isin(several), names)


def trainings(runs: Frame) -> Frame:
    """Models trained from scratch, with and without JREG."""
    rows = c.need(runs, *SHAPE, WEIGHT, ALPHA, "steps", "batch_size", "seq_len", RATE)
    rows = rows[rows["shape.layers"].notna()].fillna({WEIGHT: 0.0})
    rows = c.without_idle_losses(rows, [*SETUP, "losses.nll."])
    ours, steps = rows[WEIGHT] > 0, c.label(rows, "{:,g}".format, "steps")
    loss = c.label(rows, "lambda {:g}, alpha {}".format, WEIGHT, ALPHA).where(ours, "baseline")
    rate = ", learning rate " + c.label(rows, "{:g}".format, RATE)
    setup = c.label(rows, "{:,g} steps of {:g} x {:g}".format, "steps", "batch_size", "seq_len")
    rows = rows.assign(size=c.label(rows, "{:g}x{:g}/{:g}".format, *SHAPE), setup=setup)
    rows = rows.assign(loss=loss, total=rows.steps, steps=steps, place="here" + rate)
    rows["curve"] = loss + ", " + steps + " steps" + rate
    rows["Method"] = ours.map({True: OURS, False: "Baseline"})
    rows["alpha"] = c.label(rows, "{:.1f}".format, ALPHA).where(ours, "-")
    return rows.sort_values(["total", WEIGHT, ALPHA], kind="stable")


def over_steps(runs: Frame, curves: Frame) -> Frame:
    """Measurements of series of checkpoints, and the curves of trainings."""
    read = displacements(runs)
    return pandas.concat([read[read.series], trainings(curves)], ignore_index=True)


# ---- tables


def as_printed(rows: Frame) -> Frame:
    """Rows with the labels of Tables 2 and 3."""
    place = "here: lambda " + c.label(rows, "{:g}".format, WEIGHT) + ", " + rows.setup
    place += rows.place.str.removeprefix("here")
    return rows.assign(Size=rows["size"].replace(SIZES), place=place)


def table_1(runs: Frame) -> Frame:
    rows = displacements(runs)
    return c.table(rows[~rows.series].assign(Model=rows.model), ["Model", "place"], RATES)


def table_2(runs: Frame) -> Frame:
    rows = c.accuracies(as_printed(trainings(runs)), TASKS, MEAN)
    return c.pivot(rows, rows[ROW])


def table_3(runs: Frame) -> Frame:
    return c.table(as_printed(trainings(runs)), ROW, RATES)


def table_7(runs: Frame, curves: Frame) -> Frame:
    rows = over_steps(runs, curves)
    finished = rows.series.notna() | rows["run"].isin(runs["run"])
    rows = rows[(rows.what == ZETA) & finished]
    total = rows.total.where(rows.total.notna(), rows.groupby("curve")["step"].transform("max"))
    fifth = (5 * rows["step"].astype(float) / total.astype(float)).round()
    rows = rows.assign(column=(20 * fifth).map("{:g}%".format))
    rows = rows[(rows["step"] == (fifth / 5 * total.astype(float)).round()) & (fifth > 0)]
    rows = rows.sort_values("step", kind="stable")
    labels = {"Model": rows.model.where(rows.series.notna(), "trained here")}
    labels |= {"Size": rows["size"].replace(SIZES).fillna("-"), "place": "here: " + rows.curve}
    return c.pivot(rows, labels)


def figure_5(runs: Frame) -> Frame:
    rows = as_printed(trainings(runs)).query("Method == 'Baseline'")
    return c.table(rows, ["Size", "steps", "place"], {"zeta_L": ZETA})


def pretraining(runs: Frame) -> Frame:
    rows = trainings(runs)
    tokens = rows.drop_duplicates(LABELS)
    tokens = tokens.assign(cell=tokens.total * tokens.batch_size * tokens.seq_len)
    columns = {"tokens": tokens, "parameters": "parameters", **METRICS, "entropy": ENTROPY}
    return c.table(rows, LABELS, columns | c.every_task(rows))


def against_baseline(rows: Frame, what: str, index: list[str]) -> Any:
    """Paired differences of trainings with JREG from the baseline with the same seed and setup."""
    rows = c.last(rows[rows.what == what])
    ours, base = (rows[rows.Method == x] for x in (OURS, "Baseline"))
    free = (WEIGHT, ALPHA, "loss", "alpha", "Method", "curve")
    return c.against(ours, base, index, ["size", "setup", "place"], free)


def paired(runs: Frame) -> Frame:
    rows = trainings(runs)
    columns = {name: against_baseline(rows, what, LABELS) for name, what in METRICS.items()}
    return c.table(rows, LABELS, columns)


def models(runs: Frame) -> Frame:
    rows, index = displacements(runs), ["model", "h_L", "place"]
    rows = rows.assign(place="here" + rows.windows)
    layers = rows[rows.what == PSI].groupby(index).layer.max().astype(float).astype(object)
    text = rows.drop_duplicates(index).assign(cell=rows.text)
    return c.table(rows, index, {**RATES, "layers": layers, "tokens": "tokens", "text": text})


# ---- figures


def figure_2(runs: Frame) -> Frame:
    rows = displacements(runs).query("what == @PSI and not series")
    return c.points(rows, DEPTH, rows.model, rows.h_L + rows.windows, "layer")


def psi(curves: Frame) -> Frame:
    """Displacements at the last step that all seeds have."""
    rows = trainings(curves)
    rows, by = rows[rows.what == PSI], ["size", "curve"]
    seeds = rows.groupby(by)["run"].transform("nunique")
    rows = rows[rows.groupby([*by, "step"])["run"].transform("nunique") == seeds]
    rows = rows[rows["step"] == rows.groupby(by)["step"].transform("max")]
    return c.points(rows, DEPTH, rows["size"], rows.curve, "layer")


def figure_4(runs: Frame, curves: Frame) -> Frame:
    """A line for each evaluated step, at most five of them."""
    rows = over_steps(runs, curves)
    rows = rows[rows.what == PSI].sort_values("step", kind="stable")
    by = rows.groupby("curve")["step"]
    pairs = zip(by.rank("dense") - 1, by.transform("nunique"), strict=True)
    some = [n > 1 and i in np.linspace(0, n - 1, min(5, n)).round() for i, n in pairs]
    rows = rows[np.array(some, bool)]
    return c.points(rows, DEPTH, rows.curve, c.label(rows, "step {:,d}".format, "step"), "layer")


def curves(runs: Frame, curves: Frame) -> Frame:
    panels = {f"{name} (%)" if name in RATES else name: what for name, what in METRICS.items()}
    rows = over_steps(runs, curves)
    made = pandas.concat([rows[rows.what == x].assign(shown=name) for name, x in panels.items()])
    return c.points(made, made.shown, made["size"].fillna("checkpoints"), made.curve)


# ---- claims


def claimed(runs: Frame, what: str, sign: int = 1) -> Frame:
    """Claim parts of JREG compared with the baseline: runs by size, one part per loss."""
    rows = c.with_answers(named(trainings(runs)), TASKS, MEAN)
    parts = rows[rows.Method == OURS].drop_duplicates(c.CLAIM).set_index(c.CLAIM).index
    return c.judged(against_baseline(rows, what, c.CLAIM).reindex(parts), sign)


def named(rows: Frame) -> Frame:
    """Rows with the labels of a claim on trainings."""
    place = rows["size"] + ", " + rows.steps + " steps" + rows.place.str.removeprefix("here")
    return rows.assign(part=rows.loss, run_on=place)


mean_accuracy = partial(claimed, what=MEAN)
below_baseline = partial(claimed, what=ZETA, sign=-1)
no_worse = partial(claimed, what=NLL, sign=-1)


def no_jump(runs: Frame) -> Frame:
    rows = named(trainings(runs))
    return within(rows[rows[ALPHA].astype(float) >= 0.5], 0.0, 0.005)


def published(runs: Frame) -> Frame:
    rows = displacements(runs)
    rows = rows.assign(part=rows.model, run_on=rows.h_L + rows.windows)
    return within(rows[~rows.series & ~rows.trained], *TABLE_1)


def within(rows: Frame, low: float, high: float) -> Frame:
    """Claim parts: the last zeta_L, and whether it is in the interval for every seed."""

    def told(its: Any) -> str:
        holds = HOLDS if its.between(low, high).all() else FAILS
        return holds if np.isfinite(its).all() else OPEN

    rows = c.last(rows[rows.what == ZETA])
    c.one_setting(rows, c.CLAIM)
    by = rows.groupby(c.CLAIM, sort=False)
    return by.agg(value=("cell", c.spread), verdict=("value", told)).reset_index()


def rising(runs: Frame, curves: Frame) -> Frame:
    """Claim parts: growth of zeta_L between fifths of the training, else between evaluations."""
    rows = over_steps(runs, curves)
    finished = rows["run"].isin(runs["run"]) & (rows.Method == "Baseline")
    rows, made = rows[(rows.what == ZETA) & (rows.series.notna() | finished)], []
    places = rows["size"] + ", " + rows.steps + " steps" + rows.place.str[4:]
    places = places.where(rows.series.isna(), rows.curve)
    for place, its in rows.groupby(places, sort=False):
        table = its.pivot_table(index="run", columns="step", values="value").dropna(axis=1)
        fifths = [round(x * max(table.columns, default=0) / 5) for x in range(1, 6)]
        steps = fifths if set(fifths) <= set(table.columns) else [x for x in table.columns if x]
        for before, step in pairwise(steps):
            apart = (table[step] - table[before]).tolist()
            told = verdict(interval(apart), 1) if any(apart) else FAILS
            made.append((place, f"step {step:,d}", interval(apart), told))
    return pandas.DataFrame(made, columns=[*c.CLAIM, "value", "verdict"])


CURVES = (PSI, ENTROPY, *METRICS.values())
