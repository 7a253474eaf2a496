"""The papers' printed numbers, as JSON: captions, labels, columns and rows."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def printed(name: str) -> dict[str, Any]:
    """{"paper": its title, "tables": {key: {caption, labels, columns, rows, notes}}, "figures":
    {key: caption}}.

    A row holds its labels, then its numbers (null: not printed, or cut off in the copy at hand).
    """
    return json.loads((resources.files(__package__) / f"{name}.json").read_text())
