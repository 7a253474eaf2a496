"""The JREG paper's tables and figures from run directories (`scripts/report.py --paper=jreg`).

Runs find their places by their configs: those of configs/jreg_pretrain.py, those of
configs/analyze.py:displacement, and accuracies of the models that the first wrote.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ffn_heterogeneity.report import jreg_claims, jreg_figures, jreg_models, jreg_training
from ffn_heterogeneity.report import paper_jreg as paper
from ffn_heterogeneity.report.paper_report import (
    check_output,
    document,
    gather,
    write,
    write_tables,
)

LEGEND = (
    'Cells: "-" not known here, or nothing to measure; "not run": no finished run was given. A '
    "number over several seeds is its mean [lowest, highest]; an accuracy of one run has its "
    "interval over the questions. Runs stand together where their data, shape, optimiser and "
    "evaluation are the same; a setup that differs has rows of its own, named by what differs."
)


def write_paper(paths: Sequence[str], output: str | os.PathLike) -> str:
    """Writes every table (Markdown, CSV), every figure (PNG, CSV) and `jreg.md`; returns its text.

    Args:
      paths: work directories of runs, or of sweeps (which stand for their points); those of
        scripts/evaluate.py give their accuracies to the run whose model they evaluated.

    Raises:
      ValueError: `output` is a file, a path is no run, or an analysis has no displacements; the
        message names it.
    """
    output = check_output(output)
    given = gather(paths)
    models = jreg_models.measured(given.runs)
    tables = [*jreg_models.tables(models), *jreg_training.tables(given.runs, models)]
    tables.append(jreg_claims.claims(given.runs, models))
    tables.sort(key=lambda table: list(paper.TITLES).index(table.key))
    write_tables(tables, output, paper.OUR_READING)
    pictures = jreg_figures.draw_all(given.runs, models, output)
    heading = f"# JREG: tables and figures\n\n{LEGEND}"
    text = document(heading, given, tables, pictures, paper.OUR_READING)
    write(output / "jreg.md", text)
    return text
