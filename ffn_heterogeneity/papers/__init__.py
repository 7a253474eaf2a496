"""The papers' printed numbers (JSON), and their tables, figures and claims as functions of runs."""

from __future__ import annotations

import functools
import importlib
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffn_heterogeneity.report.paper import Paper

NAMES = ["nucl", "jreg", "massive_weights", "p32", "mlp_fusion"]


@functools.cache
def printed(name: str) -> dict[str, Any]:
    """The JSON of a paper, see `report.paper.Paper`; "@place" in it is what "names" has there.

    A row holds its labels, then its numbers (null: not printed, or cut off in the copy at hand).
    """
    text = (resources.files(__package__) / f"{name}.json").read_text()
    for key, value in json.loads(text).get("names", {}).items():
        text = text.replace(f'"@{key}"', json.dumps(value))
    return json.loads(text)


def load(name: str) -> Paper:
    """The report of a paper of `NAMES`; a module's ALSO is another that holds functions of it.

    Raises:
      ImportError: pandas is not installed.
    """
    from ffn_heterogeneity.report.paper import Paper

    module = importlib.import_module(f"{__name__}.{name}")
    return Paper(name, printed(name), vars(getattr(module, "ALSO", module)) | vars(module))
