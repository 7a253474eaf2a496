"""MLP Fusion: its tables and figures of dense models, beside what was measured here."""

from __future__ import annotations

import os

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.p32 import on_paper
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN
from ffn_heterogeneity.report.tidy import Frame, Match
from ffn_heterogeneity.report.versus import versus

PRINTED = printed("mlp_fusion")
BEST, SCORE = "validation/best/", "score"
# What a fine-tuning was compressed by; names of stages' groups.
METHOD = ["compress.method", "compress.ratio", "compress.layers", "mask_1.kind", "mask_3.ratio"]
METHOD += ["mask_3.layers", "truncate.blocks"]
TUNING = ["tune.kind", "tune.losses.layerwise.states", "tune.epochs"]
# And the learning rate, which is chosen for each method.
CHOSEN = (*METHOD, *TUNING, "compress.n_init", "compress.canonical", "optimizer.learning_rate")
SHOWN = ("data.task", *CHOSEN)
SAME = [*SHOWN, "finetune.base", "epochs", "batch_size", "optimizer.", "dropout", "compute_dtype"]
FUSION = {"compress.method": "fusion", "tune.kind": None}
WHOLE = {"compress.method": None, "mask_1.kind": None, "truncate.blocks": [0, None]}
UNTUNED, TUNED = {"tune.kind": None}, {"tune.losses.layerwise.states": "block"}
WIDTHS, THREE_QUARTERS = ["sketch", "fusion"], {"compress.ratio": [0.75, None]}
DEFAULT = {**THREE_QUARTERS, "compress.layers": ["2-5", None]}  # of MiniLM's six layers
# Of language models: how they were made smaller, and what is equal beside it.
REDUCED = ("fuse.method", "fuse.canonical", "fuse.spare", "fuse.ratio")
REDUCED += ("prune.criterion", "prune.compensation")
RECOVERED = (*REDUCED, "model", "fuse.n_init", "prune.ratio", "recover.", "score.")
SETTINGS = dict.fromkeys((*REDUCED, "fuse.n_init", "prune.ratio", "stages"))
SETTINGS |= dict.fromkeys(("recover.kind", "recover.base"))
SETTINGS |= dict.fromkeys((*SAME, "analysis", "method", "objective", "ratio", "canonical", "spare"))
DRAWN = ["fusion", "merged", "sqrt", "sketch", "hybrid_sketch", "mmd"]  # whose seed matters
PARTS = {"webnlg_seen": "S", "webnlg_unseen": "U", "webnlg": "A"}  # Table IV's letters
NTK, FFN, BLOCK = "ntk_error", "output_error", "block_error"


# ---- runs


def finetunings(rows: Frame) -> Frame:
    """Last stages of jobs on labelled rows: "score" in percent, of the best evaluation."""
    last = rows["run"].str.fullmatch(r".*[/_]finetune") & (rows.objective == "labels")
    widths = rows[rows.what == "ffn_widths_after"]
    widths = widths.groupby(widths["run"].map(os.path.dirname))["value"].min()
    rows = rows[last]
    rows = rows.assign(model=model_of(rows["finetune.base"]))
    rows = tidy.records(rows, SAME, SHOWN, {"objective": tidy.ANY})
    best = rows[rows.what.str.startswith(BEST)]
    rows = pandas.concat([rows, best.assign(what=SCORE, value=100 * best["value"], low=None)])
    neurons = rows["run"].map(os.path.dirname).map(widths).astype(object)
    layers = rows["compress.layers"].fillna(rows["mask_3.layers"]).map(count_of).astype(object)
    return rows.assign(neurons=neurons, **{"compressed layers": layers}).reset_index(drop=True)


def model_of(base: pandas.Series) -> pandas.Series:
    """The model of a job, "x:<model>,<task>": its last stage reads another stage's."""
    return base.str.extract(r":(.+),", expand=False).map(os.path.basename)


def count_of(layers: object) -> float | None:
    """The number of layers that "2-5" or "0,3" names; None of what does not say."""
    parts = [part.split("-") for part in str(layers).split(",")]
    if not all(end.isdigit() for part in parts for end in part):
        return None
    return float(sum(int(part[-1]) - int(part[0]) + 1 for part in parts))


