"""`scripts/benchmark.py`: every benchmark by name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.bench import fusion, losses, model, streaming, tail
from ffn_heterogeneity.bench.timing import Questions, machine
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.models.families import preset

BENCHMARKS: dict[str, Callable[[ConfigDict, epath.Path], dict]] = {
    "model": model.benchmark_model,
    "nucl": lambda config, workdir: losses.benchmark_nucl(rounds=config.repetitions),
    "nll": lambda config, workdir: losses.benchmark_nll(rounds=config.repetitions),
    "fusion": lambda config, workdir: fusion.benchmark_fusion(config),
    "tail": lambda config, workdir: tail.benchmark_tail(config),
    "streaming": lambda config, workdir: streaming.benchmark_streaming(
        preset(config.model)[0], config.repetitions, config.directory or None
    ),
}
# The questions that each answers: kept in results.json, sections of docs/benchmarks.md.
QUESTIONS: dict[str, Questions] = {
    "model": model.QUESTIONS,
    "nucl": losses.NUCL_QUESTIONS,
    "nll": losses.NLL_QUESTIONS,
    "fusion": fusion.QUESTIONS,
    "tail": tail.QUESTIONS,
    "streaming": streaming.QUESTIONS,
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
    results = {"benchmark": config.name, "questions": QUESTIONS[config.name], "machine": machine()}
    results |= BENCHMARKS[config.name](config, workdir)
    write_results(workdir, results)
    print(workdir / "results.json", file=sys.stderr)
    return results
