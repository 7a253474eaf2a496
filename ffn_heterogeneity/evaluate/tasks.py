"""Evaluation tasks, run by lm-evaluation-harness on a model in memory."""

import dataclasses
import functools
import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.evaluate.answer_metrics import wilson_interval, with_ends
from ffn_heterogeneity.evaluate.graders import running
from ffn_heterogeneity.evaluate.harness_tasks import TaskPack, checked_names, make_task_pack
from ffn_heterogeneity.evaluate.inputs import ModelSettings
from ffn_heterogeneity.evaluate.result_rows import write_rows
from ffn_heterogeneity.io.files import once
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.wording import check_choice, check_numbers

ADD_BOS = {"auto": None, "always": True, "never": False}
# Metrics that are shares of questions, which have a 95% interval.
SHARES = ("acc", "acc_norm", "exact_match", "pass_at_1")


class NamedTasks(NamedTuple):
    """The tasks that one name of `config.tasks` denotes.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarnessSettings(ModelSettings):
    """Settings of `configs/parts/tasks.py`."""

    tasks: tuple[str, ...]
    data_root: str
    num_fewshot: int | None = None
    fewshot_seed: int
    fewshot_from: str
    limit: int
    add_bos: str
    chat_template: bool
    stop: tuple[str, ...]
    max_length: int
    allow_code_execution: bool
    save_samples: bool
    batch_tokens: int
    generation_batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("add_bos", self.add_bos, ADD_BOS)
        check_numbers(self, limit="[0, inf)", max_length="[0, inf)")
        check_numbers(self, batch_tokens="[1, inf)", generation_batch_size="[1, inf)")

    @property
    def pack(self) -> dict[str, Any]:
        """Arguments of `make_task_pack`."""
        examples = {"num_fewshot": self.num_fewshot, "fewshot_from": self.fewshot_from}
        return {"data_root": self.data_root, **examples, "allow_code": self.allow_code_execution}

    def read(self) -> list[str]:
        """Return the names of the tasks; for a pack, check the names and their files.

        Raises:
          ValueError (DataError): no tasks; or as `make_task_pack`; or programs would be run without
            an available sandbox.
        """
        if not self.tasks or isinstance(self.tasks, str):
            raise ValueError(f"tasks={self.tasks!r}: give names, e.g. --config.tasks=\"('piqa',)\"")
        names = list(map(str, self.tasks))
        return checked_names(names, **self.pack) if self.data_root else names


def evaluate_tasks(
    settings: HarnessSettings, model: Model, workdir: epath.Path
) -> dict[str, dict[str, Any]]:
    """Evaluate `settings.tasks`.

    The names are evaluated one after another. The metrics of each are saved in `<workdir>/tasks`
    before the next begins, and are not computed again. With `save_samples`, questions and answers
    are saved in `<workdir>/samples`, one JSONL file per task.

    Returns:
      "tasks": {task or group: {"n": questions, "shots": examples before each, metric: value, and
      for shares metric + "_low", "_high": Wilson's 95% interval}}. A tag is replaced by its tasks;
      a group without a mean in the harness is followed by its tasks.

    Raises:
      ValueError, DataError: an unknown task (with the nearest names), or unreadable data.
      ImportError: the harness is not installed.
    """
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    # All are loaded before the first is evaluated, so that a missing file is found at once.
    names = list(map(str, settings.tasks))
    pack = make_task_pack(names=names, **settings.pack) if settings.data_root else None
    manager, jobs = _load(names, pack)
    lm = HarnessLM(
        model,
        options=settings.options,
        batch_size=settings.generation_batch_size,
        batch_tokens=settings.batch_tokens,
        max_length=settings.max_length or None,
        add_bos=ADD_BOS[settings.add_bos],
        stop=settings.stop,
    )
    arguments = {
        "task_manager": manager,
        # The tasks of a pack already have their examples.
        "num_fewshot": None if pack else settings.num_fewshot,
        "fewshot_random_seed": settings.fewshot_seed,
        "confirm_run_unsafe_code": settings.allow_code_execution,
        "apply_chat_template": settings.chat_template,
        "bootstrap_iters": 0,
        "log_samples": settings.save_samples,
    }
    if settings.num_fewshot and not pack:
        for name, task in (pair for job in jobs.values() for pair in job.tasks.items()):
            if task.get_config("num_fewshot") == 0:
                print(f"{name}: no examples, as its definition says", file=sys.stderr)
    samples_dir = workdir / "samples" if settings.save_samples else None
    rows: dict[str, dict[str, Any]] = {}
    for name in list(jobs):
        # This also frees its requests and answers.
        job = jobs.pop(name)
        evaluate = functools.partial(_evaluate, lm, job, settings.limit, arguments, samples_dir)
        rows |= once(workdir / "tasks", name, evaluate)
    return {"tasks": rows}


def _load(names: list[str], pack: TaskPack | None) -> tuple[Any, dict[str, NamedTasks]]:
    """The harness's task manager, and the tasks of each name: of a pack, else the harness's."""
    from lm_eval.tasks import TaskManager

    manager = pack.task_manager if pack else TaskManager()
    specs = pack.tasks if pack else names
    jobs = {name: _job(manager.load([spec])) for name, spec in zip(names, specs, strict=True)}
    for job in jobs.values():
        for name, task in job.tasks.items():
            if how := running(task):
                raise ValueError(
                    f"{name} {how} generated programs, without a sandbox: use a task "
                    "with data_root, or leave it out (a reviewed grader has its digest in "
                    "evaluate/graders.py)"
                )
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
    """Evaluate one name: write its samples and return its rows."""
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
    """{task: number of its first questions to use}: `limit` questions in total, or all.

    They are distributed evenly; the first tasks get the remainder. If a task has too few, others
    get more. Tasks without questions are omitted.
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


def _summary(output: Mapping[str, Any], job: NamedTasks) -> dict[str, dict[str, Any]]:
    """A row for every root, and for every task that is not part of a root's row."""
    summary, covered = {}, set()
    for name, tasks in job.leaves.items():
        leaves = [leaf for leaf in tasks if leaf in output["n-samples"]]
        if leaves:
            summary[name] = _row(output, name, leaves)
        # A mean that the harness does not define may mix different kinds of tasks.
        if getattr(job.roots[name], "has_aggregation", True):
            covered |= {*leaves}
    rest = [task for task in output["n-samples"] if task not in covered and task not in summary]
    return summary | {task: _row(output, task, [task]) for task in rest}


def _row(output: Mapping[str, Any], name: str, leaves: Sequence[str]) -> dict[str, Any]:
    """The harness's numbers of `name`, else the means of its tasks, weighted by questions."""
    sizes = [output["n-samples"][leaf]["effective"] for leaf in leaves]
    row: dict[str, Any] = {"n": sum(sizes), "shots": output["n-shot"].get(leaves[0])}
    # The harness's mean of a group is not used with a limit.
    group = _metrics(output["results"].get(name, {}))
    each = [group] if group else [_metrics(output["results"].get(leaf, {})) for leaf in leaves]
    weights = [row["n"]] if group else sizes
    for label in dict.fromkeys(label for one in each for label in one):
        values = [one[label] for one in each if label in one]
        shares = [n for one, n in zip(each, weights, strict=True) if label in one]
        # Tasks without counts have equal weights.
        value = float(np.average(values, weights=shares if sum(shares) else None))
        row[label] = value
        if label.startswith(SHARES) and row["n"] and 0 <= value <= 1 + 1e-6:
            row |= with_ends(label, value, *wilson_interval(min(value, 1.0) * row["n"], row["n"]))
    return row


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert the harness's "acc,none" etc. to {"acc": 0.5, "exact_match_strict-match": 0.1}."""
    metrics = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if isinstance(value, numbers.Real) and filtered and not metric.endswith("_stderr"):
            metrics[metric if filtered == "none" else f"{metric}_{filtered}"] = float(value)
    return metrics
