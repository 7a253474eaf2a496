"""Removal without data: rules on what the model itself writes, and what the kept neurons can say
for the others.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/own_removal.py runs/own-* --out=runs/own
"""

from __future__ import annotations

from typing import Any

from ffn_heterogeneity.papers import nucl
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame

TASKS = {name: (name, None) for name in ("hellaswag", "piqa", "arc_easy", "winogrande", "sciq")}
LABELS = ["model", "share", "rule", "text", "tokens", "compensation", "place"]
MERGED = ["model", "share", "neurons", "compensation", "place"]
HOW = ("method", "compensation", "calibration", "calibration_tokens", "n_init", "ratio")


def removals(runs: Frame) -> Frame:
    rows = nucl.removals(runs)
    order = rows.sequential.eq(True).map({True: ", layer after layer", False: ""})
    return rows.assign(
        share=c.label(rows, "{:g}".format, "ratio").where(rows.criterion != "none", "-"),
        rule=rows.criterion,
        text=rows.calibration.fillna("").map(nucl.corpus).replace("", "-"),
        tokens=c.label(rows, "{:g}".format, "calibration_tokens").fillna("-"),
        compensation=(rows.compensation + order).fillna("-"),
    )


def mean_over_layers(rows: Frame, what: str, index: list[str]) -> Any:
    own = rows[rows.what == what]
    means = own.groupby("run")["value"].mean()
    own = own.drop_duplicates("run")
    return c.cells(own.assign(cell=own["run"].map(means).astype(object)), index)


def minus(rows: Frame, base: Frame, index: list[str], on: list[str]) -> Any:
    """Against another removal, paired over windows or questions."""
    free = (*nucl.REMOVAL, *nucl.SIZE, "method", "removed", "limit", "rule", "share")
    return c.against(rows, base, index, on, free, c.paired_units)


def own(removals: Frame) -> Frame:
    losses, columns = removals[removals.what == "nll"], {"NLL": "nll"}
    base = losses[losses.method == "Pre-trained baseline"]
    columns["Δ vs unpruned"] = minus(losses, base, LABELS, ["model", "place"])
    base, on = losses[losses.method == "Entropy-based"], ["model", "share", "place"]
    columns["Δ vs entropy"] = minus(losses, base, LABELS, on)
    columns["left"] = mean_over_layers(removals, "compensated/held_residual", LABELS)
    return c.table(removals, LABELS, columns)


def tasks(removals: Frame) -> Frame:
    """Accuracies in percent, and question by question against removal by entropy."""
    every = c.accuracies(removals, TASKS)
    columns = {}
    for task in TASKS:
        its = every[every.column == task]
        base = its[its.method == "Entropy-based"]
        columns[task] = c.cells(its, LABELS)
        columns[f"{task}, Δ vs entropy"] = minus(its, base, LABELS, ["model", "share", "place"])
    return c.table(every, LABELS, columns)


def clusters(runs: Frame) -> Frame:
    keys = ("method", "compensation", "ratio", "calibration", "calibration_tokens", "n_init")
    rows = c.evaluated(c.need(runs, *keys, *nucl.EVALUATION), "method")
    whole = rows.ratio == 0
    rows.loc[whole, [*HOW]] = None
    return rows.assign(
        share=c.label(rows, "{:g}".format, "ratio").fillna("-"),
        neurons=rows.method.where(~whole, "none"),
        compensation=rows.compensation.fillna("-"),
        place="here",
    )


def merged(clusters: Frame) -> Frame:
    """Neurons clustered, each cluster's sums kept; what the centroids can say besides."""
    losses, columns, free = clusters[clusters.what == "nll"], {"NLL": "nll"}, HOW
    base = losses[losses.neurons == "none"]
    columns["Δ vs unpruned"] = c.against(losses, base, MERGED, ["model"], free, c.paired_units)
    base = losses[(losses.neurons == "merged") & (losses.compensation == "none")]
    on = ["model", "share"]
    columns["Δ vs merged"] = c.against(losses, base, MERGED, on, free, c.paired_units)
    columns["left"] = mean_over_layers(clusters, "compensated/held_residual", MERGED)
    return c.table(clusters, MERGED, columns)
