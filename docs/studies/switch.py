"""Ways to compress the experts of a small Switch Transformer, by the loss of span corruption.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/switch.py runs/recover --out=runs/switch

The runs are those of configs/t5_recover.py: the recovery's first evaluation is right after the
compression, its last one after the further training.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame

METHOD = ("stages", "compress.method")
NAMES = {"merge": "M-SMoE", "residuals": "ResMoE", "recover": "whole"}
FREE = ("compress.", "tune.", "merge.", "residuals.", "stages", "method")
AFTER = "after training"


def recoveries(runs: Frame) -> Frame:
    """Held-out losses by method; "when" is "after compression", or "after training"."""
    rows = c.need(runs, *METHOD, "recover.kind", "objective", "steps")
    chosen = rows["run"].str.fullmatch(r".*/\d+_recover") & (rows.objective == "span_corruption")
    rows = rows[chosen & (rows.what == "validation/nll")]
    first, last = rows[rows.step == 0].index, c.last(rows).index
    rows = rows[rows.index.isin(first.union(last))]
    named = [method_of(*its) for its in rows[list(METHOD)].itertuples(index=False)]
    when = (rows.step == 0).map({True: "after compression", False: AFTER})
    # One model in other forms: nothing else than the method may differ.
    return rows.assign(method=named, when=when, model="switch", place="here")


def method_of(stages: Any, method: Any) -> str:
    """Name of a method, by the stages of its job."""
    name = NAMES.get(stages[0], method)
    return f"{name}, tuned" if "tune" in stages else name


def recovery(recoveries: Frame) -> Frame:
    groups = recoveries.groupby("when", sort=False)
    made = {f"NLL {name}": rows.drop(columns="when") for name, rows in groups}
    return c.table(recoveries, ["method", "place"], made)


def cheaper(recoveries: Frame, ours: str, base: str) -> Frame:
    """A method's loss after training against another's."""
    rows = recoveries[recoveries.when == AFTER].assign(part="switch", run_on="span corruption")
    return c.claim(rows, rows.method == ours, rows.method == base, ["model"], FREE, -1)


fusion_beats_merging = partial(cheaper, ours="fusion", base="M-SMoE")
fusion_beats_clustering = partial(cheaper, ours="fusion", base="sqrt")
tuning_helps = partial(cheaper, ours="fusion, tuned", base="fusion")
