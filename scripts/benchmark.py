"""Benchmarks on this machine: ratios inside one run, with 95% intervals.

Example:
  python scripts/benchmark.py nucl            NUCL (mstd) and the paper's listing
  python scripts/benchmark.py nll             chunked and plain cross-entropy
  python scripts/benchmark.py model --config.peer=transformers    forward, step, perplexity and
                                              generation, compared with PyTorch
  python scripts/benchmark.py steps --config.configs="('configs/five.py:<model>,mrpc', ...)"
  python scripts/benchmark.py streaming --config.model=gemma2_2b --config.repetitions=3
                                              surgery from disk to disk, compared with a copy

Writes <workdir>/results.json.
"""

import functools

from ffn_heterogeneity.bench.run import run
from ffn_heterogeneity.launch import cli

if __name__ == "__main__":
    cli.launch(
        functools.partial(run, load=cli.load_config),
        "benchmark",
        "benchmark",
        positional="name",
    )
