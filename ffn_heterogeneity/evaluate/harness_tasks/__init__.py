"""Tasks of lm-evaluation-harness over local JSONL files, in its own prompts and metrics, offline.

    pack = make_task_pack("data", ["piqa", "gsm8k", "mmlu"])
    lm_eval.simple_evaluate(model=lm, **pack._asdict())

`<name>.yaml` holds a task: the harness's settings, and under `local` where its rows are.

  folder              under the root given
  evaluation, fewshot names of the .jsonl files of the two parts, the first that exists is used
  rows                function of rows.py that reads a row
  split               "validation" where the stock task has no test split
  first_shots         {field, values}: these rows are the first few-shot examples, in this order
  runs_code           programs written by the model are run
  cut                 "middle": what a prompt too long for the model loses, else its beginning

Few-shot examples come from the training file (`fewshot`). Where there is none, or its rows have
another form (HellaSwag in a form without activity labels), they come from the evaluation file
without the question being asked, as the harness itself does for sets without training data: a
warning says so and `metadata.fewshot_file` of the results names the file. `fewshot_from` makes it
"train" (or an error) or "evaluation". MBPP's are tasks 2, 3 and 4 of `prompt.jsonl`, MMLU's the
first of the subject in `dev.jsonl`, all others are drawn by the harness's seed.

Numbers of examples unless told otherwise: MMLU, TriviaQA, NQ-open and GSM8K 5, HellaSwag 10, MBPP
3, all others 0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.evaluate.harness_tasks.reading import FEWSHOT_FROM, Reader
from ffn_heterogeneity.evaluate.harness_tasks.task_files import tables
from ffn_heterogeneity.evaluate.sandbox import programs as sandbox
from ffn_heterogeneity.wording import check_choice, check_number, unknown

__all__ = ["TaskPack", "checked_names", "make_task_pack"]


class TaskPack(NamedTuple):
    """Keyword arguments of `lm_eval.simple_evaluate`."""

    tasks: list[Any]
    task_manager: Any
    confirm_run_unsafe_code: bool


def make_task_pack(
    data_root: str,
    names: str | Sequence[str],
    *,
    num_fewshot: int | None = None,
    fewshot_from: str = "auto",
    allow_code: bool = False,
) -> TaskPack:
    """The named tasks and groups, with their rows read and checked.

    Args:
      data_root: directory with a folder for every task.
      names: of the files beside this one; "mmlu" is all subjects, "mmlu_stem" a group,
        "mmlu_virology" one.
      num_fewshot: examples before every question; None: each task's own number.
      fewshot_from: "auto", "train" or "evaluation", see above.
      allow_code: whether programs written by the model may be run (in the sandbox); without it
        MBPP is refused.

    Raises:
      DataError: an unknown name (with the nearest ones), a missing file (with the path expected),
        an empty or non-UTF-8 file, a row without a field (with its line), too few rows for the
        examples asked for, or code that nobody allowed.
      ImportError: the harness is not installed (the extra `eval`).
    """
    names = [names] if isinstance(names, str) else names
    names = checked_names(
        list(dict.fromkeys(names)), data_root, num_fewshot, fewshot_from, allow_code
    )
    reader = Reader(str(data_root), fewshot_from)
    built = [_build(reader, name, num_fewshot) for name in names]
    from lm_eval.tasks import TaskManager

    return TaskPack(built, TaskManager(include_defaults=False), allow_code)


def _build(reader: Reader, name: str, num_fewshot: int | None) -> Any:
    """A `LocalTask`, or the harness's `Group` of them."""
    group = tables().groups.get(name)
    if group is None:
        return _task(reader, name, num_fewshot)
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    made = Group.from_config(GroupConfig(group=name, **copy.deepcopy(group.settings)))
    for member in group.members:
        made.add(_build(reader, member, num_fewshot))
    return made


def _task(reader: Reader, name: str, num_fewshot: int | None) -> Any:
    from ffn_heterogeneity.evaluate.harness_tasks.task import EVALUATION, FEWSHOT, LocalTask

    settings = copy.deepcopy(tables().tasks[name])
    if num_fewshot is not None:
        settings["num_fewshot"] = num_fewshot
    local, count = settings.pop("local"), settings["num_fewshot"]
    questions, path = reader.evaluation(local)
    rows, files = {EVALUATION: questions}, {"evaluation_file": path}
    if count:
        examples, source = reader.fewshot(local, count)
        if examples is not None:
            rows[FEWSHOT] = examples
        elif len(questions) <= count:
            raise DataError(
                f"{path}: {count} examples asked for, but beside the question only "
                f"{len(questions) - 1} rows"
            )
        files["fewshot_file"] = source or path
    settings["metadata"] = {**settings["metadata"], **files}
    return LocalTask(settings, rows, leave_out=local.get("split") == "validation")


def checked_names(
    names: list[str], data_root: str, num_fewshot: int | None, fewshot_from: str, allow_code: bool
) -> list[str]:
    """The names, if `make_task_pack` can make them; no row is read. Arguments, errors as there."""
    known = tables().names()
    for name in names:
        if name not in known:
            few = [one for one in known if not one.startswith("mmlu_")]
            few = ", ".join([*few, "mmlu_<subject or group>"])
            raise DataError(unknown("task", name, known, few))
    if not names:
        raise DataError(f"no tasks asked for: there are {', '.join(known)}")
    leaves = tables().leaves(names)
    twice = sorted({leaf for leaf in leaves if leaves.count(leaf) > 1})
    if twice:
        raise DataError(f"{twice[0]} is asked for twice, alone and in a group: {', '.join(names)}")
    check_number("num_fewshot", num_fewshot or 0, "[0, inf)", DataError)
    check_choice("fewshot_from", fewshot_from, FEWSHOT_FROM, DataError)
    if not epath.Path(data_root).is_dir():
        raise DataError(f"{data_root}: no such directory; it holds a folder for every task")
    for code in tables().running_code(names)[:1]:
        if not allow_code:
            raise DataError(
                f"{code} runs programs written by the model; set allow_code=True (--config."
                "allow_code_execution=true) to allow it, in a sandbox, or leave the task out"
            )
        # Tried now: it would be missed only after everything has been generated.
        if (mechanism := sandbox.available()).name == "none":
            raise DataError(
                f"{code} runs programs that the model wrote, and nothing here can lock them in "
                f"({mechanism.reason}): {sandbox.WAY_OUT}, or leave the task out"
            )
    return names
