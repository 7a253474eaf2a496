"""Benchmarks: ratios inside one run.

Command:   python scripts/benchmark.py nucl | nll | step [--config.peer=transformers] | streaming
           python scripts/benchmark.py jreg --config.repetitions=24 --config.remat=full
           python scripts/benchmark.py streaming --config.model=gemma2_2b --config.repetitions=3
Hardware:  any; figures in the README are from 2 CPU cores.
Hours:     nucl and nll about a minute, step and streaming a few minutes.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            # nucl | nll | step | jreg | tail | streaming.
            "name": "",
            # Of step, jreg, tail, streaming: a preset (random weights); of step and jreg: the
            # batch, the computation.
            "model": "smollm2_135m",
            "batch": 4,  # rows
            "seq_len": 512,  # tokens a row
            "compute_dtype": "float32",
            "remat": "dots",
            "unroll": 1,
            # "transformers": torch on the same weights, interleaved (extra `parity`).
            "peer": "",
            # Measured rounds; but for streaming after one that compiles.
            "repetitions": 10,
            # Of streaming: on the disk to be measured, with room for three checkpoints (default:
            # that of temporary files).
            "directory": "",
        }
    )
