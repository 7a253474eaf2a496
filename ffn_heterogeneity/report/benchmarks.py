"""The page of the benchmarks whose results.json were kept."""

from __future__ import annotations

import os
from collections.abc import Sequence

from etils import epath

from ffn_heterogeneity.io.files import read_object
from ffn_heterogeneity.report.tables import markdown_table, write_text

INTRODUCTION = """# Benchmarks

Made by `scripts/report.py --benchmarks` from results.json of `scripts/benchmark.py`. What took
turns inside one run is compared; seconds of different runs are not. Intervals are 95%, of rounds
drawn anew.
"""


def write_page(paths: Sequence[str], output: str | os.PathLike) -> str:
    """Writes `<output>/benchmarks.md`: machine and tables of each file; returns the text.

    Raises:
      ValueError: no files, or one is not a benchmark's results.
    """
    if not paths:
        raise ValueError("--benchmarks needs the results.json of one benchmark or more")
    parts = [INTRODUCTION]
    for path in map(epath.Path, paths):
        results = read_object(path)
        if not {"benchmark", "machine", "tables"} <= set(results):
            raise ValueError(f"{path} is not the results.json of scripts/benchmark.py")
        facts = (f"{name} {value}" for name, value in results["machine"].items())
        parts.append(f"## {results['benchmark']}\n\n{'; '.join(facts)}.\n")
        for one in results["tables"]:
            parts.append(f"{one['title']}:\n\n{markdown_table(one['columns'], one['rows'])}\n")
    return write_text(epath.Path(output) / "benchmarks.md", "\n".join(parts))
