"""JREG (Shibata et al.): its tables and figures, beside what was measured here."""

from __future__ import annotations

import os
from functools import partial
from itertools import pairwise

import numpy as np
import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.nucl import EVALUATION, TUNED
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN, interval, verdict
from ffn_heterogeneity.report.tidy import Frame
from ffn_heterogeneity.report.versus import versus

WEIGHT, ALPHA = "losses.jreg.weight", "losses.jreg.alpha"
NLL, PSI, ENTROPY = "validation/nll", "validation/jreg/psi", "validation/entropy/ent/ffn_out/mean"
RATES = {rate: f"validation/jreg/{rate}" for rate in ("zeta_L", "zeta_L-1", "zeta_L-2")}
ZETA, METRICS = RATES["zeta_L"], {**RATES, "validation NLL": NLL}
DEPTH, MEAN = "angular displacement", "avg"
ORDER = (OPEN, FAILS, HOLDS)  # of a record the first that one of its seeds says
READINGS = {"before_final_norm/": "before", "after_final_norm/": "after"}
READ = (*EVALUATION, "positions")
SHAPE = ("shape.layers", "shape.d_model", "shape.ffn_width")
BASELINE, OURS = {WEIGHT: [0, None]}, {WEIGHT: tidy.ANY}
TRAINED = [*TUNED, "tokenizer", "compute_dtype", "eval.max_batches", "shape.", "monitors."]
# Settings of losses that count where JREG has no weight.
ALWAYS = (WEIGHT, *(f"losses.jreg.{key}" for key in ("final_norm", "positions", "term")))
ALWAYS += ("losses.nll.",)
TASKS, FIGURE_4 = printed("jreg")["tasks"], printed("jreg")["figures"]["figure_4"]
SETTINGS = dict.fromkeys((WEIGHT, ALPHA, *SHAPE, *READ, "analysis", "series"))
SETTINGS |= dict.fromkeys(("steps", "batch_size", "seq_len"))
TABLE_1 = (7.16, 22.2)  # zeta_L of its models: the lowest, the highest


# ---- runs


def displacements(rows: Frame) -> Frame:
    """Analyses of models, or of a series of checkpoints: a record for each reading of h_L."""
    trained = rows[rows["shape.layers"].notna()]["run"]
    rows = rows[rows.analysis == "displacement"]
    place = rows.text.where(rows.text.astype(bool), rows.token_ids)
    rows = rows.assign(name=two_names(rows), text=[os.path.basename(str(x)) for x in place])
    rows["written here"], parts = rows.origin.isin(trained), []
    for start, reading in READINGS.items():
        its = rows[rows.what.str.startswith(start) | (rows.what == "tokens")]
        name = its.what.str.replace(start, "validation/jreg/", regex=False)
        run = its["run"] + f" ({reading})"
        its = its.assign(what=name, reading=reading, path=its["run"], run=run)
        steps = its[its.what == PSI].groupby("path")["step"].count()
        for path in set(rows["run"]) - set(steps.index):
            raise ValueError(f"{path}/results.json is no analysis of h_L: is it damaged?")
        parts.append(its.assign(series=its.path.map(steps > 0)))
    rows = pandas.concat(parts, ignore_index=True)
    # All models' analyses are told apart together.
    made = tidy.records(rows.assign(model=""), ("path", "reading", *READ), ("path", "reading"))
    return made.assign(model=made["name"])


def two_names(rows: Frame) -> pandas.Series:
    """Models' names; two analyses of one model have two."""
    runs = rows.drop_duplicates("run")
    several = runs[runs.model.duplicated(keep=False)].model
    names = rows.model + " (" + rows["run"].map(os.path.basename) + ")"
    return rows.model.where(~rows.model.isin(several), names)


def trainings(rows: Frame) -> Frame:
    """Models trained from nothing, without and with JREG."""
    rows = rows[rows["shape.layers"].notna()]
    shown = ("model", *SHAPE, "shape.", "steps", WEIGHT, ALPHA, "batch_size", "seq_len")
    rows = tidy.records(rows, TRAINED, shown, {"shape.layers": tidy.ANY}, ALWAYS)
    return tidy.scored(rows, TASKS, MEAN)


def over_steps(runs: Runs) -> Frame:
    """Curves of trainings, and what was measured of series of checkpoints."""
    read = tidy.matching(runs["displacement"], {"series": True})
    first = len(runs["displacement"])
    trained = runs["curves"].assign(record=runs["curves"]["record"] + first)
    return pandas.concat([read, trained], ignore_index=True)


# ---- tables


def table_1(runs: Runs) -> Frame:
    return tidy.cells(tidy.matching(runs["displacement"], {"series": False}), RATES)


def table_2(runs: Runs) -> Frame:
    return tidy.cells(runs["pretraining"], {name: name for name in (*TASKS, MEAN)})


def table_3(runs: Runs) -> Frame:
    return tidy.cells(runs["pretraining"], RATES)


def table_7(runs: Runs) -> Frame:
    rows = over_steps(runs)
    finished = rows.series.notna() | rows["run"].isin(runs["pretraining"]["run"])
    rows = rows[(rows.what == ZETA) & finished]
    last = rows.groupby("record")["step"].transform("max")
    last = rows.steps.where(rows.steps.notna(), last).astype(float)
    shares = (20, 40, 60, 80, 100)
    return tidy.cells(
        rows, {f"{x}%": rows[rows["step"] == (x / 100 * last).round()] for x in shares}
    )


