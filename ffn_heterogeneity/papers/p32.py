"""P-32 (depth-wise pooling): its tables and figures, with what was measured here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN, interval, verdict

PRINTED = printed("p32")
TABLES, MAJORITY = PRINTED["tables"], PRINTED["majority"]
TASKS = TABLES["table_6"]["columns"][:-1]
METHODS = PRINTED["methods"]  # pooling -> the paper's name, or ours
OWN_RATE = "P-32, lambda at the model's rate"
SCORE, TEST, DEPTH, PEAK = "score", "test score", "max |w - 1/L|", "peak layer"
POOLED = ("pooling", "lambda_rate", "method", "rate", "place", "order")  # in which poolings differ
DATA = ["model", "data.task", "data.fraction"]
WHOLE = [1.0, 0.2727, 0.4016]  # decoders read 1,000 rows of MRPC or RTE: all, for this report
INDEX = ["model", "task", "method", "place"]


# ---- runs


def classifiers(runs: Frame, whole: bool = False) -> Frame:
    """Runs on labeled rows: the best "score" in percent, and the layer weights' distance from 1/L.

    Args:
      whole: only runs on all blocks, without those that truncate to the first n of n blocks.
    """
    keys = ("objective", "pooling", "lambda_rate", "final_norm", "prepare", "data.task")
    rows = c.need(runs, *keys, "truncate.blocks", "data.fraction")
    rows = c.without_idle_losses(rows[(rows.objective == "labels") & rows.pooling.notna()])
    learned = rows.lambda_rate.notna() & (rows.pooling == "p32")
    method = rows.pooling.map(METHODS).where(learned | (rows.pooling != "p32"), OWN_RATE)
    rate = (", lambda_rate " + rows.lambda_rate.astype(str)).where(learned, "")
    some = c.label(rows, ", {:.2g} of the rows".format, "data.fraction")
    some = some.where(rows["data.fraction"] != 1, "")
    rows = rows.assign(method=method, rate=rate, task=rows["data.task"], place="here" + some + rate)
    rows = pandas.concat([rows, *scores_of(rows), *weights_of(rows)], ignore_index=True)
    layers = rows[rows.what == "depth_weights"].groupby("model").layer.max()
    every = rows.model.map(layers).astype(object)
    all_blocks = rows["truncate.blocks"].fillna(0).eq(0)
    cut = (~all_blocks & (rows["truncate.blocks"] == every)).map({True: ", truncated", False: ""})
    rows["truncate.blocks"] = rows["truncate.blocks"].where(~all_blocks, every)
    rows = rows.assign(cut=cut, order=rows.pooling.map(list(METHODS).index))
    chosen: Frame = rows[all_blocks] if whole else rows
    return chosen.sort_values(["model", "task", "order"], kind="stable")


def scores_of(rows: Frame) -> list[Frame]:
    """The task's metric where the best weights were saved, and the same metric on a test set."""
    best = rows[rows.what.str.startswith("validation/best/")]
    name = best.set_index("run").what.str.removeprefix("validation/best/")
    test = rows[rows.what == "test/" + rows["run"].map(name).astype(object)]
    return [c.in_percent(best.assign(what=SCORE)), c.in_percent(test.assign(what=TEST))]


def weights_of(rows: Frame) -> list[Frame]:
    """The largest distance of a layer's weight from 1/L, and the layer of the largest weight."""
    weights = rows[(rows.what == "depth_weights") & (rows.pooling != "average")]
    by_run, first = weights.groupby("run"), weights.drop_duplicates("run")
    apart = (weights["value"] - 1 / by_run.layer.transform("max").astype(float)).abs()
    apart = first["run"].map(apart.groupby(weights["run"]).max())
    peak = first["run"].map(by_run["value"].idxmax().map(weights.layer.astype(float)))
    pairs = ((DEPTH, apart), (PEAK, peak))
    return [first.assign(what=x, value=y, cell=y.astype(object), layer=pandas.NA) for x, y in pairs]


