"""`scripts/evaluate.py`."""

from __future__ import annotations

import sys

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.sources import read_utf8
from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.evaluate.tasks import check_tasks, evaluate_tasks
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.models.causal_lm import RunOptions

DTYPES = ("float32", "bfloat16")
EVALUATIONS = ("perplexity", "tasks")


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """What `config.evaluation` names (perplexity where it is not there); returns `results.json`.

    Raises:
      ValueError: a setting or a file is unusable; the message names it.
    """
    check_config(config)
    model = load_model(config.model, revision=config.revision)
    if config.get("evaluation") == "tasks":
        samples = workdir / "samples" if config.save_samples else None
        results = {"model": config.model, "tasks": evaluate_tasks(config, model, samples)}
        print(task_table(results["tasks"]), file=sys.stderr)
    else:
        results = score(config, model)
        print(
            f"perplexity {results['perplexity']:.4f} (nll {results['nll']:.5f} nats, "
            f"{results['tokens']:,} tokens in {results['windows']} windows)",
            file=sys.stderr,
        )
    write_json(workdir / "results.json", results)
    print(f"{workdir}/results.json", file=sys.stderr)
    return results


def task_table(tasks: dict[str, dict]) -> str:
    """One line a task and metric, with its interval."""
    lines = []
    for name, row in tasks.items():
        for metric in (key for key in row if f"{key}_low" in row):
            low, high = row[f"{metric}_low"], row[f"{metric}_high"]
            lines.append(
                f"{name:<18}{metric:<28}{row[metric]:7.4f}  [{low:.4f}, {high:.4f}]  "
                f"n={row['n']}, {row['shots']} shots"
            )
    return "\n".join(lines)


def score(config: ConfigDict, model: Model) -> dict:
    """Perplexity of `config.text` or of `config.token_ids`, of a model in memory."""
    if config.token_ids:
        rows = read_token_ids(config.token_ids)
    else:
        if model.tokenizer is None:
            raise ValueError(
                f"{model.source} has no tokenizer, so no text can be read: add its files, or give "
                "--config.token_ids"
            )
        rows = text_windows(
            read_utf8(config.text), model.tokenizer, config.window,
            max_windows=config.max_windows or None, bos=config.bos,
        )  # fmt: skip
    results = perplexity(
        model.config, model.params, rows, batch_size=config.batch_size,
        options=RunOptions(compute_dtype=np.dtype(config.compute_dtype)),
    )  # fmt: skip
    bos = "in token_ids" if config.token_ids else config.bos
    return results | {"bos": bos, "model": config.model}


def check_config(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded or trained; errors as `run`."""
    if not config.model:
        raise ValueError("--config.model is empty: give a directory, a .gguf file or a hub id")
    if config.compute_dtype not in DTYPES:
        raise ValueError(f"compute_dtype={config.compute_dtype!r}: choose one of {DTYPES}")
    if config.get("evaluation", "perplexity") not in EVALUATIONS:
        raise ValueError(f"evaluation={config.evaluation!r}: choose one of {EVALUATIONS}")
    if config.get("evaluation") == "tasks":
        check_tasks(config)
        return
    if bool(config.text) == bool(config.token_ids):
        raise ValueError("give exactly one of --config.text=<file> and --config.token_ids=<file>")
    if config.batch_size < 1:
        raise ValueError(f"batch_size={config.batch_size} must be at least 1")
    if config.token_ids:
        read_token_ids(config.token_ids)
    else:
        read_utf8(config.text)


def read_token_ids(path: str) -> np.ndarray:
    """Integers [windows, length] of a .npy file; pickled objects are refused.

    Raises:
      ValueError: the file is not such an array.
    """
    try:
        with epath.Path(path).open("rb") as file:
            ids = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a plain .npy array of integers: {error}") from None
    if not isinstance(ids, np.ndarray):
        raise ValueError(f"{path} is not a plain .npy array of integers but a .npz archive")
    return ids
