"""The papers' printed numbers (JSON), and their tables, figures and claims as functions of runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffn_heterogeneity.papers.printed import printed

if TYPE_CHECKING:
    from ffn_heterogeneity.report.paper import Paper

NAMES = ["nucl", "jreg", "massive_weights", "p32"]


def load(name: str) -> Paper:
    """The report of a paper of `NAMES`.

    Raises:
      ImportError: pandas is not installed.
    """
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        hint = "a paper's report needs pandas: pip install 'ffn-heterogeneity[plots]'"
        raise ImportError(hint) from None

    from ffn_heterogeneity.report.paper import Paper

    texts = printed(name)
    return Paper(name, texts, vars(module), module.KINDS, module.CURVES, module.SETTINGS)


def write(name: str, paths: Sequence[str], output: str | os.PathLike) -> str:
    """Writes the report of a paper; see `report.paper.write_paper`.

    Raises:
      ImportError: pandas is not installed.
    """
    paper = load(name)

    from ffn_heterogeneity.report.paper import write_paper

    return write_paper(paper, paths, output)
