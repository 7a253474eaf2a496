"""Streaming surgery compared with a plain copy of the directory: time, and peak memory."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ffn_heterogeneity.bench.timing import ratio_interval, table, table_of_ratios
from ffn_heterogeneity.io.hf.export import MAX_SHARD_BYTES, choose_form, write_configs
from ffn_heterogeneity.io.load import load_config
from ffn_heterogeneity.io.pieces import Spec, open_pieces
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import expected_shapes, family_by_name
from ffn_heterogeneity.progress import bar

PLAN = {"criterion": "entropy", "ratio": 0.25}
# A separate process, so that its memory is only that of the surgery.
_PROGRAM = f"""
import sys, time
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.surgery.streaming import compress_directory
start = time.perf_counter()
compress_directory(*sys.argv[1:], RemovalPlan(**{PLAN}))
print(time.perf_counter() - start)
"""


def time_streaming(config: Any, *_: Any, model: ModelConfig | None = None) -> dict[str, Any]:
    """Remove 25% of the neurons of a random bfloat16 checkpoint, from disk to disk.

    Interleaved with a plain copy. Before each measurement, the files are written out and dropped
    from the page cache. `config.directory` is on the measured disk; it needs three times the
    checkpoint's size, which is freed again.

    Args:
      model: None: `config.model`.

    Returns:
      "copy_seconds", "streaming_seconds" (inside the process), "process_seconds" (with the start of
      Python) and "peak_anonymous_mb" (RssAnon: without file pages in the cache), one number per
      round; "ratio", of the medians of process and copy; "bytes"; "tables".
    """
    model, rows = model or load_config(config.model), []
    with tempfile.TemporaryDirectory(dir=config.directory or None) as held:
        source, target = Path(held) / "source", Path(held) / "target"
        write_random(model, source)
        size = sum(path.stat().st_size for path in source.iterdir())
        for _round in range(config.repetitions):
            copy, _path = _cold(shutil.copytree, source, target)
            process, (inside, peak) = _cold(_watched, source, target)
            rows.append((copy, inside, process, peak))
    names = ("copy_seconds", "streaming_seconds", "process_seconds", "peak_anonymous_mb")
    figures = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    ratio = ratio_interval(*(np.array(figures[f"{one}_seconds"]) for one in ("process", "copy")))
    lines = [(name, f"{np.median(x):.2f}", f"{max(x):.2f}") for name, x in figures.items()]
    title = f"{size / 1e9:.2f} GB of {model.family}, {PLAN}, {config.repetitions} rounds"
    tables = [table(title, ("figure", "median", "largest"), lines)]
    tables.append(table_of_ratios({"process / copy": ratio}))
    return {"bytes": size, "ratio": ratio[0], "tables": tables} | figures


def write_random(config: ModelConfig, directory: Path) -> None:
    """Write a checkpoint of Gaussian bfloat16 weights (std 0.02), one tensor at a time."""
    dtype = np.dtype(ml_dtypes.bfloat16)
    shapes, rng = expected_shapes(config), np.random.default_rng(0)
    specs = {
        name: Spec(shape, dtype)
        for rule in family_by_name(config.family).rules(config)
        for name, shape in zip(rule.names, rule.stored_shapes(shapes), strict=True)
    }
    directory.mkdir(parents=True)
    with open_pieces(directory, specs, MAX_SHARD_BYTES) as pieces:
        for name in bar("random weights", pieces.order, unit="tensor", mininterval=1.0):
            weights = rng.standard_normal(specs[name].shape, np.float32)
            pieces.write(name, np.multiply(weights, 0.02, out=weights))
    write_configs(directory, choose_form(config, "auto"), {dtype})


def _cold(function: Callable[[Path, Path], Any], source: Path, target: Path) -> tuple[float, Any]:
    """(seconds, result) of a function that writes `target`, with `source` not in the page cache."""
    for path in source.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    result = function(source, target)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    os.sync()
    return seconds, result


def _watched(source: Path, target: Path) -> tuple[float, float]:
    """(seconds of the surgery in a separate process, MB of its peak anonymous memory)."""
    command = [sys.executable, "-c", _PROGRAM, str(source), str(target)]
    environment, peak = {**os.environ, "JAX_PLATFORMS": "cpu"}, 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            # The file of a process that has just ended has no such line.
            peak = max([peak, *map(int, re.findall(r"RssAnon:\s+(\d+)", status.read_text()))])
            time.sleep(0.01)
        printed = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"the streaming process ended with code {process.returncode}")
    return float(printed.split()[-1]), peak * 1024 / 1e6
