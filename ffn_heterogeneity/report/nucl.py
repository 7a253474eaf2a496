"""The NUCL paper's tables and figures from run directories (`scripts/report.py --paper=nucl`).

Runs find their places by their configs, whoever started them: a sweep, a script, a job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ffn_heterogeneity.report import nucl_figures, nucl_removal, nucl_training
from ffn_heterogeneity.report import paper_nucl as paper
from ffn_heterogeneity.report.paper_report import (
    check_output,
    document,
    gather,
    write,
    write_tables,
)

LEGEND = (
    'Cells: "-" the paper\'s number is not known here; "not run": no finished run was given; '
    '"closed weights": nobody outside can run it. A number over several seeds is its mean '
    "[low, high]."
)


def write_paper(paths: Sequence[str], output: str | os.PathLike) -> str:
    """Writes every table (Markdown, CSV), every figure (PNG, CSV) and `nucl.md`; returns its text.

    Args:
      paths: work directories of runs, or of sweeps (which stand for their points); those of
        scripts/evaluate.py give their accuracies to the run whose model they evaluated.

    Raises:
      ValueError: `output` is a file, or a path is no run; the message names it.
    """
    output = check_output(output)
    given = gather(paths)
    tables = [*nucl_training.tables(given.runs), *nucl_removal.tables(given.runs)]
    tables += [*nucl_training.curves(given.runs), *nucl_removal.pairs(given.runs)]
    write_tables(tables, output, paper.OUR_READING)
    pictures = nucl_figures.draw_all(given.runs, tables, output)
    # Tables first; those of one number stay in their order.
    tables.sort(key=lambda table: (table.key[0] != "t", table.key.split("_")[1]))
    heading = f"# NUCL: tables and figures\n\n{LEGEND}"
    text = document(heading, given, tables, pictures, paper.OUR_READING)
    write(output / "nucl.md", text)
    return text
