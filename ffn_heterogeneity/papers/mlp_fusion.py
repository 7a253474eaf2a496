"""MLP Fusion: its tables and figures of dense models, with what was measured here."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.p32 import on_paper
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN

TABLES, NAMES = (printed("mlp_fusion")[key] for key in ("tables", "names"))
METHODS, TUNED = NAMES["methods"], NAMES["tuned"]  # the paper's names, or ours
BEST, SCORE, FUSION = "validation/best/", "score", METHODS["fusion"]
NTK, BLOCK = "ntk_error", "block_error"
STATES, LAYERS = "tune.losses.layerwise.states", "compress.layers"
METHOD = ("compress.method", "mask_1.kind", "truncate.blocks", "tune.kind", STATES)
# In which methods differ: stages of a job, and the learning rate, chosen for each method.
STAGES = ("compress.", "tune.", "truncate.", "finetune.", "fuse.", "prune.", "stages")
STAGES += tuple(f"{kind}_{i}." for kind in ("mask", "round") for i in (1, 2, 3))
RATE = "optimizer.learning_rate"
FREE = (*STAGES, RATE, "method", "size", "layers", "neurons")
ON = ["model", "task", "chosen"]
DRAWN = ["fusion", "merged", "sqrt", "sketch", "hybrid_sketch", "mmd"]  # whose seed matters


# ---- runs


def finetunings(runs: Frame) -> Frame:
    """Last stages of jobs on labelled rows: "score" in percent, of the best evaluation.

    Runs of less than three epochs choose the learning rate, which their "place" has.
    """
    more = ("compress.ratio", LAYERS, "mask_3.layers", "finetune.base", "epochs", RATE)
    rows = c.need(runs, *METHOD, *more, "objective", "data.task")
    widths = rows[rows.what == "ffn_widths_after"]
    widths = widths.groupby(widths["run"].map(os.path.dirname))["value"].min()
    rows = rows[rows["run"].str.fullmatch(r".*[/_]finetune") & (rows.objective == "labels")]
    rows = c.without_idle_losses(rows.assign(model=model_of(rows["finetune.base"])))
    rate = ", learning rate " + rows[RATE].astype(str)
    chosen = ", " + c.label(rows, "epochs {:g}".format, "epochs") + rate.where(rows.epochs < 3, "")
    size = c.label(rows, size_of, "compress.ratio", LAYERS)
    rows = rows.assign(size=size, chosen=chosen, task=rows["data.task"])
    rows["method"] = c.label(rows, method_of, *METHOD)
    rows["layers"] = rows[LAYERS].fillna(rows["mask_3.layers"]).map(count_of)
    rows["neurons"] = rows["run"].map(os.path.dirname).map(widths)
    rows["place"] = "here: " + rows.model + size + chosen
    best = c.in_percent(rows[rows.what.str.startswith(BEST)])
    return pandas.concat([rows, best.assign(what=SCORE)], ignore_index=True)


def method_of(method: Any, masked: Any, blocks: Any, tuned: Any, states: Any) -> str:
    """The paper's name of a compression, or ours."""
    name = METHODS.get(method, method) if isinstance(method, str) else ""
    if isinstance(tuned, str):
        fused = TUNED.get(states) if method == "fusion" else None
        return fused or f"{name or 'LTH'}, tuned"
    cut = f"first {blocks} layers" if blocks and blocks == blocks else "whole"
    return name or ("LTH" if isinstance(masked, str) else cut)


def size_of(ratio: Any, layers: Any) -> str:
    """Text of what is removed: ", 75% of layers 2-5"."""
    return "" if pandas.isna(ratio) else f", {100 * ratio:.3g}% of layers {layers}"


def model_of(base: Any) -> Any:
    """The model of a job, "x:<model>,<task>": its last stage reads another stage's."""
    return base.str.extract(r":(.+),", expand=False).map(os.path.basename, na_action="ignore")


