"""P-32 (depth-wise pooling): its tables and figures, beside what was measured here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN, interval, verdict
from ffn_heterogeneity.report.tidy import Frame, Match
from ffn_heterogeneity.report.versus import by_seed, versus

PRINTED = printed("p32")
TASKS = PRINTED["tables"]["table_6"]["columns"][:-1]
BEST = "validation/best/"  # the metric of the task, where the best weights were kept
SCORE, TEST, DEPTH, PEAK = "score", "test score", "max |w - 1/L|", "peak layer"
POOLING = ("model", "pooling", "lambda_rate", "final_norm", "truncate.blocks", "data.fraction")
SAME = [*POOLING, "data.task", "optimizer.", "losses.", "nf4.", "lora."]
SAME += ["prepare", "epochs", "batch_size", "dropout", "compute_dtype"]
METHODS = PRINTED["names"]["method"][1]
BASELINE, OURS, AVERAGE = (METHODS[name] for name in ("Baseline", "P-32", "Avg.Pool"))
ALL_BLOCKS = {"truncate.blocks": [0, None]}
# A decoder is given 1,000 rows of MRPC or RTE; that counts as all of them.
WHOLE = {**ALL_BLOCKS, "data.fraction": [1.0, 0.2727, 0.4016]}
SETTINGS = dict.fromkeys((*SAME, "objective"))


# ---- runs


def classifiers(rows: Frame) -> Frame:
    """Runs on labelled rows: "score" in percent, of the best evaluation; how far from average."""
    rows = rows[(rows.objective == "labels") & rows.pooling.notna()]
    rows = tidy.records(rows, SAME, ("data.task", *POOLING, "losses."), {"pooling": tidy.ANY})
    best = rows[rows.what.str.startswith(BEST)]
    name = best.set_index("run").what.str.removeprefix(BEST)
    test = rows[rows.what == "test/" + rows["run"].map(name).astype(object)]
    weights = rows[(rows.what == "depth_weights") & (rows.pooling != "average")]
    by_run = weights.groupby("run")
    layers = weights.groupby("model").layer.max()
    first = weights.drop_duplicates("run")
    apart = (weights["value"] - 1 / by_run.layer.transform("max").astype(float)).abs()
    peak = by_run["value"].idxmax().map(weights.layer.astype(float))
    made = [
        best.assign(what=SCORE, value=100 * best["value"]),
        test.assign(what=TEST, **{end: 100 * test[end] for end in ("value", "low", "high")}),
        first.assign(what=DEPTH, value=first["run"].map(apart.groupby(weights["run"]).max())),
        first.assign(what=PEAK, value=first["run"].map(peak)),
    ]
    rows = pandas.concat([rows, *made], ignore_index=True)
    blocks = rows["truncate.blocks"].replace(0, None)
    blocks = blocks.where(blocks.notna(), rows.model.map(layers)).astype(object)
    tuned = rows.prepare.map(lambda names: isinstance(names, tuple) and "lora" in names)
    return rows.assign(blocks=blocks, tuned=tuned)


def against(runs: Runs, settings: dict, base: dict, what: str = SCORE) -> Frame:
    return versus(runs["classifier"], what, settings, base, SAME, ("pooling", "lambda_rate"))


# ---- tables


def scores(runs: Runs, match: Match) -> Frame:
    """The mean of all nine tasks stays out: MNLI's second set is no column of one run, and nobody
    has run all of them."""
    rows = tidy.matching(runs["classifier"], match)
    return rows[rows.what == SCORE]


table_2 = table_6 = partial(scores, match=WHOLE)
BY_DEPTH = {**BASELINE, "data.fraction": 1.0}
table_3 = partial(scores, match={**BY_DEPTH, "tuned": False})
table_4 = partial(scores, match={**BY_DEPTH, "tuned": True})


def table_1(runs: Runs) -> Frame:
    rows = tidy.matching(runs["classifier"], {**BASELINE, **WHOLE})
    rows = rows[rows.what == "parameters"].drop_duplicates("model").assign(differs="")
    depth = rows[rows.blocks.notna()]
    depth = depth.assign(value=depth.blocks.astype(float))
    return tidy.cells(rows, {"# Transformer Blocks": depth, "# Parameters": rows})


def table_5(runs: Runs) -> Frame:
    rows = tidy.matching(runs["classifier"], WHOLE).drop_duplicates(["data.task", "model", "what"])
    columns = {"# Train Samples": "train/rows", "Avg. Input Length": "train/tokens_a_row"}
    return tidy.cells(rows, columns)


def paired(runs: Runs) -> Frame:
    rows = tidy.matching(runs["classifier"], WHOLE)
    first = rows[rows["data.task"].isin(list(PRINTED["majority"]))].drop_duplicates("record")
    majority = first["data.task"].map(PRINTED["majority"])
    columns = {
        "score": SCORE,
        "less Baseline": against(runs, WHOLE, BASELINE),
        "less Avg.Pool": against(runs, WHOLE, AVERAGE),
        "majority": first.assign(value=majority.astype(float), low=None),
        DEPTH: DEPTH,
        PEAK: PEAK,
    }
    return tidy.cells(rows, columns)


def test_sets(runs: Runs) -> Frame:
    rows = tidy.matching(runs["classifier"], WHOLE)
    tested = against(runs, WHOLE, BASELINE, TEST)
    return tidy.cells(rows, {"score": TEST, "less Baseline": tested})


# ---- figures


def figure_2(runs: Runs) -> Frame:
    """Data sets ordered by size, means over seeds."""
    rows = tidy.matching(runs["classifier"], {"pooling": "p32", **WHOLE})
    sizes = rows[rows.what == "train/rows"].set_index("run")["value"]
    rows = rows[rows.what == "lambda"].assign(column="raw lambda")
    return rows.assign(size=rows["run"].map(sizes)).sort_values("size", kind="stable")


def figure_3(runs: Runs) -> Frame:
    rows = scores(runs, {"data.task": "stsb", **ALL_BLOCKS, "pooling": ["last", "p32"]})
    rows = rows.assign(column="Spearman's correlation (%)", differs="")
    # A seed that ran at one place alone would take the other places from a mean over seeds.
    by = rows.groupby(["model", "pooling", "lambda_rate", "seed"], dropna=False)
    return rows[by["data.fraction"].transform("nunique") > 1]


def figure_4(runs: Runs) -> Frame:
    rows = scores(runs, BY_DEPTH).assign(column="score (%)", differs="")
    return rows[rows.groupby(["model", "data.task", "seed"]).blocks.transform("nunique") > 1]


# ---- claims


def on_paper(parts: list[tuple[str, str, Any, str]]) -> Frame:
    """Parts of a claim on the paper's numbers, from (model, part, value, verdict)."""
    rows = [(f"the paper's {model}", *rest) for model, *rest in parts]
    return pandas.DataFrame(rows, columns=["run on", "part", "value", "verdict"])