def whole(runs: Frame) -> Frame:
    """Runs on all blocks and rows."""
    rows = classifiers(runs, whole=True)
    return rows[rows["data.fraction"].isin(WHOLE)]


def minus(rows: Frame, method: str, base: str, index: list[str], what: str = SCORE) -> Any:
    """Paired differences by seed of a pooling's scores ("": all poolings) from another's."""
    rows = rows[rows.what == what]
    ours = rows[rows.method == method] if method else rows
    return c.against(ours, rows[rows.method == base], index, DATA, POOLED)


# ---- tables


def table_1(runs: Frame) -> Frame:
    """Sizes of each model, with the head of the first task that was run."""
    rows = whole(runs)
    rows = rows.query("method == 'Baseline' and what == 'parameters'").drop_duplicates("model")
    rows = rows.assign(Model=rows.model, place="here")
    names = {"truncate.blocks": "# Transformer Blocks", "value": "# Parameters"}
    return rows.set_index(["Model", "place"])[[*names]].rename(columns=names)


def by_task(rows: Frame, **labels: Any) -> Frame:
    """Scores, a column for each task.

    The mean of all nine stays empty: MNLI's second set is no column of one run.
    """
    rows = rows[rows.what == SCORE].assign(**labels)
    place = rows.place.str.replace(r"0\.\d+ of", "a part of", regex=True)
    return c.pivot(rows, {**labels, "place": place}, rows["data.task"])


def table_2(runs: Frame) -> Frame:
    rows = whole(runs)
    return by_task(rows, Model=rows.model, Method=rows.method.replace("P-32", "P-32 (ours)"))


def table_3(runs: Frame, adapter: bool = False) -> Frame:
    """The baseline on all rows, by its number of blocks."""
    rows = classifiers(runs).query("method == 'Baseline' and `data.fraction` == 1")
    lora = rows.prepare.map(lambda names: isinstance(names, tuple) and "lora" in names)
    rows = rows[lora.astype(bool) == adapter].sort_values("truncate.blocks", kind="stable")
    blocks = c.label(rows, "{:g}".format, "truncate.blocks")
    return by_task(rows, **{"Num Blocks": blocks, "place": "here: " + rows.model + rows.cut})


table_4 = partial(table_3, adapter=True)


def table_5(runs: Frame) -> Frame:
    """Sizes of each data set, as the first run of each model read it."""
    names = {"train/rows": "# Train Samples", "train/tokens_a_row": "Avg. Input Length"}
    rows = whole(runs).query("what in @names").drop_duplicates(["data.task", "model", "what"])
    labels = {"Dataset": rows["data.task"], "place": "here: " + rows.model}
    return c.pivot(rows, labels, rows.what.map(names))


def table_6(runs: Frame) -> Frame:
    rows = whole(runs)
    place = "here: " + rows.model + rows.place.str.removeprefix("here")
    return by_task(rows, Method=rows.method, place=place)


def paired(runs: Frame) -> Frame:
    rows = whole(runs)
    known = rows.query("task in @MAJORITY").drop_duplicates(INDEX)
    columns = {"score": SCORE, "Δ vs Baseline": minus(rows, "", "Baseline", INDEX)}
    columns |= {"Δ vs Avg.Pool": minus(rows, "", "Avg.Pool", INDEX)}
    columns |= {"majority": known.assign(cell=known.task.map(MAJORITY).astype(object))}
    return c.table(rows, INDEX, columns | {DEPTH: DEPTH, PEAK: PEAK})


def test_sets(runs: Frame) -> Frame:
    rows = whole(runs)
    columns = {"score": TEST, "Δ vs Baseline": minus(rows, "", "Baseline", INDEX, TEST)}
    columns |= {"Δ vs Avg.Pool": minus(rows, "", "Avg.Pool", INDEX, TEST)}
    return c.table(rows, INDEX, columns)


