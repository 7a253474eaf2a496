"""The interface of a task, which converts a record to a prompt and a target."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ffn_heterogeneity.data.sources import DataError


class Example(NamedTuple):
    """A prompt (not in the loss) and the target that directly continues it.

    `starts`, `ends`: whether this piece begins and ends its document (passages of a long file).
    """

    prompt: str
    target: str
    starts: bool = True
    ends: bool = True


# Fields with the weight of a row or an answer; 1 changes nothing.
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

    `weight`: its share of the draws, an integer. `folders`: possible names of its folder under the
    mixture's root. `option`: the data setting that excludes it ("" for none).
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
      name: its name in configs.
      example: `(record, fields) -> Example`, or with `encode` any value; raises `DataError` for an
        unreadable record.
      expand: `(row, training) -> records`, if a row of the file has zero or more examples; None:
        every row is one. Outside training, it returns every question once.
      passage: field that examples may share; all of one passage are held out together.
      reference: `record -> reference of the metrics`; None: the example's target.
      members: the tasks that this one mixes; its data is then a root with a folder for each.
      split_long: whether a document longer than a row continues in the next row (plain text);
        otherwise it is cut at the end, and each example is within one row (prompt and response).
      hub, split: default data set (`name[:config]`) and split.
      metrics: names of the metrics of a model's answers.
      encode: for tasks without prompt and target: `(value of example, packing.Encoder) -> (ids,
        mask of ids in the loss)`; raises `DataError` for a value that it cannot encode.
    """

    name: str
    example: Callable[[Mapping[str, Any], Fields], Any]
    split_long: bool = False
    hub: str = ""
    split: str = "train"
    metrics: tuple[str, ...] = ()
    expand: Expand | None = None
    passage: str = ""
    reference: Callable[[Mapping[str, Any]], Any] | None = None
    members: tuple[MixedTask, ...] = ()
    encode: Callable[[Any, Any], tuple[Sequence[int], Sequence[bool]]] | None = None


def value_of(record: Mapping[str, Any], field: str, kind: type | tuple, expected: str) -> Any:
    """Return the value of a field; errors name the field and the record's fields."""
    if field not in record:
        raise DataError(f"no field {field!r}; fields seen: {', '.join(map(str, record)) or 'none'}")
    value = record[field]
    if not isinstance(value, kind):
        raise DataError(
            f"field {field!r} is {type(value).__name__} ({value!r:.40}), expected {expected}"
        )
    return value


def text_of(record: Mapping[str, Any], field: str) -> str:
    """Return the string in a field; half surrogate pairs (no tokenizer takes them) are errors."""
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
    """Raise DataError for a field that is not read but would change what is learned.

    Empty fields (also JSON in a string), `FLAGS` of 1 and fields in `read` are allowed.
    """
    for name in fields:
        value = record.get(name)
        neutral = value in (None, 1) if name in FLAGS else value in (None, "", "[]", "{}", [], {})
        if not (neutral or name in read or (value is False and name not in FLAGS)):
            raise DataError(
                f"field {name!r} is {value!r:.40} and is not supported: leave it out, or write it "
                "into the text"
            )


def list_of(record: Mapping[str, Any], field: str) -> list[Any]:
    """Return the list in a field."""
    return value_of(record, field, list, "a list")


def texts_of(record: Mapping[str, Any], field: str) -> list[str]:
    """Return the list of strings in a field."""
    for value in list_of(record, field):
        if not isinstance(value, str):
            raise DataError(
                f"field {field!r} holds {type(value).__name__} ({value!r:.40}), expected text only"
            )
    return record[field]


def mapping_of(record: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return the object in a field."""
    return value_of(record, field, Mapping, "an object")


def word_of(record: Mapping[str, Any], words: Sequence[str], field: str = "label") -> str:
    """Return the label word; the field has one of `words` or its number (True is 1, False is 0).

    Raises:
      DataError: no such field, or no answer in it (test sets are published with -1).
    """
    value = value_of(record, field, object, "a label")
    if isinstance(value, str) and value in words:
        return value
    if isinstance(value, int) and 0 <= value < len(words):
        return words[value]
    known = ", ".join(f"{word} or {number}" for number, word in enumerate(words))
    raise DataError(f"field {field!r} is {value!r:.40}, which is not an answer; known: {known}")