def told(holds: bool) -> str:
    return HOLDS if holds else FAILS


def gains() -> Frame:
    """P-32's gains over the baseline, by model and task, from Table 2."""
    table = PRINTED["tables"]["table_2"]
    frame = pandas.DataFrame(table["rows"], columns=[*table["labels"], *table["columns"]])
    by_method = frame.set_index(["Method", "Model"])
    return by_method.loc["P-32 (ours)"] - by_method.loc["Baseline"]


def with_ours(paper: Frame, runs: Runs, settings: Match, base: Match) -> Frame:
    ours = against(runs, {**settings, **WHOLE}, base)
    ours = tidy.claimed(ours, PRINTED["claims"]["above_baseline"])
    return pandas.concat([paper, ours], ignore_index=True)


def above_baseline(runs: Runs) -> Frame:
    parts = [(model, "mean", gain, verdict(gain, 1)) for model, gain in gains()["Avg."].items()]
    return with_ours(on_paper(parts), runs, OURS, BASELINE)


def by_1_5_points(runs: Runs) -> Frame:
    mean = gains()["Avg."]
    return on_paper([(model, "mean", gain, told(gain >= 1.5)) for model, gain in mean.items()])


def depths(runs: Runs) -> dict[tuple[str, str], Frame]:
    """(run on, task) -> scores by blocks: of the paper's Tables 3 and 4, and over seeds here."""
    found = {}
    for key, model in (("table_3", "the paper's BERT"), ("table_4", "the paper's LLAMA-2-7B")):
        rows = PRINTED["tables"][key]["rows"]
        table = pandas.DataFrame([row[1:] for row in rows], [int(row[0]) for row in rows])
        found |= {(model, task): table[i] for i, task in enumerate(TASKS)}
    for key, its in figure_4(runs).groupby(["model", "data.task"], sort=False):
        found[key] = its.groupby("blocks")["value"].mean().sort_index()
    return found


