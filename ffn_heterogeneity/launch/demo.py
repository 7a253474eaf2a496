"""`make demo`: neurons removed without data, then recovery, on a real model and two CPU cores."""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate.connectivity import layer_sums
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.io.fetch import fetch_model
from ffn_heterogeneity.io.files import once, write_text
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.io.read import read_json
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.io.workdir import working_in
from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.models.options import products
from ffn_heterogeneity.report.figures import bar_figure, curves_figure
from ffn_heterogeneity.surgery.reduce import prune
from ffn_heterogeneity.wording import markdown_table

WINDOW = 256
WINDOWS = 16
RATIO = 0.25
# The rule that the demo recommends: what neurons do on text that the model itself writes.
BEST = "states on self-generated text, refitted"
# Row of the table -> settings of the removal.
REMOVALS: dict[str, dict[str, Any]] = {
    BEST: {
        "criterion": "optipfair",
        "calibration": "own",
        "calibration_tokens": 2048,
        "compensation": "state_ridge",
    },
    "highest entropy of the weights": {"criterion": "entropy"},
    "random": {"criterion": "random"},
    "smallest magnitude": {"criterion": "magnitude"},
}


def python_manual() -> tuple[str, str]:
    """(train, held-out) text: CPython's language reference, with every 8th topic held out."""
    from pydoc_data.topics import topics

    parts: tuple[list[str], list[str]] = ([], [])
    for i, name in enumerate(sorted(topics)):
        parts[i % 8 == 0].append(topics[name])
    return "\n\n".join(parts[0]), "\n\n".join(parts[1])


def run(workdir: epath.Path, models: str | None, steps: int, fresh: bool = False) -> dict:
    """Results of the demo; completed pieces of an earlier run are read, and a report is written.

    Args:
      models: where the model is fetched to; None: `fetch.models_directory`.
      steps: of both fine-tunings.
      fresh: removes an earlier demo's pieces first.

    Raises:
      WorkdirError: the directory holds something else, or a demo with other settings.
    """
    settings = {"demo": True, "steps": steps, "window": WINDOW, "windows": WINDOWS, "ratio": RATIO}
    claimed = workdir / "config.json"
    if fresh and claimed.exists() and "demo" in read_json(claimed):
        workdir.rmtree()
    with working_in(workdir, settings):
        return pieces(workdir, models, settings)


@products()
def pieces(workdir: epath.Path, models: str | None, settings: dict) -> dict:
    """Results of `run`, in a work directory that is ours."""
    started = time.time()
    path = fetch_model("smollm2", models)
    train_text, heldout_text = python_manual()
    for name, text in (("train", train_text), ("heldout", heldout_text)):
        write_text(workdir / f"{name}.txt", text)
    sizes = f"{len(train_text):,} + {len(heldout_text):,}"
    say(f"SmolLM2-135M-Instruct from {path}; {sizes} characters of the Python language reference")
    folder, pruned = workdir / "pieces", workdir / "pruned"
    loaded = functools.cache(lambda: load_model(path))  # not by a second run, which only reads
    before = once(
        folder, "before", lambda: measured(loaded(), heldout_text, "none removed", workdir)
    )
    removal = {}
    for label, rule in REMOVALS.items():
        saved = pruned if label == BEST else None
        one = functools.partial(removed, loaded, heldout_text, label, rule, saved)
        removal[label] = once(folder, label, one)
    print(f"\n{removal_table(before, removal)}\n", flush=True)
    results = {"settings": settings, "before": before, "removal": removal}
    models_by_name = {"uncompressed": path, "pruned": pruned}
    results["training"] = {
        name: train(workdir, name, model, settings["steps"])
        for name, model in models_by_name.items()
    }
    # A second run only reads: the reported time is the first one's.
    results["seconds"] = once(folder, "time", lambda: round(time.time() - started, 1))
    write_results(workdir, results)
    report(workdir, results)
    return results


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measured(model: Model, text: str, label: str, workdir: epath.Path | None = None) -> dict:
    """Perplexity of the held-out text; with a directory the connectivity of each layer, too."""
    rows = text_windows(text, model.tokenizer, WINDOW, max_windows=WINDOWS, bos="auto")
    scores = perplexity(model.config, model.params, rows, progress=f"perplexity, {label}")
    return scores | ({"layers": layer_sums(model, workdir)} if workdir else {})


