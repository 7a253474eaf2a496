"""Checks with common error messages: choices, intervals, nearest names; and text tables.

It also converts mappings of settings to frozen dataclasses, so that a typo is an error.
"""

import contextlib
import dataclasses
import difflib
import math
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

Kind = TypeVar("Kind")
_TYPES = {"str": str, "bool": bool, "int": Integral, "float": Real, "None": type(None)}

# Minimum similarity (difflib's ratio) of a suggested name.
LIKE = 0.6


def check_choice(
    name: str, value: Any, choices: Collection[Any], error: type[Exception] = ValueError
) -> None:
    """Raise `error`, which names the value and the choices, if it is none of `choices`."""
    if value not in choices:
        raise error(f"{name}={value!r:.80}: choose one of {tuple(choices)}")


def check_number(name: str, value: Any, allowed: str, error: type[Exception] = ValueError) -> None:
    """Raise `error` if a value is not a number in an interval; NaN never is.

    Args:
      allowed: interval notation, e.g. "[0, 1)"; further text appears only in the message:
        "[0, inf), 0 for all".
    """
    left, low, high, right = re.match(r"([\[(])(\S+), (\S+)([\])])", allowed).groups()
    value = value.item() if getattr(value, "ndim", 1) == 0 else value  # of numpy, of jax
    number: Any = value if isinstance(value, Real) else math.nan
    above = number >= float(low) if left == "[" else number > float(low)
    below = number <= float(high) if right == "]" else number < float(high)
    if not (above and below):
        raise error(f"{name}={value!r:.40} must be a number in {allowed}")


def check_numbers(settings: Any, error: type[Exception] = ValueError, **allowed: str) -> None:
    """Call `check_number` for the named attributes."""
    for name, interval in allowed.items():
        check_number(name, getattr(settings, name), interval, error)


def unknown(kind: str, typed: str, names: Collection[str], known: str = "") -> str:
    """Message for a name that is not in `names`, with the nearest one and all known ones.

    Args:
      known: text instead of all names, if they are many.
    """
    near = nearest(typed, names)
    hint = f", did you mean {near!r}?" if near else "."
    return f"unknown {kind} {typed!r}{hint} Known: {known or ', '.join(names) or 'none'}"


def check_known(given: Iterable[str], names: Collection[str], kind="setting", error=ValueError):
    """Raise `error` with the nearest name if one of the given names is not in `names`."""
    for name in given:
        if name not in names:
            raise error(unknown(kind, name, names))


@contextlib.contextmanager
def naming(
    place: str,
    caught: type[Exception] | tuple[type[Exception], ...] = ValueError,
    raised: type[Exception] = ValueError,
) -> Iterator[None]:
    """Re-raise errors of the block as `raised`, with the place before their message."""
    try:
        yield
    except caught as error:
        raise raised(f"{place}: {error}") from None


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Context whose import errors name the extra to install."""
    try:
        yield
    except ImportError as error:
        way = f"pip install 'ffn-heterogeneity[{name}]'"
        raise ImportError(f"{first_line(error)}: {way}") from error


def settings_of(kind: type[Kind], given: Any) -> Kind:
    """Return the frozen dataclass `kind` with the given settings, and defaults for the others.

    Args:
      given: a mapping, None for the defaults, or an instance, which is returned.

    Raises:
      ValueError: an unknown setting, or one of another type; and as `kind`.
    """
    if isinstance(given, kind):
        return given
    values, fields = dict(given or {}), dataclasses.fields(kind)
    check_known(values, [field.name for field in fields])
    for field in fields:
        # A class, a union of some, or their text where annotations are postponed.
        kinds = getattr(field.type, "__name__", str(field.type))
        parts, value = kinds.split(" | "), values.get(field.name, field.default)
        wanted = tuple(_TYPES[type_name] for type_name in parts if type_name in _TYPES)
        if len(wanted) == len(parts) and not isinstance(value, wanted):
            raise ValueError(f"{field.name}={value!r}; expected {kinds}")
    return kind(**values)


def settings_from(kind: type[Kind], source: Any, **given: Any) -> Kind:
    """`settings_of` from the keys of a config that are fields of `kind`, and the given values.

    Fields with a default may be absent from the config.
    """
    fields = [x for x in dataclasses.fields(kind) if x.name not in given]
    needed = [x.name for x in fields if x.default is dataclasses.MISSING or x.name in source]
    return settings_of(kind, {name: source[name] for name in needed} | given)


def nearest(typed: str, names: Collection[str]) -> str | None:
    """Return the name most similar to what was typed, or None if none is similar.

    Case, "-" instead of "_", and omitted groups ("weight" for "losses.nucl.weight") are ignored; of
    names with the same end, the shortest is returned.
    """
    endings = {}
    for name in sorted(names, key=len):
        parts = name.lower().split(".")
        for i in range(len(parts)):
            endings.setdefault(".".join(parts[i:]), name)
    typed = typed.lower().replace("-", "_")
    matches = difflib.get_close_matches(typed, endings, n=1, cutoff=LIKE)
    return endings[matches[0]] if matches else None


def some(names: Sequence[str], limit: int = 5) -> str:
    """The first names, quoted, and the number of further ones."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


def shell_line(command: Sequence[str]) -> str:
    """The command for bash, on one line: a line break inside an argument is written as $'\\n'."""
    return shlex.join(command).replace("\n", "'$'\\n''")  # it is inside '...' there


def spans(steps: Sequence[int]) -> str:
    """Format ascending numbers as "3 to 5, 8"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join(" to ".join(map(str, ends)) for ends in runs)


def first_line(error: BaseException) -> str:
    """First line of an error's message, shortened; the error's type if the message is empty.

    (Some libraries' messages have a hundred lines; orbax appends a link to the first one.)
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(" See full")[0][:200]


def as_text(value: object, links: bool = False) -> str:
    """Escape a text for one line of Markdown: no HTML, links (unless `links`) or cell ends.

    Names of runs and settings are untrusted.
    """
    text = re.sub(r"[\\|<]", r"\\\g<0>", " ".join(str(value).split()))
    return text if links else text.replace("](", "]\\(")


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[object]], links: bool = False
) -> str:
    """A Markdown table with aligned columns: first column left, others right.

    Raises:
      ValueError: a row has another number of cells than the header.
    """
    cells = [[as_text(cell, links) for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "| " + " | ".join([row[0].ljust(widths[0]), *padded[1:]]) + " |"

    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])
