"""`scripts/evaluate.py` and `scripts/analyze.py`: what can be measured of a model, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate.answers import check_answers, evaluate_answers
from ffn_heterogeneity.evaluate.chat import judge
from ffn_heterogeneity.evaluate.chat.conversations import answer_questions, check_chat
from ffn_heterogeneity.evaluate.classify import check_classify, classify_file
from ffn_heterogeneity.evaluate.compressions import check_ntk, ntk
from ffn_heterogeneity.evaluate.connectivity import connectivity
from ffn_heterogeneity.evaluate.displacement import displacement
from ffn_heterogeneity.evaluate.inputs import check_inputs, input_rows, options_of
from ffn_heterogeneity.evaluate.lesions import check_lesions, lesions
from ffn_heterogeneity.evaluate.massive import massive
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.evaluate.tasks import check_tasks, evaluate_tasks
from ffn_heterogeneity.io.load import Load, Model, load_model
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.models.options import COMPUTE_DTYPES
from ffn_heterogeneity.wording import check_choice


def run(config: ConfigDict, workdir: epath.Path, load: Load = load_model) -> dict:
    """Runs what `config.evaluation` or `config.analysis` names; returns what `results.json` holds.

    Args:
      load: what makes a model of `config.model`.

    Raises:
      ValueError: a setting or a file is unusable; the message names it.
    """
    check_config(config)
    results = {key: config[key] for key in ("model", "analysis") if key in config}
    if "compute_dtype" in config:
        results["compute_dtype"] = str(options_of(config).compute_dtype)
        print(f"computing in {results['compute_dtype']}", file=sys.stderr)
    _, measure = EVALUATIONS[_chosen(config)[1]]
    results |= measure(config, workdir, load)
    write_results(workdir, results)
    written = (path for kind in ("*.png", "*.csv") for path in sorted(workdir.glob(kind)))
    for path in (workdir / "results.json", *written):
        print(path, file=sys.stderr)
    return results


def check_config(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded or trained; errors as `run`."""
    key, name = _chosen(config)
    check_choice(key, name, EVALUATIONS)
    if "model" in config and not config.model:
        raise ValueError("--config.model is empty: give a directory, a .gguf file or a hub id")
    check_choice("compute_dtype", config.get("compute_dtype", "auto"), COMPUTE_DTYPES)
    check, _ = EVALUATIONS[name]
    check(config)


def _chosen(config: Mapping[str, Any]) -> tuple[str, str]:
    """(the config's key that says what is measured, its value)."""
    key = "analysis" if "analysis" in config else "evaluation"
    return key, config.get(key, "perplexity")


def score(config: ConfigDict, model: Model) -> dict:
    """Perplexity of `config.text` or of `config.token_ids`, of a model in memory."""
    rows = input_rows(config, model)
    options = options_of(config)
    results = perplexity(
        model.config, model.params, rows, batch_size=config.batch_size, options=options
    )
    bos = "in token_ids" if config.token_ids else config.bos
    return results | {"bos": bos, "model": config.model}


def _of_a_model(
    measure: Callable[[ConfigDict, Model, epath.Path], dict], summary: Callable[[dict], str]
) -> Callable[[ConfigDict, epath.Path, Load], dict]:
    """(config, workdir, load) -> what `measure` finds in a model; and its summary printed."""

    def evaluate(config: ConfigDict, workdir: epath.Path, load: Load) -> dict:
        model = load(config.model, revision=config.revision)
        results = measure(config, model, workdir)
        print(summary(results))
        return results

    return evaluate


def _perplexity_line(results: Mapping[str, Any]) -> str:
    return (
        f"perplexity {results['perplexity']:.4f} (nll {results['nll']:.5f} nats, "
        f"{results['tokens']:,} tokens in {results['windows']} windows)"
    )


def _tasks(config: ConfigDict, model: Model, workdir: epath.Path) -> dict:
    samples = workdir / "samples" if config.save_samples else None
    return {"tasks": evaluate_tasks(config, model, samples, done_dir=workdir / "tasks")}


def _tasks_table(results: Mapping[str, Any]) -> str:
    """One line a task and metric, with its interval."""
    lines = []
    for name, row in results["tasks"].items():
        for metric in (key for key in row if f"{key}_low" in row):
            low, high = row[f"{metric}_low"], row[f"{metric}_high"]
            lines.append(
                f"{name:<18}{metric:<28}{row[metric]:7.4f}  [{low:.4f}, {high:.4f}]  "
                f"n={row['n']}, {row['shots']} shots"
            )
    return "\n".join(lines)


def _chat_line(results: Mapping[str, Any]) -> str:
    return (
        f"{results['answered']} answers of {results['turns']} turns: cut by the "
        f"limit of tokens {results['turns_length']}, without room {results['turns_no_room']}, "
        f"empty {results['turns_empty']}"
    )


def _labels_line(results: Mapping[str, Any]) -> str:
    """The counts, and each metric with its interval."""
    parts = [f"{results['rows']} rows"]
    parts += [f"{label}: {count}" for label, count in results.get("predicted", {}).items()]
    for metric in (key for key in results if f"{key}_low" in results):
        low, high = results[f"{metric}_low"], results[f"{metric}_high"]
        parts.append(f"{metric} {results[metric]:.4f} [{low:.4f}, {high:.4f}]")
    return ", ".join(parts)


# name -> (what refuses its config before anything is loaded, what measures)
EVALUATIONS: dict[str, tuple[Callable[[ConfigDict], None], Callable[..., dict]]] = {
    "perplexity": (
        check_inputs,
        _of_a_model(lambda config, model, workdir: score(config, model), _perplexity_line),
    ),
    "tasks": (check_tasks, _of_a_model(_tasks, _tasks_table)),
    "answers": (check_answers, _of_a_model(evaluate_answers, _tasks_table)),
    "chat": (check_chat, _of_a_model(answer_questions, _chat_line)),
    "classify": (check_classify, _of_a_model(classify_file, _labels_line)),
    "judge": (judge.check, lambda config, workdir, load: judge.run(config, workdir)),
    "connectivity": (lambda config: None, connectivity),
    "displacement": (check_inputs, displacement),
    "massive": (lambda config: None, massive),
    "lesions": (check_lesions, lesions),
    "ntk": (check_ntk, ntk),
}
