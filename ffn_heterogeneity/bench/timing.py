"""Interleaved timing of programs: medians, ratios with 95% bootstrap intervals, temporary memory.

All programs of a comparison run in the same process and are interleaved in rounds, so that a slower
machine slows down all of them.
"""

import functools
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import once
from ffn_heterogeneity.report import stats
from ffn_heterogeneity.wording import markdown_table

# (value, 2.5% bound, 97.5% bound)
Interval = tuple[float, float, float]
# Question that ratios of a benchmark answer -> (meaning of the ratios; regex of their labels, whose
# first group names a column; regex of the size in the first table's title).
Questions = dict[str, tuple[str, str, str]]


def take_turns(
    programs: Mapping[str, Callable[[], Any]], rounds: int, folder: epath.Path | None = None
) -> dict[str, np.ndarray]:
    """Seconds of each program in each round, after one warm-up round; prints each round.

    In its turn a program runs twice, and the second run counts, as in a loop of steps: the first
    one also pays for the memory that it got back from the operating system after the others. On a
    virtual machine that was 0.8 of 2.6 s.

    Args:
      folder: directory for finished rounds; an interrupted run resumes after the last one (on
        another machine it starts again).
    """

    @functools.cache
    def warm_up() -> None:
        for name, program in programs.items():
            print(f"warm-up: {name} {_seconds(program):.4g} s", file=sys.stderr)

    def turn(label: str) -> dict[str, float]:
        warm_up()
        seconds = {}
        for name, program in programs.items():
            _seconds(program)
            seconds[name] = _seconds(program)
        print(f"{label}:", ", ".join(f"{n} {s:.4g} s" for n, s in seconds.items()), file=sys.stderr)
        return seconds

    where = "{processor}, {cores} cores".format(**machine())
    labels = [f"round {number + 1} of {rounds}" for number in range(rounds)]
    turns = [once(folder, f"{label}, {where}", functools.partial(turn, label)) for label in labels]
    return {name: np.asarray([round[name] for round in turns]) for name in programs}


def _seconds(program: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program())
    return time.perf_counter() - start


def compiled(function: Any, held: list, *arguments: Any) -> tuple:
    """A program for `compare`: (compiled function, held, *arguments); `held` as in `stepping`."""
    return function.lower(*held, *arguments).compile(), held, *arguments


def stepping(program: Callable, held: list, *arguments: Any) -> Callable[[], Any]:
    """Return a function that calls a program.

    Args:
      held: an empty list, or one with a state, the program's first argument: the program returns
        (state, metrics), and gets that state in the next call. Programs that share the list update
        the same state, in call order.
    """
    if not held:
        return functools.partial(program, *arguments)

    def call():
        held[0], metrics = program(held[0], *arguments)
        return held[0], metrics

    return call


def machine() -> dict[str, Any]:
    """Facts that times depend on: processor or GPU, cores, versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    flags = facts.get("flags", "").split()
    return {
        "device": jax.devices()[0].device_kind,
        "processor": facts.get("model name", platform.processor()),
        "units": " ".join(one for one in ("avx2", "avx512f", "amx_bf16") if one in flags),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Print a table, and return it in the form of results.json."""
    print(f"{title}\n{markdown_table(columns, rows)}\n")
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}


def ratio_interval(
    numerator: np.ndarray, denominator: np.ndarray, base: np.ndarray | None = None
) -> Interval:
    """Ratio of medians over rounds, after subtracting `base` from both.

    Infinite if the denominator's median is not above the base's.
    """
    base = np.zeros_like(numerator) if base is None else base
    return _bootstrapped(_ratio_of_medians, np.stack([numerator, denominator, base]))


def paired_interval(numerator: np.ndarray, denominator: np.ndarray) -> Interval:
    """Median of the ratios within rounds.

    For small differences: changes of the machine's speed between rounds cancel.
    """
    ratios = np.asarray(numerator) / np.asarray(denominator)
    return _bootstrapped(functools.partial(np.median, axis=-1), ratios)


def ratios_of(
    pairs: Sequence[tuple[str, str]], interval: Callable[..., Interval] = paired_interval
) -> Callable[[Mapping[str, np.ndarray]], dict[str, Interval]]:
    """The argument `ratios` of `compare` for pairs of programs (numerator, denominator)."""
    return lambda seconds: {f"{a} / {b}": interval(seconds[a], seconds[b]) for a, b in pairs}


def _bootstrapped(statistic: Callable[[np.ndarray], np.ndarray], rounds: np.ndarray) -> Interval:
    """`statistic` of [..., rounds] over its last axis, with bounds from bootstrapped rounds."""
    drawn = statistic(rounds[..., stats.resamples(rounds.shape[-1], 2000)])
    # method="nearest": interpolating between infinities would give NaN.
    return float(statistic(rounds)), *stats.ends(drawn, method="nearest")


def _ratio_of_medians(rows: np.ndarray) -> np.ndarray:
    top, bottom, floor = np.median(rows, axis=-1)
    return np.where(bottom > floor, (top - floor) / np.maximum(bottom - floor, 1e-12), np.inf)


def compare(
    title: str,
    programs: Mapping[str, tuple],
    rounds: int,
    ratios: Callable[[Mapping[str, np.ndarray]], Mapping[str, Interval]],
) -> dict[str, Any]:
    """Time programs interleaved: {"programs": figures of each, "ratios", "tables": both}.

    "temporary_mb" is the memory of a program without its inputs and outputs.

    Args:
      programs: {name: result of `compiled`}.
      ratios: {name: seconds in each round} -> {label: ratio}.
    """
    seconds = take_turns({name: stepping(*one) for name, one in programs.items()}, rounds)
    figures = {
        name: {
            "median_ms": 1e3 * float(np.median(seconds[name])),
            "fastest_ms": 1e3 * float(np.min(seconds[name])),
            "temporary_mb": program.memory_analysis().temp_size_in_bytes / 1e6,
        }
        for name, (program, *_) in programs.items()
    }
    rows = [(name, *(f"{x:.2f}" for x in row.values())) for name, row in figures.items()]
    columns, factors = ("program", "median ms", "fastest ms", "temporary mb"), dict(ratios(seconds))
    tables = [table(f"{title}; {rounds} rounds", columns, rows), table_of_ratios(factors)]
    return {"programs": figures, "ratios": factors, "tables": tables}


def table_of_ratios(ratios: Mapping[str, Interval]) -> dict[str, Any]:
    """A table of ratios of times with their intervals."""
    rows = [(name, said(one)) for name, one in ratios.items()]
    return table("ratios of times", ("ratio", "median (95% interval)"), rows)


def said(interval: Interval) -> str:
    """Format a ratio and its interval."""
    return "{:.3f} ({:.3f} .. {:.3f})".format(*interval)
