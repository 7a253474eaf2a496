"""Tasks with metrics, run by lm-evaluation-harness on a model in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate.harness_tasks import make_task_pack, task_names
from ffn_heterogeneity.evaluate.harness_tasks.tables import tables
from ffn_heterogeneity.evaluate.metrics import wilson_interval
from ffn_heterogeneity.io.files import atomic_path
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import RunOptions

# Metrics that are shares of questions: these have a 95% interval.
SHARES = ("acc", "acc_norm", "exact_match", "pass_at_1")


def evaluate_tasks(
    config: ConfigDict, model: Model, samples_dir: epath.Path | None = None
) -> dict[str, dict[str, Any]]:
    """Metrics of `config.tasks`, as configs/harness.py explains its keys.

    Args:
      samples_dir: where every question is written with the model's answers, one JSONL file a task;
        None: nowhere.

    Returns:
      {task or group: {"n": questions, "shots": examples before each, metric: value, and for shares
      metric + "_low", "_high": Wilson's 95% interval}}.

    Raises:
      ValueError, DataError: an unknown task (with the nearest names), or data that cannot be read.
      ImportError: the harness is not installed.
    """
    import lm_eval

    from ffn_heterogeneity.evaluate.harness import HarnessLM

    names = [str(name) for name in config.tasks]
    shots = config.get("num_fewshot")
    limits: dict[str, Any] = {"limit": config.limit or None}
    if config.data_root:
        run = names
        if config.limit:
            counts = limited(names, config.limit)
            run, limits = list(counts), {"samples": {k: list(range(n)) for k, n in counts.items()}}
        pack = make_task_pack(
            config.data_root, run, num_fewshot=shots,
            fewshot_from=config.fewshot_from, allow_code=config.allow_code_execution,
        )._asdict()  # fmt: skip
    else:
        pack = {"tasks": names, "num_fewshot": shots}
        pack["confirm_run_unsafe_code"] = config.allow_code_execution
    lm = HarnessLM(
        model,
        options=RunOptions(compute_dtype=np.dtype(config.compute_dtype)),
        batch_size=config.generation_batch_size,
        batch_tokens=config.batch_tokens,
        max_length=config.max_length or None,
        add_bos={"auto": None, "always": True, "never": False}[config.add_bos],
    )
    found = lm_eval.simple_evaluate(
        lm, **pack, **limits,
        bootstrap_iters=0, log_samples=samples_dir is not None,
        fewshot_random_seed=config.fewshot_seed, apply_chat_template=config.chat_template,
    )  # fmt: skip
    if samples_dir is not None:
        for task, rows in found["samples"].items():
            lines = (json.dumps(row, default=str, ensure_ascii=False) for row in rows)
            with atomic_path(samples_dir / f"{task}.jsonl") as path:
                path.write_text("".join(f"{line}\n" for line in lines))
    return _summary(found, names)


def check_tasks(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded; errors as `evaluate_tasks`."""
    if not config.tasks or isinstance(config.tasks, str):
        raise ValueError(f"tasks={config.tasks!r}: give names, e.g. --config.tasks=\"('piqa',)\"")
    if config.add_bos not in ("auto", "always", "never"):
        raise ValueError(f"add_bos={config.add_bos!r}: choose auto, always or never")
    for key in ("limit", "max_length"):
        if config[key] < 0:
            raise ValueError(f"{key}={config[key]} must be positive, or 0 for none")
    for key in ("batch_tokens", "generation_batch_size"):
        if config[key] < 1:
            raise ValueError(f"{key}={config[key]} must be at least 1")
    if config.data_root:
        for name in config.tasks:
            tables().check(str(name))
        if not epath.Path(config.data_root).is_dir():
            raise ValueError(f"data_root={config.data_root!r}: no such directory")
        codes = [
            leaf for name in config.tasks for leaf in leaf_tasks(str(name))
            if tables().tasks[leaf]["local"].get("runs_code")
        ]  # fmt: skip
        if codes and not config.allow_code_execution:
            raise ValueError(
                f"{codes[0]} runs programs that the model wrote: allow it with "
                "--config.allow_code_execution=true (they run in a sandbox), or leave it out"
            )


def limited(names: list[str], limit: int) -> dict[str, int]:
    """{task: how many of its questions, the first ones}: `limit` of each name.

    A group's are spread over its tasks, one more for each of the first where it does not come out
    even; tasks that get none are not run.
    """
    chosen: dict[str, int] = {}
    for name in names:
        leaves = leaf_tasks(name)
        for i, leaf in enumerate(leaves):
            share = limit // len(leaves) + (i < limit % len(leaves))
            if share:
                chosen[leaf] = share
    return chosen


def leaf_tasks(name: str) -> list[str]:
    """The tasks of a group; a task is its own."""
    group = tables().groups.get(name)
    return [leaf for one in group.members for leaf in leaf_tasks(one)] if group else [name]


def _summary(found: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    counts = {task: n["effective"] for task, n in found["n-samples"].items()}
    summary = {}
    for name in names:
        leaves = leaf_tasks(name) if name in task_names() else [name]
        leaves = [leaf for leaf in leaves if leaf in counts] or [name]
        sizes = [counts.get(leaf, 0) for leaf in leaves]
        groups = found.get("groups", {})
        # A group that was cut short is no group of the harness: its mean over questions.
        whole = groups.get(name) or found["results"].get(name)
        rows = [_metrics(row) for row in ([whole] if whole else map(found["results"].get, leaves))]
        weights = np.asarray(sizes if len(rows) == len(sizes) else [1.0], np.float64)
        row: dict[str, Any] = {"n": sum(sizes), "shots": found["n-shot"].get(leaves[0])}
        for label in rows[0]:
            row[label] = value = float(np.average([one[label] for one in rows], weights=weights))
            if label.startswith(SHARES) and row["n"]:
                low, high = wilson_interval(min(value, 1.0) * row["n"], row["n"])
                row[f"{label}_low"], row[f"{label}_high"] = low, high
        summary[name] = row
    return summary


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """{"acc": 0.5, "exact_match_strict-match": 0.1} of the harness's "acc,none" and so on."""
    found = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if isinstance(value, (int, float)) and filtered and not metric.endswith("_stderr"):
            found[metric if filtered == "none" else f"{metric}_{filtered}"] = float(value)
    return found
