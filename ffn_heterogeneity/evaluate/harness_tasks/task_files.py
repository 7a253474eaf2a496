"""The task files: every task's settings, and the groups they form."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings of a group and the names of its members, tasks or groups."""

    settings: dict[str, Any]
    members: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Tables:
    """Attributes:
    tasks: settings by name; treat as read-only.
    groups: by name.
    """

    tasks: dict[str, dict[str, Any]]
    groups: dict[str, Group]

    def names(self) -> list[str]:
        return sorted({*self.tasks, *self.groups})

    def leaves(self, names: Iterable[str]) -> list[str]:
        """The tasks that tasks and groups are made of, in order."""
        found = []
        for name in names:
            group = self.groups.get(name)
            found += self.leaves(group.members) if group else [name]
        return found

    def running_code(self, names: Iterable[str]) -> list[str]:
        """Those of their tasks that run programs which the model wrote."""
        return [leaf for leaf in self.leaves(names) if self.tasks[leaf]["local"].get("runs_code")]


@functools.cache
def tables() -> Tables:
    """All task files of this directory."""
    found = Tables({}, {})
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        settings = yaml.safe_load(path.read_text("utf-8"))
        if "group" in settings:
            _add_subjects(found, settings)
        else:
            found.tasks[settings["task"]] = settings
    return found


def _add_subjects(found: Tables, settings: dict[str, Any]) -> None:
    """A group of groups of tasks that differ in their subject only."""
    name = settings["group"]
    shared = {key: settings[key] for key in ("aggregate_metric_list", "metadata")}
    groups = settings["subject_groups"]
    found.groups[name] = Group(shared, tuple(f"{name}_{group}" for group in groups))
    for group, subjects in groups.items():
        alias = {"group_alias": group.replace("_", " ")}
        members = tuple(f"{name}_{subject}" for subject in subjects)
        found.groups[f"{name}_{group}"] = Group({**shared, **alias}, members)
        for subject in subjects:
            task = copy.deepcopy(settings["subject_task"])
            words = subject.replace("_", " ")
            task["description"] = task["description"].replace("<subject>", words)
            task["local"]["only"] = {"field": "subject", "value": subject}
            task |= {"task": f"{name}_{subject}", "task_alias": subject}
            found.tasks[task["task"]] = task
