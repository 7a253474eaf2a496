"""Tasks whose answer is a label or a number: GLUE's, and the user's.

A task defines the fields of its texts and its answer, its labels in the order of their numbers, its
metrics, and the place of its data.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ffn_heterogeneity.data.record_source import ClassName, DataError
from ffn_heterogeneity.data.tasks.base import text_of, value_of
from ffn_heterogeneity.wording import check_known, some

# Field names of files that differ from the task's (GLUE's TSV files, published copies).
_PAIR = ("sentence1", "sentence2")
_COPY = ("text_a", "text_b")
_ANSWERS = ("label", "Quality", "is_duplicate", "gold_label")
_ENTAILMENT = ("entailment", "not_entailment")
_LARGEST = 3.4028234663852886e38  # of float32, the dtype of targets
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


@dataclasses.dataclass(frozen=True)
class LabelTask:
    """A task whose answer is a label or a number.

    Attributes:
      name: its name in configs.
      fields: names of the one or two text fields; the first of these tuples that a file has is
        used.
      labels: labels in the order of their numbers; (): the answer is a number.
      metrics: metrics of the task; the first selects the best checkpoint.
      answer: possible names of the answer field; the first that a file has is used.
      hub: `name:config` of the data set; "": none.
      validation: its held-out splits, by the name of the set.
      rows: number of rows of the training split.
      numbers: labels of the numbers 0, 1, ... in a file, in any case; None: `labels`; (): numbers
        are rejected.
      positive: the number of the label whose F1 is "f1".
    """

    name: str
    fields: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    answer: tuple[str, ...] = ("label",)
    hub: str = ""
    validation: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"validation": "validation"}
    )
    rows: int = 0
    numbers: tuple[str, ...] | None = None
    positive: int = 1

    @property
    def regression(self) -> bool:
        return not self.labels

    @property
    def outputs(self) -> int:
        """Number of outputs of the task's head."""
        return max(len(self.labels), 1)

    def texts(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the record's texts.

        Raises:
          DataError: none of the task's fields, or a field that is not a text.
        """
        for names in self.fields:
            if all(name in record for name in names):
                return tuple(text_of(record, name) for name in names)
        wanted = " or ".join(", ".join(map(repr, names)) for names in self.fields)
        raise DataError(
            f"task {self.name!r} reads the fields {wanted}; this file has "
            f"{', '.join(map(repr, record)) or 'none'}: name them with --config.fields=<a>[,<b>]"
        )

    def field(self, record: Mapping[str, Any]) -> str:
        """The name of the field with the record's answer."""
        return next((name for name in self.answer if name in record), self.answer[0])

    def target_or_nan(self, record: Mapping[str, Any]) -> float:
        """Return the target, or NaN for a row without one: no field, an empty one, or -1."""
        text = label_text(record.get(self.field(record)))
        hidden = text == "-1" and "-1" not in self.labels and not self.regression
        return math.nan if hidden or not text else self.target(record)

    def target(self, record: Mapping[str, Any]) -> int | float:
        """Return the number of the record's label, or its numeric answer.

        Raises:
          DataError: no such field, or no answer in it.
        """
        field = self.field(record)
        value = value_of(record, field, object, "an answer")
        if self.regression:
            return _score(field, value)
        return label_number(field, value, self.labels, self.numbers)


def label_text(value: Any) -> str:
    """Convert a value to a label's text: "1" for 1, 1.0, "1" and " 1.0 "; "" for null and NaN.

    Raises:
      DataError: a list or an object; half a surrogate pair.
    """
    if isinstance(value, (list, Mapping)):
        raise DataError(f"an answer is {value!r:.60}; expected one text or number per row")
    text = "" if value is None or value != value else str(value).strip()
    if re.search("[\ud800-\udfff]", text):
        raise DataError(f"an answer is {text!a:.60}: half a surrogate pair, which no file can hold")
    return re.sub(r"^(-?[0-9]+)\.0+$", r"\1", text)


@functools.lru_cache
def _known(labels: tuple[str, ...], numbers: tuple[str, ...]) -> dict[Any, int]:
    """{text: number of its label} for labels, and for indices of `numbers`.

    Indices are omitted if labels are numbers.
    Keys `(text in lower case,)` are included if unambiguous.
    """
    exact = {name: i for i, name in enumerate(labels)}
    folded = {name.casefold(): i for name, i in exact.items()}
    known = {label_text(name): i for name, i in exact.items()} | exact
    places = {str(i): exact.get(x, folded[x.casefold()]) for i, x in enumerate(numbers)}
    held = [re.findall(r"\d+", name) for name in labels if not re.fullmatch(r"LABEL_\d+", name)]
    if len({tuple(one) for one in held if len(one) == 1}) == len(labels):
        places = {one[0]: i for i, one in enumerate(held)}  # "1 star", "2 stars"
    known = known if any(map(NUMBER.fullmatch, known)) else known | places
    return known | {(x,): i for x, i in folded.items() if len(folded) == len(exact)}


def label_number(field: str, value: Any, labels: Sequence[str], numbers: Any = None) -> int:
    """Return the number of the label that a value names; the value's JSON type does not matter.

    A label with that text takes priority: with labels ("1", "2"), the value 1 is the first.
    Otherwise, an integer is an index in `numbers` (True is 1).

    Args:
      numbers: as in `LabelTask`.

    Raises:
      DataError: no label; or -1, which means that the answer is not published.
    """
    known = _known(tuple(labels), tuple(labels if numbers is None else numbers))
    text = label_text(value)
    number = str(int(value)) if isinstance(value, bool) else text
    for name in (str(value).strip(), text, number, (text.casefold(),)):
        if name in known:
            return known[name]
    if isinstance(value, ClassName) and all(re.fullmatch(r"(LABEL_)?\d+", x) for x in labels):
        return label_number(field, value.place, labels, numbers)  # a model without names
    if text == "-1":
        raise DataError(
            f"field {field!r} is -1: this split's labels are not published, so nothing can be "
            "trained or measured on it (classify predicts without labels)"
        )
    why = "; numbers are unclear where --config.labels reorders a task's: write names"
    said = f"field {field!r} is {value!r:.60}, none of the labels {some(labels)}"
    raise DataError(said + why * (numbers == ()))


def _score(field: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise DataError(f"field {field!r} is {value!r:.60}, expected a finite number of float32")
    return number


def _glue(
    name: str, rows: int, fields, labels: tuple[str, ...], *metrics: str, **more
) -> LabelTask:
    # Published copies use the same two names for the texts of all tasks.
    if len(fields[0]) == 2:
        fields = tuple(dict.fromkeys((*fields, _PAIR, _COPY)))
    more = {"answer": _ANSWERS, "hub": f"nyu-mll/glue:{name}", "rows": rows} | more
    return LabelTask(name, fields, labels, metrics or ("accuracy",), **more)


_MNLI = (("premise", "hypothesis"),), ("entailment", "neutral", "contradiction")
_MATCHED = {name: f"validation_{name}" for name in ("matched", "mismatched")}
_MRPC = (_PAIR, ("#1 String", "#2 String"))
_QUESTIONS = (("question1", "question2"),)
_F1 = ("f1", "accuracy", "matthews")
_ANY = ("accuracy", "macro_f1", "matthews")
# The eight tasks of the P-32 paper, by size; sizes as GLUE's cards print them (its Table 5).
TASKS = {
    task.name: task
    for task in (
        _glue("rte", 2_490, (_PAIR,), _ENTAILMENT),
        _glue("mrpc", 3_668, _MRPC, ("not_equivalent", "equivalent"), *_F1),
        _glue("stsb", 5_749, (_PAIR,), (), "spearman", "pearson", answer=("label", "score")),
        _glue("cola", 8_551, (("sentence",),), ("unacceptable", "acceptable"), *reversed(_F1)),
        _glue("sst2", 67_349, (("sentence",),), ("negative", "positive")),
        _glue("qnli", 104_743, (("question", "sentence"),), _ENTAILMENT),
        _glue("qqp", 363_846, _QUESTIONS, ("not_duplicate", "duplicate"), *_F1),
        _glue("mnli", 392_702, *_MNLI, validation=_MATCHED),
    )
}
# The tasks' texts as a prompt for an encoder-decoder (MLP Fusion's published code).
PROMPTS = {
    "sst2": "sentence: {}",
    "mnli": "premise: {}\nhypothesis: {}",
    "cola": "cola sentence: {}",
    "mrpc": "mrpc sentence1: {}\nsentence2: {}",
}
# For the user's data: labels by name, or a number; fields and labels come from the config.
OWN = ("labels", "regression")


def with_labels(labels: Sequence[str]) -> LabelTask | None:
    """The first of `TASKS` with these labels, in any order and case."""
    names = sorted(name.casefold() for name in labels)
    return next((task for task in TASKS.values() if names and sorted(task.labels) == names), None)


def positive(task: LabelTask, labels: Sequence[str]) -> int:
    """The number of the task's positive label among the same labels in another order or case."""
    names = [name.casefold() for name in labels]
    same = sorted(names) == sorted(task.labels)
    return names.index(task.labels[task.positive]) if same and names else 1


def get_task(name: str, fields: Sequence[str] = (), labels: Sequence[str] = ()) -> LabelTask:
    """Return the task of that name, with the given fields or labels, if any.

    Raises:
      DataError: an unknown task, or missing fields or labels.
    """
    check_known([name], (*TASKS, *OWN), "task", DataError)
    task = TASKS.get(name) or LabelTask(
        name, (), (), _ANY if name == "labels" else ("spearman", "pearson")
    )
    if len(fields) > 2:
        raise DataError(f"fields {', '.join(fields)}: a row has one text or two")
    if fields:
        task = dataclasses.replace(task, fields=(tuple(fields),))
    if labels:
        if len(set(labels)) < 2 or len(set(labels)) < len(labels):
            raise DataError(f"labels {', '.join(labels)}: two or more, each once")
        moved = tuple(labels) != task.labels and sorted(labels) == sorted(task.labels)
        changes = {"numbers": () if moved else None, "positive": positive(task, labels)}
        task = dataclasses.replace(task, labels=tuple(labels), **changes)
    if not task.fields:
        raise DataError(f"task {name!r} needs --config.fields=<a>[,<b>], where its texts are")
    return task
