"""Tasks by name: `TASK`, or the several `TASKS`, of every module here; nothing else to edit."""

import functools
import importlib
import pkgutil

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example, Fields, MixedTask, Task
from ffn_heterogeneity.wording import unknown

__all__ = ["Example", "Fields", "MixedTask", "Task", "get_task", "tasks"]


@functools.cache
def tasks() -> dict[str, Task]:
    """Every task, by name; a config file of one's own may add to it: tasks()["mine"] = TASK."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        defined = vars(importlib.import_module(f"{__name__}.{module.name}"))
        for task in (*defined.get("TASKS", ()), *filter(None, [defined.get("TASK")])):
            found[task.name] = task
    return found


def get_task(name: str) -> Task:
    """The task called `name`; an unknown name is a `DataError` with the nearest one."""
    if name in tasks():
        return tasks()[name]
    raise DataError(unknown("task", name, sorted(tasks())))
