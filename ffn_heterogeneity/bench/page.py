"""The page of saved benchmark results: one section per question, one row per run."""

import os
import re
from collections.abc import Mapping, Sequence

from etils import epath

from ffn_heterogeneity.bench.peer import COMPILED
from ffn_heterogeneity.bench.run import CASES
from ffn_heterogeneity.io.files import write_text
from ffn_heterogeneity.io.read import read_object
from ffn_heterogeneity.report.tables import UNKNOWN
from ffn_heterogeneity.wording import markdown_table

INTRODUCTION = """# Benchmarks

Made by `scripts/report.py --benchmarks` from results.json of `scripts/benchmark.py`. Each row is a
run, with a link to its file. The numbers are ratios of times that were interleaved in that run,
with 95% bootstrap intervals over rounds. CPUs without amx_bf16 emulate bfloat16, in PyTorch too.
"""
CPU = "{processor}, {cores} cores, {units}"


def write_page(paths: Sequence[str], output: str | os.PathLike) -> str:
    """Write `<output>/benchmarks.md` with one section per answered question; return the text.

    Results of earlier versions, which do not contain their questions, answer the benchmark's
    current questions.

    Raises:
      ValueError: no files; a file that is not a benchmark's results, or answers no question.
    """
    if not paths:
        raise ValueError("--benchmarks needs the results.json of one benchmark or more")
    # Sections in the order of `CASES`, then of the files' names.
    sections = {(name, how[0]): [] for _, one in CASES.values() for name, how in one.items()}
    for path in map(epath.Path, sorted(paths)):
        link = os.path.relpath(path, output)
        for section, machine, size, ratios in _answers(path):
            sections.setdefault(section, []).append((f"[{machine}]({link})", size, ratios))
    parts = [_section(*section, rows) for section, rows in sections.items() if rows]
    return write_text(epath.Path(output) / "benchmarks.md", "\n".join([INTRODUCTION, *parts]))


def _answers(path: epath.Path) -> list[tuple]:
    """Rows of a file: ((question, meaning of the ratios), machine, size, {column: ratio})."""
    results, answers = read_object(path), []
    results.setdefault("questions", CASES.get(str(results.get("benchmark")), (None, None))[1])
    if not all(results.get(key) for key in ("questions", "machine", "tables")):
        raise ValueError(f"{path} is not the results.json of scripts/benchmark.py")
    facts, tables = results["machine"], results["tables"]
    machine = CPU.format(**facts) if facts["device"] == "cpu" else facts["device"]
    if facts.get("peer") == COMPILED:
        machine += f", {COMPILED}"
    cells = [(row[0], row[-1]) for one in tables for row in one["rows"] if row[-1] != UNKNOWN]
    for question, (reading, labels, pattern) in results["questions"].items():
        # A label's part in parentheses depends on the machine: one column for all machines.
        matches = [(re.fullmatch(labels, name.partition(" (")[0]), cell) for name, cell in cells]
        ratios = {match[1]: cell for match, cell in matches if match}
        if ratios:
            size = ", ".join(re.findall(pattern, tables[0]["title"]))
            answers.append(((question, reading), machine, size, ratios))
    if not answers:
        raise ValueError(f"{path} answers none of its benchmark's questions: it has no ratios")
    return answers


def _section(question: str, reading: str, rows: Sequence[tuple[str, str, Mapping]]) -> str:
    names = dict.fromkeys(name for *_, ratios in rows for name in ratios)
    # Sorted by number: "generate 8" before "generate 32".
    columns = sorted(names, key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)])
    cells = [(*where, *(ratios.get(one, UNKNOWN) for one in columns)) for *where, ratios in rows]
    table = markdown_table(("machine", "size", *columns), cells, links=True)
    return f"## {question}\n\n{reading}:\n\n{table}\n"
