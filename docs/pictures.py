"""Pictures drawn from archives: docs/removal.png, the first of README.md, and docs/massive.png.

python docs/pictures.py    (in the repository's root)
"""

from matplotlib.figure import Figure

import ffn_heterogeneity as fh
from ffn_heterogeneity.report.figures import COLOURS, save

RUNS = "docs/results/runs"
SELF = "spread-own-smollm2/optipfair,own-smollm2-0.jsonl"
RULES = {
    "hybrid on self-generated text, refitted": f"{SELF},ridge",
    "hybrid on self-generated text": f"{SELF},plain",
    "entropy of the weights": "spread-rules-smollm2/entropy",
    "OptiPFair's MAW": "spread-rules-smollm2/maw",
    "random (1 draw)": "spread-rules-smollm2/random,seed=0",
    "OptiPFair's VOW": "spread-rules-smollm2/vow",
    "OptiPFair's PON": "spread-rules-smollm2/pon",
}


def added_losses() -> dict[str, float]:
    """NLL minus the dense model's, in nats per token, by rule."""
    archives = (f"{RUNS}/spread-{name}-smollm2.tar.xz" for name in ("own", "rules"))
    runs = fh.results(*archives).query("what == 'nll'")
    losses = {"/".join(run.split("/")[-2:]): x for run, x in zip(runs.run, runs.value, strict=True)}
    dense = losses["spread-rules-smollm2/unpruned"]
    return {name: losses[run] - dense for name, run in RULES.items()}


def draw_removal() -> None:
    """The loss that each rule adds on windows of the whole text."""
    losses = added_losses()
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axis = figure.subplots()
    colors = [COLOURS[2] if "self" in name else COLOURS[0] for name in losses]
    bars = axis.barh(list(losses), list(losses.values()), color=colors)
    axis.bar_label(bars, [f"+{loss:.3g}" for loss in losses.values()], padding=3)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    title = "25% of SmolLM2-135M's FFN neurons removed"
    axis.set(xlabel="Δ NLL vs dense model (nats per token)", title=title)
    axis.margins(x=0.12)
    save(figure, "docs/removal.png")


def draw_massive() -> None:
    """Perplexity by the number of massive neurons that an attack zeroes, or retains."""
    runs = fh.results(f"{RUNS}/massive-k-smollm2.tar.xz").query("what == 'perplexity'")
    runs = runs.rename(columns=lambda name: name.removeprefix("config.")).sort_values("k")
    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axis = figure.subplots()
    names = {"zero": "the k zeroed", "retain": "all but the k zeroed (k = 0: all)"}
    for (attack, name), color in zip(names.items(), COLOURS, strict=False):
        its = runs[runs.attack == attack]
        axis.plot(its.k, its.value, "o-", color=color, label=name)
    ticks = sorted(runs.k.unique())
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xticks(ticks, [str(k) for k in ticks])
    axis.set_xticks([], minor=True)
    axis.set_ylim(0)
    axis.spines[["top", "right"]].set_visible(False)
    label = "k: neurons with the largest state on the first token (logarithmic from 1)"
    title = "SmolLM2-135M-Instruct, layer 12: 1,536 FFN neurons"
    axis.set(xlabel=label, ylabel="perplexity, WikiText-2", title=title)
    axis.legend(frameon=False)
    save(figure, "docs/massive.png")


if __name__ == "__main__":
    draw_removal()
    draw_massive()
