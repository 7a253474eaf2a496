"""The papers' printed numbers (JSON), and their tables, figures and claims as functions of runs."""

from __future__ import annotations

import functools
import importlib
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffn_heterogeneity.report.paper import Paper

NAMES = ["nucl", "jreg", "massive_weights", "p32"]


@functools.cache
def printed(name: str) -> dict[str, Any]:
    """{"paper": its title, "tables": {key: {caption, labels, columns, rows, notes}}, "figures":
    {key: caption}}.

    A row holds its labels, then its numbers (null: not printed, or cut off in the copy at hand).
    """
    return json.loads((resources.files(__package__) / f"{name}.json").read_text())


def load(name: str) -> Paper:
    """The report of a paper of `NAMES`.

    Raises:
      ImportError: pandas is not installed.
    """
    from ffn_heterogeneity.report.paper import Paper

    module = importlib.import_module(f"{__name__}.{name}")
    functions = vars(getattr(module, "ALSO", module)) | vars(module)
    return Paper(name, printed(name), functions, module.KINDS, module.CURVES, module.SETTINGS)
