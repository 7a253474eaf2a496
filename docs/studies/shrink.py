"""Smaller models without training: what people use, ours, and whole blocks at equal parameters.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/shrink.py runs/shrink-* --out=runs/shrink

on scripts/sweep.py --config=configs/prune_table.py --sweep=shrink, with a directory of texts as
--config.text, and on jobs of configs/shrink.py.
"""

from __future__ import annotations

import os
from typing import Any

from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame

NAMES = {
    "none": "unpruned",
    "mean_state": "mean activation",
    "wanda_sp_published": "Wanda-sp",
    "flap_published": "FLAP without bias",
    "flap_published, bias": "FLAP",
    "flap_published, state_ridge": "FLAP + state_ridge",
    "optipfair": "hybrid",
    "optipfair, state_ridge": "hybrid + state_ridge",
}
OWN = ("", "own", "own_text.jsonl")  # self-generated text; the tables name others
KEYS = ("surgery", "criterion", "compensation", "ratio", "blocks", "calibration", "seed")
FREE = (*KEYS, "budget", "layers", "calibration_tokens", "method", "removed", "fewer")
# Losses are of all windows, whatever the tasks of the same run.
LOSSES = (*FREE, "limit", "generation_batch_size", "allow_code_execution")
LABELS = ["model", "removed", "method", "fewer", "place"]
STAGE = r"(?:^|/)[^/]+/\d+_\w+$"  # of a job of configs/shrink.py
AFTER = "perplexity_after"
TASKS = {name: (task, None) for name, task in (("MBPP", "mbpp"), ("GSM8K", "gsm8k"))}
LEAST = 0.1  # nats
BLOCKS, ENTROPY, WHOLE = "whole blocks", "entropy", "unpruned"
OURS = NAMES["optipfair, state_ridge"]


def shrunk(runs: Frame) -> Frame:
    """Scores after a removal; "removed": the share of the neurons, "fewer": of all parameters."""
    rows = c.need(runs, *KEYS, "budget", "layers", "calibration_tokens")
    rows = c.evaluated(rows[~rows["run"].str.contains(STAGE)], "criterion")
    whole, deep = rows.criterion == "none", rows.surgery == "drop_layers"
    plain = rows.compensation.fillna("none") == "none"
    rules = rows.criterion.where(plain, rows.criterion + ", " + rows.compensation.astype(str))
    text = rows.calibration.fillna("").map(os.path.basename)
    other = text.mask(text.isin(OWN) | whole, "")
    method = rules.replace(NAMES).mask(deep, BLOCKS).mask(whole, WHOLE)
    method += (" on " + other).where(other != "", "")
    if "bos" in rows:  # Qwen2.5's texts have none
        rows["model"] = rows.model.mask(rows.bos == "none", rows.model + ", no bos")
    lost = rows[rows.what == "parameters_removed_percent"].groupby("run")["value"].mean()
    return rows.assign(
        method=method,
        removed=c.label(rows, "{:.0%}".format, "ratio").mask(whole, "-"),
        fewer=rows["run"].map(lost).fillna(0).map("{:.1f}%".format),
        seed=rows.seed.where(method == "random"),
        place="here",
    )


def job(runs: Frame) -> Frame:
    """Perplexity before and after each stage of the one command, on the same windows."""
    rows = c.need(runs, "stages")
    rows = rows[rows["run"].str.contains(STAGE) & rows.what.isin(["perplexity_before", AFTER])]
    place = rows["run"].str.extract(r"([^/]+)/\d+_(\w+)$")
    rows = rows.assign(job=place[0], stage=place[1], place="here")
    columns = {"before": "perplexity_before", "after": AFTER}
    return c.table(rows, ["job", "stage", "place"], columns)


def losses(rows: Frame) -> dict[str, Frame]:
    """{text: rows of its NLL}; of one text alone also "NLL"."""
    name = rows.what.str.extract(r"^texts/(.+)/nll$", expand=False)
    texts = dict(iter(rows[name.notna()].groupby(name, sort=False)))
    return texts or {"NLL": rows[rows.what == "nll"]}


def compared(shrunk: Frame) -> Frame:
    columns: dict[str, Any] = {}
    for text, rows in losses(shrunk).items():
        columns[text] = c.cells(rows, LABELS)
        base, on = rows[rows.method == ENTROPY], ["model", "removed", "place"]
        columns[f"{text}, Δ vs entropy"] = c.against(rows, base, LABELS, on, LOSSES, c.paired_units)
    return c.table(shrunk, LABELS, columns)


def overall(shrunk: Frame) -> Frame:
    """The mean over all windows of all texts, against entropy and against our rule."""
    rows, columns = shrunk[shrunk.what == "nll"], {}
    for base in (ENTROPY, OURS):
        sides = rows, rows[rows.method == base], LABELS, ["model", "removed", "place"]
        columns[f"Δ vs {base}"] = c.against(*sides, LOSSES, c.paired_units)
    return c.table(shrunk, LABELS, {"NLL": "nll"} | columns)


def tasks(shrunk: Frame) -> Frame:
    """Right answers in percent, question by question against unpruned and against entropy."""
    every = c.accuracies(shrunk, TASKS)
    losses = shrunk[(shrunk.what == "nll") & shrunk["run"].isin(every["run"])]
    columns: dict[str, Any] = {"NLL": c.cells(losses, LABELS)}
    for task, its in every.groupby("column", sort=False):
        columns[str(task)] = c.cells(its, LABELS)
        for base, on in ((WHOLE, ["model"]), (ENTROPY, ["model", "removed", "place"])):
            sides = its, its[its.method == base], LABELS, on
            columns[f"{task}, Δ vs {base}"] = c.against(*sides, FREE, c.paired_units)
    return c.table(every, LABELS, columns)


def shares(shrunk: Frame) -> Frame:
    """Added NLL as a share of what entropy adds, at the same size, if it adds `LEAST`."""
    index, columns = ["model", "removed", "method", "place"], {}
    if {WHOLE, ENTROPY} - {*shrunk.method}:
        return c.table(shrunk, index, columns)
    for text, rows in losses(shrunk).items():
        means = rows.groupby(index, sort=False, dropna=False)["value"].mean()
        dense = means.xs(WHOLE, level="method").groupby("model").mean()
        added = means - means.index.get_level_values("model").map(dense)
        base = added.xs(ENTROPY, level="method").groupby(["model", "removed"]).mean()
        keys = [added.index.get_level_values(name) for name in ("model", "removed")]
        base = base.where(base >= LEAST)  # of next to nothing there are no shares
        columns[text] = added / [base.get(key) for key in zip(*keys, strict=True)]
    return c.table(shrunk, index, columns)
