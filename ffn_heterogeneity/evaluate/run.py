"""`scripts/evaluate.py` and `scripts/analyze.py`: measurements of a model, by name."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.windows import window_bos
from ffn_heterogeneity.evaluate.answers import AnswerSettings, evaluate_answers
from ffn_heterogeneity.evaluate.chat import judge
from ffn_heterogeneity.evaluate.chat.conversations import ChatSettings, answer_questions
from ffn_heterogeneity.evaluate.classify import ClassifySettings, classify_file
from ffn_heterogeneity.evaluate.compressions import NtkSettings, ntk
from ffn_heterogeneity.evaluate.connectivity import connectivity
from ffn_heterogeneity.evaluate.displacement import DisplacementSettings, displacement
from ffn_heterogeneity.evaluate.expert_use import ExpertSettings, experts
from ffn_heterogeneity.evaluate.inputs import ModelSettings, PerplexitySettings
from ffn_heterogeneity.evaluate.lesions import LesionSettings, lesions
from ffn_heterogeneity.evaluate.massive import MassiveSettings, massive
from ffn_heterogeneity.evaluate.perplexity import by_text, perplexity
from ffn_heterogeneity.evaluate.tasks import HarnessSettings, evaluate_tasks
from ffn_heterogeneity.io.load import Load, Model, load_model
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.wording import check_choice, settings_from


class Measurement(NamedTuple):
    """A measurement of a model, named in `EVALUATIONS`.

    Attributes:
      settings: the class of its settings, or a function of the config that makes them.
      measure: (settings, model, workdir) -> results.
      line: results -> text to print; None: `measure` prints.
      loads: `measure` gets the model; False: it gets the function that loads one.
    """

    settings: Callable[..., Any]
    measure: Callable[..., dict]
    line: Callable[[dict], str] | None = None
    loads: bool = True


def run(config: ConfigDict, workdir: epath.Path, load: Load = load_model) -> dict:
    """Run `config.evaluation` or `config.analysis`; return the content of `results.json`.

    Args:
      load: function that loads `config.model`.

    Raises:
      ValueError: an invalid setting or file; the message names it.
    """
    settings, evaluation = check_config(config), EVALUATIONS[_chosen(config)[1]]
    results = {key: config[key] for key in ("model", "analysis") if key in config}
    if "compute_dtype" in config:
        results["compute_dtype"] = str(settings.options.compute_dtype)
        print(f"computing in {results['compute_dtype']}", file=sys.stderr)
    given = load(settings.model, revision=settings.revision) if evaluation.loads else load
    measured = evaluation.measure(settings, given, workdir)
    if evaluation.line:
        print(evaluation.line(measured))
    results |= measured
    write_results(workdir, results)
    written = (path for kind in ("*.png", "*.csv") for path in sorted(workdir.glob(kind)))
    for path in (workdir / "results.json", *written):
        print(path, file=sys.stderr)
    return results


def check_config(config: ConfigDict) -> Any:
    """Return the measurement's settings after reading their files once, without loading a model.

    Raises:
      ValueError: an invalid setting or file; the message names it.
    """
    key, name = _chosen(config)
    check_choice(key, name, EVALUATIONS)
    kind = EVALUATIONS[name].settings
    settings = settings_from(kind, config) if isinstance(kind, type) else kind(config)
    settings.read()
    return settings


def _chosen(config: Mapping[str, Any]) -> tuple[str, str]:
    """(the config's key that names the measurement, its value)."""
    key = "analysis" if "analysis" in config else "evaluation"
    return key, config.get(key, "perplexity")


def score(settings: PerplexitySettings, model: Model, workdir: epath.Path | None = None) -> dict:
    """Perplexity of a model in memory; of a directory of texts also of each text ("texts")."""
    rows, documents = {}, []
    for name, one in settings.files().items():
        rows[name] = one.rows(model)
        if settings.document:
            first = documents[-1] + 1 if documents else 0
            documents += [first + x for x in one.documents(model, len(rows[name]))]
    windows = np.concatenate([*rows.values()])
    results = perplexity(model.config, model.params, windows, **settings.how)
    results |= {"window_documents": documents} if documents else {}
    if "" not in rows:
        results["texts"] = by_text(results, {name: len(one) for name, one in rows.items()})
    bos = "in token_ids" if settings.token_ids else window_bos(settings.bos, model.tokenizer)
    return results | {"bos": bos, "model": settings.model}


def _perplexity_line(results: Mapping[str, Any]) -> str:
    parts = [
        f"perplexity {results['perplexity']:.4f} (nll {results['nll']:.5f} nats, "
        f"{results['tokens']:,} tokens in {results['windows']} windows)"
    ]
    for name, one in results.get("texts", {}).items():
        parts.append(f"{name}: nll {one['nll']:.5f}, accuracy {one['accuracy']:.4f}")
    return "\n".join(parts)


def _tasks_table(results: Mapping[str, Any]) -> str:
    """Table with one line per task and metric, with its interval."""
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
        f"token limit {results['turns_length']}, without room {results['turns_no_room']}, "
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


EVALUATIONS = {
    "perplexity": Measurement(PerplexitySettings, score, _perplexity_line),
    "tasks": Measurement(HarnessSettings, evaluate_tasks, _tasks_table),
    "answers": Measurement(AnswerSettings, evaluate_answers, _tasks_table),
    "chat": Measurement(ChatSettings, answer_questions, _chat_line),
    "classify": Measurement(ClassifySettings, classify_file, _labels_line),
    "judge": Measurement(judge.JudgeSettings.of, judge.run, loads=False),
    "connectivity": Measurement(ModelSettings, connectivity),
    "displacement": Measurement(DisplacementSettings, displacement, loads=False),
    "massive": Measurement(MassiveSettings, massive),
    "lesions": Measurement(LesionSettings, lesions),
    "ntk": Measurement(NtkSettings.of, ntk),
    "experts": Measurement(ExpertSettings, experts),
}
