"""Massive weights (House of Cards): its tables and figures, beside what was measured here."""

from __future__ import annotations

from ffn_heterogeneity.papers import nucl, specs
from ffn_heterogeneity.papers.specs import (
    Accuracy,
    Against,
    Cell,
    Claim,
    Curves,
    Kind,
    Label,
    Mean,
    Share,
    Table,
)

ATTACK = ("attack", "k", "layer", "token")
OWN = tuple(f"macdrop.{key}" for key in ("scope", "curriculum", "a", "p0"))
MACDROP = tuple(f"trained.{key}" for key in OWN)
KINDS = {
    "attack": Kind({"attack": bool, "perplexity": bool, "trained.adapter": None},
                   ("model", *ATTACK, *nucl.EVALUATION), ("model", *ATTACK, "text"),
                   Label("{model}")),
    "analysis": Kind({"analysis": "massive"}, ("model", "layer", "token", "five", "rank"),
                     ("model", "rank", "layer", "five"), Label("{model}")),
    "removal": nucl.KINDS["removal"]._replace(
        shown=("model", "ratio", *nucl.REMOVAL, "window")
    ),
    # Models that were trained with adapters, as they are (k = 0) and attacked; each its seed.
    "adapted": Kind({"trained.adapter": bool, "attack": bool, "perplexity": bool},
                    ("model", *ATTACK, *nucl.EVALUATION, "trained."),
                    ("model", "text", "trained.adapter", *MACDROP, *ATTACK),
                    Label("{model}"), {"trained.adapter": bool}),
    "tuning": Kind({"prepare": bool, "macdrop.p0": bool},
                   ("model", "steps", "macdrop."), ("model", *OWN), Label("{model}")),
}  # fmt: skip

WHOLE = {"attack": "zero", "k": 0}
ATTACKED = Label("{attack} {k}", {"-": WHOLE})
ATTACKS = Label("top-{k} {attack}", {
    "-": WHOLE, "top-5 zeroing": {"attack": "zero", "k": 5},
    "top-5 retaining": {"attack": "retain", "k": 5}})  # fmt: skip
TASKS = {"ARC-E": Accuracy("arc_easy"), "ARC-C": Accuracy("arc_challenge"),
         "BoolQ": Accuracy("boolq"), "PIQA": Accuracy("piqa"),
         "WG": Accuracy("winogrande")}  # fmt: skip
MEAN = tuple(TASKS.values())
CORPORA = {"WikiText": "wikitext", "C4": "c4", "PG-19": "pg19"}
PERPLEXITY = {name: Cell("perplexity", {"corpus": corpus}) for name, corpus in CORPORA.items()}
MODEL = Label("{model}")
# Labels of rows: what was read; of what how much was removed.
READ = {"model": MODEL, "text": Label("{corpus}")}
PRUNED = {"model": MODEL, "share of neurons": Label("{ratio}")}
UNATTACKED = {"where": WHOLE, "free": ("attack", "k")}

SCOPE, CURRICULUM, A, P0 = MACDROP
ALONE, ITS_STEP = {P0: None}, {SCOPE: "massive", CURRICULUM: "step", P0: 0.8}
METHOD = Label(f"{{trained.adapter}}, {{{SCOPE}}}, {{{CURRICULUM}}}, p0 {{{P0}}}", {
    f"{{trained.adapter}}, {{{SCOPE}}}, exp, a {{{A}}}, p0 {{{P0}}}": {CURRICULUM: "exp"}} | {
    name + more: {"trained.adapter": name.lower()} | its
    for name in ("LoRA", "DoRA") for more, its in (("", ALONE), (" + MacDrop", ITS_STEP))
})  # fmt: skip
CURRICULA, DRAWN = (
    Label(f"{{{key}curriculum}}", {f"exp, a = {{{key}a:.2f}}": {f"{key}curriculum": "exp"}})
    for key in ("trained.macdrop.", "macdrop.")
)
DROPPED = {"where": ALONE, "free": ("trained.macdrop.",)}
LONG = dict(zip(("ARC-Easy", "ARC-Challenge", "BoolQ", "PIQA", "WinoGrande"), MEAN, strict=True))

HERE = "here: windows of {window}"
UNPRUNED, ENTROPY = {"criterion": "none"}, nucl.METHODS["Entropy-based"]
FREE = (*nucl.REMOVAL, "layer")
CHANCE = {"criterion": "random", **nucl.PLAIN}
RULE = Label(
    "{criterion}, {compensation}, reverse {reverse}, {protect} spared, on {calibration_corpus}",
    nucl.METHODS | {
        "Random, {protect} spared": {**CHANCE, "protect": bool},
        "{criterion}, on {calibration_corpus}": {**nucl.PLAIN, "calibration": bool},
        "{criterion}": nucl.PLAIN, "{criterion}, reversed": {**nucl.PLAIN, "reverse": True},
        "{criterion}, {compensation}": nucl.FREELY,
    })  # fmt: skip
