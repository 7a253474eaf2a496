"""Tasks whose answer is a label or a number: GLUE's, and one of the user's own.

What a task is: which fields hold its texts and its answer, what its labels are in the order of
their numbers, which metrics judge it, and where its data is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.base import text_of, value_of
from ffn_heterogeneity.wording import check_known, some

# Of files that name their texts otherwise than the task does (GLUE's TSV files, published copies).
_PAIR = ("sentence1", "sentence2")
_COPY = ("text_a", "text_b")
_ENTAILMENT = ("entailment", "not_entailment")


@dataclasses.dataclass(frozen=True)
class LabelTask:
    """One task.

    Attributes:
      name: in configs.
      fields: names of the one or two texts; the first of these tuples that a file has is read.
      labels: in the order of their numbers; (): the answer is a number.
      metrics: the first decides which checkpoint is the best.
      answer: names of the field with the answer, the first that a file has.
      hub: `name:config` of the data set; "": it has none.
      validation: its held-out splits, by the name of the set.
      rows: of the training split.
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

    @property
    def regression(self) -> bool:
        return not self.labels

    @property
    def outputs(self) -> int:
        """Numbers that a head has to make."""
        return max(len(self.labels), 1)

    def texts(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """The record's texts.

        Raises:
          DataError: it has none of the task's fields, or no text in one.
        """
        for names in self.fields:
            if all(name in record for name in names):
                return tuple(text_of(record, name) for name in names)
        wanted = " or ".join(", ".join(map(repr, names)) for names in self.fields)
        raise DataError(
            f"task {self.name!r} reads the fields {wanted}; this file has "
            f"{', '.join(map(repr, record)) or 'none'}: name them with --config.fields=<a>[,<b>]"
        )

    def target(self, record: Mapping[str, Any]) -> int | float:
        """The number of the record's label, or the number that is its answer.

        Raises:
          DataError: there is no such field, or what is in it is no answer.
        """
        field = next((name for name in self.answer if name in record), self.answer[0])
        value = value_of(record, field, object, "an answer")
        return _score(field, value) if self.regression else label_number(field, value, self.labels)


def label_number(field: str, value: Any, labels: Sequence[str]) -> int:
    """The number of a label that is given by its name or its number, as text or not.

    Raises:
      DataError: it is neither; -1 stands for an answer that is not published.
    """
    if isinstance(value, str) and value.strip() in labels:
        return labels.index(value.strip())
    try:
        number = int(value)
        if number == float(value) and 0 <= number < len(labels):
            return number
    except (TypeError, ValueError, OverflowError):
        number = None
    if number == -1:
        raise DataError(
            f"field {field!r} is -1: this split's labels are not published, so nothing can be "
            "trained or measured on it (classify predicts without labels)"
        )
    known = [f"{name!r} or {i}" for i, name in enumerate(labels)]
    raise DataError(f"field {field!r} is {value!r:.60}, none of the labels {some(known)}")


def _score(field: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"field {field!r} is {value!r:.60}, expected a finite number")
    return number


def _glue(
    name: str, rows: int, fields, labels: tuple[str, ...], *metrics: str, **more
) -> LabelTask:
    # Published copies name the two texts of any task alike.
    if len(fields[0]) == 2:
        fields = tuple(dict.fromkeys((*fields, _PAIR, _COPY)))
    hub = f"nyu-mll/glue:{name}"
    return LabelTask(name, fields, labels, metrics or ("accuracy",), hub=hub, rows=rows, **more)


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
        _glue(
            "mrpc",
            3_668,
            _MRPC,
            ("not_equivalent", "equivalent"),
            *_F1,
            answer=("label", "Quality"),
        ),
        _glue("stsb", 5_749, (_PAIR,), (), "spearman", "pearson", answer=("label", "score")),
        _glue("cola", 8_551, (("sentence",),), ("unacceptable", "acceptable"), *reversed(_F1)),
        _glue("sst2", 67_349, (("sentence",),), ("negative", "positive")),
        _glue("qnli", 104_743, (("question", "sentence"),), _ENTAILMENT),
        _glue("qqp", 363_846, _QUESTIONS, ("not_duplicate", "duplicate"), *_F1),
        _glue(
            "mnli",
            392_702,
            (("premise", "hypothesis"),),
            ("entailment", "neutral", "contradiction"),
            validation=_MATCHED,
        ),
    )
}
# Of data of one's own: labels by name, or a number; fields and labels come from the config.
OWN = ("labels", "regression")


def get_task(name: str, fields: Sequence[str] = (), labels: Sequence[str] = ()) -> LabelTask:
    """The task of that name, with fields, or labels, of the user's own where they are given.

    Raises:
      DataError: there is none, or what it needs is not given.
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
        task = dataclasses.replace(task, labels=tuple(labels))
    if not task.fields:
        raise DataError(f"task {name!r} needs --config.fields=<a>[,<b>], where its texts are")
    return task
