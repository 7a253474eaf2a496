"""`--help`: the script's description, its flags, and the config's keys with their comments."""

import functools
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.launch.configs import as_typed, find_config, home, shown

COLUMN = 36  # where comments begin
# Comment lines, then a key of a dictionary (with that of a group of one) or of `config`, and the
# rest of its line.
_OF_DICT, _OF_CONFIG = r'"(\w+)": (?:\(?\{"(\w+)": )?', r"(?:config\.)?(\w[\w.]*) = "
_KEY = re.compile(rf"((?:^ *# .*\n)*)^ +(?:{_OF_DICT}|{_OF_CONFIG})(.*)", re.M)
# A function, or a table of groups; the names of sweeps are no keys.
_PART = re.compile(r"^(?:def )?(?!SWEEPS)(\w+)(.*\n(?:[^\w\n].*\n|\n)*)", re.M)


def help_text(doc: str, flags: Sequence[Any], config: ConfigDict | None, spec: str) -> str:
    """Return the help text, as wide as the terminal, at most 100 columns.

    Args:
      doc: the script's docstring; prose is wrapped and indented text is kept, with the typed
        command instead of `python scripts/<name>.py`.
      flags: absl's flags.
      config, spec: the config that the command line names, and its name as given.
    """
    width = max(60, min(shutil.get_terminal_size().columns, 100))
    lines = [*_prose(as_typed(doc.strip()), width), "", "Flags:"]
    for flag in flags:
        default = "" if flag.default in (None, "") else f" (default: {flag.default})"
        lines += _entry(f"--{flag.name}", f"{flag.help}{default}", width)
    if config is not None:
        lines += _entry("--config", f"The file of the keys below; now {shown(spec)}", width)
        said = comments_of(spec.partition(":")[0], config)
        keys = flatten_config(config.to_dict())
        for group, names in itertools.groupby(sorted(keys, key=_group), _group):
            lines += ["", f"Config, {group}:" if group else "Config:"]
            for key in names:
                lines += _entry(f"--config.{key}={keys[key]!r}", said[key], width)
    return "\n".join(lines)


def _prose(text: str, width: int) -> list[str]:
    lines = []
    for indented, group in itertools.groupby(text.splitlines(), lambda x: x[:1] in (" ", "")):
        paragraph = list(group)
        lines += paragraph if indented else textwrap.wrap(" ".join(paragraph), width)
    return lines


def _entry(name: str, about: str, width: int) -> list[str]:
    """`name` and, from COLUMN on, its description, on the same line if there is room."""
    left, indent = f"  {name}", " " * COLUMN
    options = {"break_long_words": False, "break_on_hyphens": False}
    lines = textwrap.wrap(about, width, initial_indent=indent, subsequent_indent=indent, **options)
    if lines and len(left) + 2 <= COLUMN:
        lines[0] = left.ljust(COLUMN) + lines[0].lstrip()
        return lines
    return [left, *lines]


def _group(key: str) -> str:
    """First part of a dotted key; "" for a key without a dot (these come first)."""
    return key.rpartition(".")[0].partition(".")[0]


def comments_of(file: str, config: ConfigDict) -> dict[str, str]:
    """Return {config key: its comment, or ""}, from the file and the configs that it imports.

    Of a stage's keys (`recover.steps` of a job) the config that the stage starts from is read, too.
    """
    said, own = {}, _comments(Path(file))
    for key in flatten_config(config.to_dict()):
        stage = config[key.split(".")[0]]
        base = stage.get("base", "") if isinstance(stage, ConfigDict) else ""
        tiers = [own]
        if found := find_config(base) if base else None:
            tiers.append(_comments(Path(found.partition(":")[0])))
        ends = [key.split(".", i)[-1] for i in range(key.count(".") + 1)]
        said[key] = next((tier[end] for tier in tiers for end in ends if end in tier), "")
    return said


@functools.cache
def _comments(path: Path) -> Mapping[str, str]:
    """Return {a key's longest known name: its comment} of a config and those that it imports.

    A comment is on the key's line or directly above it. A key is named as in its file ("steps",
    "data.packing"), within a group of configs/parts with the group's name ("nucl.weight"), and by
    its last component.
    """
    said, last = {}, {}
    for text in (path.read_text(encoding="utf-8") for path in _imported(path)):
        for block, body in _PART.findall(text):
            prefix = "" if block.startswith("get_") else f"{block.lower()}."
            for above, item, inner, name, rest in _KEY.findall(body):
                comment = rest.partition("# ")[2] or " ".join(re.findall("# (.*)", above))
                if rest == "{" and block.isupper():
                    prefix = f"{item}."
                if comment:
                    name = name or (f"{item}.{inner}" if inner else prefix + item)
                    said.setdefault(name, comment)
                    last.setdefault(name.split(".")[-1], comment)
    return last | said


def _imported(path: Path) -> Iterator[Path]:
    """Iterate over the config's file and the configs that it imports."""
    yield path
    pattern = r"^from configs(\.parts)? import (.+)$"
    for parts, names in re.findall(pattern, path.read_text(encoding="utf-8"), re.M):
        for name in names.split(", "):
            yield from _imported(home() / "configs" / ("parts" if parts else "") / f"{name}.py")