def blocks(rows: Frame) -> Frame:
    """Analyses of one block: a record a method, seeds those of the head and the method."""
    rows = rows[rows.analysis == "ntk"]
    norms = rows[rows.what == "kernel_norm"].set_index("run")["value"]
    rows = rows[rows.what.str.startswith("errors/")]
    apart = rows[rows.what.str.endswith(f"/{NTK}")]
    share = apart["value"] / apart["run"].map(norms)
    shares = apart.assign(what=apart.what.str.replace(NTK, "share"), value=share)
    rows = pandas.concat([rows, shares], ignore_index=True)
    parts = rows.what.str.split("/", expand=True).reindex(columns=range(3))
    run = rows["run"] + " (" + parts[1].astype(object) + ")"
    rows = rows.assign(method=parts[1].astype(object), what=parts[2], run=run)
    same = ("model", "method", "config.layer", "ratio", "n_init", "max_rows", "data.")
    return tidy.records(rows, same, ("model", "method"), {"analysis": tidy.ANY})


def in_memory(rows: Frame) -> Frame:
    """Language models compressed in memory, and their perplexity."""
    rows = rows[rows.method.notna() & rows["run"].isin(rows[rows.what == "perplexity"]["run"])]
    shown = ("model", "method", "ratio", "canonical", "spare")
    same = (*shown, "n_init", "steps", "text", "token_ids", "window", "max_windows", "bos")
    return tidy.records(rows, same, shown, {"method": DRAWN})


def recovered(rows: Frame) -> Frame:
    """Language models compressed, or neurons removed, then trained on: their last measurement."""
    rows = rows[rows["run"].str.fullmatch(r".*[/_]score") & rows["recover.kind"].notna()]
    rows = rows.assign(model=model_of(rows["recover.base"]))
    for stage in ("fuse", "prune"):  # in the config of a job that leaves that stage out, too
        left_out = ~rows.stages.map(lambda stages, name=stage: name in (stages or ()))
        rows.loc[left_out, [name for name in RECOVERED if name.startswith(f"{stage}.")]] = None
    return tidy.records(rows, RECOVERED, ("model", *(x for x in RECOVERED if x[-1] != ".")))


def answering(rows: Frame) -> Frame:
    """Models trained on WebNLG: BLEU and TER, in percent, of what others asked of them."""
    rows = rows[(rows["data.task"] == "webnlg") & rows.what.isin(["bleu", "ter"])]
    rows = rows.assign(what=rows.what.str.upper() + " " + rows.task.map(PARTS))
    return tidy.records(rows, ("model", "steps", "optimizer."), ("model", "steps"))


# ---- tables


def scores(runs: Runs, match: Match, **columns: str) -> Frame:
    rows = tidy.matching(runs["finetuned"], match)
    return rows[rows.what == SCORE].assign(**columns)


def table_1(runs: Runs) -> Frame:
    return tidy.cells(runs["kernel"], {"Output": BLOCK, "NTK": NTK})


def table_2(runs: Runs) -> Frame:
    return scores(runs, DEFAULT)


def table_5(runs: Runs) -> Frame:
    own = {"compress.layers": DEFAULT["compress.layers"], "compress.method": WIDTHS}
    rows = scores(runs, {"data.task": "sst2", **own, **UNTUNED})
    return rows.assign(neurons=rows.neurons.map("{:g}".format))


def table_10(runs: Runs) -> Frame:
    rows = runs["finetuned"].drop_duplicates(["data.task", "what", "split"])
    rows = rows.assign(differs="")
    return tidy.cells(rows, {"Train size": "train/rows", "Test Size": "validation/rows"})


def table_12(runs: Runs) -> Frame:
    return scores(runs, {"data.task": "sst2", **TUNED, **DEFAULT}, column="Accuracy")


def table_13(runs: Runs) -> Frame:
    return scores(runs, {"data.task": ["stsb", "qnli"], **DEFAULT})


def table_14(runs: Runs) -> Frame:
    kept = {"tune.losses.layerwise.states": ["ffn", "gradient"]}
    parts = (FUSION, {"compress.method": "fusion", **kept})
    rows = [scores(runs, {"data.task": "sst2", **DEFAULT, **match}) for match in parts]
    return pandas.concat(rows).assign(column="Accuracy")


def kernels(runs: Runs) -> Frame:
    columns = {"NTK": NTK, "of its norm": "share", "NTK of SGD": "sgd_ntk_error", "FFN output": FFN}
    columns |= {"of words": f"{FFN}_words", "block output": BLOCK}
    columns |= {"of words (block)": f"{BLOCK}_words", "kept share": "kept_share"}
    return tidy.cells(runs["kernel"], columns)


def webnlg(runs: Runs) -> Frame:
    columns = [f"{name} {part}" for name in ("BLEU", "TER") for part in PARTS.values()]
    return tidy.cells(runs["answering"], dict(zip(columns, columns, strict=True)))