def figure_5(runs: Runs) -> Frame:
    return tidy.cells(tidy.matching(runs["pretraining"], BASELINE), {"zeta_L": ZETA})


def pretraining(runs: Runs) -> Frame:
    rows = runs["pretraining"]
    first = rows.drop_duplicates("record")
    tokens = first.assign(value=first.steps * first.batch_size * first.seq_len, low=None)
    columns = {"tokens": tokens, "parameters": "parameters", **METRICS, "entropy": ENTROPY}
    columns |= dict(iter(tidy.scores(rows).groupby("what", sort=False)))
    return tidy.cells(rows, columns)


def paired(runs: Runs) -> Frame:
    columns = {name: against_baseline(runs, what) for name, what in METRICS.items()}
    return tidy.cells(runs["pretraining"], columns)


def against_baseline(runs: Runs, what: str) -> Frame:
    return versus(runs["pretraining"], what, OURS, BASELINE, TRAINED, (WEIGHT, ALPHA))


mean_accuracy = partial(against_baseline, what=MEAN)
below_baseline, no_worse = (partial(against_baseline, what=x) for x in (ZETA, NLL))


def models(runs: Runs) -> Frame:
    rows = runs["displacement"]
    layers = rows[rows.what == PSI].groupby("record").layer.max()
    first = rows.drop_duplicates("record")
    columns = {**RATES, "layers": first.assign(value=first["record"].map(layers))}
    columns |= {"tokens": "tokens", "text": first.assign(value=first.text)}
    return tidy.cells(rows, columns)


# ---- figures


def figure_2(runs: Runs) -> Frame:
    return by_layer(tidy.matching(runs["displacement"], {"series": False}))


def psi(runs: Runs) -> Frame:
    return by_layer(runs["curves"])


def by_layer(rows: Frame) -> Frame:
    """Displacements at the last step that all seeds of a record have."""
    rows = rows[rows.what == PSI].assign(column=DEPTH)
    step = rows["step"].fillna(0)
    seeds = rows.groupby("record")["run"].transform("nunique")
    having = rows.assign(at=step).groupby(["record", "at"])["run"].transform("nunique")
    last = step.where(having == seeds).groupby(rows["record"]).transform("max")
    return rows[step == last]


def figure_4(runs: Runs) -> Frame:
    """A line for each evaluated step, at most five of them."""
    rows = over_steps(runs)
    rows = rows[rows.what == PSI].assign(column=DEPTH)
    chosen = [rows.head(0)]
    for _, its in rows.groupby("record", sort=False):
        steps = sorted(its["step"].unique())
        some = {steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(5, len(steps)))}
        chosen.append(its[its["step"].isin(some if len(steps) > 1 else ())].sort_values("step"))
    made = pandas.concat(chosen)
    panel = tidy.labelled(made, {"labels": {}, "here": FIGURE_4["line"]})["from"]
    return made.assign(panel=panel, line=[f"step {step:,d}" for step in made["step"]])


def curves(runs: Runs) -> Frame:
    panels = {f"{name} (%)" if name in RATES else name: what for name, what in METRICS.items()}
    rows = over_steps(runs)
    return tidy.cells(rows, {name: rows[rows.what == what] for name, what in panels.items()})


# ---- claims


def no_jump(runs: Runs) -> Frame:
    rows = tidy.matching(runs["pretraining"], OURS)
    return within(rows[rows[ALPHA].astype(float) >= 0.5], 0.0, 0.005)


def published(runs: Runs) -> Frame:
    rows = tidy.matching(runs["displacement"], {"series": False, "written here": False})
    return within(rows, *TABLE_1)


def within(rows: Frame, low: float, high: float) -> Frame:
    """The last zeta_L, with the verdict whether every seed's lies there."""
    rows = tidy.cells(rows, {"zeta_L": ZETA})
    told = rows["value"].between(low, high).map({True: HOLDS, False: FAILS})
    told = told.where(np.isfinite(rows["value"]), OPEN)
    worst = told.groupby(rows["record"]).transform(lambda its: min(its, key=ORDER.index))
    return rows.assign(verdict=worst)


def rising(runs: Runs) -> Frame:
    """The growth of zeta_L from each fifth of training to the next; else from evaluation to
    evaluation."""
    rows = over_steps(runs)
    finished = rows["run"].isin(runs["pretraining"]["run"]) & rows[WEIGHT].fillna(0).eq(0)
    rows = rows[(rows.what == ZETA) & (rows.series.notna() | finished)]
    made = [rows.head(0)]
    for _, its in rows.groupby("record", sort=False):
        table = its.pivot_table(index="run", columns="step", values="value").dropna(axis=1)
        fifths = [round(x * max(table.columns, default=0) / 5) for x in range(1, 6)]
        steps = fifths if set(fifths) <= set(table.columns) else [x for x in table.columns if x]
        for before, step in pairwise(steps):
            apart = (table[step] - table[before]).tolist()
            told = verdict(interval(apart), 1) if any(apart) else FAILS
            row = its.head(1).assign(verdict=told, part=f"step {step:,d}")
            made.append(row.assign(**tidy.as_row(interval(apart))))
    return pandas.concat(made, ignore_index=True)


KINDS = {"displacement": displacements, "pretraining": trainings}
CURVE_KINDS = {"curves": trainings}
CURVES = (PSI, ENTROPY, *METRICS.values())
