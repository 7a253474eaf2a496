"""MLP Fusion: its tables and figures, with what was measured here."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame

NAMES = printed("mlp_fusion")["names"]
METHODS, TUNED = NAMES["methods"], NAMES["tuned"]  # the paper's names, or ours
SCORE, FUSION = "score", METHODS["fusion"]
NTK, BLOCK = "ntk_error", "block_error"
STATES, LAYERS = "tune.losses.layerwise.states", "compress.layers"
FREEZE = "finetune.freeze"  # only jobs of configs/switch.py have it
METHOD = ("compress.method", "mask_1.kind", "truncate.blocks", "tune.kind", STATES)
# In which methods differ: stages of a job, and the learning rate, chosen for each method.
STAGES = ("compress.", "tune.", "truncate.", "finetune.", "fuse.", "prune.", "stages")
STAGES += tuple(f"{kind}_{i}." for kind in ("mask", "round") for i in (1, 2, 3))
RATE = "optimizer.learning_rate"
FREE = (*STAGES, RATE, "method", "size", "layers", "neurons")
ON = ["model", "task", "chosen"]
UNRANKED = ["structured", "bias_only", "random", "random_bias_only"]  # not in the paper's Table I
DRAWN = ["fusion", "merged", "sqrt", "sketch", "hybrid_sketch", "mmd"]  # whose seed matters


# ---- runs


def finetunings(runs: Frame) -> Frame:
    """Last stages of jobs on labelled rows, of dense models."""
    rows = jobs(runs)
    return rows[~rows.switch]


def jobs(runs: Frame) -> Frame:
    """Last stages of jobs on labelled rows: "score" in percent, of the last evaluation.

    Runs of less than three epochs choose the learning rate, which their "place" has. "switch": of
    models with experts (configs/switch.py).
    """
    more = ("compress.ratio", LAYERS, "mask_3.layers", "finetune.base", "epochs", RATE)
    rows = c.need(runs, *METHOD, *more, FREEZE, "objective", "data.task")
    widths = rows[rows.what == "ffn_widths_after"]
    widths = widths.groupby(widths["run"].map(os.path.dirname))["value"].min()
    rows = rows[rows["run"].str.fullmatch(r".*[/_]finetune") & (rows.objective == "labels")]
    base = rows["finetune.base"].str.removesuffix(",lora")
    rows = c.without_idle_losses(rows.assign(model=model_of(base)))
    rate = ", learning rate " + rows[RATE].astype(str)
    chosen = ", " + c.label(rows, "epochs {:g}".format, "epochs") + rate.where(rows.epochs < 3, "")
    size = c.label(rows, size_of, "compress.ratio", LAYERS)
    rows = rows.assign(size=size, chosen=chosen, task=rows["data.task"])
    rows["switch"] = rows[FREEZE].notna()
    rows["method"] = c.label(rows, method_of, *METHOD)
    rows.loc[rows["finetune.base"] != base, "method"] = "LoRA"
    rows["layers"] = rows[LAYERS].fillna(rows["mask_3.layers"]).map(count_of)
    rows["neurons"] = rows["run"].map(os.path.dirname).map(widths)
    rows["place"] = "here: " + rows.model + size + chosen
    return pandas.concat([rows, c.final_scores(rows).assign(what=SCORE)], ignore_index=True)


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


def fused(method: str, canonical: Any, spare: Any) -> str:
    """Name of a fusion: "fusion, canonical", "fusion, 5 spared"."""
    if canonical is True:
        return f"{method}, canonical"
    return f"{method}, {spare} spared" if spare and spare == spare else f"{method}"


def recovered(runs: Frame) -> Frame:
    """The last measurement of language models that were compressed or pruned and then trained."""
    keys = ("fuse.method", "fuse.canonical", "fuse.spare", "prune.criterion", "prune.compensation")
    keys_of_stage = [f"recover.{x}" for x in ("kind", "base", "steps", "export.weights")]
    rows = c.need(runs, *keys_of_stage, "stages", *keys)
    rows = rows[rows["run"].str.fullmatch(r".*[/_]score") & rows["recover.kind"].notna()]
    for stage in ("fuse", "prune"):  # in the config of a job that leaves that stage out, too
        out = ~rows.stages.map(lambda stages, name=stage: name in (stages or ())).astype(bool)
        rows.loc[out, [name for name in rows if name.startswith(f"{stage}.")]] = None
    best = rows["recover.export.weights"] == "best"  # the last weights depend on no evaluation
    rows.loc[~best, [name for name in rows if name.startswith("recover.eval.")]] = None
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


def scores(finetunings: Frame) -> Frame:
    """Scores on all tasks, in percent."""
    return finetunings[finetunings.what == SCORE]


def switch_scores(runs: Frame) -> Frame:
    """Accuracies of models with experts, in percent; "place" marks those of one answer alone."""
    rows = jobs(runs)
    rows = rows[rows.switch & (rows.what == "validation/accuracy")]
    rows = c.in_percent(c.last(rows))
    same = (rows["value"] - rows.task.map(NAMES["majority"])).abs() <= 0.5
    names = rows.method.replace("whole", "Switch Transformer")
    place = rows.place + same.map({True: ", the majority answer", False: ""})
    return rows.assign(method=names, place=place)


def switch_costs(runs: Frame) -> Frame:
    """Benchmarks of compressed models with experts: "method", "program", and what was measured."""
    rows = c.need(runs, "name", "batch", "seq_len", "optimizer")
    rows = rows[(rows.name == "fusion") & rows.model.astype(str).str.startswith("switch")]
    parts = rows.what.str.extract(r"^(?:programs|models|ratios)/(\w+)(?:, (\w+))?(?:/(\w+)| / .*)$")
    names = dict(NAMES["methods"]) | {"whole": "Full", "mlp_lora": "LoRA", "fusion": "MLP Fusion"}
    method = parts[0].map(names | {"structured": "Structured Pruning"})
    what, size = parts[2].fillna("ratio"), rows.batch.astype(str) + " x " + rows.seq_len.astype(str)
    place = "here: " + size + " tokens, " + rows.optimizer.astype(str)
    run = rows["run"] + " (" + method + ")"
    # A benchmark may measure one method, always beside the whole model.
    rows = rows.drop(columns=["methods", "calls", "repetitions"], errors="ignore").copy()
    rows = rows.assign(run=run, method=method, program=parts[1], what=what, place=place)
    return rows[rows.method.notna()]


def sst2(scores: Frame) -> Frame:
    """Scores on SST-2, with the labels of a claim."""
    rows = scores[scores.task == "sst2"]
    return rows.assign(part=rows.method + rows["size"], run_on=rows.task + rows.chosen)


def table_1(blocks: Frame) -> Frame:
    rows = blocks.rename(columns={"kernel": "Method"})
    return c.table(rows, ["Method", "place"], {"Output": BLOCK, "NTK": NTK})


def table_2(scores: Frame, names: dict[str, str] = NAMES["table_2"]) -> Frame:
    rows = default(scores).query("task in @names")
    return c.pivot(rows, {"Method": rows.method, "place": rows.place}, rows.task.map(names))


table_13 = partial(table_2, names=NAMES["table_13"])


def table_3(switch_scores: Frame) -> Frame:
    rows = switch_scores[switch_scores[FREEZE].map(len) > 0]
    tasks = rows.task.map(NAMES["tasks"])
    return c.pivot(rows[tasks.notna()], {"Method": rows.method, "place": rows.place}, tasks)


def table_6(switch_scores: Frame) -> Frame:
    rows = switch_scores.query("method == 'Switch Transformer'")
    frozen = rows[FREEZE].map(len).map(lambda n: "Frozen" if n else "Not-frozen")
    tasks = rows.task.replace(NAMES["tasks"])
    rows = rows.drop(columns=[FREEZE, "freeze"], errors="ignore")
    return c.pivot(rows, {"Task": tasks, "place": rows.place}, frozen)


def costs(rows: Frame, program: str) -> Frame:
    """Sizes of models, and operations, memory and time of one of their programs."""
    scales = {"temporary_mb": 1e-3, "gflop": 1e-3, "parameters": 1e-6, "trainable": 1e-6}
    rows = rows[rows.program.isin([program]) | rows.program.isna()]
    scale = rows.what.map(scales).fillna(1.0)
    rows = c.with_cells(rows.assign(value=rows["value"] * scale))
    rows = rows.rename(columns={"method": "Method"})
    return c.table(rows, ["Method", "place"], NAMES["costs"])


def table_7(switch_costs: Frame) -> Frame:
    return costs(switch_costs, "step")


def table_8(switch_costs: Frame) -> Frame:
    return costs(switch_costs, "forward")


def table_5(sst2: Frame) -> Frame:
    rows = sst2.query("method in ['Sketch', @FUSION] and `compress.layers` == '2-5'")
    widths = c.label(rows, "{:g}".format, "neurons")
    labels = {"Intermediate Dimension": widths, "place": rows.place}
    return c.pivot(rows, labels, rows.method.replace(FUSION, "MLP Fusion"))


def table_10(finetunings: Frame) -> Frame:
    """Sizes of each data set, as the first run on it read them."""
    names = {"train/rows": "Train size", "validation/rows": "Test Size"}
    rows = finetunings.query("what in @names").drop_duplicates(["task", "what"])
    labels = {"Dataset": rows.task.replace(NAMES["tasks"]), "place": "here: " + rows.model}
    return c.pivot(rows, labels, rows.what.map(names))


def table_12(sst2: Frame) -> Frame:
    rows, label = default(sst2[sst2[STATES] == "block"]), "Method+Task-specific Fine-tuning"
    names = rows.method.str.removesuffix(", tuned").replace(TUNED["block"], "MLP Fusion(Ours)")
    return c.pivot(rows, {label: names, "place": rows.place}, "Accuracy")


def table_14(sst2: Frame) -> Frame:
    rows = default(sst2[sst2["compress.method"] == "fusion"])
    seeds = rows.seed[rows.method != FUSION]  # a mean over further seeds would not compare
    rows = rows[rows.seed.isin(seeds)]
    names = rows[STATES].map(NAMES["kept"]).where(rows.method != FUSION, FUSION)
    rows = rows.assign(Methods=names)[names.notna()]
    return c.pivot(rows, rows[["Methods", "place"]], "Accuracy")


def kernels(blocks: Frame) -> Frame:
    rows = blocks.assign(method=blocks.kernel)
    return c.table(rows, ["model", "method", "place"], NAMES["kernels"])


def webnlg(runs: Frame) -> Frame:
    """BLEU and TER, in percent, of what other runs asked of models trained on WebNLG."""
    rows = c.need(runs, "data.task", "steps")
    rows = rows[(rows["data.task"] == "webnlg") & rows.what.isin(["bleu", "ter"])]
    labels = {"model": rows.model, "steps": rows.steps.astype(str), "place": "here: " + rows.model}
    return c.pivot(rows, labels, rows.what.str.upper() + " " + rows.task.map(NAMES["webnlg"]))


def minus(rows: Frame, base: str, index: list[str]) -> Any:
    """Paired differences by seed from a method's scores, each at its learning rate."""
    rows = rows[rows.what == SCORE]
    return c.against(rows, default(rows[rows.method == base]), index, ON, FREE)


