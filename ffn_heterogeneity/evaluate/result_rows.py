"""Rows of results in JSONL files, which are whole at any time."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from etils import epath

from ffn_heterogeneity.data.sources import read_each, read_jsonl
from ffn_heterogeneity.io.files import atomic_path


def write_rows(
    path: epath.Path, rows: Iterable[Mapping[str, Any]], default: Callable[[Any], Any] | None = None
) -> None:
    """All of a JSONL file, whole or not at all; halves of surrogate pairs become "?".

    Args:
      default: what JSON has no form for -> what is written instead; None: that is an error.
    """
    lines = (json.dumps(row, default=default, ensure_ascii=False) for row in rows)
    text = "".join(f"{line}\n" for line in lines)
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "replace"))


def read_rows(path: epath.Path) -> list[dict[str, Any]]:
    """Rows that `write_rows` wrote; none where there is no such file, or nothing in it."""
    if not path.exists() or not path.read_text().strip():
        return []
    return list(read_each(read_jsonl([str(path)]), dict))
