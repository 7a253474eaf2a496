"""Reports a run, or compares several: tables of configs and numbers, and the curves.

Example:
  python scripts/report.py --compare runs/alpha-0 runs/alpha-10 --output=runs/alphas
  python scripts/report.py runs/alpha-10

Reads config.json, results.json and metrics.jsonl of the runs' work directories, of any script, also
while they run; a run over seeds is shown as mean [low, high]. Differences and ratios are against
the first run. Writes <output>/compare.md and compare.png (of one run: report.md and report.png).
"""

from __future__ import annotations

import sys
import time

from absl import flags

from ffn_heterogeneity import cli
from ffn_heterogeneity.report.compare import write_report

_COMPARE = flags.DEFINE_bool("compare", False, "Compare the runs: two or more directories.")
_OUTPUT = flags.DEFINE_string(
    "output", None, "Directory to write; default: runs/compare-<date>-<time> (or runs/report-...)."
)
RUNS: list[str] = []


def main() -> None:
    if _COMPARE.value and len(RUNS) < 2:
        raise ValueError(
            f"--compare needs two or more run directories, given: {', '.join(RUNS) or 'none'}"
        )
    name = "compare" if len(RUNS) > 1 else "report"
    output = _OUTPUT.value or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    print(write_report(RUNS, output, name), end="")
    print(f"{output}/{name}.md", file=sys.stderr)


if __name__ == "__main__":
    cli.launch_flags(main, positional=RUNS.append, many=True)