def paired(finetunings: Frame) -> Frame:
    index = ["task", "method", "place"]
    fusion, whole = (minus(finetunings, base, index) for base in (FUSION, "whole"))
    names = dict.fromkeys(TUNED.values(), FUSION)
    rows = finetunings[finetunings.what == SCORE]
    rows = rows.assign(plain=rows.method.replace(names).str.removesuffix(", tuned"))
    tuned = rows.plain != rows.method
    untuned = c.against(rows[tuned], rows[~tuned], index, [*ON, "size", "plain"], FREE)
    columns = {"score": SCORE, "Δ vs fusion": fusion, "Δ vs whole": whole}
    columns["Δ vs untuned"] = untuned
    return c.table(finetunings, index, columns | {"parameters": "parameters"})


def untrained(runs: Frame) -> Frame:
    """Language models compressed in memory."""
    rows = c.evaluated(c.need(runs, "method", "ratio", "canonical", "spare"), "method")
    names = c.label(rows, fused, "method", "canonical", "spare").where(rows.ratio != 0, "whole")
    seed, share = rows.seed.where(rows.method.isin(DRAWN)), c.label(rows, "{:g}".format, "ratio")
    rows = rows.assign(method=names, seed=seed, share=share, place="here")
    rows = rows.sort_values(["model", "ratio"], kind="stable")
    columns = {"NLL": "nll", "perplexity": "perplexity", "inertia share": "inertia_share"}
    return c.table(rows, ["model", "method", "share", "place"], columns)