# ---- figures


def figure_2(runs: Frame) -> Frame:
    """Data sets ordered by their size."""
    rows = whole(runs).query("pooling == 'p32'")
    sizes = rows[rows.what == "train/rows"].set_index("run")["value"]
    rows = rows.assign(size=rows["run"].map(sizes)).sort_values("size", kind="stable")
    rows = rows[rows.what == "lambda"]
    rate = rows.rate.where(rows.lambda_rate.notna(), ", the model's rate")
    return c.points(rows, "raw lambda", rows.model, rows["data.task"] + rate, "layer")


def fractions(runs: Frame) -> Frame:
    """Scores on STS-B's rows, or on a share of them."""
    return classifiers(runs, whole=True).query("what == @SCORE and task == 'stsb'")


def figure_3(runs: Frame) -> Frame:
    """Runs of seeds with several shares of the rows (others would bias a mean over seeds)."""
    rows = fractions(runs).query("pooling in ['last', 'p32']").drop(columns="place")
    by = rows.groupby(["model", "method", "rate", "seed"], dropna=False)["data.fraction"]
    rows, value = rows[by.transform("nunique") > 1], "Spearman's correlation (%)"
    return c.points(rows, value, rows.model, rows.method + rows.rate, "data.fraction")


def figure_4(runs: Frame) -> Frame:
    rows = classifiers(runs).drop(columns="cut")
    rows = rows.query("what == @SCORE and method == 'Baseline' and `data.fraction` == 1")
    by = rows.groupby(["model", "data.task", "seed"])["truncate.blocks"]
    rows = rows[by.transform("nunique") > 1]
    return c.points(rows, "score (%)", rows.model, rows["data.task"], "truncate.blocks")


# ---- claims


def parts_of(rows: Any) -> Frame:
    """Parts of claims, from (run on, part, value, verdict)."""
    return pandas.DataFrame(rows, columns=[*c.CLAIM, "value", "verdict"])


def on_paper(parts: list[tuple[str, str, Any, str]]) -> Frame:
    """Parts of a claim on the paper's numbers, from (model, part, value, verdict)."""
    return parts_of([(f"the paper's {model}", *rest) for model, *rest in parts])


def told(holds: bool) -> str:
    """Verdict of a statement without uncertainty."""
    return HOLDS if holds else FAILS


def gains() -> Frame:
    """P-32's gains over the baseline, by model and task, from Table 2."""
    table = TABLES["table_2"]
    frame = pandas.DataFrame(table["rows"], columns=[*table["index"], *table["columns"]])
    by_method = frame.set_index(["Method", "Model"])
    return by_method.loc["P-32 (ours)"] - by_method.loc["Baseline"]


def claimed(runs: Frame, method: str, base: str) -> Frame:
    """Claim parts of one pooling compared with another: runs by model, one part per task."""
    rows = whole(runs)
    rows = rows.assign(part=rows["data.task"], run_on=rows.model + rows.rate)
    return c.judged(minus(rows, method, base, c.CLAIM))


def above_baseline(runs: Frame) -> Frame:
    parts = [(model, "mean", gain, verdict(gain, 1)) for model, gain in gains()["Avg."].items()]
    return pandas.concat([on_paper(parts), claimed(runs, "P-32", "Baseline")])


def by_1_5_points() -> Frame:
    mean = gains()["Avg."]
    return on_paper([(model, "mean", gain, told(gain >= 1.5)) for model, gain in mean.items()])


def depths(runs: Frame) -> dict[tuple[str, str], Any]:
    """(run on, task) -> scores by blocks: of the paper's Tables 3 and 4, and over seeds here."""
    found = {}
    for key, model in (("table_3", "the paper's BERT"), ("table_4", "the paper's LLAMA-2-7B")):
        rows = TABLES[key]["rows"]
        table = pandas.DataFrame([row[1:] for row in rows], [int(row[0]) for row in rows])
        found |= {(model, task): table[i] for i, task in enumerate(TASKS)}
    for key, its in figure_4(runs).groupby(["panel", "line"], sort=False):
        found[key] = its.groupby("x")["y"].mean().sort_index()
    return found