def against(runs: Runs, these: Match, base: Match) -> Frame:
    return versus(runs["finetuned"], SCORE, these, base, SAME, CHOSEN)


def paired(runs: Runs) -> Frame:
    rows = runs["finetuned"]
    columns = {"score": SCORE, "less fusion": against(runs, {}, {**FUSION, **DEFAULT})}
    columns |= {"less whole": against(runs, {}, WHOLE), "parameters": "parameters"}
    return tidy.cells(rows, columns)


def untrained(runs: Runs) -> Frame:
    columns = {"NLL": "nll", "perplexity": "perplexity", "inertia share": "inertia_share"}
    return tidy.cells(runs["untrained"], columns)


def after_recovery(runs: Runs) -> Frame:
    every, own = runs["recovered"], ("fuse.", "prune.")
    base = {"whole": {"fuse.method": None, "prune.criterion": None}}
    base["entropy removal"] = {"prune.criterion": "entropy"}
    columns = {"NLL": "nll", "perplexity": "perplexity"}
    for name, match in base.items():
        columns[f"less {name}"] = versus(every, "nll", {}, match, RECOVERED, own, "units")
    return tidy.cells(every, columns)


# ---- figures


def figure_4(runs: Runs) -> Frame:
    rows = scores(runs, {"data.task": "sst2", **UNTUNED, **THREE_QUARTERS}, column="accuracy (%)")
    by = rows.groupby(["compress.method", "seed"])["compressed layers"].transform("nunique")
    return rows[by > 1].assign(differs="")


def figure_5(runs: Runs) -> Frame:
    rows = tidy.matching(runs["curves"], {"data.task": "sst2", **FUSION})
    rows = rows[rows.what == "train/loss"].assign(column="training loss")
    return rows.assign(neurons=rows["compress.ratio"].map(lambda x: f"{1 - x:.3g} of the"))


# ---- claims


def of_paper(key: str, place: int, sign: int, but: tuple[str, ...] = ()) -> Frame:
    """Each method less fusion in a table of means and spreads over three runs, with z [ours]."""
    cells = {row[0]: row[place].split(" ± ") for row in PRINTED["tables"][key]["rows"]}
    mean, spread = map(float, cells.pop("MLP Fusion (Ours)"))
    parts = []
    for name, (other, own) in cells.items():
        apart = float(other) - mean
        z = sign * apart / ((spread**2 + float(own) ** 2) / 3) ** 0.5
        told = HOLDS if z > 1.96 else FAILS if z < -1.96 else OPEN
        if name not in but:
            parts.append(("RoBERTa", name, f"{apart:+,.2f}, z {z:.1f}", told))
    return on_paper(parts)


def with_paper(paper: Frame, ours: Frame, key: str) -> Frame:
    ours = tidy.claimed(ours, PRINTED["claims"][key])
    return pandas.concat([paper, ours], ignore_index=True)


def closest_kernel(runs: Runs) -> Frame:
    others = ["sqrt", "merged", "sketch", "hybrid_sketch", "mmd", "svd", "unstructured"]
    same = ("model", "config.layer", "ratio", "data.")
    ours = versus(runs["kernel"], NTK, {"method": others}, {"method": "fusion"}, same)
    return with_paper(of_paper("table_1", 2, 1), ours, "closest_kernel")


def above_all(runs: Runs) -> Frame:
    rows = tidy.matching(runs["finetuned"], {"data.task": "sst2", **UNTUNED, **DEFAULT})
    rows = rows[~rows.record.isin(tidy.matching(rows, WHOLE).record)]
    ours = versus(rows, SCORE, {}, {**FUSION, **DEFAULT}, SAME, CHOSEN)
    paper = of_paper("table_2", 1, -1, ("RoBERTa", "+Task-specific Tuning"))
    return with_paper(paper, ours, "above_all")


def tuning(runs: Runs, method: str) -> Frame:
    own = {"data.task": "sst2", "compress.method": method, **DEFAULT}
    return against(runs, own | TUNED, own | UNTUNED)


def tuning_helps(runs: Runs) -> Frame:
    return tuning(runs, "fusion")


def tuning_helps_sketch(runs: Runs) -> Frame:
    return tuning(runs, "sketch")


def above_half_depth(runs: Runs) -> Frame:
    return against(runs, {"data.task": "sst2", **FUSION}, {"truncate.blocks": tidy.ANY})


KINDS = {"finetuned": finetunings, "kernel": blocks}
KINDS |= {"untrained": in_memory, "recovered": recovered, "answering": answering}
CURVE_KINDS = {"curves": finetunings}
CURVES = ("train/loss",)
