"""`make demo`: the NUCL paper's claims on a pretrained model, in minutes on two CPU cores."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate.connectivity import layer_sums
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.io.fetch import fetch_model
from ffn_heterogeneity.io.files import once, write_text
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.io.read import read_json
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.io.workdir import working_in
from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.models.options import products
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.report.figures import bar_figure, curves_figure
from ffn_heterogeneity.report.stats import student
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.wording import markdown_table

WINDOW = 256
WINDOWS = 16
RATIO = 0.25
# label -> (criterion, reverse)
REMOVALS: dict[str, tuple[str, bool]] = {
    "highest entropy (NUCL)": ("entropy", False),
    "random": ("random", False),
    "smallest magnitude": ("magnitude", False),
    "lowest entropy (sanity row)": ("entropy", True),
}


def python_manual() -> tuple[str, str]:
    """(train, held-out) text: CPython's language reference, with every 8th topic held out."""
    from pydoc_data.topics import topics

    parts: tuple[list[str], list[str]] = ([], [])
    for i, name in enumerate(sorted(topics)):
        parts[i % 8 == 0].append(topics[name])
    return "\n\n".join(parts[0]), "\n\n".join(parts[1])


def run(
    workdir: epath.Path, models: str | None, steps: int, alpha: float, fresh: bool = False
) -> dict:
    """Run every part that has no saved result and write the report.

    Args:
      models: directory for the fetched model; None: `fetch.models_directory`.
      alpha: NUCL's weight in the second of the two training runs.
      fresh: remove the results of an earlier demo first.

    Raises:
      WorkdirError: the directory holds something else, or a demo with other settings.
    """
    settings = {"demo": True, "steps": steps, "alpha": alpha}
    settings |= {"window": WINDOW, "windows": WINDOWS, "ratio": RATIO}
    claimed = workdir / "config.json"
    if fresh and claimed.exists() and "demo" in read_json(claimed):
        workdir.rmtree()
    with working_in(workdir, settings):
        return pieces(workdir, models, settings)


@products()
def pieces(workdir: epath.Path, models: str | None, settings: dict) -> dict:
    """Run or read the parts of the demo; see `run`."""
    started = time.time()
    path = fetch_model("smollm2", models)
    train_text, heldout_text = python_manual()
    for name, text in (("train", train_text), ("heldout", heldout_text)):
        write_text(workdir / f"{name}.txt", text)
    sizes = f"{len(train_text):,} + {len(heldout_text):,}"
    say(f"SmolLM2-135M-Instruct from {path}; {sizes} characters of the Python language reference")
    spec = f"nucl_finetune:{path},text"
    model, folder = Pretrained(workdir, str(path), heldout_text), workdir / "pieces"
    before = once(folder, "before", model.before)
    removal = {
        label: once(folder, label, functools.partial(model.removal, *how))
        for label, how in REMOVALS.items()
    }
    print(f"\n{removal_table(before, removal)}\n", flush=True)
    results = {"settings": settings, "before": before, "removal": removal, "training": {}}
    for alpha in (0.0, settings["alpha"]):
        trained = train(workdir, spec, alpha, settings["steps"])
        tuned = Pretrained(workdir, str(workdir / f"train-alpha-{alpha:g}" / "model"), heldout_text)
        after = once(folder, f"after alpha = {alpha:g}", tuned.after)
        results["training"][f"alpha = {alpha:g}"] = {**trained, **after}
    results["bought"] = bought(*(run["added"] for run in results["training"].values()))
    # A second run only reads results, so the first run's time is reported.
    results["seconds"] = once(folder, "time", lambda: round(time.time() - started, 1))
    write_results(workdir, results)
    report(workdir, results)
    return results


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass
class Pretrained:
    """Measurements on the pretrained model."""

    workdir: epath.Path
    spec: str
    heldout: str

    @functools.cached_property
    def model(self) -> Model:
        """The model, loaded on first use: a second run with all results needs none."""
        return load_model(self.spec)

    def rows(self) -> np.ndarray:
        return text_windows(
            self.heldout, self.model.tokenizer, WINDOW, max_windows=WINDOWS, bos="segment"
        )

    def before(self) -> dict:
        """Perplexity and connectivity of the original model."""
        model = self.model
        found = perplexity(model.config, model.params, self.rows(), progress="perplexity before")
        return {**found, "layers": layer_sums(model, self.workdir)}

    def after(self) -> dict:
        """Increase of each window's NLL by removing neurons by entropy."""
        model = self.model
        whole = perplexity(model.config, model.params, self.rows(), progress="perplexity after")
        thin = self.removal(*REMOVALS["highest entropy (NUCL)"])
        return {"added": np.subtract(thin["nll_windows"], whole["nll_windows"]).tolist()}

    def removal(self, criterion: str, reverse: bool) -> dict:
        """Perplexity after removing 25% of every layer's neurons."""
        model = self.model
        plan = RemovalPlan(criterion, RATIO, reverse=reverse)
        config, params, *_ = reduce_model(model.config, model.params, plan)
        label = f"without {RATIO:.0%} by {'reversed ' if reverse else ''}{criterion}"
        return perplexity(config, restack(config, params), self.rows(), progress=label)


