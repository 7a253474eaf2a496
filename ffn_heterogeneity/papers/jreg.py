"""JREG (Shibata et al.): its tables and figures, with what was measured here."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.nucl import EVALUATION, windows
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame
from ffn_heterogeneity.report.stats import FAILS, OPEN, TOLD, interval, verdict

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


def over_steps(displacements: Frame, curves: Frame) -> Frame:
    """Measurements of series of checkpoints, and the curves of trainings."""
    series = displacements[displacements.series]
    return pandas.concat([series, trainings(curves)], ignore_index=True)


def finished(over_steps: Frame, runs: Frame) -> Frame:
    """zeta_L over series of checkpoints, and over trainings that have ended."""
    rows = over_steps[over_steps.what == ZETA]
    return rows[rows.series.notna() | rows["run"].isin(runs["run"])]


# ---- tables


def as_printed(trainings: Frame) -> Frame:
    """Rows with the labels of Tables 2 and 3."""
    place = "here: lambda " + c.label(trainings, "{:g}".format, WEIGHT) + ", " + trainings.setup
    place += trainings.place.str.removeprefix("here")
    return trainings.assign(Size=trainings["size"].replace(SIZES), place=place)


def table_1(displacements: Frame) -> Frame:
    rows = displacements[~displacements.series]
    return c.table(rows.assign(Model=rows.model), ["Model", "place"], RATES)


def table_2(as_printed: Frame) -> Frame:
    rows = c.accuracies(as_printed, TASKS, MEAN)
    return c.pivot(rows, rows[ROW])


def table_3(as_printed: Frame) -> Frame:
    return c.table(as_printed, ROW, RATES)


def table_7(finished: Frame) -> Frame:
    """zeta_L at each fifth of a training, or of a series of checkpoints."""
    rows = finished.sort_values("step", kind="stable")
    step = rows["step"].astype(float)
    total = rows.total.fillna(rows.groupby("curve")["step"].transform("max")).astype(float)
    fifth = (5 * step / total).round()
    labels = {"Model": rows.model.where(rows.series.notna(), "trained here")}
    labels |= {"Size": rows["size"].replace(SIZES).fillna("-"), "place": "here: " + rows.curve}
    rows = rows[(step == (fifth / 5 * total).round()) & (fifth > 0)]
    return c.pivot(rows, labels, (20 * fifth).map("{:g}%".format))


def figure_5(as_printed: Frame) -> Frame:
    rows = as_printed.query("Method == 'Baseline'")
    return c.table(rows, ["Size", "steps", "place"], {"zeta_L": ZETA})


def pretraining(trainings: Frame) -> Frame:
    tokens = trainings.total * trainings.batch_size * trainings.seq_len
    tokens = trainings.assign(cell=tokens).drop_duplicates(LABELS)
    columns = {"tokens": tokens, "parameters": "parameters", **METRICS, "entropy": ENTROPY}
    return c.table(trainings, LABELS, columns | c.every_task(trainings))


def against_baseline(rows: Frame, what: str, index: list[str]) -> Any:
    """Trainings with JREG against the baseline of the same seed and setup."""
    rows = rows[rows.what == what]
    ours, base = (rows[rows.Method == x] for x in (OURS, "Baseline"))
    free = (WEIGHT, ALPHA, "loss", "alpha", "Method", "curve")
    return c.against(ours, base, index, ["size", "setup", "place"], free)


def paired(trainings: Frame) -> Frame:
    columns = {x: against_baseline(trainings, what, LABELS) for x, what in METRICS.items()}
    return c.table(trainings, LABELS, columns)


def models(displacements: Frame) -> Frame:
    index = ["model", "h_L", "place"]
    rows = displacements.assign(place="here" + displacements.windows)
    layers = rows[rows.what == PSI].groupby(index).layer.max().astype(float).astype(object)
    text = rows.drop_duplicates(index).assign(cell=rows.text)
    return c.table(rows, index, {**RATES, "layers": layers, "tokens": "tokens", "text": text})


# ---- figures


def figure_2(displacements: Frame) -> Frame:
    rows = displacements.query("what == @PSI and not series")
    return c.points(rows, DEPTH, rows.model, rows.h_L + rows.windows, "layer")


def psi(curves: Frame) -> Frame:
    """Displacements at the last step that all seeds have."""
    rows, by = trainings(curves).query("what == @PSI"), ["size", "curve"]
    seeds = rows.groupby(by)["run"].transform("nunique")
    rows = rows[rows.groupby([*by, "step"])["run"].transform("nunique") == seeds]
    rows = rows[rows["step"] == rows.groupby(by)["step"].transform("max")]
    return c.points(rows, DEPTH, rows["size"], rows.curve, "layer")


def figure_4(over_steps: Frame) -> Frame:
    """A line for each evaluated step, at most five of them."""
    rows = over_steps[over_steps.what == PSI].sort_values("step", kind="stable")
    by = rows.groupby("curve")["step"]
    pairs = zip(by.rank("dense") - 1, by.transform("nunique"), strict=True)
    some = [n > 1 and i in np.linspace(0, n - 1, min(5, n)).round() for i, n in pairs]
    rows = rows[np.array(some, bool)]
    return c.points(rows, DEPTH, rows.curve, c.label(rows, "step {:,d}".format, "step"), "layer")


def curves(over_steps: Frame) -> Frame:
    panels = {what: f"{name} (%)" if name in RATES else name for name, what in METRICS.items()}
    made = pandas.concat([over_steps[over_steps.what == what] for what in panels])
    size = made["size"].fillna("checkpoints")
    return c.points(made, made.what.map(panels), size, made.curve)


# ---- claims


def named(trainings: Frame) -> Frame:
    """Rows with the labels of a claim on trainings."""
    place = trainings["size"] + ", " + trainings.steps + " steps" + trainings.place.str[4:]
    return trainings.assign(part=trainings.loss, run_on=place)


def claimed(named: Frame, what: str, sign: int = 1) -> Frame:
    """JREG against the baseline: the runs of a size, and each loss a part."""
    rows = c.with_answers(named, TASKS, MEAN)
    parts = rows[rows.Method == OURS].drop_duplicates(c.CLAIM).set_index(c.CLAIM).index
    return c.judged(against_baseline(rows, what, c.CLAIM).reindex(parts), sign)


mean_accuracy = partial(claimed, what=MEAN)
below_baseline = partial(claimed, what=ZETA, sign=-1)
no_worse = partial(claimed, what=NLL, sign=-1)


def no_jump(named: Frame) -> Frame:
    return within(named[named[ALPHA].astype(float) >= 0.5], 0.0, 0.005)


def published(displacements: Frame) -> Frame:
    rows = displacements.query("not series and not trained")
    return within(rows.assign(part=rows.model, run_on=rows.h_L + rows.windows), *TABLE_1)


def within(rows: Frame, low: float, high: float) -> Frame:
    """The last zeta_L, and whether that of every seed is between these."""
    rows = c.last(rows[rows.what == ZETA])
    c.one_setting(rows, c.CLAIM)
    rows = rows.assign(holds=rows["value"].between(low, high), known=np.isfinite(rows["value"]))
    by = rows.groupby(c.CLAIM, sort=False)
    made = by.agg(value=("cell", c.spread), holds=("holds", "all"), known=("known", "all"))
    return made.assign(verdict=made.holds.map(TOLD).where(made.known, OPEN)).reset_index()


def rising(finished: Frame) -> Frame:
    """The growth of zeta_L from each fifth of training to the next; else from evaluation to
    evaluation."""
    rows, made = finished[finished.series.notna() | (finished.Method == "Baseline")], []
    places = rows["size"] + ", " + rows.steps + " steps" + rows.place.str[4:]
    c.one_setting(rows[rows.series.isna()].assign(on=places), ["on"])
    for place, its in rows.groupby(places.where(rows.series.isna(), rows.curve), sort=False):
        table = its.pivot_table("value", "run", "step").drop(columns=0, errors="ignore")
        table = table.dropna(axis=1)  # steps that all seeds have
        fifths = [round(x * max(table, default=0) / 5) for x in range(1, 6)]
        table = table[fifths] if set(fifths) <= set(table) else table
        for step, grown in table.diff(axis=1).iloc[:, 1:].items():
            told = verdict(interval(list(grown)), 1) if grown.any() else FAILS
            made.append((place, f"step {step:,d}", interval(list(grown)), told))
    return pandas.DataFrame(made, columns=c.PARTS)


CURVES = (PSI, ENTROPY, *METRICS.values())
