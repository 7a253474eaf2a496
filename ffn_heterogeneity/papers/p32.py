"""P-32 (depth-wise pooling): its tables and figures, with what was measured here."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN, TOLD, interval, verdict

# Pooling -> the paper's name, or ours; task -> score of its most frequent answer.
METHODS, MAJORITY = (printed("p32")[key] for key in ("methods", "majority"))
OWN_RATE = "P-32, lambda at the model's rate"
SCORE, TEST, DEPTH, PEAK = "score", "test score", "max |w - 1/L|", "peak layer"
POOLED = ("pooling", "lambda_rate", "method", "rate", "place", "order")  # in which poolings differ
DATA = ["model", "data.task", "data.fraction"]
WHOLE = [1.0, 0.2727, 0.4016]  # decoders read 1,000 rows of MRPC or RTE: all, for this report
INDEX = ["model", "task", "method", "place"]


# ---- runs


def classifiers(runs: Frame) -> Frame:
    """Runs on labelled rows: "score" in percent, of the last evaluation, and how far the weights
    of the layers are from an average.

    A run on the first n of n blocks is not one on "all_blocks". One that began again, because its
    loss was no number, has another seed.
    """
    keys = ("objective", "pooling", "lambda_rate", "final_norm", "prepare", "data.task")
    rows = c.need(runs, *keys, "truncate.blocks", "data.fraction")
    rows = c.without_idle_losses(rows[(rows.objective == "labels") & rows.pooling.notna()])
    rows = c.with_last_seeds(rows)
    learned = rows.lambda_rate.notna() & (rows.pooling == "p32")
    method = rows.pooling.map(METHODS).where(learned | (rows.pooling != "p32"), OWN_RATE)
    rate = (", lambda_rate " + rows.lambda_rate.astype(str)).where(learned, "")
    some = c.label(rows, ", {:.2g} of the rows".format, "data.fraction")
    some = some.where(rows["data.fraction"] != 1, "")
    rows = rows.assign(method=method, rate=rate, task=rows["data.task"], place="here" + some + rate)
    rows = pandas.concat([rows, *scores_of(rows), weights_of(rows)], ignore_index=True)
    layers = rows[rows.what == "depth_weights"].groupby("model").layer.max()
    every, blocks = rows.model.map(layers).astype(object), rows["truncate.blocks"].fillna(0)
    rows["all_blocks"] = blocks == 0
    rows["cut"] = (blocks == every).map({True: ", truncated", False: ""})
    rows["truncate.blocks"] = blocks.where(blocks != 0, every)
    rows["order"] = rows.pooling.map(list(METHODS).index)
    return rows.sort_values(["model", "task", "order"], kind="stable")


def scores_of(rows: Frame) -> list[Frame]:
    """The task's metric at the last evaluation, and the same metric of the saved weights on a test
    set."""
    final = c.final_scores(rows)
    names = final.set_index("run").what.str.replace("validation/", "test/")
    test = rows[rows.what == rows["run"].map(names).astype(object)]
    return [final.assign(what=SCORE), c.in_percent(test.assign(what=TEST))]


def weights_of(rows: Frame) -> Frame:
    """The largest distance of a layer's weight from 1/L, and the layer of the largest weight."""
    rows = rows[(rows.what == "depth_weights") & (rows.pooling != "average")]
    apart = (rows["value"] - 1 / rows.groupby("run").layer.transform("max").astype(float)).abs()
    farthest = rows.assign(what=DEPTH, value=apart).loc[apart.groupby(rows["run"]).idxmax()]
    peak = rows.loc[rows.groupby("run")["value"].idxmax()]
    peak = peak.assign(what=PEAK, value=peak.layer.astype(float))
    return c.with_cells(pandas.concat([farthest, peak]).sort_index()).assign(layer=pandas.NA)


def full(classifiers: Frame) -> Frame:
    """Runs on all blocks and rows."""
    return classifiers.query("all_blocks and `data.fraction` in @WHOLE")


