"""What errors say alike: the choices, the nearest name, some of many, an error in one line.

Settings that come as a mapping become a frozen dataclass here, so that a slip is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def check_choice(
    name: str, value: Any, choices: Collection[Any], error: type[Exception] = ValueError
) -> None:
    """Raises `error`, which names the value and what it may be, where it is none of `choices`."""
    if value not in choices:
        raise error(f"{name}={value!r}: choose one of {tuple(choices)}")


def unknown(kind: str, typed: str, names: Collection[str], known: str = "") -> str:
    """The message for a name that is none of `names`: the nearest one, and those there are.

    Args:
      known: said instead of all names, where they are many.
    """
    near = nearest(typed, names) if names else None
    hint = f", did you mean {near!r}?" if near else "."
    return f"unknown {kind} {typed!r}{hint} Known: {known or ', '.join(names) or 'none'}"


def check_known(given: Iterable[str], names: Collection[str], kind: str = "setting") -> None:
    """Raises ValueError with the nearest name where one of those given is none of `names`."""
    for name in given:
        if name not in names:
            raise ValueError(unknown(kind, name, names))


def settings_of(kind: type[Kind], given: Mapping[str, Any] | Kind | None) -> Kind:
    """The frozen dataclass `kind` of the settings given, with its defaults for those left out.

    Args:
      given: an instance is itself.

    Raises:
      ValueError: a setting that `kind` has not; and as `kind` itself.
    """
    if isinstance(given, kind):
        return given
    values = dict(given or {})
    check_known(values, [field.name for field in dataclasses.fields(kind)])
    return kind(**values)


def nearest(typed: str, names: Collection[str]) -> str | None:
    """The name with the fewest edits from what was typed; None where even that is another word.

    Case, and "-" for "_", count for nothing, and neither do groups that were left out ("weight" for
    "losses.nucl.weight"); of names equally near, the one that is nearest with its groups.
    """
    typed = typed.lower().replace("-", "_")

    def away(name: str) -> tuple[int, int]:
        parts = name.lower().split(".")
        counts = [_edits(typed, ".".join(parts[i:])) for i in range(len(parts))]
        return min(counts), counts[0]

    edits, name = min(((away(name), name) for name in names), key=lambda pair: pair[0])
    return name if edits[0] <= max(1, len(typed) // 2) else None


def _edits(a: str, b: str) -> int:
    """Letters to drop, add or replace, and neighbours to swap, that make `a` into `b`."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            fewest = min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y))
            if i > 1 and j > 1 and (x, a[i - 2]) == (b[j - 2], y):
                fewest = min(fewest, before[j - 2] + 1)
            row.append(fewest)
        before, last = last, row
    return last[-1]


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first names, quoted, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


def spans(steps: Sequence[int]) -> str:
    """ "3 to 5, 8" of ascending numbers."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][-1] + 1:
            found[-1][1:] = [step]
        else:
            found.append([step])
    return ", ".join(" to ".join(map(str, ends)) for ends in found)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut where it is long; its type where it says nothing.

    Libraries answer with a hundred lines, orbax with a link behind the first one.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(" See full")[0][:200]
