"""Ways to compress the experts of a small Switch Transformer, by the loss of span corruption.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/switch.py runs/switch runs/recover runs/ntk \
      runs/sst2 runs/answers --out=runs/report

`recovery`: configs/t5_recover.py, whose first evaluation is right after the compression, its last
one after the further training. `kernels`: configs/analyze.py:ntk on one expert of the same model.
`training`: the model's own (configs/t5_pretrain.py:switch). `labelled`: configs/switch.py, and
configs/classify.py with each of its models (runs/answers), for the comparison by sentence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ffn_heterogeneity.papers import mlp_fusion
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report import stats
from ffn_heterogeneity.report.cells import Frame

METHOD = ("stages", "compress.method", "compress.ratio")
NAMES = {"merge": "M-SMoE", "residuals": "ResMoE", "recover": "whole"}
FREE = ("compress.", "tune.", "merge.", "residuals.", "stages", "method")
FREE += ("optimizer.learning_rate", "recover.optimizer.learning_rate")  # chosen for each method
BEFORE, AFTER = "after compression", "after training"
LOAD = "validation/load_balance/max_load"
# What a model's training measures; loads and shares are means over the layers with experts.
TRAINING = {"NLL": "validation/nll", "accuracy": "validation/nll/accuracy"}
TRAINING |= {"largest load / mean": LOAD, "dropped tokens": "validation/load_balance/dropped"}
TRAINING |= {"unused": "validation/load_balance/unused"}
CURVES = tuple(TRAINING.values())
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
    rows = rows.assign(method=named, when=when, model="switch", place="here")
    drawn = rows.groupby("method")["run"].transform("nunique") > 1
    return rows.assign(seed=rows.seed.where(drawn))


def method_of(stages: Any, method: Any, ratio: Any) -> str:
    """Name of a method, by the stages of its job; with its ratio if that is not three quarters."""
    name, lost = NAMES.get(stages[0], method), float(ratio or 0)
    name += f", {lost:.0%}" if lost > 0 and lost != 0.75 else ""
    return f"{name}, tuned" if "tune" in stages else name


def recovery(recoveries: Frame) -> Frame:
    """The losses, and their differences from the uncompressed model's."""
    index, made = ["method", "place"], {}
    for when in (BEFORE, AFTER):
        rows = recoveries[recoveries.when == when]
        whole = rows[rows.method == "whole"]
        made[f"NLL {when}"] = rows
        apart = c.against(rows, whole, index, ["model"], FREE)
        made["Δ vs whole" + (", trained" if when == AFTER else "")] = apart
    return c.table(recoveries, index, made)


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


def grown(curves: Frame) -> Frame:
    """Evaluations of the model's own training; of each stack apart, where it has experts."""
    rows = c.need(curves, "shape.experts", "shape.encoder_layers")
    rows = rows[rows["shape.experts"].notna()].assign(place="here")
    stack = (rows.layer > rows["shape.encoder_layers"]).map({True: "decoder", False: "encoder"})
    return rows.assign(stack=stack.where(rows.layer.notna(), "both"))


def training(grown: Frame) -> Frame:
    """The model at its last evaluation."""
    rows = c.last(grown)
    sparse = rows[(rows.what == LOAD) & (rows["value"] > 0)].layer
    rows = rows[rows.layer.isna() | rows.layer.isin(sparse)]
    return c.table(c.over_layers(rows, ["run", "what", "stack"]), ["stack", "place"], TRAINING)


def answers(runs: Frame) -> Frame:
    """Accuracies of configs/classify.py in percent, labelled as the jobs that tuned the models."""
    jobs = mlp_fusion.jobs(runs)
    jobs = jobs[jobs.switch].drop_duplicates("run").set_index("run")
    rows = c.need(runs, "evaluation", "input")
    rows = rows[(rows.what == "accuracy") & rows.origin.isin(jobs.index) & rows.units.notna()]
    theirs = {name: rows.origin.map(jobs[name]) for name in ("method", "seed", "task", "place")}
    rows = c.in_percent(rows.assign(**theirs, model="switch"))
    frozen = rows.origin.map(jobs[mlp_fusion.FREEZE]).astype(bool)
    trained = rows.method.astype(str) + ", router trained"
    return rows.assign(method=rows.method.where(frozen, trained))


def labelled(answers: Frame) -> Frame:
    """Accuracies over the seeds; differences from the uncompressed model, paired by sentence."""
    index = ["task", "method", "place"]
    over = answers.groupby(index, sort=False)["value"].agg(lambda its: stats.interval([*its]))
    whole, on = answers[answers.method == "whole"], ["task", "model"]
    apart = c.against(answers, whole, index, on, FREE, c.paired_units)
    return c.table(answers, index, {"accuracy": over, "Δ vs whole, by sentence": apart})


def means(rows: Frame, column: str) -> Frame:
    return rows.pivot_table(index="method", columns=column, values="value", aggfunc="mean")


def cheaper(recoveries: Frame, ours: str, base: str) -> Frame:
    """A method's loss after training against another's."""
    rows = recoveries[recoveries.when == AFTER].assign(part="switch", run_on="span corruption")
    return c.claim(rows, rows.method == ours, rows.method == base, ["model"], FREE, -1)


fusion_beats_merging = partial(cheaper, ours="fusion", base="M-SMoE")
fusion_beats_clustering = partial(cheaper, ours="fusion", base="sqrt")
tuning_helps = partial(cheaper, ours="fusion, tuned", base="fusion")
