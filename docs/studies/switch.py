"""Ways to compress the experts of a small Switch Transformer, by the loss of span corruption.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/switch.py runs/recover runs/ntk --out=runs/switch

The runs are those of configs/t5_recover.py: the recovery's first evaluation is right after the
compression, its last one after the further training. And those of configs/analyze.py:ntk on one
expert of the same model.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ffn_heterogeneity.papers import mlp_fusion
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame

METHOD = ("stages", "compress.method")
NAMES = {"merge": "M-SMoE", "residuals": "ResMoE", "recover": "whole"}
FREE = ("compress.", "tune.", "merge.", "residuals.", "stages", "method")
BEFORE, AFTER = "after compression", "after training"
# Errors of the kernel of one expert, and of its outputs.
ERRORS = {"ntk_error": "|K - K'|", "ntk_cosine": "cosine of K and K'", "output_error": "|y - y'|"}


def recoveries(runs: Frame) -> Frame:
    """Held-out losses by method; "when" is "after compression", or "after training"."""
    rows = c.need(runs, *METHOD, "recover.kind", "objective", "steps")
    chosen = rows["run"].str.fullmatch(r".*/\d+_recover") & (rows.objective == "span_corruption")
    rows = rows[chosen & (rows.what == "validation/nll")]
    first, last = rows[rows.step == 0].index, c.last(rows).index
    rows = rows[rows.index.isin(first.union(last))]
    named = [method_of(*its) for its in rows[list(METHOD)].itertuples(index=False)]
    when = (rows.step == 0).map({True: BEFORE, False: AFTER})
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


analyses = mlp_fusion.blocks


def kernels(analyses: Frame, recoveries: Frame) -> Frame:
    """Errors of one expert by method, means over the seeds of the head, and the model's losses."""
    errors = means(analyses[analyses.what.isin(ERRORS)], "what").rename(columns=ERRORS)
    losses = means(recoveries, "when").add_prefix("NLL ")
    joined = errors.join(losses, how="inner").assign(place="here")
    return joined.set_index("place", append=True)


def predictions(kernels: Frame) -> Frame:
    """Rank correlation of an error with a loss over the methods (Spearman's)."""
    names = [name for name in ERRORS.values() if name in kernels]
    losses = [name for name in kernels if name.startswith("NLL ")]
    ranks = kernels.rank().corr().reindex(index=names, columns=losses)
    ranks = ranks.rename_axis("error").assign(methods=len(kernels), place="here")
    return ranks.set_index("place", append=True)


def means(rows: Frame, column: str) -> Frame:
    return rows.pivot_table(index="method", columns=column, values="value", aggfunc="mean")


def cheaper(recoveries: Frame, ours: str, base: str) -> Frame:
    """A method's loss after training against another's."""
    rows = recoveries[recoveries.when == AFTER].assign(part="switch", run_on="span corruption")
    return c.claim(rows, rows.method == ours, rows.method == base, ["model"], FREE, -1)


fusion_beats_merging = partial(cheaper, ours="fusion", base="M-SMoE")
fusion_beats_clustering = partial(cheaper, ours="fusion", base="sqrt")
tuning_helps = partial(cheaper, ours="fusion, tuned", base="fusion")