SPARED = Label("{protect}", {"nobody": CHANCE})
HARM = Against("nll", UNPRUNED, (*FREE, *nucl.SIZE), "windows")
# What a figure shows of entropy made to lose neurons; the loudest have the largest |h| on bos.
LOST = {
    "massive:2": "massive layer's 2 loudest",
    "bos:5": "each layer's 5 loudest",
    "entropy:0.01": "each layer's lowest 1%",
    "random:0.01": "any other 1%",
}
NEEDED = Label(
    "",
    {"entropy": ENTROPY, "chance": CHANCE}
    | {f"entropy, {who} lost": {**ENTROPY, "lose": lose} for lose, who in LOST.items()},
)
# As many as a figure can hold: chance, and rules that do better at most shares.
SHOWN = ("random", "entropy", "mstd", "bos", "largest_outgoing", "mean_state", "optipfair")

TABLES = (
    Table("table_1", ("attack",), {"Models": MODEL, "Attack": ATTACKS},
          {**PERPLEXITY, "Avg. (perplexity)": Mean(tuple(PERPLEXITY.values())), **TASKS,
           "Avg. (accuracy)": MEAN}, {"k": (0, 5)}, here=HERE),
    Table("table_7", ("analysis",), {"Models": MODEL}, {"Layer": "layer", "Indices": "five"},
          here="here"),
    Table("table_8", ("adapted",), {"Model": MODEL, "Method": METHOD}, {**LONG, "Avg.": MEAN},
          WHOLE),
    Table("table_4", ("adapted",), {"Model": MODEL, "Method": METHOD}, {**TASKS, "Avg.": MEAN},
          {"attack": "zero", "k": 3}),
    Table("table_5", ("adapted",), {"Curriculum": CURRICULA},
          {str(p0): Cell(MEAN, {P0: p0}) for p0 in (0.2, 0.5, 0.8, 1.0)},
          {**WHOLE, "trained.adapter": "lora", SCOPE: "massive"}),
    Table("macdrop", ("adapted",),
          {**READ, "method": METHOD, "attack": ATTACKED},
          {"NLL": "nll", "less adapter alone": Against("nll", **DROPPED),
           "less unattacked": Against("nll", **UNATTACKED),
           "accuracy": MEAN, "accuracy less adapter alone": Against(MEAN, **DROPPED)},
          here="here", title="Ours: adapters with and without MacDrop, as they are and attacked",
          notes=("In nats a token and percent, the mean of five tasks; paired over seeds.",)),
    Table("macdrop_questions", ("adapted",),
          {"model": MODEL, "method": METHOD, "attack": ATTACKED},
          {name: Against(task, **DROPPED, how="questions") for name, task in TASKS.items()},
          here="here", title="Ours: accuracy with MacDrop less that of the adapter alone",
          notes=("In points, of means over the seeds, paired over questions.",)),
    Table("attacks", ("attack",), {
        **READ, "attack": Label("{attack}"), "k": Label("{k}")},
        {"perplexity": "perplexity",
         "NLL less unattacked": Against("nll", **UNATTACKED, how="windows"),
         **{f"{name} less unattacked": Against(task, **UNATTACKED, how="questions")
            for name, task in TASKS.items()}},
        here="here", title="Ours: every attack, against the model as it is",
        notes=("Differences in nats a token and in points, paired over windows and questions.",)),
    Table("removal", ("removal",), {
        **PRUNED, "method": RULE},
        {"NLL": "nll", "less unpruned": HARM,
         "less entropy": Against("nll", ENTROPY, FREE, "windows"),
         "less chance": Against("nll", CHANCE, FREE)},
        {"lose": ""}, here=HERE, title="Ours: neurons removed, every rule", notes=(
            "Nats a token; differences paired over windows, those from chance over its seeds.",)),
    Table("needed", ("removal",), {
        **PRUNED, "lost": Label("{lose}", {"none": ENTROPY})},
        {"NLL": "nll", "less entropy": Against("nll", ENTROPY, FREE, "windows"),
         "of entropy's advantage": Cell(Share("nll", ENTROPY, CHANCE, FREE), {"draws": False})},
        {"criterion": "entropy", "compensation": "none", **nucl.FREELY}, here=HERE,
        title="Ours: the part of entropy's advantage over chance that goes with neurons lost",
        notes=("As many go in all. 1: as bad as chance, over its seeds; 0: as good as entropy.",)),
    Table("explained", ("removal",), {
        **PRUNED, "spared": SPARED},
        {"NLL": "nll", "less chance": Against("nll", CHANCE, FREE),
         "of entropy's advantage": Share("nll", CHANCE, ENTROPY, FREE)},
        {"criterion": "random", "reverse": False, "compensation": "none"}, here=HERE,
        title="Ours: the part of entropy's advantage over chance that comes with neurons spared",
        notes=("1: as good as entropy; 0: as bad as chance. Paired over seeds.",)),
)  # fmt: skip