def count_of(layers: object) -> float | None:
    """The number of layers that "2-5" or "0,3" names; None for other texts."""
    parts = [part.split("-") for part in str(layers).split(",")]
    if not all(end.isdigit() for part in parts for end in part):
        return None
    return float(sum(int(part[-1]) - int(part[0]) + 1 for part in parts))


def default(rows: Frame) -> Frame:
    """Runs that keep three quarters of the last four of MiniLM's six layers, and dense models."""
    return rows[rows["size"].isin(["", ", 75% of layers 2-5"])]


def blocks(runs: Frame) -> Frame:
    """Analyses of one compressed block, apart for each method; seeds of the head and the method."""
    rows = c.need(runs, "analysis", "config.layer", "ratio").query("analysis == 'ntk'")
    norms = rows[rows.what == "kernel_norm"].set_index("run")["value"]
    rows = rows[rows.what.str.startswith("errors/")]
    parts = rows.what.str.split("/", expand=True).reindex(columns=range(3)).astype(object)
    rows = rows.assign(method=parts[1], kernel=parts[1].replace(METHODS), what=parts[2])
    shares = rows[rows.what == NTK]
    shares = shares.assign(what="share", value=shares["value"] / shares["run"].map(norms))
    rows = pandas.concat([rows, c.with_cells(shares)], ignore_index=True)
    run = rows["run"] + " (" + rows.method + ")"
    return rows.assign(run=run, place="here: " + rows.model)


def in_memory(runs: Frame) -> Frame:
    """Language models compressed in memory."""
    rows = c.evaluated(c.need(runs, "method", "ratio", "canonical", "spare"), "method")
    names = c.label(rows, fused, "method", "canonical", "spare").where(rows.ratio != 0, "whole")
    seed = rows.seed.where(rows.method.isin(DRAWN))
    rows = rows.assign(seed=seed, names=names, place="here")
    return rows.sort_values(["model", "ratio"], kind="stable")


def fused(method: str, canonical: Any, spare: Any) -> str:
    """Name of a fusion: "fusion, canonical", "fusion, 5 spared"."""
    if canonical is True:
        return f"{method}, canonical"
    return f"{method}, {spare} spared" if spare and spare == spare else f"{method}"


def recovered(runs: Frame) -> Frame:
    """The last measurement of language models that were compressed or pruned and then trained."""
    keys = ("fuse.method", "fuse.canonical", "fuse.spare", "prune.criterion", "prune.compensation")
    rows = c.need(runs, "recover.kind", "recover.base", "recover.steps", "stages", *keys)
    rows = rows[rows["run"].str.fullmatch(r".*[/_]score") & rows["recover.kind"].notna()]
    for stage in ("fuse", "prune"):  # in the config of a job that leaves that stage out, too
        out = ~rows.stages.map(lambda stages, name=stage: name in (stages or ())).astype(bool)
        rows.loc[out, [name for name in rows if name.startswith(f"{stage}.")]] = None
    method = c.label(rows, recovered_from, *keys)
    steps = c.label(rows, "{:g}".format, "recover.steps")
    model = model_of(rows["recover.base"])
    return rows.assign(model=model, method=method, steps=steps, place="here")


def recovered_from(method: Any, canonical: Any, spare: Any, criterion: Any, more: Any) -> str:
    """Name of the compression of a model before its further training."""
    if not isinstance(criterion, str):
        return fused(method, canonical, spare) if isinstance(method, str) else "whole"
    name = "entropy removal" if criterion == "entropy" else f"removal by {criterion}"
    return f"{name}, {more}" if more in ("state_ridge", "gram", "bias") else name


# ---- tables


def scores(runs: Frame, task: str = "") -> Frame:
    """Scores on one task, or all."""
    rows = finetunings(runs)
    return rows[(rows.what == SCORE) & ((rows.task == task) | (task == ""))]


def table_1(runs: Frame) -> Frame:
    rows = blocks(runs).rename(columns={"kernel": "Method"})
    return c.table(rows, ["Method", "place"], {"Output": BLOCK, "NTK": NTK})


