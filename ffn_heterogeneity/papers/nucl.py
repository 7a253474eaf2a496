"""NUCL (Stahlberg and Kumar): its tables and figures, beside what was measured here."""

from __future__ import annotations

from ffn_heterogeneity.papers import specs
from ffn_heterogeneity.papers.specs import (
    Accuracy,
    Against,
    Cell,
    Claim,
    Curves,
    Kind,
    Label,
    Table,
)

NUCL = "losses.nucl."
WEIGHT, VARIANT, TARGETS = NUCL + "weight", NUCL + "variant", NUCL + "targets"
NLL, ENTROPY = "validation/nll", "validation/entropy/ent/ffn_out/mean"
REMOVAL = ("criterion", "reverse", "compensation", "layers", "protect", "lose", "calibration")
SIZE = ("ratio", "count", "budget")
EVALUATION = ("text", "token_ids", "window", "max_windows", "bos", "compute_dtype")
KINDS = {
    "removal": Kind({"criterion": bool, "perplexity": bool},
                    ("model", *REMOVAL, *SIZE, *EVALUATION), ("model", *REMOVAL[:4]),
                    Label("{model}"), {"draws": True}),
    "training": Kind(
        {TARGETS: bool, "shape.layers": None},
        ("model", "revision", "seq_len", "batch_size", "steps", "dropout", "freeze", "train_only",
         "data.", "optimizer.", "losses."),
        ("model", "data.task", "data.path", VARIANT, WEIGHT, TARGETS),
        Label("{model}"), {TARGETS: bool}, (NUCL,)),
}  # fmt: skip

# Method of Table 4 (below the six: ours) -> the config keys that make a removal it.
FREELY = {"reverse": False, "protect": ""}
PLAIN = {"compensation": "none", "lose": "", **FREELY}
SIMILAR = {"criterion": "similarity", **FREELY}
METHODS = {
    "Pre-trained baseline": {"criterion": "none"},
    "Srinivas and Babu (2015)": {**SIMILAR, "compensation": "sum"},
    "Stahlberg and Byrne (2017)": {**SIMILAR, "compensation": "least_squares"},
    "Random": {"criterion": "random", **PLAIN},
    "Magnitude-based": {"criterion": "magnitude", **PLAIN},
    "Entropy-based": {"criterion": "entropy", **PLAIN},
    "gini": {"criterion": "gini", **PLAIN},
    "mstd": {"criterion": "mstd", **PLAIN},
    "Stahlberg and Byrne (2017), ridge": {**SIMILAR, "compensation": "ridge"},
    "lowest entropy (sanity row)": {"criterion": "entropy", **PLAIN, "reverse": True},
}
METHOD = Label("{criterion}, {compensation}, reverse {reverse}", METHODS)
WEAK = {"criterion": ("similarity", "magnitude"), **FREELY,
        "compensation": ("none", "sum", "least_squares")}  # fmt: skip
# config.layers counts from 0, the paper from 1; in Gemma-2 layer 0 is local.
LAYERS = Label("{layers}", {
    "Bottom half of the layers": {"layers": "bottom"}, "Top half of the layers": {"layers": "top"},
    "Even layers (after global attention)": {"layers": "odd"},
    "Odd layers (after local attention)": {"layers": "even"}})  # fmt: skip
TASKS = {
    "MMLU 5-shot": Accuracy("mmlu", 5), "HellaSwag 10-shot": Accuracy("hellaswag", 10),
    "ARC-e 0-shot": Accuracy("arc_easy"), "PIQA 0-shot": Accuracy("piqa"),
    "SIQA 0-shot": Accuracy("social_iqa"), "TriviaQA 5-shot": Accuracy("triviaqa", 5),
    "NQ 5-shot": Accuracy("nq_open", 5),
}  # fmt: skip
MEAN = tuple(TASKS.values())
UNPRUNED = {"where": {"criterion": "none"}, "free": (*REMOVAL, *SIZE)}

# Presets of this library, and the last parts of hub ids.
SIZES = {x: {"model": (f"gemma2_{x.lower()}", f"gemma-2-{x.lower()}")} for x in ("2B", "9B", "27B")}
DATA = {"GSM8K": {"data.task": "gsm8k"}, "MBPP": {"data.task": "mbpp"}}
SCORES = {"GSM8K (accuracy in %)": DATA["GSM8K"], "MBPP (3-shot success rate in %)": DATA["MBPP"]}
PLACES = {
    "FFN outgoing": {TARGETS: ["ffn_out"]},
    "FFN incoming (linear)": {TARGETS: ["ffn_in_linear"]},
    "FFN incoming (gated)": {TARGETS: ["ffn_in_gated"]},
    "Attention outgoing": {TARGETS: ["attention_out"]},
}
STANDARD, MSTD = {WEIGHT: (0, None)}, {WEIGHT: bool, VARIANT: "mstd"}
OUTGOING = PLACES["FFN outgoing"]
SCORE, PLAINLY = Accuracy("{data.task}", None), {"where": STANDARD, "free": (NUCL,)}
GAIN, Z = Against(SCORE, **PLAINLY, how="percent"), Against(SCORE, **PLAINLY, how="z")
QUESTIONS = {"GSM8K": 1319, "MBPP": 500}  # of the test sets


