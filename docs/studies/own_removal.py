"""Removal without data: rules on what the model itself writes, and what the kept neurons can say
for the others.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/own_removal.py runs/own-* --out=runs/own
"""

from __future__ import annotations

import re
from typing import Any

from ffn_heterogeneity.papers import nucl, printed
from ffn_heterogeneity.papers.massive_weights import corpus
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.tidy import Frame
from ffn_heterogeneity.report.versus import versus

PRINTED = printed(__file__)
TASKS = {name: (name, None) for name in ("hellaswag", "piqa", "arc_easy", "winogrande", "sciq")}
HOW = ("method", "compensation", "calibration", "calibration_tokens", "n_init")
CLUSTERED = ("model", "ratio", *HOW, *nucl.EVALUATION)
WHOLE, MERGED = {"method": "none"}, {"method": "merged", "compensation": "none"}
UNPRUNED, ENTROPY = {"criterion": "none"}, {"criterion": "entropy", **nucl.PLAIN}


def text_read(place: Any) -> str:
    """ "own 0" of a model's own text (text-0/own_text.jsonl, smollm2-0.jsonl), else the corpus."""
    own = re.search(r"-(\d+)(?:/own_text)?\.jsonl$", str(place))
    return f"own {own[1]}" if own else corpus(place)


def removals(rows: Frame) -> Frame:
    rows = nucl.removals(rows, ("model", "ratio", *nucl.REMOVAL, "window"))
    rows["calibration_tokens"] = rows.calibration_tokens.where(rows.calibration.astype(bool))
    order = rows.sequential.eq(True).map({True: ", layer after layer", False: ""})
    made = rows.compensation + order
    return rows.assign(text_read=rows.calibration.map(text_read), made_good=made)


def clusters(rows: Frame) -> Frame:
    rows = rows[rows.method.notna() & rows["run"].isin(rows[rows.what == "perplexity"]["run"])]
    rows = rows.copy()
    whole = rows.ratio == 0
    rows.loc[whole, ["ratio", *HOW[1:]]] = tidy.IDLE
    rows.loc[whole, "method"] = "none"
    return tidy.records(rows, CLUSTERED, ("model", *HOW, "ratio"))


def mean_over_layers(rows: Frame, what: str) -> Frame:
    """A row a run."""
    own = rows[rows.what == what]
    means = own.groupby("run")["value"].mean()
    own = own.drop_duplicates("run")
    return own.assign(value=own["run"].map(means), layer=None)


def own(runs: Runs) -> Frame:
    every = runs["removal"]
    columns = {
        "NLL": "nll",
        "less unpruned": versus(
            every, "nll", every, UNPRUNED, nucl.REMOVED, (*nucl.REMOVAL, *nucl.SIZE), "units"
        ),
        "less entropy": versus(every, "nll", every, ENTROPY, nucl.REMOVED, nucl.REMOVAL, "units"),
        "left": mean_over_layers(every, "compensated/held_residual"),
    }
    return tidy.cells(every, columns)


def tasks(runs: Runs) -> Frame:
    """Accuracies in percent, and question by question against removal by entropy."""
    every = runs["removal"]
    scored = tidy.scores(every[every.task.notna()], TASKS)
    columns = {}
    for task in TASKS:
        columns[task] = scored[scored.what == task]
        columns[f"{task}, less entropy"] = versus(
            scored, task, scored, ENTROPY, nucl.REMOVED, nucl.REMOVAL, "units"
        )
    return tidy.cells(scored, columns)


def merged(runs: Runs) -> Frame:
    """Neurons clustered, each cluster's sums kept; what the centroids can say besides."""
    every = runs["merged"]
    columns = {"NLL": "nll", "left": mean_over_layers(every, "compensated/held_residual")}
    columns["less unpruned"] = versus(
        every, "nll", every, WHOLE, CLUSTERED, (*HOW, "ratio"), "units"
    )
    columns["less merged"] = versus(every, "nll", every, MERGED, CLUSTERED, HOW, "units")
    return tidy.cells(every, columns)


KINDS = {"removal": removals, "merged": clusters}
SETTINGS = nucl.SETTINGS | dict.fromkeys(("method", "n_init"))
