"""Rows of token ids, as surgeries leave their self-generated text (own_text.jsonl)."""

from collections.abc import Mapping, Sequence
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import Fields, Task, list_of


def example(record: Mapping[str, Any], fields: Fields) -> list[int]:
    """Field "tokens" of a row, with its bos; every id after the first is predicted."""
    ids = list_of(record, "tokens")
    if wrong := [i for i in ids if type(i) is not int or i < 0]:
        raise DataError(f"field 'tokens' holds {wrong[0]!r:.40}, expected token ids")
    return ids


def encode(ids: Sequence[int], encoder: Any) -> tuple[Sequence[int], Sequence[bool]]:
    """The ids as they are, without another bos or eos."""
    return ids, [True] * len(ids)


TASK = Task("rows", example, encode=encode)