def minus(rows: Frame, base: str, index: list[str], what: str = SCORE) -> Any:
    """Scores against those of another pooling, seed by seed."""
    every = rows[rows.what == what]
    return c.against(every, every[every.method == base], index, DATA, POOLED)


def compared(rows: Frame, what: str) -> dict[str, Any]:
    """Columns: scores, and what they are against the last layer and average pooling."""
    baseline, average = (minus(rows, x, INDEX, what) for x in ("Baseline", "Avg.Pool"))
    return {"score": what, "Δ vs Baseline": baseline, "Δ vs Avg.Pool": average}


# ---- tables


def table_1(full: Frame) -> Frame:
    """Sizes of each model, with the head of the first task that was run."""
    rows = full.query("method == 'Baseline' and what == 'parameters'").drop_duplicates("model")
    names = {"model": "Model", "truncate.blocks": "# Transformer Blocks", "value": "# Parameters"}
    rows = rows.assign(place="here").rename(columns=names)
    return rows.set_index(["Model", "place"])[["# Transformer Blocks", "# Parameters"]]


def by_task(rows: Frame, **labels: Any) -> Frame:
    """Scores, a column for each task.

    The mean of all nine stays empty: MNLI's second set is no column of one run.
    """
    rows = rows[rows.what == SCORE].assign(**labels)
    place = rows.place.str.replace(r"0\.\d+ of", "a part of", regex=True)
    return c.pivot(rows, {**labels, "place": place}, rows["data.task"])


def table_2(full: Frame) -> Frame:
    return by_task(full, Model=full.model, Method=full.method.replace("P-32", "P-32 (ours)"))


def table_3(classifiers: Frame, adapter: bool = False) -> Frame:
    """The baseline on all rows, by its number of blocks."""
    rows = classifiers.query("method == 'Baseline' and `data.fraction` == 1")
    lora = rows.prepare.map(lambda names: isinstance(names, tuple) and "lora" in names)
    rows = rows[lora.astype(bool) == adapter].sort_values("truncate.blocks", kind="stable")
    blocks = c.label(rows, "{:g}".format, "truncate.blocks")
    return by_task(rows, **{"Num Blocks": blocks, "place": "here: " + rows.model + rows.cut})


table_4 = partial(table_3, adapter=True)


def table_5(full: Frame) -> Frame:
    """Sizes of each data set, as the first run of each model read it."""
    names = {"train/rows": "# Train Samples", "train/tokens_a_row": "Avg. Input Length"}
    rows = full.query("what in @names").drop_duplicates(["data.task", "model", "what"])
    labels = {"Dataset": rows["data.task"], "place": "here: " + rows.model}
    return c.pivot(rows, labels, rows.what.map(names))


def table_6(full: Frame) -> Frame:
    place = "here: " + full.model + full.place.str.removeprefix("here")
    return by_task(full, Method=full.method, place=place)


def paired(full: Frame) -> Frame:
    known = full.query("task in @MAJORITY").drop_duplicates(INDEX)
    known = known.assign(cell=known.task.map(MAJORITY).astype(object))
    columns = {"majority": known, DEPTH: DEPTH, PEAK: PEAK}
    if (full[full.what == c.AGAIN]["value"] > 0).any():
        columns["began again"] = c.AGAIN  # the mean over runs
    return c.table(full, INDEX, compared(full, SCORE) | columns)


def test_sets(full: Frame) -> Frame:
    return c.table(full, INDEX, compared(full, TEST))


# ---- figures


def figure_2(full: Frame) -> Frame:
    """Data sets ordered by their size."""
    sizes = full[full.what == "train/rows"].set_index("run")["value"]
    rows = full.query("pooling == 'p32' and what == 'lambda'")
    rows = rows.assign(size=rows["run"].map(sizes)).sort_values("size", kind="stable")
    rate = rows.rate.where(rows.lambda_rate.notna(), ", the model's rate")
    return c.points(rows, "raw lambda", rows.model, rows["data.task"] + rate, "layer")


def fractions(classifiers: Frame) -> Frame:
    """Scores on STS-B's rows, or on a share of them."""
    return classifiers.query("all_blocks and what == @SCORE and task == 'stsb'")


