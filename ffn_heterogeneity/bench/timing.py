"""Programs timed in turns: medians, ratios with 95% bootstrap intervals, temporary memory.

Every comparison is made inside one run: the programs take turns, round after round, so that a
machine that slows down slows all of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.report.tables import markdown_table

# (value, 2.5% bound, 97.5% bound)
Interval = tuple[float, float, float]


def take_turns(programs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each program in each round, after one warm-up round."""
    from tqdm import tqdm

    seconds: dict[str, list[float]] = {name: [] for name in programs}
    # Shown between rounds, so never within what is measured; only on a terminal.
    for turn in tqdm(range(rounds + 1), desc="rounds", disable=None, file=sys.stderr):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: np.asarray(values) for name, values in seconds.items()}


def ratio_interval(
    numerator: np.ndarray, denominator: np.ndarray, base: np.ndarray | None = None
) -> Interval:
    """The ratio of medians over rounds; `base` is taken off both.

    Infinite where the denominator's median is at or below the base's.
    """
    base = np.zeros_like(numerator) if base is None else base
    return _bootstrapped(_ratio_of_medians, np.stack([numerator, denominator, base]))


def paired_interval(numerator: np.ndarray, denominator: np.ndarray) -> Interval:
    """The median of the rounds' own ratios.

    For small differences: what moves the machine's speed from round to round falls out.
    """
    return _bootstrapped(_median, np.asarray(numerator) / np.asarray(denominator))


def _bootstrapped(statistic: Callable[[np.ndarray], np.ndarray], rounds: np.ndarray) -> Interval:
    """`statistic` of [..., rounds] over its last axis, and its bounds over drawn rounds."""
    count = rounds.shape[-1]
    picks = np.random.default_rng(0).integers(0, count, (2000, count))
    # method="nearest": interpolating between infinities would give NaN.
    low, high = np.percentile(statistic(rounds[..., picks]), [2.5, 97.5], method="nearest")
    return float(statistic(rounds)), float(low), float(high)


def _ratio_of_medians(rows: np.ndarray) -> np.ndarray:
    top, bottom, floor = np.median(rows, axis=-1)
    return np.where(bottom > floor, (top - floor) / np.maximum(bottom - floor, 1e-12), np.inf)


def _median(ratios: np.ndarray) -> np.ndarray:
    return np.median(ratios, axis=-1)


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of temporary memory of a compiled program (beside inputs and outputs)."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def figures(seconds: np.ndarray, compiled: jax.stages.Compiled) -> dict[str, float]:
    """What is reported of one program."""
    return {
        "median_ms": 1e3 * float(np.median(seconds)),
        "fastest_ms": 1e3 * float(np.min(seconds)),
        "temporary_mb": temporary_bytes(compiled) / 1e6,
    }


def print_figures(title: str, programs: Mapping[str, Mapping[str, float]]) -> None:
    """A table of `figures`, one row a program."""
    names = list(next(iter(programs.values())))
    rows = [(name, *(f"{row[key]:.2f}" for key in names)) for name, row in programs.items()]
    print(f"{title}\n{markdown_table(('program', *names), rows)}\n")


def print_ratios(ratios: Mapping[str, Interval]) -> None:
    """A table of ratios of times with their intervals."""
    rows = [
        (name, f"{m:.3f}", f"{low:.3f} .. {high:.3f}") for name, (m, low, high) in ratios.items()
    ]
    print(markdown_table(("ratio of times", "median", "95% interval"), rows))
