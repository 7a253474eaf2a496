"""Tasks by name: `TASK`, or the several `TASKS`, of every module here; nothing else to edit."""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example, Fields, Member, Task

__all__ = ["Example", "Fields", "Member", "Task", "get_task", "tasks"]


@functools.cache
def tasks() -> dict[str, Task]:
    """Every task, by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        defined = vars(importlib.import_module(f"{__name__}.{module.name}"))
        for task in (*defined.get("TASKS", ()), *filter(None, [defined.get("TASK")])):
            found[task.name] = task
    return found


def get_task(name: str) -> Task:
    """The task called `name`; an unknown name is a `DataError` with the nearest ones."""
    if name in tasks():
        return tasks()[name]
    near = difflib.get_close_matches(name, tasks(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise DataError(f"unknown task {name!r}; {hint}known: {', '.join(sorted(tasks()))}")
