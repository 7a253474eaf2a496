"""`--help`: a script about itself, its flags, a config's keys by group with their comments."""

from __future__ import annotations

import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.launch.configs import as_typed, home, shown

COLUMN = 36  # where comments begin


def help_text(doc: str, flags: Sequence[Any], config: ConfigDict | None, spec: str) -> str:
    """The whole text, as wide as the terminal and 100 columns at most.

    Args:
      doc: the script's docstring; prose is wrapped, what is indented stands as it is, with the
        command that was typed for `python scripts/<name>.py`.
      flags: of absl.
      config, spec: the config that the command line names, and how it does.
    """
    width = max(60, min(shutil.get_terminal_size().columns, 100))
    lines = [*_prose(as_typed(doc.strip()), width), "", "Flags:"]
    for flag in flags:
        default = "" if flag.default in (None, "") else f" (default: {flag.default})"
        lines += _entry(f"--{flag.name}", f"{flag.help}{default}", width)
    if config is not None:
        lines += _entry("--config", f"The file of the keys below; now {shown(spec)}", width)
        said = comments_of(spec.partition(":")[0])
        keys = flatten_config(config.to_dict())
        for group, names in itertools.groupby(sorted(keys, key=_group), _group):
            lines += ["", f"Config, {group}:" if group else "Config:"]
            for key in names:
                lines += _entry(f"--config.{key}={keys[key]!r}", comment_of(key, said), width)
    return "\n".join(lines)


def _prose(text: str, width: int) -> list[str]:
    lines = []
    for indented, group in itertools.groupby(text.splitlines(), lambda x: x[:1] in (" ", "")):
        part = list(group)
        lines += part if indented else textwrap.wrap(" ".join(part), width)
    return lines


def _entry(name: str, about: str, width: int) -> list[str]:
    """`name` and, from COLUMN on, what it is: on its line where there is room."""
    left, indent = f"  {name}", " " * COLUMN
    whole = {"break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(about, width, initial_indent=indent, subsequent_indent=indent, **whole)
    if lines and len(left) + 2 <= COLUMN:
        lines[0] = left.ljust(COLUMN) + lines[0].lstrip()
        return lines
    return [left, *lines]


def _group(key: str) -> str:
    """The first part of a dotted key; "" of one without, which come first."""
    return key.rpartition(".")[0].partition(".")[0]


def comment_of(key: str, said: Sequence[Mapping[str, str]]) -> str:
    """The comment of the dotted key's longest end that has one, in the first mapping with any."""
    ends = [key.split(".", i)[-1] for i in range(key.count(".") + 1)]
    names = [name for end in ends for name in (f"config.{end}", end)]
    return next((tier[name] for tier in said for name in names if name in tier), "")


def comments_of(file: str) -> tuple[dict[str, str], ...]:
    """Key of a config -> comment: beside or right above it, and above a group it is in, in the file
    and what it imports of configs/; then the same of the other configs.

    A key is named as it stands there: "config.steps", "data.packing"; of a dictionary in a part's
    function by both ("nucl.weight"), in `get_config` alone. By its last part too, where nothing
    says more.
    """
    own = list(_imported(Path(file)))
    folder = home() / "configs"
    others = [p for p in sorted([*folder.glob("*.py"), *folder.glob("parts/*.py")]) if p not in own]
    tiers: list[dict[str, str]] = [{}, {}, {}, {}]
    for number, paths in enumerate((own, others)):
        for path in paths:
            _comments(path.read_text(encoding="utf-8"), *tiers[2 * number : 2 * number + 2])
    return tuple(tiers)


def _imported(path: Path) -> Iterator[Path]:
    """The config and the configs it is made of."""
    yield path
    pattern = r"^from configs(\.parts)? import (.+)$"
    for parts, names in re.findall(pattern, path.read_text(encoding="utf-8"), re.M):
        for name in names.split(", "):
            yield from _imported(home() / "configs" / ("parts" if parts else "") / f"{name}.py")


def _comments(text: str, direct: dict[str, str], inherited: dict[str, str]) -> None:
    above, function, commented = [], "", False
    for line in text.splitlines():
        code, _, comment = line.partition("# ")
        if code[:1].strip():  # a new function, or what is in none
            function = match[1] if (match := re.match(r"def (\w+)", code)) else ""
        key = re.match(r'\s+(?:"(\w+)": |([\w.]+) = )', code)
        if function and key and (comment or above):
            in_dictionary = key[1] and not function.startswith("get_")
            name = f"{function}.{key[1]}" if in_dictionary else key[1] or key[2]
            tier = direct if comment or commented else inherited
            for end in (name, name.split(".")[-1]):
                tier.setdefault(end, comment.strip() or " ".join(above))
        alone = not code.strip()
        # What stands above holds until the next comment, empty line or dictionary.
        if code.rstrip().endswith("{") or (alone and not commented):
            above = []
        commented = alone and bool(comment)
        if commented:
            above = [*above, comment]
        elif alone:
            above = []