def _gains():
    """(task, model, standard, NUCL, absolute and relative gain, z)."""
    for key in ("table_7", "table_8"):
        table = specs.printed("nucl")["tables"][key]
        scores = {tuple(row[:2]): row[2:] for row in table["rows"]}
        for task in dict.fromkeys(task for task, _ in scores):
            pairs = [scores[task, f"{x} fine-tuning"] for x in ("Standard", "NUCL")]
            name = task.split()[0]
            for model, a, b in zip(table["columns"], *pairs, strict=True):
                z = specs.two_proportions(a, b, QUESTIONS.get(name))
                yield (name, model, a, b, b - a, 100 * (b / a - 1), z)


TABLES = (
    Table("table_2", ("training",), {"Model size": Label("{model}", SIZES)},
          {name: Cell(GAIN, match) for name, match in reversed(DATA.items())},
          {**MSTD, **OUTGOING}, best=NLL, here="here: {data.task}"),
    Table("table_3", ("training",), {"Weight matrices": Label("{losses.nucl.targets}", PLACES)},
          {"Relative gain (in %)": Cell(GAIN, DATA["GSM8K"])}, MSTD, best=NLL),
    Table("table_4", ("removal",), {
        "Pruning": Label("25%", {"0%": {"criterion": "none"}}), "Method": METHOD},
        {**TASKS, "Average": MEAN}, {"layers": "all", "ratio": (0.25, None)}),
    Table("table_5", ("removal",), {"Layers": LAYERS}, {"Average accuracy": MEAN},
          {**METHODS["Entropy-based"], "layers": ("bottom", "top", "odd", "even")}, notes=(
              "A paper's layers count from 1, a config's from 0: its odd are the paper's even.",)),
    Table("table_8", ("training",), {
        "Task": Label("{data.task}", SCORES), "Method": Label("NUCL {losses.nucl.variant}", {
            "Standard fine-tuning": STANDARD, "NUCL fine-tuning": MSTD})},
        {f"Gemma-{size}": Cell(SCORE, match) for size, match in SIZES.items()},
        {**OUTGOING, "data.task": ("gsm8k", "mbpp")}, best=NLL),
    Table("gains", ("training",), {"task": Label("{data.task}", DATA), "model": Label("{model}")},
          {"standard": Cell(SCORE, STANDARD), "NUCL": Cell(SCORE, MSTD),
           "absolute gain": Against(SCORE, **PLAINLY), "relative gain (in %)": GAIN, "z (ours)": Z},
          OUTGOING, best=NLL, rows=tuple(_gains()), here="here",
          title="Ours: gains in points and in percent, and whether chance explains them",
          notes=("z: of two proportions, of 1,319 and 500 questions, here of those asked.",)),
    Table("finetuning", ("training",), {
        "model": Label("{model}"), "data": Label("{data}"),
        "connections": Label("{losses.nucl.targets}", PLACES),
        "loss": Label("{losses.nucl.variant}"), "alpha": Label("{losses.nucl.weight:g}")},
        {"validation NLL": NLL, "less standard": Against(NLL, **PLAINLY), "*": True}, here="here",
        title="Ours: fine-tuning, by loss and alpha"),
    Table("removal", ("removal",), {
        "model": Label("{model}"), "method": METHOD, "layers": LAYERS},
        {"perplexity": "perplexity", "x unpruned": Against("perplexity", **UNPRUNED, how="ratio"),
         "% of parameters": "parameters_removed_percent", "norm of lambda": "largest_lambda_norm",
         "condition": "largest_condition", "*": True}, here="here", notes=(
            "Norm and condition number: the largest over the layers, of least squares.",),
        title="Ours: perplexity after removal"),
)  # fmt: skip

VARIANTS, ALPHAS = Label("{model}, {losses.nucl.variant}"), Label("alpha = {losses.nucl.weight:g}")
CURVES = (
    Curves("figure_2", ("training",), VARIANTS, ALPHAS, {"entropy a neuron (nats)": ENTROPY},
           where=OUTGOING),
    Curves("figure_3", ("training",), VARIANTS, ALPHAS, {"validation NLL": NLL}, where=OUTGOING),
    Curves("figure_4", ("removal",), Label("by perplexity (ours)"), Label("{model}"),
           {"perplexity x unpruned": Against("perplexity", **UNPRUNED, how="ratio")}, x="pair",
           xlabel="first of the two layers, from 0", where=METHODS["Entropy-based"], log=True),
)  # fmt: skip

SAME_ALPHA = {"where": {VARIANT: "gini"}, "free": (VARIANT,)}
AT_RANDOM = {"where": METHODS["Random"], "free": REMOVAL[:3]}
TRAINED = ("compare", "training", {**MSTD, **OUTGOING}, Label("{model}, {data.task}"))
MODEL = Label("{model}, {layers}")
CLAIMS = (
    Claim("mstd's entropy falls below gini's at the same alpha", "Section 4.1, Figure 2", *TRAINED,
          {"value": Against(ENTROPY, **SAME_ALPHA), "sign": -1, "label": ALPHAS}),
    Claim("mstd's text loss is below gini's at the same alpha", "Section 4.1, Figure 3", *TRAINED,
          {"value": Against(NLL, **SAME_ALPHA), "sign": -1, "label": ALPHAS}),
    Claim("removal by entropy does less harm than at random", "Section 4.2; here by perplexity",
          "compare", "removal", METHODS["Entropy-based"], MODEL,
          {"value": Against("perplexity", **AT_RANDOM), "sign": -1, "label": Label("entropy")}),
    Claim("the three weak criteria do more harm than chance", "Section 4.2; here by perplexity",
          "compare", "removal", WEAK, MODEL,
          {"value": Against("perplexity", **AT_RANDOM), "sign": 1, "label": METHOD}),
)  # fmt: skip
PAPER = specs.Paper("nucl", KINDS, TABLES, CURVES, CLAIMS)
