"""The first picture of README.md: the loss that each rule adds on windows of the whole text.

python docs/removal_picture.py    (in the repository's root; writes docs/removal.png)
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


def main() -> None:
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


if __name__ == "__main__":
    main()
