"""The interface of a task: how a record becomes a prompt and a target."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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


# Fields that say how much a row or an answer counts; 1 changes nothing.
FLAGS = ("weight", "loss_weight", "train", "training", "trainable", "loss")
# Fields of instruction rows that change the question or what is learned.
UNREAD = ("system", "system_prompt", "history", "tools", "tool_calls", "input", "context", *FLAGS)


class Fields(NamedTuple):
    """Names of record fields chosen by the user; "" leaves the choice to the task."""

    prompt: str = ""
    response: str = ""
    text: str = ""


class MixedTask(NamedTuple):
    """A task in a mixture.

    `weight`: its share of the draws, a whole number. `folders`: what its folder under the mixture's
    root may be called. `option`: the data setting that leaves it out ("" for none).
    """

    task: str
    weight: int
    folders: tuple[str, ...]
    option: str = ""


Expand = Callable[[Mapping[str, Any], bool], Sequence[Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A named kind of data.

    Attributes:
      name: what the config calls it.
      example: `(record, fields) -> Example`, or with `encode` anything; raises `DataError` for a
        record it cannot read.
      expand: `(row, training) -> records`, where a row of the file is no, one or several examples;
        None: every row is one. Not in training, it gives every question once.
      reference: `record -> what the metrics compare an answer with`; None: the example's target.
      members: the tasks that this one mixes; its data is then a root with a folder for each.
      split_long: a document longer than a row goes on in the next row (plain text); otherwise it is
        cut at the end and each example stays whole in one row (prompt and response).
      hub, split: where its data is when no path is given (`name[:config]`).
      metrics: names of the metrics that judge a model's answers.
      encode: for what is no prompt and target: `(what example returned, packing.Encoder) -> (ids,
        which of them are in the loss)`; raises `DataError` for what it cannot encode.
    """

    name: str
    example: Callable[[Mapping[str, Any], Fields], Any]
    split_long: bool = False
    hub: str = ""
    split: str = "train"
    metrics: tuple[str, ...] = ()
    expand: Expand | None = None
    reference: Callable[[Mapping[str, Any]], Any] | None = None
    members: tuple[MixedTask, ...] = ()
    encode: Callable[[Any, Any], tuple[Sequence[int], Sequence[bool]]] | None = None


def value_of(record: Mapping[str, Any], field: str, kind: type | tuple, expected: str) -> Any:
    """The value of a field; the error names the field and those the record has."""
    if field not in record:
        raise DataError(f"no field {field!r}; fields seen: {', '.join(map(str, record)) or 'none'}")
    value = record[field]
    if not isinstance(value, kind):
        raise DataError(
            f"field {field!r} is {type(value).__name__} ({value!r:.40}), expected {expected}"
        )
    return value


def text_of(record: Mapping[str, Any], field: str) -> str:
    """The string in a field; no half of a surrogate pair, which no tokenizer takes, is in it."""
    text = value_of(record, field, str, "text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"field {field!r}: half a surrogate pair {text[error.start]!r} at character "
            f"{error.start}; write whole characters"
        ) from None
    return text


def reject_fields(
    record: Mapping[str, Any], fields: Sequence[str] = UNREAD, read: Sequence[str] = ()
) -> None:
    """Raises DataError for a field that would be dropped and changes what is learned.

    Empty ones (JSON in a string, too) and `FLAGS` of 1 change nothing, nor do those in `read`.
    """
    for name in fields:
        value = record.get(name)
        neutral = value in (None, 1) if name in FLAGS else value in (None, "", "[]", "{}", [], {})
        if not (neutral or name in read or (value is False and name not in FLAGS)):
            raise DataError(
                f"field {name!r} is {value!r:.40} and is not read here: leave it out, or write it "
                "into the text"
            )


def list_of(record: Mapping[str, Any], field: str) -> list[Any]:
    """The list in a field."""
    return value_of(record, field, list, "a list")


def texts_of(record: Mapping[str, Any], field: str) -> list[str]:
    """The list of strings in a field."""
    for value in list_of(record, field):
        if not isinstance(value, str):
            raise DataError(
                f"field {field!r} holds {type(value).__name__} ({value!r:.40}), expected text only"
            )
    return record[field]


def mapping_of(record: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The object in a field."""
    return value_of(record, field, Mapping, "an object")


def word_of(record: Mapping[str, Any], words: Sequence[str], field: str = "label") -> str:
    """The label word: the field holds one of `words`, or its number (True and False are 1 and 0).

    Raises:
      DataError: there is no such field, or no answer in it (test sets are published with -1).
    """
    value = value_of(record, field, object, "a label")
    if isinstance(value, str) and value in words:
        return value
    if isinstance(value, int) and 0 <= value < len(words):
        return words[value]
    known = ", ".join(f"{word} or {number}" for number, word in enumerate(words))
    raise DataError(f"field {field!r} is {value!r:.40}, which is no answer; known: {known}")
