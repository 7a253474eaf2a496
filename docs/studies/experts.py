"""Ways to shrink the experts of small mixtures of experts, over seeds of their training.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/experts.py runs/moe_* runs/use_* runs/half_* \
      runs/quarter_* runs/own_* runs/active_* runs/whole_* --out=runs/experts

`zeroed` and `macdrop` are of runs/zeroed, runs/macdrop_* and runs/attacked: attacks on experts that
were made of a dense model's neurons (docs/reproduce.md).

The unit is the seed of a model's training, the number before "/model" in the name that a job reads
(runs/moe_0/model); three random draws of experts count as their mean.
"""

from __future__ import annotations

from typing import Any

import pandas

from ffn_heterogeneity.papers import massive_weights
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report import stats
from ffn_heterogeneity.report.cells import Frame

STAGES = ("remove", "merge", "fuse", "prune")
NARROWED = ["fuse", "prune"]  # stages that leave every expert, with fewer neurons
KEYS = ("remove.rule", "remove.ratio", "merge.method", "merge.ratio", "merge.share", "fuse.method")
KEYS += ("fuse.ratio", "prune.criterion", "prune.ratio")
READ = ("remove.calibration", "merge.calibration", "remove.top_k")
NAMES = {"reap": "REAP", "aimer": "AIMER", "msan": "MSAN", "mone": "MoNE", "m_smoe": "M-SMoE"}
NAMES |= {
    "ream": "REAM",
    "resmoe": "ResMoE",
    "merged": "merged neurons",
    "random": "random experts",
}
WITHOUT_TEXT = ("aimer", "entropy", "random", "resmoe")
LABELS = ["method", "kept", "calibration", "active", "place"]
ON = ["model", "when"]
FREE = (*(f"{stage}." for stage in STAGES), "stages", "recover.", *LABELS)
WHOLE, NARROWER = "whole", ("fusion", "merged neurons", "neurons by entropy")
CALIBRATED = ("REAP", "MSAN", "experts by frequency")
TIMES = {"before": "before recovery", "after": "after 100 steps"}
BALANCE, LOAD = "losses.load_balance.weight", "validation/load_balance/max_load"
TRAINING = {"validation NLL": "validation/nll", "accuracy": "validation/nll/accuracy"}
TRAINING |= {"largest load / mean": LOAD, "unused": "validation/load_balance/unused"}
CURVES = tuple(TRAINING.values())


# ---- runs

# House of Cards' Figure 5: attacks on experts that were made of a dense model's neurons.
evaluations, tunings = massive_weights.evaluations, massive_weights.tunings
untrained, adapted = massive_weights.untrained, massive_weights.adapted


def grown(curves: Frame) -> Frame:
    """Evaluations of the models' training; loads are means over a model's layers in tables."""
    rows = c.need(curves, BALANCE, "shape.experts", "shape.layers")
    rows = rows[rows["shape.layers"].notna()]
    balance = c.label(rows, "mixture, balance weight {:g}".format, BALANCE)
    return rows.assign(trained=balance.where(rows["shape.experts"].notna(), "dense"), place="here")


def shrunk(runs: Frame) -> Frame:
    """Measurements before and after recovery; the mean of several draws on one model."""
    rows = c.need(runs, "stages", "recover.base", "recover.kind", *KEYS, *READ)
    rows = rows[rows["run"].str.fullmatch(r".*/\d+_(before|after)") & rows["recover.kind"].notna()]
    seeds = rows["recover.base"].str.extract(r"(\d+)/model,", expand=False).astype(float)
    first = rows.stages.map(lambda names: names[0])
    for stage in STAGES:
        rows.loc[first != stage, [name for name in rows if name.startswith(f"{stage}.")]] = None
    rows = rows.drop(columns=["recover.base"]).copy()
    rows = rows.assign(seed=seeds, model="mixtures", place="here")
    rows["when"] = rows["run"].str.extract(r"_(before|after)$", expand=False).map(TIMES)
    named = [rows[name] for name in KEYS]
    methods = [method_of(*its) for its in zip(first, *named, strict=True)]
    shares = [kept_of(*its) for its in zip(*named, strict=True)]
    # Text even if there is no row.
    rows["method"], rows["kept"] = (
        pandas.Series(texts, rows.index, dtype=object) for texts in (methods, shares)
    )
    names = rows["remove.rule"].fillna(rows["merge.method"])
    texts = rows["remove.calibration"].fillna(rows["merge.calibration"]).where(names.notna())
    texts = texts.map(lambda x: "self-generated" if x == "own" else "in-domain", "ignore")
    rows["calibration"] = texts.where(~names.isin(WITHOUT_TEXT)).fillna("-")
    rows["active"] = rows.kept.where((rows["remove.top_k"] == 1) | first.isin(NARROWED), "100%")
    by = [*LABELS, "when", "what", "seed"]
    c.one_setting(rows, by)
    means = rows.groupby(by, dropna=False)["value"].transform("mean")
    return c.with_cells(rows.assign(value=means).drop_duplicates(by))


def method_of(first: str, *settings: Any) -> str:
    """Name of a method in tables."""
    made = dict(zip(KEYS, settings, strict=True))
    if first not in STAGES:
        return WHOLE
    name = made.get(f"{first}.rule", made.get(f"{first}.method", made.get(f"{first}.criterion")))
    what = {"remove": "experts", "prune": "neurons"}.get(first)
    return NAMES.get(name, f"{what} by {name}" if what else name)