def table_2(runs: Frame, names: dict[str, str] = NAMES["table_2"]) -> Frame:
    rows = default(scores(runs)).query("task in @names")
    return c.pivot(rows, {"Method": rows.method, "place": rows.place}, rows.task.map(names))


table_13 = partial(table_2, names=NAMES["table_13"])


def table_5(runs: Frame) -> Frame:
    rows = scores(runs, "sst2").query("method in ['Sketch', @FUSION]")
    rows = rows[rows[LAYERS].isin(["2-5"])]
    widths = c.label(rows, "{:g}".format, "neurons")
    labels = {"Intermediate Dimension": widths, "place": rows.place}
    return c.pivot(rows, labels, rows.method.replace(FUSION, "MLP Fusion"))


def table_10(runs: Frame) -> Frame:
    """Sizes of each data set, as the first run on it read them."""
    names = {"train/rows": "Train size", "validation/rows": "Test Size"}
    rows = finetunings(runs).query("what in @names").drop_duplicates(["task", "what"])
    labels = {"Dataset": rows.task.replace(NAMES["tasks"]), "place": "here: " + rows.model}
    return c.pivot(rows, labels, rows.what.map(names))


def table_12(runs: Frame) -> Frame:
    rows, label = default(scores(runs, "sst2")), "Method+Task-specific Fine-tuning"
    rows = rows[rows[STATES] == "block"]
    names = rows.method.str.removesuffix(", tuned").replace(TUNED["block"], "MLP Fusion(Ours)")
    return c.pivot(rows, {label: names, "place": rows.place}, "Accuracy")


def table_14(runs: Frame) -> Frame:
    rows = default(scores(runs, "sst2"))
    names = rows[STATES].map(NAMES["kept"]).where(rows.method != FUSION, FUSION)
    rows = rows.assign(Methods=names)[(rows["compress.method"] == "fusion") & names.notna()]
    return c.pivot(rows, rows[["Methods", "place"]], "Accuracy")


def kernels(runs: Frame) -> Frame:
    rows = blocks(runs)
    return c.table(rows.assign(method=rows.kernel), ["model", "method", "place"], NAMES["kernels"])


def webnlg(runs: Frame) -> Frame:
    """BLEU and TER, in percent, of models trained on WebNLG, from the runs that evaluated them."""
    rows, parts = c.need(runs, "data.task", "steps"), NAMES["webnlg"]
    rows = rows[(rows["data.task"] == "webnlg") & rows.what.isin(["bleu", "ter"])]
    labels = {"model": rows.model, "steps": rows.steps.astype(str), "place": "here: " + rows.model}
    made = c.pivot(rows, labels, rows.what.str.upper() + " " + rows.task.map(parts))
    return made.reindex(columns=[f"{x} {y}" for x in ("BLEU", "TER") for y in parts.values()])


def minus(rows: Frame, base: str, index: list[str]) -> Any:
    """Paired differences by seed from a method's scores, each at its learning rate."""
    rows = rows[rows.what == SCORE]
    return c.against(rows, default(rows[rows.method == base]), index, ON, FREE)


def paired(runs: Frame) -> Frame:
    rows, index = finetunings(runs), ["task", "method", "place"]
    columns = {"score": SCORE, "Δ vs fusion": minus(rows, FUSION, index)}
    columns |= {"Δ vs whole": minus(rows, "whole", index), "parameters": "parameters"}
    return c.table(rows, index, columns)


def untrained(runs: Frame) -> Frame:
    rows = in_memory(runs)
    rows = rows.assign(method=rows.names, share=c.label(rows, "{:g}".format, "ratio"))
    columns = {"NLL": "nll", "perplexity": "perplexity", "inertia share": "inertia_share"}
    return c.table(rows, ["model", "method", "share", "place"], columns)


