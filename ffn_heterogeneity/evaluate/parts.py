"""Parts of a long evaluation, each kept as soon as it is done, so that a stopped run goes on.

A part is known by its name alone: the work directory says that all settings are the same
(`io.workdir.prepare_workdir`).
"""

from __future__ import annotations

import re
import sys
from typing import Any

from etils import epath

from ffn_heterogeneity.io.files import read_json, write_json


def read_part(folder: epath.Path | None, name: str) -> Any:
    """What `write_part` wrote; None where there is nothing, or no folder."""
    if folder is None or not (path := _path(folder, name)).exists():
        return None
    kept = read_json(path)
    # Two names may share a file's: then the file is the other's.
    if kept["name"] != name:
        return None
    print(f"{name}: done before, read from {path}", file=sys.stderr)
    return kept["value"]


def write_part(folder: epath.Path | None, name: str, value: Any) -> None:
    """Keeps plain data as `<folder>/<name>.json`; nothing without a folder."""
    if folder is not None:
        write_json(_path(folder, name), {"name": name, "value": value})


def _path(folder: epath.Path, name: str) -> epath.Path:
    return folder / (re.sub(r"[^\w.-]+", "_", name) + ".json")
