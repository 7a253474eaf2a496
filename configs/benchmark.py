"""Benchmarks: ratios inside one run.

Command:   python scripts/benchmark.py nucl | nll | step [--config.peer=transformers]
Hardware:  any; figures in the README are from 2 CPU cores.
Hours:     nucl and nll about a minute, step a few minutes.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            # nucl | nll | step.
            "name": "",
            # Of the step benchmark: a preset (random weights), the batch, the computation.
            "model": "smollm2_135m",
            "batch": 4,
            "seq_len": 512,
            "compute_dtype": "float32",
            "remat": "dots",
            "unroll": 1,
            # "transformers": torch on the same weights, interleaved (extra `parity`).
            "peer": "",
            # Measured rounds, after one that compiles.
            "repetitions": 10,
        }
    )