def after_recovery(runs: Frame) -> Frame:
    rows, index = recovered(runs), ["model", "steps", "method", "place"]
    losses, columns = rows[rows.what == "nll"], {"NLL": "nll", "perplexity": "perplexity"}
    for name in ("whole", "entropy removal"):
        base, on = losses[losses.method == name], ["model", "steps"]
        columns[f"Δ vs {name}"] = c.against(losses, base, index, on, FREE, c.paired_units)
    return c.table(rows, index, columns)


# ---- figures


def figure_4(runs: Frame) -> Frame:
    rows = scores(runs, "sst2")
    rows = rows[rows["tune.kind"].isna() & rows["compress.ratio"].isin([0.75])]
    rows = rows[rows.groupby(["method", "chosen", "seed"])["layers"].transform("nunique") > 1]
    away = (*STAGES, "size", "neurons", RATE)
    rows = rows.drop(columns=[name for name in rows if name.startswith(away)])
    return c.points(rows, "accuracy (%)", rows.task, rows.method + rows.chosen, "layers")


def figure_5(curves: Frame) -> Frame:
    rows = finetunings(curves)
    rows = rows.query("task == 'sst2' and method == @FUSION and what == 'train/loss'")
    return c.points(rows, "training loss", rows.task, rows.place.str.removeprefix("here: "))


# ---- claims


def of_paper(key: str, place: int, sign: int, but: tuple[str, ...] = ()) -> Frame:
    """Each method minus fusion in a table of means and spreads over three runs, with z [ours]."""
    cells = {row[0]: row[place].split(" ± ") for row in TABLES[key]["rows"]}
    mean, spread = map(float, cells.pop(FUSION))
    parts = []
    for name, (other, own) in cells.items():
        apart = float(other) - mean
        z = sign * apart / ((spread**2 + float(own) ** 2) / 3) ** 0.5
        told = HOLDS if z > 1.96 else FAILS if z < -1.96 else OPEN
        if name not in but:
            parts.append(("RoBERTa", name, f"{apart:+,.2f}, z {z:.1f}", told))
    return on_paper(parts)


def closest_kernel(runs: Frame) -> Frame:
    rows = blocks(runs).query("what == @NTK and method not in ['structured', 'bias_only']")
    rows = rows.assign(part=rows.method, run_on=rows.model)
    base, free = rows[rows.method == "fusion"], ("method", "kernel", "part")
    found = c.against(rows, base, c.CLAIM, ["run_on"], free)
    return pandas.concat([of_paper("table_1", 2, 1), c.judged(found)])


def above_all(runs: Frame) -> Frame:
    rows = default(scores(runs, "sst2")).query("`tune.kind`.isna() and method != 'whole'")
    rows = rows.assign(part=rows.method, run_on=rows.task + rows.chosen)
    paper = of_paper("table_2", 1, -1, ("RoBERTa", "+Task-specific Tuning"))
    return pandas.concat([paper, c.judged(minus(rows, FUSION, c.CLAIM), -1)])


def tuning(runs: Frame, tuned: str, base: str, sign: int) -> Frame:
    """Compare a method with layer-wise tuning with the method alone."""
    rows = default(scores(runs, "sst2"))
    rows = rows.assign(part="tuned", run_on=rows.task + rows.chosen)
    ours, other = (rows[rows.method == x] for x in (tuned, base))
    return c.judged(c.against(ours, other, c.CLAIM, ON, FREE), sign)


tuning_helps = partial(tuning, tuned=TUNED["block"], base=FUSION, sign=1)
tuning_helps_sketch = partial(tuning, tuned="Sketch, tuned", base="Sketch", sign=-1)


def above_half_depth(runs: Frame) -> Frame:
    rows = scores(runs, "sst2")
    rows = rows.assign(part=rows.method + rows["size"], run_on=rows.task + rows.chosen)
    half = rows[rows.method.str.startswith("first ")]
    ours = rows[(rows.layers < 5) & (rows.method == FUSION)]  # of six; the paper: < 10 of twelve
    return c.judged(c.against(ours, half, c.CLAIM, ON, FREE))


CURVES = ("train/loss",)
