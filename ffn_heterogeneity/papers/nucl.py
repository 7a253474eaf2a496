"""NUCL (Stahlberg and Kumar): its tables and figures, beside what was measured here."""

from __future__ import annotations

from collections.abc import Sequence

import pandas

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.stats import two_proportions
from ffn_heterogeneity.report.tidy import Frame, Match
from ffn_heterogeneity.report.versus import versus

PRINTED = printed("nucl")
NUCL = "losses.nucl."
WEIGHT, VARIANT, TARGETS = NUCL + "weight", NUCL + "variant", NUCL + "targets"
SCORE, NLL = "score", "validation/nll"
ENTROPY_OF_WEIGHTS = "validation/entropy/ent/ffn_out/mean"
REMOVAL = ("criterion", "reverse", "compensation", "layers", "protect", "lose", "calibration")
SIZE = ("ratio", "count", "budget")
EVALUATION = ("text", "token_ids", "window", "max_windows", "bos", "compute_dtype")
REMOVED = ("model", *REMOVAL, *SIZE, *EVALUATION)  # equal in the runs of a removal
TUNED = ["model", "revision", "seq_len", "batch_size", "steps", "dropout", "freeze", "train_only"]
TUNED += ["data.", "optimizer.", "losses."]

# Method of Table 4 (below the six: ours) -> the settings that make a removal it.
FREELY = {"reverse": False, "protect": ""}
PLAIN = {"compensation": "none", "lose": "", **FREELY}
METHODS = PRINTED["methods"]
METHOD = ("{criterion}, {compensation}, reverse {reverse}", METHODS)
WEAK = {"criterion": ["similarity", "magnitude"], **FREELY}
WEAK["compensation"] = ["none", "sum", "least_squares"]
# config.layers counts from 0, the paper from 1; in Gemma-2 layer 0 is local.
LAYERS = ("{layers}", PRINTED["layers"])
TASKS = PRINTED["tasks"]

# Presets of this library, and the last parts of hub ids.
SIZES = {x: {"model": [f"gemma2_{x.lower()}", f"gemma-2-{x.lower()}"]} for x in ("2B", "9B", "27B")}
DATA = {"GSM8K": {"data.task": "gsm8k"}, "MBPP": {"data.task": "mbpp"}}
SCORES = {"GSM8K (accuracy in %)": DATA["GSM8K"], "MBPP (3-shot success rate in %)": DATA["MBPP"]}
PLACES = {name: {TARGETS: (target,)} for name, target in PRINTED["targets"].items()}
STANDARD, MSTD = {WEIGHT: [0, None]}, {WEIGHT: bool, VARIANT: "mstd"}
OUTGOING = PLACES["FFN outgoing"]
GAINS = PRINTED["ours"]["tables"]["gains"]["columns"]
QUESTIONS = {"GSM8K": 1319, "MBPP": 500}  # of the test sets


UNPRUNED, ENTROPY = METHODS["Pre-trained baseline"], METHODS["Entropy-based"]
# In runs whose config does not have them.
SETTINGS = dict.fromkeys((*REMOVAL, *SIZE, *EVALUATION, WEIGHT, VARIANT, TARGETS))
SETTINGS |= dict.fromkeys(("shape.layers", "data.task", "data.path"))
SETTINGS |= dict.fromkeys(("protect", "lose", "calibration"), "")


# ---- runs


def removals(rows: Frame, shown: Sequence[str] = ("model", *REMOVAL[:4])) -> Frame:
    """Neurons removed, and the perplexity after it; none removed is that of any rule and size."""
    measured = rows[rows.what == "perplexity"]
    rows = rows[rows.criterion.notna() & rows["run"].isin(measured["run"])].copy()
    idle = rows.criterion == "none"
    rows.loc[idle, [*REMOVAL[1:], *SIZE]] = tidy.IDLE
    rows.loc[idle, "layers"] = "all"
    rows["draws"] = (rows.criterion == "random") | rows.lose.str.startswith("random:")
    return tidy.records(rows, REMOVED, shown, {"draws": True})