def train(workdir: epath.Path, spec: str, alpha: float, steps: int) -> dict:
    """Run one short fine-tuning; return its results and its metrics by step."""
    from ffn_heterogeneity.launch.commands import COMMANDS

    say(f"fine-tuning, alpha = {alpha:g}")
    folder = workdir / f"train-alpha-{alpha:g}"
    config = demo_config(cli.load_config(spec), workdir, alpha, steps)
    results = COMMANDS["train"](config, folder, None)
    return {"results": results, "metrics": read_metrics(folder / "metrics.jsonl")}


def demo_config(config: ConfigDict, workdir: epath.Path, alpha: float, steps: int) -> ConfigDict:
    """The paper's recipe for two CPU cores: few short rows, no dropout, a larger learning rate."""
    config.steps, config.batch_size, config.seq_len = steps, 2, WINDOW
    config.losses.nucl.weight, config.dropout = alpha, 0.0
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 5e-5, 5
    config.data.path = str(workdir / "train.txt")
    config.data.validation_path = str(workdir / "heldout.txt")
    config.data.validation_fraction = 0.0
    config.eval.every, config.eval.max_batches = max(1, steps // 3), 4
    config.checkpoint.every, config.checkpoint.keep_best = 0, False
    config.checkpoint.at_end = False
    config.remat = "none"  # with few rows, the memory saved is not worth a second forward pass
    return config


def report(workdir: epath.Path, results: Mapping[str, Any]) -> None:
    """Write report.md and figures, and print the tables."""
    before, removal = results["before"], results["removal"]
    perplexities = with_none(before, removal)
    title = f"perplexity without {RATIO:.0%} of the FFN neurons (log scale)"
    bar_figure(perplexities, title, workdir / "removal.png")
    runs = results["training"]
    panels = {
        title: {label: curve(run["metrics"], name) for label, run in runs.items()}
        for name, title in PANELS.items()
    }
    curves_figure(panels, workdir / "training.png")
    training_table = markdown_table(
        ("fine-tuning", "steps", "NLL before", "NLL after", "entropy before", "entropy after"),
        [training_row(label, run["results"]) for label, run in runs.items()],
    )
    numbers = results["settings"] | {"tokens": before["tokens"], "seconds": results["seconds"]}
    tables = {"removal": removal_table(before, removal), "training": training_table}
    template = Path(__file__).with_name("demo.md").read_text()
    report = template.format(**tables, bought=results["bought"], **numbers)
    write_text(workdir / "report.md", report)
    print(f"\n{training_table}\n\n{results['bought']}\n")
    say(f"report: {workdir}/report.md ({results['seconds']:.0f} s)")


def with_none(before: Mapping[str, Any], removal: Mapping[str, Any]) -> dict[str, float]:
    """Perplexity of each removal, starting with the unpruned model."""
    return {"none removed": before["perplexity"]} | {
        label: float(found["perplexity"]) for label, found in removal.items()
    }


def removal_table(before: Mapping[str, Any], removal: Mapping[str, Any]) -> str:
    """Table of the perplexities and their ratios to the unpruned model's."""
    return markdown_table(
        (f"{RATIO:.0%} of every layer's neurons removed by", "perplexity", "x unpruned"),
        [
            (label, f"{value:,.2f}", f"{value / before['perplexity']:,.2f}")
            for label, value in with_none(before, removal).items()
        ],
    )


def bought(plain: Sequence[float], nucl: Sequence[float]) -> str:
    """One sentence that compares the cost of removal after fine-tuning with and without NUCL.

    Args:
      plain, nucl: increase of each window's NLL by the removal, for the same windows.
    """
    found = student(np.subtract(nucl, plain).tolist())
    told = "less" if found.high < 0 else "more" if found.low > 0 else ""
    verdict = f"{told} harm than" if told else "as much harm, as far as these windows tell, as"
    return (
        f"Without {RATIO:.0%} of its neurons (by entropy) the model tuned with NUCL loses "
        f"{np.mean(nucl):.3f} nats a token and the one tuned without {np.mean(plain):.3f}: a "
        f"difference of {found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}], {verdict} without."
    )


def curve(rows: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    """{step: value} of the rows that have the metric."""
    return {row["step"]: row[name] for row in rows if name in row}


ENTROPY = "entropy/ent/ffn_out/mean"
PANELS = {
    f"validation/{ENTROPY}": "outgoing entropy, mean per neuron (nats)",
    "validation/nll": "held-out NLL (nats per token)",
}


def training_row(label: str, results: Mapping[str, Any]) -> tuple[str, ...]:
    """Table row: label, steps, held-out NLL and mean entropy before and after."""
    first, final = results["first"], results["final"]
    values = [row[f"validation/{name}"] for name in ("nll", ENTROPY) for row in (first, final)]
    return (label, str(results["steps"]), *(f"{value:.4f}" for value in values))
