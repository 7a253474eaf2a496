"""Tasks of lm-evaluation-harness over local JSONL files, offline.

    pack = make_task_pack("data", ["piqa", "gsm8k", "mmlu"])
    lm_eval.simple_evaluate(model=lm, **pack._asdict())

Prompts, metrics and splits are those of the installed harness's task files. Three tasks have files
here: MBPP, whose programs run in the sandbox, and two of LongBench. `forms.TASKS` lists the tasks,
the folders of their rows and the accepted forms: that of the data set on the hub, and other
published forms.

Questions are in `<folder>/<split>.jsonl`, where the split is the one that the harness evaluates.
Few-shot examples come from the training file (`train`, MMLU's `dev`, MBPP's `prompt`). If there is
none, or its rows have another form, they come from the evaluation file, excluding the current
question; then a warning is logged, and `metadata.fewshot_file` of the results names the file.
`fewshot_from` forces "train" (or an error) or "evaluation". MBPP uses tasks 2, 3 and 4 first, MMLU
the first rows of the subject; all other examples are drawn with the harness's seed.

Default numbers of examples: MMLU, TriviaQA, NQ-open and GSM8K 5, HellaSwag 10, MBPP 3, all others
  0.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.evaluate.harness_tasks.forms import TASKS
from ffn_heterogeneity.evaluate.harness_tasks.reading import FEWSHOT_FROM, Reader
from ffn_heterogeneity.evaluate.sandbox import programs as sandbox
from ffn_heterogeneity.wording import check_choice, check_number, extra, unknown

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
    """Return the named tasks and groups, with their rows read and checked.

    Args:
      data_root: directory with a folder for every task.
      names: names of `forms.TASKS`; "mmlu" is all subjects, "mmlu_stem" a group, "mmlu_virology"
        one.
      num_fewshot: examples before every question; None: each task's default.
      fewshot_from: "auto", "train" or "evaluation", see above.
      allow_code: whether generated programs may be run (in the sandbox); required for MBPP.

    Raises:
      DataError: an unknown name (with the nearest ones), a missing file (with the path expected),
        an empty or non-UTF-8 file, a row without a field (with its line), too few rows for the
        requested examples, or code that is not allowed.
      ImportError: the harness is not installed (the extra `eval`).
    """
    names = [names] if isinstance(names, str) else names
    names = checked_names(
        list(dict.fromkeys(names)), data_root, num_fewshot, fewshot_from, allow_code
    )
    reader = Reader(str(data_root), fewshot_from)
    from lm_eval.tasks import TaskManager

    with _quietly():
        built = [_build(reader, name, num_fewshot) for name in names]
    return TaskPack(built, TaskManager(include_defaults=False), allow_code)


@functools.cache
def _index() -> Mapping[str, Any]:
    """{name: the harness's entry} of the tasks, groups and tags in the used folders."""
    with extra("eval"):
        import lm_eval
        from lm_eval.tasks import TaskManager
    stock = Path(lm_eval.__file__).parent / "tasks"
    folders = {str(stock / one.stock) for one in TASKS.values() if one.stock}
    paths: Any = [*sorted(folders), str(Path(__file__).parent)]
    return TaskManager(include_defaults=False, include_path=paths).task_index


def _members(name: str) -> list[str]:
    """The tasks and groups in a group of MMLU; [] for a task."""
    entry = _index()[name]
    members = []
    for member in entry.cfg["task"] if "group" in (entry.cfg or {}) else ():
        tasks = sorted(_index()[member].tags)  # a tag means its tasks
        members += tasks if _index()[member].yaml_path is None else [member]
    return members


def _leaves(names: Sequence[str]) -> list[str]:
    """All tasks of the given tasks and groups, in order."""
    return [leaf for name in names for leaf in _leaves(_members(name)) or [name]]


def _build(reader: Reader, name: str, num_fewshot: int | None) -> Any:
    """Return the harness's task, or its `Group` of tasks."""
    members = _members(name)
    if not members:
        return _task(reader, name, num_fewshot)
    from lm_eval.api.group import Group
    from lm_eval.config.group import GroupConfig

    made = Group.from_config(GroupConfig(**_index()[name].cfg))
    for member in members:
        made.add(_build(reader, member, num_fewshot))
    return made


def _task(reader: Reader, name: str, num_fewshot: int | None) -> Any:
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    local = TASKS["mmlu" if name.startswith("mmlu_") else name]
    settings = load_yaml(_index()[name].yaml_path)
    count = settings.get("num_fewshot", 0) if local.shots is None else local.shots
    settings["num_fewshot"] = count = count if num_fewshot is None else num_fewshot
    subject = settings["dataset_name"] if name.startswith("mmlu_") else ""
    split = settings.get("test_split") or settings["validation_split"]
    rows, path = reader.evaluation(local, split, subject)
    process = settings.pop("process_docs", lambda rows: rows)
    data, files = {split: process(datasets.Dataset.from_list(rows))}, {"evaluation_file": path}
    if not count:  # otherwise the harness would read the training file
        settings |= {"training_split": None, "fewshot_split": None}
        settings["fewshot_config"] = {"samples": []}
    else:
        train = settings.get("fewshot_split") or settings.get("training_split")
        examples, source = reader.fewshot(local, train or "train", count, subject)
        files["fewshot_file"] = source or path
        if examples is not None:
            data[train or "train"] = process(datasets.Dataset.from_list(examples))
            settings["fewshot_split"] = settings.get("fewshot_split") if train else "train"
        elif len(rows) > count:
            # The harness excludes the question if both splits are equal, also if both are None.
            settings |= {"training_split": None, "fewshot_split": settings.get("test_split")}
        else:
            raise DataError(
                f"{path}: {count} examples asked for, but only {len(rows) - 1} rows without the "
                "question"
            )
    settings["metadata"] = {**settings["metadata"], **files}
    settings.pop("tag", None)
    return ConfigurableTask(config=settings | {"custom_dataset": lambda **_: data})


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Context that suppresses the harness's warnings about its task files, two per task."""
    log = logging.getLogger("lm_eval.api.task")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def checked_names(
    names: list[str], data_root: str, num_fewshot: int | None, fewshot_from: str, allow_code: bool
) -> list[str]:
    """Check the names without reading rows; arguments and errors as in `make_task_pack`."""
    groups = [name for name in _index() if name.startswith("mmlu_") and _index()[name].yaml_path]
    known = sorted({*TASKS, *groups})
    for name in names:
        if name not in known:
            few = ", ".join([*TASKS, "mmlu_<subject or group>"])
            raise DataError(unknown("task", name, known, few))
    if not names:
        raise DataError(f"no tasks asked for: there are {', '.join(known)}")
    leaves = _leaves(names)
    twice = sorted({leaf for leaf in leaves if leaves.count(leaf) > 1})
    if twice:
        raise DataError(f"{twice[0]} is asked for twice, alone and in a group: {', '.join(names)}")
    check_number("num_fewshot", num_fewshot or 0, "[0, inf)", DataError)
    check_choice("fewshot_from", fewshot_from, FEWSHOT_FROM, DataError)
    if not epath.Path(data_root).is_dir():
        raise DataError(f"{data_root}: no such directory; it holds a folder for every task")
    if "mbpp" in leaves:
        if not allow_code:
            raise DataError(
                "mbpp runs programs written by the model; set allow_code=True (--config."
                "allow_code_execution=true) to allow it, in a sandbox, or leave the task out"
            )
        # Tried now, because it is needed only after everything has been generated.
        if (mechanism := sandbox.available()).name == "none":
            raise DataError(
                "mbpp runs generated programs, and no sandbox is available for them "
                f"({mechanism.reason}): {sandbox.WAY_OUT}, or leave the task out"
            )
    return names