def after_recovery(recovered: Frame) -> Frame:
    index, columns = ["model", "steps", "method", "place"], {"NLL": "nll"}
    columns["perplexity"] = "perplexity"
    losses = recovered[recovered.what == "nll"]
    for name in ("whole", "entropy removal"):
        base, on = losses[losses.method == name], ["model", "steps"]
        columns[f"Δ vs {name}"] = c.against(losses, base, index, on, FREE, c.paired_units)
    return c.table(recovered, index, columns)


# ---- figures


def figure_4(sst2: Frame) -> Frame:
    """Accuracy by the number of fused layers; models without fusion are level lines."""
    rows = sst2[sst2["tune.kind"].isna()]
    fused = rows[rows["compress.ratio"].isin([0.75])]
    others = rows[rows["compress.method"].isna() & rows["mask_1.kind"].isna()]
    level = [others.assign(layers=x) for x in (fused.layers.min(), fused.layers.max())]
    rows = pandas.concat([fused, *level], ignore_index=True)
    names = rows.method.replace({FUSION: "MLP Fusion", "whole": "dense model"}) + rows.chosen
    return c.points(rows, "accuracy (%)", rows.task, names, "layers", (*FREE, "place"), least=2)


def figure_5(curves: Frame) -> Frame:
    rows = finetunings(curves)
    rows = rows.query("task == 'sst2' and method == @FUSION and what == 'train/loss'")
    return c.points(rows, "training loss", rows.task, rows.place.str.removeprefix("here: "))