def trainings(rows: Frame) -> Frame:
    """Fine-tuning with and without NUCL; its own task's accuracy is "score"."""
    rows = rows[rows[TARGETS].notna() & rows["shape.layers"].isna()]
    shown = ("model", "data.task", "data.path", VARIANT, WEIGHT, TARGETS)
    rows = tidy.records(rows, TUNED, shown, {TARGETS: bool}, (NUCL,))
    own = tidy.scores(rows, {task: (task, None) for task in rows["data.task"].dropna().unique()})
    own = own[own.what == own["data.task"]].assign(what=SCORE)
    return pandas.concat([rows, own], ignore_index=True)


def lowest(rows: Frame, labels: Sequence[str]) -> Frame:
    """The records whose last validation loss is lowest among those with their labels."""
    losses = tidy.cells(rows, {NLL: NLL}).groupby("record")["value"].mean()
    found = rows.drop_duplicates("record")
    found = found.assign(loss=found["record"].map(losses)).sort_values("loss", kind="stable")
    found = found[found.loss.notna()].drop_duplicates([*labels, "from"])
    return rows[rows["record"].isin(found["record"])]


def against_standard(rows: Frame, what: str, every: Frame, how: str = "difference") -> Frame:
    return versus(every, what, rows, STANDARD, TUNED, (NUCL,), how)


def times_unpruned(rows: Frame, every: Frame) -> Frame:
    return versus(every, "perplexity", rows, UNPRUNED, REMOVED, (*REMOVAL, *SIZE), "ratio")


# ---- tables


def table_2(runs: Runs) -> Frame:
    every = runs["training"]
    labels = {"Model size": ("{model}", SIZES), "column": ("{data.task}", DATA)}
    rows = tidy.labelled(tidy.matching(every, {**MSTD, **OUTGOING}), labels, "here: {data.task}")
    return against_standard(lowest(rows, list(labels)), SCORE, every, "percent")


def table_3(runs: Runs) -> Frame:
    every = tidy.matching(runs["training"], DATA["GSM8K"])
    labels = {"Weight matrices": ("{losses.nucl.targets}", PLACES)}
    best = lowest(tidy.labelled(tidy.matching(every, MSTD), labels), list(labels))
    gains = against_standard(best, SCORE, every, "percent")
    return gains.assign(column="Relative gain (in %)")


def table_4(runs: Runs) -> Frame:
    rows = tidy.matching(runs["removal"], {"layers": "all", "ratio": [0.25, tidy.IDLE]})
    labels = {"Pruning": ("25%", {"0%": UNPRUNED}), "Method": METHOD}
    return tidy.labelled(tidy.scores(rows, TASKS, "Average"), labels)


def table_5(runs: Runs) -> Frame:
    rows = tidy.matching(runs["removal"], {**ENTROPY, "layers": ["bottom", "top", "odd", "even"]})
    rows = tidy.scores(rows, TASKS, "Average accuracy")
    return tidy.labelled(rows[rows.what == "Average accuracy"], {"Layers": LAYERS})


def table_8(runs: Runs) -> Frame:
    rows = tidy.matching(runs["training"], {**OUTGOING, "data.task": ["gsm8k", "mbpp"]})
    methods = {"Standard fine-tuning": STANDARD, "NUCL fine-tuning": MSTD}
    models = {f"Gemma-{size}": match for size, match in SIZES.items()}
    labels = {"Task": ("{data.task}", SCORES), "Method": ("NUCL {losses.nucl.variant}", methods)}
    labels["column"] = ("{model}", models)
    best = lowest(tidy.labelled(rows, labels), list(labels))
    return best[best.what == SCORE]


def gains(runs: Runs) -> Frame:
    """Gains and their z, of the paper's Tables 7 and 8 and of ours."""
    labels = {"task": ("{data.task}", DATA), "model": "{model}"}
    rows = tidy.labelled(tidy.matching(runs["training"], OUTGOING), labels, "here")
    standard, ours = (lowest(tidy.matching(rows, x), list(labels)) for x in (STANDARD, MSTD))
    own = [x[x.what == SCORE] for x in (standard, ours)]
    hows = ("difference", "percent", "z")
    apart = [against_standard(ours, SCORE, runs["training"], how) for how in hows]
    columns = dict(zip(GAINS, (*own, *apart), strict=True))
    tables = (PRINTED["tables"][key] for key in ("table_7", "table_8"))
    return pandas.concat([*map(gains_of, tables), tidy.cells(rows, columns)], ignore_index=True)


