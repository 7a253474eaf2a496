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
    """The JSON of a paper, or beside a file of Python; see `report.paper.Paper`.

    "@place" in it is what "names" has there. A row holds its labels, then its numbers (null: not
    printed, or cut off in the copy at hand).
    """
    text = _file(name).with_suffix(".json").read_text()
    for key, value in json.loads(text).get("names", {}).items():
        text = text.replace(f'"@{key}"', json.dumps(value))
    return json.loads(text)


def load(name: str) -> Paper:
    """The report of a paper of `NAMES`, or of a file of Python with its texts in JSON beside it.

    Raises:
      ImportError: pandas is not installed.
      ValueError: the name is neither.
    """
    from ffn_heterogeneity.report.paper import Paper

    file = _file(name)
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"--paper={name}: give {', '.join(NAMES)}, or a file of Python")
    return Paper(file.stem, printed(name), runpy.run_path(str(file), run_name=file.stem))
