"""`scripts/benchmark.py`: every benchmark by name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.bench import fusion, losses, model, steps, streamed
from ffn_heterogeneity.bench.timing import Questions, machine
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.models.families import preset

# Each is given a config, a working directory, and what reads the config files that it names.
BENCHMARKS: dict[str, Callable[..., dict]] = {
    "model": lambda config, workdir, load: model.benchmark_model(config, workdir),
    "nucl": lambda config, workdir, load: losses.benchmark_nucl(rounds=config.repetitions),
    "nll": lambda config, workdir, load: losses.benchmark_nll(rounds=config.repetitions),
    "fusion": lambda config, workdir, load: fusion.benchmark_fusion(
        config.model, (config["batch"], config["seq_len"]), config.repetitions
    ),
    "steps": lambda config, workdir, load: steps.benchmark_steps(config, load),
    "streaming": lambda config, workdir, load: streamed.benchmark_streaming(
        preset(config.model)[0], config.repetitions, config.directory or None
    ),
}
# The questions that each answers: kept in results.json, sections of docs/benchmarks.md.
QUESTIONS: dict[str, Questions] = {
    "model": model.QUESTIONS,
    "nucl": losses.NUCL_QUESTIONS,
    "nll": losses.NLL_QUESTIONS,
    "fusion": fusion.QUESTIONS,
    "steps": steps.QUESTIONS,
    "streaming": streamed.QUESTIONS,
}


def run(
    config: ConfigDict, workdir: epath.Path, load: Callable[[str], ConfigDict] | None = None
) -> dict:
    """Runs the benchmark `config.name`; returns what `results.json` holds.

    Args:
      load: reads "configs/x.py:argument", which the benchmark "steps" names.

    Raises:
      ValueError: no such benchmark.
    """
    if config.name not in BENCHMARKS:
        raise ValueError(
            f"benchmark {config.name!r}: write scripts/benchmark.py {'|'.join(BENCHMARKS)}"
        )
    results = {"benchmark": config.name, "questions": QUESTIONS[config.name], "machine": machine()}
    results |= BENCHMARKS[config.name](config, workdir, load)
    write_results(workdir, results)
    print(workdir / "results.json", file=sys.stderr)
    return results
