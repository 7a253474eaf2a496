"""Bytes that a compiled program moves between devices, read from its HLO text."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OPERATION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
      kind: one of `KINDS`.
      shapes: shapes of its results, one or more arrays.
      bytes: bytes of its results on one device.
      inside: whether it is inside a loop (over layers or chunks) and runs several times per step.
      source: the model's operation that it comes from, if the compiler states it.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    inside: bool
    source: str


def collectives(text: str) -> list[Collective]:
    """List every collective of `compiled.as_text()` once.

    TPU programs contain several forms of one operation on the same channel; one is kept. The parts
    of a product that is split into a ring of permutes are separate operations.
    """
    operations, channels = [], set()
    looped = _loop_computations(text)
    computation = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
        match = _OPERATION.search(line)
        if not match:
            continue
        channel = re.search(r"channel_id=(\d+)", line)
        if channel and (match[2], channel[1]) in channels:
            continue
        if channel:
            channels.add((match[2], channel[1]))
        arrays = [(dtype, _dims(dims)) for dtype, dims in _ARRAY.findall(match[1])]
        source = re.search(r'op_name="([^"]*)"', line)
        source = source[1] if source else ""
        operations.append(
            Collective(
                match[2],
                tuple(shape for _, shape in arrays),
                int(sum(math.prod(shape) * _size(dtype) for dtype, shape in arrays)),
                computation in looped or "/while/body" in source,
                source,
            )
        )
    return operations


def summary(operations: Iterable[Collective]) -> list[tuple[str, str, int, int]]:
    """Rows of (kind, "in a loop" or "once", count, bytes of results on one device), by kind."""
    rows: dict[tuple[str, str], tuple[int, int]] = {}
    for each in operations:
        key = each.kind, "in a loop" if each.inside else "once"
        count, size = rows.get(key, (0, 0))
        rows[key] = count + 1, size + each.bytes
    return [(kind, where, *counts) for (kind, where), counts in sorted(rows.items())]


def _loop_computations(text: str) -> set[str]:
    """Names of the computations that a loop's body contains, calls or fuses."""
    calls: dict[str, set[str]] = {}
    bodies: set[str] = set()
    computation = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
            calls[computation] = set()
        elif computation:
            named = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", line)
            for group in re.findall(r"(?:calls|called_computations)=\{([^}]*)\}", line):
                named += re.findall(r"[\w.\-]+", group)
            calls[computation].update(named)
            bodies.update(re.findall(r"body=%?([\w.\-]+)", line))
    inside, waiting = set(), list(bodies)
    while waiting:
        name = waiting.pop()
        if name not in inside:
            inside.add(name)
            waiting += calls.get(name, ())
    return inside


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _size(dtype: str) -> float:
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0