def gains_of(table: dict) -> Frame:
    """The paper's gains, from the scores that a table prints."""
    found = {tuple(row[:2]): row[2:] for row in table["rows"]}
    made = []
    for task in dict.fromkeys(row[0] for row in table["rows"]):
        name = task.split()[0]
        pairs = [found[task, f"{x} fine-tuning"] for x in ("Standard", "NUCL")]
        for model, a, b in zip(table["columns"], *pairs, strict=True):
            z = two_proportions(a, b, QUESTIONS.get(name))
            cells_of = zip(GAINS, (a, b, b - a, 100 * (b / a - 1), z), strict=True)
            made += [(name, model, "paper", *cell) for cell in cells_of if cell[1] is not None]
    return pandas.DataFrame(made, columns=["task", "model", "from", "column", "value"])


def finetuning(runs: Runs) -> Frame:
    rows = runs["training"]
    columns = {"validation NLL": NLL, "less standard": against_standard(rows, NLL, rows)}
    columns |= dict(iter(tidy.scores(rows[rows.task.notna()]).groupby("what", sort=False)))
    labels = {"model": "{model}", "data": "{data.task}", "loss": "{losses.nucl.variant}"}
    labels["connections"] = ("{losses.nucl.targets}", PLACES)
    labels["alpha"] = "{losses.nucl.weight:g}"
    return tidy.labelled(tidy.cells(rows, columns), labels, "here")


def removal(runs: Runs) -> Frame:
    rows = runs["removal"]
    columns = {"perplexity": "perplexity", "x unpruned": times_unpruned(rows, rows)}
    columns["% of parameters"] = "parameters_removed_percent"
    columns |= {"norm of lambda": "largest_lambda_norm", "condition": "largest_condition"}
    columns |= dict(iter(tidy.scores(rows).groupby("what", sort=False)))
    labels = {"model": "{model}", "method": METHOD, "layers": LAYERS}
    return tidy.labelled(tidy.cells(rows, columns), labels, "here")


# ---- figures and claims


def figure_2(runs: Runs) -> Frame:
    return over_training(runs, "entropy a neuron (nats)", ENTROPY_OF_WEIGHTS)


def figure_3(runs: Runs) -> Frame:
    return over_training(runs, "validation NLL", NLL)


def over_training(runs: Runs, name: str, what: str) -> Frame:
    """A panel for each model and variant."""
    rows = tidy.matching(runs["curves"], OUTGOING)
    rows = rows[rows.what == what].assign(column=name)
    return tidy.points(rows, "{model}, {losses.nucl.variant}", "alpha = {losses.nucl.weight:g}")


def figure_4(runs: Runs) -> Frame:
    rows = tidy.matching(runs["removal"], ENTROPY)
    rows = times_unpruned(rows[rows.layers.str.startswith("pair:")], runs["removal"])
    pair = rows.layers.str.removeprefix("pair:").astype(int)
    rows = rows.assign(pair=pair, column="perplexity x unpruned")
    return tidy.points(rows, "by perplexity (ours)", "{model}", "pair")


def entropy_of_mstd(runs: Runs) -> Frame:
    return mstd_against_gini(runs, ENTROPY_OF_WEIGHTS)


def loss_of_mstd(runs: Runs) -> Frame:
    return mstd_against_gini(runs, NLL)


def mstd_against_gini(runs: Runs, what: str) -> Frame:
    ours, base = MSTD | OUTGOING, {VARIANT: "gini"}
    apart = versus(runs["training"], what, ours, base, TUNED, (VARIANT,))
    return tidy.claimed(apart, "{model}, {data.task}", "alpha = {losses.nucl.weight:g}", -1)


def by_entropy(runs: Runs) -> Frame:
    return tidy.claimed(against_chance(runs, ENTROPY), "{model}, {layers}", "entropy", -1)


def by_weak_criteria(runs: Runs) -> Frame:
    return tidy.claimed(against_chance(runs, WEAK), "{model}, {layers}", METHOD)


def against_chance(runs: Runs, settings: Match) -> Frame:
    base = METHODS["Random"]
    return versus(runs["removal"], "perplexity", settings, base, REMOVED, REMOVAL[:3])


KINDS = {
    "removal": lambda rows, _: removals(rows),
    "training": lambda rows, _: trainings(rows),
    "curves": lambda _, curves: trainings(curves),
}
CURVES = (NLL, ENTROPY_OF_WEIGHTS)
