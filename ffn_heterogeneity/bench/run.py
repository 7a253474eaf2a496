"""`scripts/benchmark.py`: every benchmark by name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.bench.losses import benchmark_nll, benchmark_nucl
from ffn_heterogeneity.bench.model import benchmark_model
from ffn_heterogeneity.bench.streaming import benchmark_streaming
from ffn_heterogeneity.bench.tail import benchmark_tail
from ffn_heterogeneity.bench.timing import machine
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.models.families import preset

BENCHMARKS: dict[str, Callable[[ConfigDict, epath.Path], dict]] = {
    "model": benchmark_model,
    "nucl": lambda config, workdir: benchmark_nucl(rounds=config.repetitions),
    "nll": lambda config, workdir: benchmark_nll(rounds=config.repetitions),
    "tail": lambda config, workdir: benchmark_tail(config),
    "streaming": lambda config, workdir: benchmark_streaming(
        preset(config.model)[0], config.repetitions, config.directory or None
    ),
}


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """Runs the benchmark `config.name`; returns what `results.json` holds.

    Raises:
      ValueError: no such benchmark.
    """
    if config.name not in BENCHMARKS:
        raise ValueError(
            f"benchmark {config.name!r}: write scripts/benchmark.py {'|'.join(BENCHMARKS)}"
        )
    results = {"benchmark": config.name, "machine": machine()}
    results |= BENCHMARKS[config.name](config, workdir)
    write_results(workdir, results)
    print(workdir / "results.json", file=sys.stderr)
    return results
