"""`scripts/evaluate.py`."""

from __future__ import annotations

import sys

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate.chat import judge
from ffn_heterogeneity.evaluate.chat.answers import answer_questions, check_chat
from ffn_heterogeneity.evaluate.inputs import DTYPES, check_inputs, input_rows
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.evaluate.tasks import check_tasks, evaluate_tasks
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.models.causal_lm import RunOptions

EVALUATIONS = ("perplexity", "tasks", "chat", "judge")


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """What `config.evaluation` names (perplexity where it is not there); returns `results.json`.

    Raises:
      ValueError: a setting or a file is unusable; the message names it.
    """
    check_config(config)
    if config.get("evaluation") == "judge":
        return judge.run(config, workdir)
    model = load_model(config.model, revision=config.revision)
    if config.get("evaluation") == "tasks":
        samples = workdir / "samples" if config.save_samples else None
        found = evaluate_tasks(config, model, samples, done_dir=workdir / "tasks")
        results = {"model": config.model, "tasks": found}
        print(task_table(results["tasks"]), file=sys.stderr)
    elif config.get("evaluation") == "chat":
        results = {"model": config.model} | answer_questions(config, model, workdir)
        print(
            f"{results['answered']} answers; turns of this run: {results['turns']}, cut by the "
            f"limit of tokens {results['turns_length']}, without room {results['turns_no_room']}, "
            f"empty {results['turns_empty']}",
            file=sys.stderr,
        )
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
    rows = input_rows(config, model)
    results = perplexity(
        model.config, model.params, rows, batch_size=config.batch_size,
        options=RunOptions(compute_dtype=np.dtype(config.compute_dtype)),
    )  # fmt: skip
    bos = "in token_ids" if config.token_ids else config.bos
    return results | {"bos": bos, "model": config.model}


def check_config(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded or trained; errors as `run`."""
    if config.get("evaluation") == "judge":
        judge.check(config)
        return
    if not config.model:
        raise ValueError("--config.model is empty: give a directory, a .gguf file or a hub id")
    if config.compute_dtype not in DTYPES:
        raise ValueError(f"compute_dtype={config.compute_dtype!r}: choose one of {DTYPES}")
    if config.get("evaluation", "perplexity") not in EVALUATIONS:
        raise ValueError(f"evaluation={config.evaluation!r}: choose one of {EVALUATIONS}")
    if config.get("evaluation") == "tasks":
        check_tasks(config)
        return
    if config.get("evaluation") == "chat":
        check_chat(config)
        return
    check_inputs(config)
