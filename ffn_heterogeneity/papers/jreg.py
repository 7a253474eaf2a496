"""JREG (Shibata et al.): its tables and figures, beside what was measured here."""

from __future__ import annotations

from ffn_heterogeneity.papers import specs
from ffn_heterogeneity.papers.specs import Accuracy, Against, At, Claim, Curves, Kind, Label, Table

WEIGHT, ALPHA = "losses.jreg.weight", "losses.jreg.alpha"
NLL, PSI, ENTROPY = "validation/nll", "validation/jreg/psi", "validation/entropy/ent/ffn_out/mean"
RATES = {rate: f"validation/jreg/{rate}" for rate in ("zeta_L", "zeta_L-1", "zeta_L-2")}
ZETA = RATES["zeta_L"]
EVALUATION = ("text", "token_ids", "window", "max_windows", "bos", "positions", "compute_dtype")
BASELINE, OURS = {WEIGHT: (0, None)}, {WEIGHT: bool}
AFTER = ", {steps:,d} steps"
NAME = Label("lambda {losses.jreg.weight:g}, alpha {losses.jreg.alpha:g}" + AFTER,
             {"baseline" + AFTER: BASELINE})  # fmt: skip
SHAPE = ("shape.layers", "shape.d_model", "shape.ffn_width")
KINDS = {
    "pretraining": Kind(
        {"shape.layers": bool},
        ("model", "revision", "tokenizer", "batch_size", "seq_len", "steps", "dropout", "freeze",
         "compute_dtype", "train_only", "eval.max_batches", "shape.", "data.", "optimizer.",
         "losses.", "monitors."),
        ("model", *SHAPE, "shape.", "steps", WEIGHT, ALPHA, "batch_size", "seq_len"),
        NAME, {"shape.layers": bool},
        (WEIGHT, "losses.jreg.final_norm", "losses.jreg.positions", "losses.jreg.term",
         "losses.nll.")),
    "displacement": Kind({"analysis": "displacement"}, ("path", "reading", *EVALUATION),
                         ("path", "reading"),
                         Label("{model}, h_L {reading} the final norm")),
}  # fmt: skip

PLAIN = {"where": BASELINE, "free": (WEIGHT, ALPHA)}
# The paper's names are not the numbers of parameters.
SIZES = Label("{shape.layers}x{shape.d_model}/{shape.ffn_width}", {
    name: dict(zip(SHAPE, shape, strict=True))
    for name, shape in {"170M": (12, 768, 2048), "1B": (16, 2048, 5376),
                        "3.4B": (30, 3072, 8192)}.items()})  # fmt: skip
METHOD = Label("JREG (ours)", {"Baseline": BASELINE})
SHARPNESS = Label("{losses.jreg.alpha:.1f}", {"-": BASELINE})
ROW = {"Size": SIZES, "Method": METHOD, "alpha": SHARPNESS}
HERE = "here: lambda {losses.jreg.weight:g}, {steps:,d} steps of {batch_size} x {seq_len}"
LOSS = Label("lambda {losses.jreg.weight:g}, alpha {losses.jreg.alpha:g}", {"baseline": BASELINE})
RUN_ON = Label(SIZES.default + AFTER)
READING = Label("{model}, h_L {reading} the final norm")
MODEL, MODELS = Label("{model}"), {"series": False}
TASKS = {
    "ARC-e": Accuracy("arc_easy"), "BoolQ": Accuracy("boolq"), "HellaSwag": Accuracy("hellaswag"),
    "LAMBADA": Accuracy("lambada_openai"), "PIQA": Accuracy("piqa"), "RACE": Accuracy("race"),
    "SocialIQA": Accuracy("social_iqa"), "SciQ": Accuracy("sciq"), "SWAG": Accuracy("swag"),
}  # fmt: skip
LABELS = {"size": SIZES, "loss": LOSS, "steps": Label("{steps:,d}")}
METRICS = {**RATES, "validation NLL": NLL}
PRETRAINING = ("pretraining",)