def kept_of(*settings: Any) -> str:
    """Share of the experts' parameters that remains, with ResMoE's barycenter (an eighth)."""
    made = dict(zip(KEYS, settings, strict=True))
    if made["merge.method"] == "resmoe":
        return f"{100 * (made['merge.share'] + 1 / 8):g}%"
    lost = [x for name, x in made.items() if name.endswith("ratio") and not pandas.isna(x)]
    return f"{100 * (1 - lost[0]):g}%" if lost else "100%"


# ---- tables


def training(grown: Frame) -> Frame:
    """The models at their last evaluation, the mean over seeds."""
    rows = c.last(grown)
    return c.table(c.over_layers(rows, ["run", "what"]), ["trained", "place"], TRAINING)


def over_models(rows: Frame) -> Any:
    """Mean over the models, with Student's interval."""
    values = rows.groupby(LABELS, sort=False, dropna=False)["value"]
    return values.agg(lambda its: stats.interval(list(its)))


def compared(rows: Frame) -> Frame:
    losses, columns = rows[rows.what == "nll"], {}
    for when, its in losses.groupby("when", sort=False):
        columns[f"NLL {when}"] = over_models(its)
    after = losses[losses.when == TIMES["after"]]
    base = after[after.method == WHOLE]
    columns["Δ vs whole"] = c.against(after, base, LABELS, ON, FREE)
    columns |= {f"model {seed:g}": over_models(its) for seed, its in after.groupby("seed")}
    right = rows[(rows.what == "accuracy") & (rows.when == TIMES["after"])]
    return c.table(after, LABELS, columns | {"accuracy": over_models(right)})


def equal_parameters(shrunk: Frame) -> Frame:
    return compared(shrunk[shrunk["remove.top_k"].isna()])


def equal_flops(shrunk: Frame) -> Frame:
    return compared(shrunk[(shrunk.active == "50%") | (shrunk.method == WHOLE)])


def kinds(shrunk: Frame) -> Frame:
    """Accuracy by kind of text, after recovery."""
    found = shrunk.what.str.extract(r"^texts/(.+)/accuracy$", expand=False)
    rows = shrunk[found.notna() & shrunk["remove.top_k"].isna()]
    rows = rows[(rows.when == TIMES["after"]) & rows.kept.isin(["100%", "50%"])]
    columns = {kind: over_models(its) for kind, its in rows.groupby(found[rows.index])}
    return c.table(rows, LABELS, columns) if columns else rows[LABELS]


def similarity(runs: Frame) -> Frame:
    """Cosines of experts' outputs, the mean over layers."""
    rows = c.need(runs, "analysis").query("analysis == 'experts' and layer.isna()")
    rows = rows.assign(place="here")
    names = rows.what.str.extract(r"^against/(.+)/(\w+)$")
    columns = {"pairs of one model": rows[rows.what == "expert_cosine"]}
    for what in ("matched_cosine", "aligned_cosine"):
        columns[what.replace("_", " ")] = rows[names[1] == what]
    return c.table(rows, ["model", "place"], columns)


zeroed, macdrop = massive_weights.attacks, massive_weights.macdrop

# ---- figures


def loads(grown: Frame) -> Frame:
    """The largest load of each layer over training."""
    rows = grown[grown.what == LOAD]
    layer = c.label(rows, "layer {:.0f}".format, "layer")
    return c.points(rows, "largest load / mean load", layer, rows.trained)


# ---- claims


def less(rows: Frame, ours: tuple[str, ...], others: tuple[str, ...]) -> Frame:
    """The loss after some methods against that after others, at each size and time."""
    rows = rows[(rows.what == "nll") & (rows.calibration != "self-generated")]
    rows = rows[rows["remove.top_k"].isna()]
    made = []
    for one in ours:
        for other in others:
            part = one + " - " + other + " at " + rows.kept
            its = rows.assign(part=part, run_on=rows.when)
            on, free = ["run_on", "kept"], (*FREE, "when", "part")
            made.append(c.claim(its, its.method == one, its.method == other, on, free, -1))
    return pandas.concat(made, ignore_index=True)


def pruning_beats_merging(shrunk: Frame) -> Frame:
    return less(shrunk, ("REAP",), ("M-SMoE", "REAM"))


def merging_beats_pruning(shrunk: Frame) -> Frame:
    return less(shrunk, ("REAM",), ("REAP", "experts by frequency"))


def fusion_beats_merging(shrunk: Frame) -> Frame:
    return less(shrunk, ("fusion",), ("M-SMoE",))


def without_data_is_level(shrunk: Frame) -> Frame:
    return less(shrunk, ("AIMER",), CALIBRATED)


def fewer_beats_narrower(shrunk: Frame) -> Frame:
    return less(shrunk, ("REAP", "AIMER"), NARROWER)


def better_than_chance(shrunk: Frame) -> Frame:
    return less(shrunk, ("REAP", "MSAN", "AIMER"), ("random experts",))


def own_text_costs_less(shrunk: Frame) -> Frame:
    """Self-generated against in-domain calibration text, at half of the experts."""
    rows = shrunk[(shrunk.what == "nll") & (shrunk.kept == "50%") & (shrunk.calibration != "-")]
    rows = rows[rows["remove.top_k"].isna()]
    rows = rows.assign(part=rows.method + ", self-generated - in-domain", run_on=rows.when)
    own = rows.calibration == "self-generated"
    return c.claim(rows, own, ~own, ["run_on", "part"], (*FREE, "when", "part"), -1)
