"""What a task is: how a record becomes a prompt and a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ffn_heterogeneity.data.sources import DataError


class Example(NamedTuple):
    """A prompt (never in the loss) and its target, which continues it with nothing in between.

    `starts`, `ends`: whether this piece begins and ends its document (passages of a long file).
    """

    prompt: str
    target: str
    starts: bool = True
    ends: bool = True


class Fields(NamedTuple):
    """Names of record fields chosen by the user; "" leaves the choice to the task."""

    prompt: str = ""
    response: str = ""
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Task:
    """A named kind of data.

    Attributes:
      name: what the config calls it.
      example: `(record, fields) -> Example`; raises `DataError` for a record it cannot read.
      split_long: a document longer than a row goes on in the next row (plain text); otherwise it is
        cut at the end and each example stays whole in one row (prompt and response).
      hub, split: where its data is when no path is given (`name[:config]`).
      metrics: names of the metrics that judge a model's answers.
    """

    name: str
    example: Callable[[Mapping[str, Any], Fields], Example]
    split_long: bool = False
    hub: str = ""
    split: str = "train"
    metrics: tuple[str, ...] = ()


def text_of(record: Mapping[str, Any], field: str) -> str:
    """The string in a field; the error names the field and those the record has."""
    if field not in record:
        raise DataError(f"no field {field!r}; fields seen: {', '.join(map(str, record)) or 'none'}")
    value = record[field]
    if not isinstance(value, str):
        raise DataError(f"field {field!r} is {type(value).__name__} ({value!r:.40}), expected text")
    return value
