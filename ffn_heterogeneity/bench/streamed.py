"""The measured cost of streaming surgery: time beside a plain copy of the directory, and memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from ffn_heterogeneity.bench.timing import Questions, ratio_interval, table, table_of_ratios
from ffn_heterogeneity.io.hf.export import MAX_SHARD_BYTES, write_configs
from ffn_heterogeneity.io.pieces import Spec, open_pieces
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import expected_shapes, family_by_name
from ffn_heterogeneity.progress import bar

# A process of its own, so that its memory is that of the surgery alone.
_PROGRAM = """
import json, sys, time
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.surgery.streaming import compress_directory
source, target, plan = sys.argv[1:]
start = time.perf_counter()
compress_directory(source, target, RemovalPlan(**json.loads(plan)))
print(json.dumps(time.perf_counter() - start))
"""
PLAN = {"criterion": "entropy", "ratio": 0.25}
_WATCH_SECONDS = 0.01
_BLOCK = 1 << 22
QUESTIONS: Questions = {
    "What does surgery on disk cost beside a copy?": ("Times", r"(process / copy)", r"^[^,]+")
}


def benchmark_streaming(
    config: ModelConfig, rounds: int = 3, directory: str | os.PathLike | None = None
) -> dict:
    """Streams a random bfloat16 checkpoint, a quarter of its neurons by entropy, in turns with a
    plain copy of it.

    Before each turn all files are written out and dropped from the page cache. Prints a table and
    returns its figures: "copy_seconds", "streaming_seconds" (inside the process),
    "process_seconds" (with the start of Python), one number a round; "ratio", of the medians of
    process and copy; "peak_anonymous_mb" (RssAnon; file pages in the cache do not count), by round.

    Args:
      directory: on the disk to be measured; default: that of temporary files. It needs three
        times the checkpoint's size, which is freed again.
    """
    with tempfile.TemporaryDirectory(dir=directory) as held:
        source, target = Path(held) / "source", Path(held) / "target"
        write_random(config, source)
        size = sum(path.stat().st_size for path in source.iterdir())
        rows = [_round(source, target) for _ in range(rounds)]
    figures = {name: [row[name] for row in rows] for name in rows[0]}
    ratio = ratio_interval(*(np.array(figures[f"{one}_seconds"]) for one in ("process", "copy")))
    lines = [(name, f"{np.median(x):.2f}", f"{max(x):.2f}") for name, x in figures.items()]
    title = f"{size / 1e9:.2f} GB of {config.family}, {PLAN}, {rounds} rounds"
    tables = [table(title, ("figure", "median", "largest"), lines)]
    tables.append(table_of_ratios({"process / copy": ratio}))
    return {"bytes": size, "ratio": ratio[0], "tables": tables} | figures


def _round(source: Path, target: Path) -> dict[str, float]:
    """One copy and one surgery."""
    with _cold(source, target):
        start = time.perf_counter()
        shutil.copytree(source, target)
        copy = time.perf_counter() - start
    with _cold(source, target):
        start = time.perf_counter()
        inside, peak = _watched(source, target)
        process = time.perf_counter() - start
    return {
        "copy_seconds": copy,
        "streaming_seconds": inside,
        "process_seconds": process,
        "peak_anonymous_mb": peak,
    }


def write_random(config: ModelConfig, directory: Path) -> None:
    """A checkpoint of Gaussian bfloat16 weights of standard deviation 0.02, written in pieces."""
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
            total = specs[name].nbytes // dtype.itemsize
            for start in range(0, total, _BLOCK):
                count = min(_BLOCK, total - start)
                block = 0.02 * rng.standard_normal(count, dtype=np.float32)
                pieces.write_part(name, start, block)
    write_configs(directory, config, {dtype}, "plain")


@contextlib.contextmanager
def _cold(source: Path, target: Path) -> Iterator[None]:
    """Neither directory in the page cache before the block; `target` is gone after it."""
    for path in source.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    yield
    shutil.rmtree(target)
    os.sync()


def _watched(source: Path, target: Path) -> tuple[float, float]:
    """(seconds the surgery took in a process of its own, MB of its peak anonymous memory)."""
    command = [sys.executable, "-c", _PROGRAM, str(source), str(target), json.dumps(PLAN)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        while process.poll() is None:
            peak = max(peak, _anonymous_kb(process.pid))
            time.sleep(_WATCH_SECONDS)
        said = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"the streaming process ended with code {process.returncode}")
    return json.loads(said.splitlines()[-1]), peak * 1024 / 1e6


def _anonymous_kb(pid: int) -> int:
    with contextlib.suppress(OSError):
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) if found else 0
    return 0