def figure_3(fractions: Frame) -> Frame:
    rows, y = fractions.query("pooling in ['last', 'p32']"), "Spearman's correlation (%)"
    line = rows.method + rows.rate
    return c.points(rows, y, rows.model, line, "data.fraction", ["place"], least=2)


def figure_4(classifiers: Frame) -> Frame:
    query = "what == @SCORE and method == 'Baseline' and `data.fraction` == 1"
    rows, x, free = classifiers.query(query), "truncate.blocks", ["cut", "all_blocks"]
    return c.points(rows, "score (%)", rows.model, rows["data.task"], x, free, least=2)


# ---- claims


def claimed(full: Frame, method: str, base: str) -> Frame:
    """A pooling against another: each model's runs, each task a part."""
    rows = full[full.what == SCORE]
    rows = rows.assign(part=rows["data.task"], run_on=rows.model + rows.rate)
    return c.claim(rows, rows.method == method, rows.method == base, DATA, POOLED)


above_baseline = partial(claimed, method="P-32", base="Baseline")
average_above_baseline = partial(claimed, method="Avg.Pool", base="Baseline")
above_average = partial(claimed, method="P-32", base="Avg.Pool")


def depths(figure_4: Frame) -> dict[tuple[str, str], Frame]:
    """(model, task) -> scores, a row for each seed and a column for each number of blocks."""
    by = figure_4.groupby(["panel", "line"], sort=False)
    return {key: its.pivot_table("y", "seed", "x", dropna=False) for key, its in by}


def best_depth(its: Frame) -> Any:
    """The number of blocks with the highest mean."""
    return its.mean().idxmax()


def rising_with_depth(depths: dict) -> Frame:
    """Each depth against the one before, seed by seed; the weakest step decides."""
    parts = []
    for key, its in depths.items():
        steps = [
            interval(list((its[b] - its[a]).dropna())) for a, b in pairwise(sorted(its.columns))
        ]
        told, text = [verdict(step, 1) for step in steps], f"best at {best_depth(its)}"
        worst = min(told, key=[FAILS, OPEN, HOLDS].index)
        parts.append((*key, f"{text} of {max(its.columns)}", worst))
    return pandas.DataFrame(parts, columns=c.PARTS)


def overthinking(depths: dict) -> Frame:
    """The best of fewer blocks against all, seed by seed; that it was chosen favors it."""
    cells = {}
    for key, its in depths.items():
        every = max(its.columns)
        fewer = best_depth(its.drop(columns=every))
        cells[key] = interval(list((its[fewer] - its[every]).dropna()))
    index = pandas.MultiIndex.from_tuples(cells, names=c.CLAIM)
    return c.judged(pandas.Series(cells.values(), index, dtype=object))


def peak_at_best_depth(full: Frame, depths: dict) -> Frame:
    rows = full.query("method == 'P-32' and what == @PEAK")
    best = {key: best_depth(its) for key, its in depths.items()}
    at = c.label(rows, lambda *key: best.get(key), "model", "data.task")
    verdict = (at == rows["value"]).map(TOLD).where(at.notna(), OPEN)
    part = rows["data.task"] + ", seed " + rows.seed.astype(str)
    return rows.assign(run_on=rows.model + rows.rate, part=part, verdict=verdict)


def gap_grows(fractions: Frame) -> Frame:
    """Seed by seed: the gain on a fifth of STS-B's rows minus that on all."""
    rows = fractions.query("`data.fraction` in [0.2, 1.0] and method in ['P-32', 'Baseline']")
    c.one_setting(rows, ["model", "method", "data.fraction"])
    adds = (rows.method == "P-32") == (rows["data.fraction"] == 0.2)
    gap = rows["value"].where(adds, -rows["value"]).groupby([rows.model, rows.seed])
    gap = gap.sum()[gap.size() == 4].groupby("model").agg(lambda its: interval(list(its)))
    gap.index = pandas.MultiIndex.from_product([gap.index, ["stsb"]], names=c.CLAIM)
    return c.judged(gap.astype(object))
