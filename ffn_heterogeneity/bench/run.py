"""`scripts/benchmark.py`: every benchmark by name."""

from __future__ import annotations

from collections.abc import Callable

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.bench.losses import benchmark_nll, benchmark_nucl
from ffn_heterogeneity.bench.step import benchmark_jreg, benchmark_step
from ffn_heterogeneity.bench.streaming import benchmark_streaming
from ffn_heterogeneity.bench.tail import benchmark_tail
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.models.families import preset

BENCHMARKS: dict[str, Callable[[ConfigDict], dict]] = {
    "nucl": lambda config: benchmark_nucl(),
    "nll": lambda config: benchmark_nll(),
    "step": benchmark_step,
    "jreg": benchmark_jreg,
    "tail": benchmark_tail,
    "streaming": lambda config: benchmark_streaming(
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
    results = BENCHMARKS[config.name](config)
    write_json(workdir / "results.json", results)
    return results