def told_by_depth(runs: Runs, tell: Callable[[Frame], bool]) -> Frame:
    rows = []
    for (run_on, task), its in depths(runs).items():
        value = f"best at {its.idxmax()} of {its.index.max()}"
        rows.append((run_on, task, value, told(tell(its))))
    return pandas.DataFrame(rows, columns=["run on", "part", "value", "verdict"])


rising_with_depth = partial(
    told_by_depth, tell=lambda its: its.is_monotonic_increasing and its.is_unique
)
overthinking = partial(told_by_depth, tell=lambda its: its.idxmax() < its.index.max())


def peak_at_best_depth(runs: Runs) -> Frame:
    rows = tidy.matching(runs["classifier"], {**OURS, **WHOLE})
    rows = rows[rows.what == PEAK].assign(low=None)
    best = {key: its.idxmax() for key, its in depths(runs).items()}
    places = zip(rows.model, rows["data.task"], strict=True)
    pairs = [(best.get(place), peak) for place, peak in zip(places, rows["value"], strict=True)]
    return rows.assign(verdict=[OPEN if n is None else told(n == peak) for n, peak in pairs])


def gap_grows(runs: Runs) -> Frame:
    """Seed by seed, the gain on a fifth of STS-B's rows less that on all."""
    rows, made = scores(runs, {"data.task": "stsb", **ALL_BLOCKS}), []
    for _, its in rows.groupby("model"):
        sides = [
            by_seed(tidy.matching(its, {"data.fraction": share, **match}))
            for share in (0.2, 1.0)
            for match in (OURS, BASELINE)
        ]
        seeds = set.intersection(*map(set, sides))
        apart = [a - b - (c - d) for a, b, c, d in ([x[seed] for x in sides] for seed in seeds)]
        made.append(its.head(1).assign(**tidy.as_row(interval(apart))))
    return pandas.concat(made) if made else rows.head(0)


def regressions(runs: Runs, column: str, low: bool) -> Frame:
    """The line of 5.4 through the gains of LLAMA-2-7B, with and without MNLI; `low`: whether the
    claim is that p is below .05."""
    from scipy.stats import linregress

    sizes = {row[0]: row[1:] for row in PRINTED["tables"]["table_5"]["rows"]}
    place = PRINTED["tables"]["table_5"]["columns"].index(column)
    gain, parts = gains().loc["LLAMA-2-7B"], []
    for name, left_out in (("seven data sets, without mnli", ["mnli"]), ("all eight", [])):
        tasks = [task for task in sizes if task not in left_out]
        line = linregress([sizes[x][place] for x in tasks], [gain[x] for x in tasks])
        text = f"slope {line.slope:.4g}, R2 {line.rvalue**2:.3f}, p {line.pvalue:.3f}"
        parts.append(("LLAMA-2-7B", name, text, told((line.pvalue < 0.05) == low)))
    return on_paper(parts)


samples_tell = partial(regressions, column="# Train Samples", low=True)
length_tells = partial(regressions, column="Avg. Input Length", low=False)


def ablation(runs: Runs, name: str, base: str) -> Frame:
    means = {row[0]: row[-1] for row in PRINTED["tables"]["table_6"]["rows"]}
    gain = means[name] - means[base]
    paper = on_paper([("LLAMA-2-7B", "mean", gain, verdict(gain, 1))])
    return with_ours(paper, runs, METHODS[name], METHODS[base])


average_above_baseline = partial(ablation, name="Avg.Pool", base="Baseline")
above_average = partial(ablation, name="P-32", base="Avg.Pool")


KINDS = {"classifier": classifiers}
