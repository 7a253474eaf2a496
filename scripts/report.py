"""Reports a run, compares several, or makes a paper's tables and figures from them.

Example:
  python scripts/report.py runs/alpha-10
  python scripts/report.py --compare runs/alpha-0 runs/alpha-10 --output=runs/alphas
  python scripts/report.py --compare runs/alpha          (a sweep)
  python scripts/report.py --paper=nucl runs/alpha runs/table4 runs/pairs --out=runs/paper
  python scripts/report.py --paper=mine.py runs/table4
  python scripts/report.py --benchmarks docs/results/benchmarks/*.json --out=docs

Reads config.json, results.json and metrics.jsonl of runs, also while they run; a directory of a
sweep, or an archive, means every run in it; seeds are shown as mean [low, high]. Differences and
ratios are against the first run. Writes <output>/compare.md and compare.png (one run: report.md);
--paper=nucl writes <output>/nucl.md, tables and figures with the paper's numbers, "-" where there
is none (a file of your own: docs/howto/report.md); --benchmarks writes <output>/benchmarks.md of
what scripts/benchmark.py left.
"""

import importlib.util
import sys
import time

from absl import flags

from ffn_heterogeneity import papers
from ffn_heterogeneity.bench.page import write_page
from ffn_heterogeneity.launch import cli

_COMPARE = flags.DEFINE_bool(
    "compare", False, "Compare the runs: two or more, or those of a sweep."
)
_OUTPUT = flags.DEFINE_string("output", None, "Directory; default: runs/<kind>-<date>-<time>.")
flags.DEFINE_alias("out", "output")
_NAMES = f"{', '.join(papers.NAMES)}, or your own <file>.py"
_PAPER = flags.DEFINE_string("paper", None, f"Make a paper's tables and figures: {_NAMES}.")
_BENCHMARKS = flags.DEFINE_bool("benchmarks", False, "Make a page of these results.json.")
RUNS: list[str] = []


def main() -> None:
    if _BENCHMARKS.value:
        print(write_page(RUNS, _OUTPUT.value or "docs"), end="")
        return
    if importlib.util.find_spec("pandas") is None:
        raise ImportError("reports need pandas: pip install 'ffn-heterogeneity[plots]'")
    from ffn_heterogeneity.report import compare, paper

    of = papers.load(_PAPER.value) if _PAPER.value else None
    name = of.name if of else "compare" if _COMPARE.value or len(RUNS) > 1 else "report"
    output = _OUTPUT.value or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    text = paper.write_paper(of, RUNS, output) if of else compare.write_report(RUNS, output, name)
    print(text, end="")
    print(f"{output}/{name}.md", file=sys.stderr)


if __name__ == "__main__":
    cli.launch_flags(main, positional=RUNS.append, many=True)
