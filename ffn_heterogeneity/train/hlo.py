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
      kind: of `KINDS`.
      shapes: of what it gives, one or more arrays.
      bytes: of what it gives on one device.
      inside: of a loop (over layers or chunks): it runs more than once a step.
      source: the operation of the model it comes from, where the compiler says so.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    inside: bool
    source: str


def collectives(text: str) -> list[Collective]:
    """Every collective of `compiled.as_text()`, each once.

    TPU programs hold several forms of one operation, on one channel; one is kept. The parts of a
    product that is cut into a ring of permutes are separate operations.
    """
    found, channels = [], set()
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
        found.append(
            Collective(
                match[2],
                tuple(shape for _, shape in arrays),
                int(sum(math.prod(shape) * _size(dtype) for dtype, shape in arrays)),
                computation in looped or "/while/body" in source,
                source,
            )
        )
    return found


def summary(found: Iterable[Collective]) -> list[tuple[str, str, int, int]]:
    """(kind, "in a loop" or "once", how many, bytes they give on one device), a row a kind."""
    rows: dict[tuple[str, str], tuple[int, int]] = {}
    for each in found:
        key = each.kind, "in a loop" if each.inside else "once"
        count, size = rows.get(key, (0, 0))
        rows[key] = count + 1, size + each.bytes
    return [(kind, where, *counts) for (kind, where), counts in sorted(rows.items())]


def _loop_computations(text: str) -> set[str]:
    """Names of the computations that a loop's body holds, calls or fuses."""
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