def removed(
    loaded: Callable[[], Model], text: str, label: str, rule: dict, saved: epath.Path | None
) -> dict:
    """Perplexity after removing a quarter of every layer's neurons; `saved`: where the model is
    written to."""
    smaller, _ = prune(loaded(), {"ratio": RATIO, **rule}, key=jax.random.key(0))
    if saved:
        form = {"tokenizer": smaller.tokenizer, "overwrite": True}
        save_pretrained(smaller.config, smaller.params, saved, **form)
    return measured(smaller, text, label)


def train(workdir: epath.Path, name: str, model: epath.Path, steps: int) -> dict:
    """Results and metrics by step of a short fine-tuning."""
    from ffn_heterogeneity.launch.commands import COMMANDS

    say(f"fine-tuning, {name}")
    folder = workdir / f"train-{name}"
    config = demo_config(cli.load_config(f"nucl_finetune:{model},text"), workdir, steps)
    results = COMMANDS["train"](config, folder, None)
    return {"results": results, "metrics": read_metrics(folder / "metrics.jsonl")}


def demo_config(config: ConfigDict, workdir: epath.Path, steps: int) -> ConfigDict:
    """The text loss alone, cut to two CPU cores: few short rows, no dropout, a larger rate."""
    config.steps, config.batch_size, config.seq_len = steps, 2, WINDOW
    config.losses.nucl.weight, config.dropout = None, 0.0
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 5e-5, 5
    config.data.path = str(workdir / "train.txt")
    config.data.validation_path = str(workdir / "heldout.txt")
    config.data.validation_fraction = 0.0
    config.eval.every, config.eval.max_batches = max(1, steps // 3), 4
    config.checkpoint.every, config.checkpoint.keep_best = 0, False
    config.checkpoint.at_end = False
    config.remat = "none"  # so few rows fit without a second forward pass
    return config


def report(workdir: epath.Path, results: Mapping[str, Any]) -> None:
    """Write report.md and figures, and print the tables."""
    before, removal = results["before"], results["removal"]
    perplexities = with_none(before, removal)
    title = f"perplexity without {RATIO:.0%} of the FFN neurons (log scale)"
    bar_figure(perplexities, title, workdir / "removal.png")
    runs = results["training"]
    curves = {name: curve(run["metrics"], "validation/nll") for name, run in runs.items()}
    curves_figure({"held-out NLL (nats per token)": curves}, workdir / "training.png")
    training = markdown_table(
        ("fine-tuning", "steps", "NLL before", "NLL after"),
        [training_row(name, run["results"]) for name, run in runs.items()],
    )
    numbers = results["settings"] | {"tokens": before["tokens"], "seconds": results["seconds"]}
    tables = {"removal": removal_table(before, removal), "training": training}
    template = Path(__file__).with_name("demo.md").read_text()
    write_text(workdir / "report.md", template.format(**tables, **numbers))
    print(f"\n{training}\n")
    say(f"report: {workdir}/report.md ({results['seconds']:.0f} s)")


def with_none(before: Mapping[str, Any], removal: Mapping[str, Any]) -> dict[str, float]:
    """Perplexities by what was removed, first that of the uncompressed model."""
    return {"none removed": before["perplexity"]} | {
        label: float(scores["perplexity"]) for label, scores in removal.items()
    }


def removal_table(before: Mapping[str, Any], removal: Mapping[str, Any]) -> str:
    """Perplexities, and their ratio to that of the uncompressed model."""
    return markdown_table(
        (f"{RATIO:.0%} of every layer's neurons removed by", "perplexity", "x uncompressed"),
        [
            (label, f"{value:,.2f}", f"{value / before['perplexity']:,.2f}")
            for label, value in with_none(before, removal).items()
        ],
    )


def curve(rows: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    """Values by step, of the rows that have this metric."""
    return {row["step"]: row[name] for row in rows if name in row}


def training_row(label: str, results: Mapping[str, Any]) -> tuple[str, ...]:
    """Label, steps, held-out NLL before and after."""
    values = [results[end]["validation/nll"] for end in ("first", "final")]
    return (label, str(results["steps"]), *(f"{value:.4f}" for value in values))
