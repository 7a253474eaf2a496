"""The papers' printed numbers (JSON), and their tables, figures and claims as functions of runs."""

from __future__ import annotations

import functools
import json
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffn_heterogeneity.report.paper import Paper

NAMES = ["nucl", "jreg", "massive_weights", "p32", "mlp_fusion"]


def _file(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.py") if name in NAMES else Path(name)


@functools.cache
def printed(name: str) -> dict[str, Any]:
    """Read the JSON of a paper, or the JSON next to a Python file (`report.paper.Paper`).

    A row has its labels, then its numbers; null: not printed, or cut off in our copy.
    """
    return json.loads(_file(name).with_suffix(".json").read_text())


def load(name: str) -> Paper:
    """The report of a paper of `NAMES`, or of a Python file with a JSON file of the same name.

    Raises:
      ImportError: pandas is not installed.
      ValueError: the name is neither.
    """
    from ffn_heterogeneity.report.paper import Paper

    file = _file(name)
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"--paper={name}: give {', '.join(NAMES)}, or a file of Python")
    return Paper(file.stem, printed(name), runpy.run_path(str(file), run_name=file.stem))