TABLES = (
    Table("table_1", ("displacement",), {"Model": MODEL}, RATES, MODELS,
          here="here: h_L {reading} the final norm"),
    Table("table_2", PRETRAINING, ROW, {**TASKS, "avg": tuple(TASKS.values())}, here=HERE),
    Table("table_3", PRETRAINING, ROW, RATES, here=HERE, notes=(
        "Here: at the end of training, of the displacement averaged over the validation text.",)),
    Table("table_7", ("displacement", "pretraining"), {
        "Model": Label("{model}", {"trained here": {"shape.layers": bool}}),
        "Size": Label("-", SIZES.names)},
        {f"{fifth}%": At(ZETA, fifth / 100) for fifth in (20, 40, 60, 80, 100)},
        {"series": (True, None)}, here="here: {name}"),
    Table("figure_5", PRETRAINING, {"Size": SIZES, "steps": Label("{steps:,d}")},
          {"zeta_L": ZETA}, BASELINE, here=HERE),
    Table("pretraining", PRETRAINING, LABELS, {
        "tokens": "tokens", "parameters": "parameters", **METRICS, "entropy": ENTROPY, "*": True},
        here="here", title="Ours: pre-training without and with JREG", notes=(
        "Tokens: steps x batch x length. Entropy: of a neuron's outgoing weights, in nats.",)),
    Table("paired", PRETRAINING, LABELS, {
        name: Against(path, **PLAIN) for name, path in METRICS.items()}, OURS, here="here",
        title="Ours: JREG less the baseline of the same seed, steps and setup"),
    Table("models", ("displacement",), {"model": MODEL, "h_L": Label("{reading} the final norm")},
          {**RATES, "layers": "layers", "tokens": "tokens", "text": "text"}, here="here",
          title="Ours: what the jump rates of models were measured on"),
)  # fmt: skip

JUMPS = {f"{name} (%)": path for name, path in RATES.items()}
DEPTH = {"angular displacement": PSI}
GROUP = Label(SIZES.default, {"checkpoints": {"analysis": "displacement"}})
CURVES = (
    Curves("figure_2", ("displacement",), MODEL, Label("{reading} the final norm"), DEPTH, "layer",
           where=MODELS),
    Curves("figure_4", ("displacement", "pretraining"), Label("{name}"), Label("step"), DEPTH,
           "layer", where={"series": (True, None)}, by_step=True),
    Curves("psi", PRETRAINING, SIZES, Label("{name}"), DEPTH, "layer",
           title="Ours: displacement by layer at the last evaluation, without and with JREG"),
    Curves("curves", ("pretraining", "displacement"), GROUP, Label("{name}"),
           {**JUMPS, "validation NLL": NLL}, where={"series": (True, None)},
           title="Ours: jump rates and loss over training"),
)  # fmt: skip

COMPARED = ("compare", "pretraining", OURS, RUN_ON)
CLAIMS = (
    Claim("the mean of the nine accuracies is above the baseline's at every alpha", "Section 5.1",
          *COMPARED, {"value": Against(tuple(TASKS.values()), **PLAIN), "sign": 1, "label": LOSS}),
    Claim("zeta_L is below the baseline's at every alpha", "Section 5.1", *COMPARED,
          {"value": Against(ZETA, **PLAIN), "sign": -1, "label": LOSS}),
    Claim("zeta_L is 0 at alpha 0.5 and above", "Section 5.1: 170M; 1B and 3.4B at every setting",
          "between", *COMPARED[1:], {"value": ZETA, "low": 0.0, "high": 0.005, "label": LOSS,
                                     "at_least": (ALPHA, 0.5)}),
    Claim("zeta_L grows from checkpoint to checkpoint", "Section 2.3, Table 7",
          "rising", "pretraining", BASELINE, COMPARED[3], {"metric": ZETA}),
    Claim("zeta_L grows from checkpoint to checkpoint", "Section 2.3, Table 7",
          "rising", "displacement", {"series": True}, READING, {"metric": ZETA}),
    Claim("zeta_L of a published model lies between 7.16 and 22.2", "Table 1: its four models",
          "between", "displacement", {**MODELS, "written here": False},
          Label("{reading} the final norm"),
          {"value": ZETA, "low": 7.16, "high": 22.2, "label": MODEL}),
    Claim("the validation NLL is no worse than the baseline's", "ours: the paper prints no loss",
          *COMPARED, {"value": Against(NLL, **PLAIN), "sign": -1, "label": LOSS}),
)  # fmt: skip
PAPER = specs.Paper("jreg", KINDS, TABLES, CURVES, CLAIMS)
