"""Plain text: the whole document is the target."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.data.tasks.base import Example, Fields, Task, text_of


def example(record: Mapping[str, Any], fields: Fields) -> Example:
    """Field "text" (or the one named) of a document; every token of it is predicted."""
    text = text_of(record, fields.text or "text")
    starts, ends = record.get("passage_starts", True), record.get("passage_ends", True)
    return Example("", text, bool(starts), bool(ends))


TASK = Task("text", example, split_long=True)