LINES = Label("{attack}, {corpus}")
SCOPES = Label(f"{{trained.adapter}}, {{{SCOPE}}}, {{attack}} {{k}}, {{corpus}}")
CURVES = (
    Curves("figure_3", ("analysis",), MODEL, Label("{rank}"), {
        "hidden state": "massive/h_out", "intermediate state": "massive/intermediate"}, "layer"),
    Curves("figure_4", ("attack",), MODEL, Label("{attack}"), {"mean accuracy (%)": MEAN}, x="k"),
    Curves("figure_6", ("adapted",), MODEL, SCOPES,
           {"mean accuracy (%)": MEAN, "perplexity": "perplexity"}, x=P0, xlabel="p",
           where={CURRICULUM: "constant"}),
    Curves("figure_7", ("tuning",), Label("p0 {macdrop.p0}"), DRAWN,
           {"p": "train/macdrop"}, where={"macdrop.scope": "massive"}),
    Curves("removal_by_ratio", ("removal",), MODEL, RULE, {"NLL less unpruned": HARM}, x="ratio",
           xlabel="share of neurons removed",
           where={**nucl.PLAIN, "criterion": SHOWN},
           title="Ours: neurons removed, by rule and by their share", log=True),
    Curves("needed_by_ratio", ("removal",), MODEL, NEEDED, {"NLL less unpruned": HARM}, x="ratio",
           xlabel="share of neurons removed",
           where={**nucl.PLAIN, "criterion": ("random", "entropy"), "lose": ("", *LOST)},
           title="Ours: entropy with and without a few neurons that it keeps", log=True),
    Curves("perplexity_by_k", ("attack",), MODEL, LINES, {"perplexity": "perplexity"}, x="k",
           title="Ours: perplexity according to k", log=True),
)  # fmt: skip

FIVE, TRAINED = {"k": 5, "layer": None}, Label("{model}, {trained.adapter}, {corpus}")
CLAIMS = (
    Claim("the massive layer and its five neurons are those printed", "Table 7", "as_printed",
          "analysis", {}, MODEL, {"paper": "massive_weights", "table": "table_7", "label": MODEL,
                                  "values": ("layer", "five")}),
    Claim("top-5 zeroing does more harm than top-5 retaining", "Section 2.3, Table 1; by NLL",
          "compare", "attack", {"attack": "zero", **FIVE}, Label("{model}, {corpus}"),
          {"value": Against("nll", {"attack": "retain", **FIVE}, ("attack",)), "sign": 1,
           "label": Label("{corpus}")}),
    Claim("zeroing three already does harm", "Section 2.3 of the Llama families; by NLL",
          "compare", "attack", {"attack": "zero", "k": 3}, Label("{model}, {corpus}"),
          {"value": Against("nll", **UNATTACKED), "sign": 1, "label": Label("{corpus}")}),
    Claim("an adapter trained with MacDrop does better under top-3 zeroing than without",
          "Section 4.1, Table 4; by NLL", "compare", "adapted",
          {"attack": "zero", "k": 3, **ITS_STEP}, TRAINED,
          {"value": Against("nll", **DROPPED), "sign": -1, "label": METHOD}),
    Claim("an adapter trained with MacDrop does better on the tasks than without",
          "Section 4.1, Tables 3 and 8", "compare", "adapted", {**WHOLE, **ITS_STEP}, TRAINED,
          {"value": Against(MEAN, **DROPPED), "sign": 1, "label": METHOD}),
    # Not that it stands the attack: LoRA beside gate and up keeps those neurons alive in training.
    Claim("trained with the massive weights always dropped, it does better under top-3 zeroing",
          "ours: the positive control, p = 1; by NLL", "compare", "adapted",
          {"attack": "zero", "k": 3, SCOPE: "massive", CURRICULUM: "constant", P0: 1.0}, TRAINED,
          {"value": Against("nll", **DROPPED), "sign": -1, "label": METHOD}),
    Claim("removal by entropy does less harm than chance that spares the massive neurons",
          "ours: NUCL, section 4.2", "compare", "removal", ENTROPY, Label("{model}, {ratio}"),
          {"value": Against("nll", CHANCE | {"protect": "bos:5"}, FREE), "sign": -1,
           "label": Label("entropy")}),
)  # fmt: skip
PAPER = specs.Paper("massive_weights", KINDS, TABLES, CURVES, CLAIMS)
