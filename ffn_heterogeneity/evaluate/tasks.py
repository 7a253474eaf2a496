"""Tasks with metrics, run by lm-evaluation-harness on a model in memory."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate.answer_metrics import wilson_interval
from ffn_heterogeneity.evaluate.graders import check_graders
from ffn_heterogeneity.evaluate.harness_tasks import TaskPack, check_pack, make_task_pack
from ffn_heterogeneity.evaluate.harness_tasks.tables import tables
from ffn_heterogeneity.evaluate.inputs import options_of
from ffn_heterogeneity.evaluate.result_rows import write_rows
from ffn_heterogeneity.evaluate.sandbox import programs as sandbox
from ffn_heterogeneity.io.files import once
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.wording import check_choice, check_numbers

# Metrics that are shares of questions: these have a 95% interval.
SHARES = ("acc", "acc_norm", "exact_match", "pass_at_1")


class NamedTasks(NamedTuple):
    """The tasks that one name of `config.tasks` stands for.

    Attributes:
      roots: {name: the harness's task or group}; one, or the tasks of a tag.
      leaves: {root's name: {task's name: task}}.
    """

    roots: dict[str, Any]
    leaves: dict[str, dict[str, Any]]

    @property
    def tasks(self) -> dict[str, Any]:
        """{name: task} of all leaves."""
        return {name: task for tasks in self.leaves.values() for name, task in tasks.items()}


def evaluate_tasks(
    config: ConfigDict,
    model: Model,
    samples_dir: epath.Path | None = None,
    done_dir: epath.Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Metrics of `config.tasks`, as configs/harness.py explains its keys.

    The names are evaluated one after another; what each gave is written before the next begins.

    Args:
      samples_dir: where every question is written with the model's answers, one JSONL file a task;
        None: nowhere.
      done_dir: where the metrics of each name are kept; names that are there already are read and
        not evaluated. None: nowhere.

    Returns:
      {task or group: {"n": questions, "shots": examples before each, metric: value, and for shares
      metric + "_low", "_high": Wilson's 95% interval}}. A tag is its tasks; a group that the
      harness has no mean for is followed by its tasks.

    Raises:
      ValueError, DataError: an unknown task (with the nearest names), or data that cannot be read.
      ImportError: the harness is not installed.
    """
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    # All are loaded before the first is evaluated: a missing file is no surprise after hours.
    names = list(map(str, config.tasks))
    examples, allowed = config.get("num_fewshot"), config.allow_code_execution
    pack = None
    if config.data_root:
        root, source = config.data_root, config.fewshot_from
        pack = make_task_pack(
            root, names, num_fewshot=examples, fewshot_from=source, allow_code=allowed
        )
    manager, jobs = _load(names, pack)
    lm = HarnessLM(
        model,
        options=options_of(config),
        batch_size=config.generation_batch_size,
        batch_tokens=config.batch_tokens,
        max_length=config.max_length or None,
        add_bos={"auto": None, "always": True, "never": False}[config.add_bos],
        stop=config.stop,
    )
    arguments = {
        "task_manager": manager,
        # The tasks of a pack have theirs already.
        "num_fewshot": None if pack else examples,
        "fewshot_random_seed": config.fewshot_seed,
        "confirm_run_unsafe_code": allowed,
        "apply_chat_template": config.chat_template,
        "bootstrap_iters": 0,
        "log_samples": samples_dir is not None,
    }
    rows: dict[str, dict[str, Any]] = {}
    for name in list(jobs):
        # Its requests and answers go with it.
        job = jobs.pop(name)
        evaluate = functools.partial(_evaluate, lm, job, config.limit, arguments, samples_dir)
        rows |= once(done_dir, name, evaluate)
    return rows