# ---- claims


def against_fusion(rows: Frame, on: list[str], sign: int) -> Frame:
    """Methods against fusion; a method is a part."""
    rows = rows.assign(part=rows.method)
    base = rows[rows.method.isin([FUSION, "fusion"])]
    return c.judged(c.against(rows, base, c.CLAIM, on, (*FREE, "kernel", "part")), sign)


def closest_kernel(blocks: Frame) -> Frame:
    rows = blocks.query("what == @NTK and method not in @UNRANKED")
    return against_fusion(rows.assign(run_on=rows.model), ["run_on"], 1)


def above_all(sst2: Frame) -> Frame:
    rows = default(sst2).query("`tune.kind`.isna() and method != 'whole'")
    return against_fusion(rows, ON, -1)


def tuning(sst2: Frame, tuned: str, base: str, sign: int) -> Frame:
    """A method tuned layer by layer against the method alone."""
    rows = default(sst2).assign(part="tuned")
    return c.claim(rows, rows.method == tuned, rows.method == base, ON, FREE, sign)


tuning_helps = partial(tuning, tuned=TUNED["block"], base=FUSION, sign=1)
tuning_helps_sketch = partial(tuning, tuned="Sketch, tuned", base="Sketch", sign=-1)


def above_half_depth(sst2: Frame) -> Frame:
    ours = (sst2.layers < 5) & (sst2.method == FUSION)  # of six; the paper: < 10 of twelve
    return c.claim(sst2, ours, sst2.method.str.startswith("first "), ON, FREE)


CURVES = ("train/loss",)