def told_by_depth(runs: Frame, tell: Callable[[Any], bool]) -> Frame:
    """A claim on scores by blocks."""
    text = "best at {} of {}".format
    every = ((*key, x, text(x.idxmax(), x.index.max())) for key, x in depths(runs).items())
    return parts_of([(*place, value, told(tell(x))) for *place, x, value in every])


rising_with_depth = partial(told_by_depth, tell=lambda its: (its.diff().dropna() > 0).all())
overthinking = partial(told_by_depth, tell=lambda its: its.idxmax() < its.index.max())


def peak_at_best_depth(runs: Frame) -> Frame:
    rows = whole(runs).query("method == 'P-32' and what == @PEAK")
    best = {key: its.idxmax() for key, its in depths(runs).items()}
    at = c.label(rows, lambda *key: best.get(key), "model", "data.task")
    verdicts = (at == rows["value"]).map(told).where(at.notna(), OPEN)
    part = rows["data.task"] + ", seed " + rows.seed.astype(str)
    return parts_of(zip(rows.model + rows.rate, part, rows["value"], verdicts, strict=True))


def gap_grows(runs: Frame) -> Frame:
    """Seed by seed: the gain on a fifth of STS-B's rows minus that on all."""
    rows = fractions(runs).query("`data.fraction` in [0.2, 1.0]")
    c.one_setting(rows, ["model", "method", "data.fraction"])
    wide = rows.pivot_table("value", ["model", "seed", "data.fraction"], "method")
    wide = wide.reindex(columns=["P-32", "Baseline"])
    gain = (wide["P-32"] - wide["Baseline"]).unstack().reindex(columns=[0.2, 1.0])
    gap = (gain[0.2] - gain[1.0]).dropna()
    found = gap.groupby("model").agg(lambda its: interval(list(its)))
    found.index = pandas.MultiIndex.from_product([found.index, ["stsb"]], names=c.CLAIM)
    return c.judged(found.astype(object))


def regressions(column: str, low: bool) -> Frame:
    """Regression of section 5.4 on the gains of LLAMA-2-7B, with and without MNLI.

    `low`: whether the claim is that p is below .05.
    """
    from scipy.stats import linregress

    sizes = {row[0]: row[1:] for row in TABLES["table_5"]["rows"]}
    place = TABLES["table_5"]["columns"].index(column)
    gain, parts = gains().loc["LLAMA-2-7B"], []
    for name, left_out in (("seven data sets, without mnli", ["mnli"]), ("all eight", [])):
        tasks = [task for task in sizes if task not in left_out]
        line = linregress([sizes[x][place] for x in tasks], [gain[x] for x in tasks])
        text = f"slope {line.slope:.4g}, R2 {line.rvalue**2:.3f}, p {line.pvalue:.3f}"
        parts.append(("LLAMA-2-7B", name, text, told((line.pvalue < 0.05) == low)))
    return on_paper(parts)


samples_tell = partial(regressions, column="# Train Samples", low=True)
length_tells = partial(regressions, column="Avg. Input Length", low=False)


def ablation(runs: Frame, name: str, base: str) -> Frame:
    """A pooling against another: the paper's means (Table 6), and ours."""
    means = {row[0]: row[-1] for row in TABLES["table_6"]["rows"]}
    gain = means[name] - means[base]
    paper = on_paper([("LLAMA-2-7B", "mean", gain, verdict(gain, 1))])
    return pandas.concat([paper, claimed(runs, name, base)])


average_above_baseline = partial(ablation, name="Avg.Pool", base="Baseline")
above_average = partial(ablation, name="P-32", base="Avg.Pool")
