"""Rows of results in JSONL files, written atomically."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from etils import epath

from ffn_heterogeneity.data.sources import read_each, read_jsonl
from ffn_heterogeneity.io.files import atomic_path


def write_rows(
    path: epath.Path, rows: Iterable[Mapping[str, Any]], default: Callable[[Any], Any] | None = None
) -> None:
    """Write a JSONL file atomically; halves of surrogate pairs become "?".

    Args:
      default: converts values that JSON does not support; None: they are errors.
    """
    lines = (json.dumps(row, default=default, ensure_ascii=False) for row in rows)
    text = "".join(f"{line}\n" for line in lines)
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))


def read_rows(path: epath.Path) -> list[dict[str, Any]]:
    """Read rows that `write_rows` wrote; [] if the file does not exist or is empty."""
    if not path.exists() or not path.read_text().strip():
        return []
    return list(read_each(read_jsonl([str(path)]), dict))