def check_tasks(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded; errors as `evaluate_tasks`."""
    if not config.tasks or isinstance(config.tasks, str):
        raise ValueError(f"tasks={config.tasks!r}: give names, e.g. --config.tasks=\"('piqa',)\"")
    check_choice("add_bos", config.add_bos, ("auto", "always", "never"))
    check_numbers(config, limit="[0, inf)", max_length="[0, inf)")
    check_numbers(config, batch_tokens="[1, inf)", generation_batch_size="[1, inf)")
    if config.data_root:
        names = list(map(str, config.tasks))
        examples, allowed = config.get("num_fewshot"), config.allow_code_execution
        check_pack(config.data_root, names, examples, config.fewshot_from, allowed)
        _check_sandbox(names)


def _check_sandbox(names: Sequence[str]) -> None:
    codes = tables().running_code(names)
    if not codes:
        return
    # Tried now: it would be missed only after everything has been generated.
    mechanism = sandbox.available()
    if mechanism.name == "none":
        raise ValueError(
            f"{codes[0]} runs programs that the model wrote, and nothing here can lock them in "
            f"({mechanism.reason}): {sandbox.WAY_OUT}, or leave the task out"
        )


def _load(names: list[str], pack: TaskPack | None) -> tuple[Any, dict[str, NamedTasks]]:
    """The harness's task manager, and what each name stands for: of a pack, else of its own."""
    from lm_eval.tasks import TaskManager

    manager = pack.task_manager if pack else TaskManager()
    specs = pack.tasks if pack else names
    jobs = {name: _job(manager.load([spec])) for name, spec in zip(names, specs, strict=True)}
    if pack is None:
        for job in jobs.values():
            for name, task in job.tasks.items():
                check_graders(name, task)
    return manager, jobs


def _job(loaded: Mapping[str, Any]) -> NamedTasks:
    tasks, groups = loaded["tasks"], loaded.get("groups", {})
    inner = {child for group in groups.values() for child in group.child_names}
    roots = {name: one for name, one in {**groups, **tasks}.items() if name not in inner}
    leaves = {name: {name: task} for name, task in roots.items()}
    for name in roots.keys() & groups.keys():
        leaves[name] = {task.task_name: task for task in roots[name].get_all_tasks()}
    return NamedTasks(roots, leaves)


def _evaluate(
    lm: Any, job: NamedTasks, limit: int, arguments: dict, samples_dir: epath.Path | None
) -> dict[str, dict[str, Any]]:
    """The rows of one name; its samples are written."""
    import lm_eval

    arguments = arguments | {"tasks": list(job.roots.values())}
    if limit:
        counts: dict[str, int] = {}
        for leaves in job.leaves.values():
            counts |= limited({name: len(task.eval_docs) for name, task in leaves.items()}, limit)
        arguments["tasks"] = [job.tasks[name] for name in counts]
        arguments["samples"] = {name: list(range(n)) for name, n in counts.items()}
    evaluated: Any = lm_eval.simple_evaluate(lm, **arguments)
    if samples_dir is not None:
        for task, rows in evaluated["samples"].items():
            write_rows(samples_dir / f"{task}.jsonl", rows, default=str)
    return _summary(evaluated, job)


def limited(sizes: Mapping[str, int], limit: int) -> dict[str, int]:
    """{task: how many of its questions, the first ones}: `limit` of them all, or all there are.

    They are spread evenly, one more for each of the first tasks where it does not come out even;
    what a task does not have the others give. Tasks that get none are left out.
    """
    shares = dict.fromkeys(sizes, 0)
    left = min(limit, sum(sizes.values()))
    while left:
        free = [name for name in sizes if shares[name] < sizes[name]]
        each, more = divmod(left, len(free))
        for i, name in enumerate(free):
            given = min(each + (i < more), sizes[name] - shares[name])
            shares[name] += given
            left -= given
    return {name: share for name, share in shares.items() if share}


def _summary(found: Mapping[str, Any], job: NamedTasks) -> dict[str, dict[str, Any]]:
    """A row for every root; and for every task that no root's row is of."""
    summary, told = {}, set()
    for name, tasks in job.leaves.items():
        leaves = [leaf for leaf in tasks if leaf in found["n-samples"]]
        if leaves:
            summary[name] = _row(found, name, leaves)
        # A mean that the harness itself does not take may mix unlike tasks.
        if getattr(job.roots[name], "has_aggregation", True):
            told |= {*leaves}
    rest = [task for task in found["n-samples"] if task not in told and task not in summary]
    return summary | {task: _row(found, task, [task]) for task in rest}


def _row(found: Mapping[str, Any], name: str, leaves: Sequence[str]) -> dict[str, Any]:
    """The harness's own numbers of `name`, else the means of its tasks over their questions."""
    sizes = [found["n-samples"][leaf]["effective"] for leaf in leaves]
    row: dict[str, Any] = {"n": sum(sizes), "shots": found["n-shot"].get(leaves[0])}
    # A group that was cut short is no group of the harness.
    own = _metrics(found["results"].get(name, {}))
    each = [own] if own else [_metrics(found["results"].get(leaf, {})) for leaf in leaves]
    weights = [row["n"]] if own else sizes
    for label in dict.fromkeys(label for one in each for label in one):
        values = [one[label] for one in each if label in one]
        shares = [n for one, n in zip(each, weights, strict=True) if label in one]
        # Tasks that count no questions weigh the same.
        value = float(np.average(values, weights=shares if sum(shares) else None))
        row[label] = value
        if label.startswith(SHARES) and row["n"] and 0 <= value <= 1 + 1e-6:
            low, high = wilson_interval(min(value, 1.0) * row["n"], row["n"])
            row[f"{label}_low"], row[f"{label}_high"] = low, high
    return row


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """{"acc": 0.5, "exact_match_strict-match": 0.1} of the harness's "acc,none" and so on."""
    found = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if isinstance(value, numbers.Real) and filtered and not metric.endswith("_stderr"):
            found[metric if filtered == "none" else f"{metric}_{filtered}"] = float(value)
    return found
