"""GLUE's labels as text to text, with the prompts of MLP Fusion's published code.

As in superglue.py, the prompt ends with a line end before the answer, a label's name.
"""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data import glue
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Example, Fields, Task


def _task(name: str) -> Task:
    known = glue.TASKS[name]

    def example(record: Mapping[str, Any], fields: Fields) -> Example:
        if any(fields):
            raise DataError(f"task glue_{name} reads fixed fields: leave prompt_field empty")
        label = known.labels[int(known.target(record))]
        return Example(glue.PROMPTS[name].format(*known.texts(record)) + "\n", label)

    return Task(f"glue_{name}", example, hub=known.hub, metrics=("accuracy",))


TASKS = tuple(map(_task, glue.PROMPTS))
