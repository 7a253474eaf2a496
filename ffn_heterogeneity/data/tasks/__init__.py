"""Tasks by name: the `TASK` or `TASKS` of every module here, which are found automatically."""

import functools
import importlib
import pkgutil

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example, Fields, MixedTask, Task
from ffn_heterogeneity.wording import unknown

__all__ = ["Example", "Fields", "MixedTask", "Task", "get_task", "tasks"]


@functools.cache
def tasks() -> dict[str, Task]:
    """Return all tasks by name; your config file may add one: tasks()["mine"] = TASK."""
    by_name = {}
    for module in pkgutil.iter_modules(__path__):
        defined = vars(importlib.import_module(f"{__name__}.{module.name}"))
        for task in (*defined.get("TASKS", ()), *filter(None, [defined.get("TASK")])):
            by_name[task.name] = task
    return by_name


def get_task(name: str) -> Task:
    """Return the task `name`; raise `DataError` with the nearest name if it is unknown."""
    if name in tasks():
        return tasks()[name]
    raise DataError(unknown("task", name, sorted(tasks())))
