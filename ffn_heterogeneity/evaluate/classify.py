"""Predictions of labels or numbers by a trained model, for texts and for a file's rows."""

import csv
import dataclasses
import functools
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from scipy.special import expit, softmax

from ffn_heterogeneity.data import labelled
from ffn_heterogeneity.data.glue import LabelTask, get_task, positive, with_labels
from ffn_heterogeneity.data.labelled import Encoded, Form
from ffn_heterogeneity.data.sources import DataError, Source, read_each
from ffn_heterogeneity.evaluate.inputs import ModelSettings, row_form, text_rows, tokenizer_of
from ffn_heterogeneity.evaluate.label_metrics import task_metrics
from ffn_heterogeneity.heads import make_head
from ffn_heterogeneity.io.files import atomic_path
from ffn_heterogeneity.io.load import Model, one_model
from ffn_heterogeneity.models.causal_lm import forward
from ffn_heterogeneity.models.config import HeadConfig, ModelConfig
from ffn_heterogeneity.models.options import RunOptions, products
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.wording import some

TABLE = "predictions.csv"
# Lengths of batches in tokens, up to the longest in the model's training.
_LENGTHS = tuple(2**i for i in range(5, 15))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifySettings(ModelSettings):
    """Settings of `configs/classify.py`."""

    input: str
    fields: str

    def read(self) -> Source:
        if not self.input:
            raise ValueError("--config.input is empty: give a .csv, .tsv or .jsonl file of rows")
        return labelled.open_rows(self.input)


def classify_file(settings: ClassifySettings, model: Model, workdir: epath.Path) -> dict:
    """Write `<workdir>/predictions.csv`: the input's columns, then those of `columns_of`.

    Returns:
      Counts, and the task's metrics over the rows that have an answer (`_measured`).

    Raises:
      ValueError (or DataError): a model without such a head, rows without its fields, columns with
        the names of the predictions, or an unknown answer.
    """
    task, source = task_of(model, settings.fields), settings.read()
    head_spec = model.config.head.settings
    problem = head_spec.get("problem", "")  # several labels or numbers per row have no metrics here
    several = problem.startswith("multi") or (problem and head_spec["outputs"] > 1)
    answers = [*read_each(source, (lambda row: math.nan) if several else task.target_or_nan)]
    tokenizer = tokenizer_of(model, "no text can be read: add its files")
    data = labelled.encode_rows(task, source, tokenizer, form_of(model.config), labelled=False)
    made = predicted(model, data, settings.batch_size, settings.options, "rows")
    columns = columns_of(model.config.head, made)
    table = table_of(source, columns)
    with atomic_path(workdir / TABLE) as temporary:
        temporary.write_bytes(table.encode("utf-8", "replace"))
    results = {
        "input": settings.input,
        "rows": len(data),
        "rows_cut": int(data.cut.sum()),
        "task": task.name,
    }
    if not task.regression:
        said = columns["prediction"]
        said = sum(said, []) if isinstance(said[0], list) else said
        names, counts = np.unique(said, return_counts=True)
        results["predicted"] = dict(zip(names.tolist(), counts.tolist(), strict=True))
    return results | _measured(task, made, np.array(answers, np.float64))


def classify(
    model: Model,
    texts: str | Sequence[str | Sequence[str]] | np.ndarray,
    *,
    batch_size: int = 32,
    options: RunOptions = RunOptions(),
) -> list[dict[str, Any]]:
    """Apply a model's trained head to texts or pairs of texts.

    Args:
      texts: one string is one text, with a result list of length one.

    Returns:
      Per text {"prediction": label, "probabilities": {label: share}}; for a model with several
      labels per text {"prediction": labels above 0.5, "probabilities"}; for a regression {"value":
      number}, with several outputs {"values": {name: number}}.

    Raises:
      ValueError: a model without such a head or a tokenizer, or invalid texts.
    """
    model = one_model(model)
    task, config = task_of(model), model.config
    rows = text_rows(texts)
    if not rows:
        return []
    # Classifiers of other libraries do not specify their inputs.
    count = len(task.fields[0]) if config.head.settings["fields"] else len(rows[0])
    for row in rows:
        if len(row) != count or not all(isinstance(text, str) for text in row):
            what = "a text" if count == 1 else "a pair of texts"
            raise ValueError(f"{row!r:.80} is not {what}, which task {task.name!r} reads")
    tokenizer = tokenizer_of(model, "no text can be read: add its files")
    ids, types, cut = labelled.encode_texts(tokenizer, rows, form_of(config))
    data = Encoded(ids, types, np.full(len(ids), np.nan), cut)
    with products(options.compute_dtype):
        columns = columns_of(config.head, predicted(model, data, batch_size, options))
    if "value" in columns:
        return [{"value": value} for value in columns["value"]]
    names, first = config.head.settings["labels"], "value" if task.regression else "probability"
    each = zip(*(columns[f"{first}_{name}"] for name in names), strict=True)
    numbers = [dict(zip(names, row, strict=True)) for row in each]
    if task.regression:
        return [{"values": row} for row in numbers]
    return [
        {"prediction": label, "probabilities": row}
        for label, row in zip(columns["prediction"], numbers, strict=True)
    ]


def task_of(model: Model, fields: str = "") -> LabelTask:
    """Return the task that a model's head was trained on.

    A file's numbers are indices of the model's labels. If these are a GLUE task's labels in another
    order (another library's classifier, or the task trained on names), they are indices of the
    task's labels.

    Args:
      fields: "<a>[,<b>]", the text fields, if the file uses other names.

    Raises:
      ValueError: the model has no head of labels or numbers.
    """
    head = model.config.head
    if head is None or head.name != "classification":
        raise ValueError(
            f"{model.source} has {f'the head {head.name!r}' if head else 'no head'}, not one of "
            "labels or numbers: train one first (configs/p32_glue.py)"
        )
    head_settings = head.settings
    names = tuple(tuple(group) for group in head_settings["fields"]) or (("text",),)
    if fields:
        names = (tuple(field.strip() for field in fields.split(",")),)
    labels = () if head_settings.get("problem") == "regression" else tuple(head_settings["labels"])
    known = head_settings["task"] or ("labels" if labels else "regression")
    kind = get_task(known, names[0], () if head_settings.get("problem") else labels)
    glue = with_labels(labels) if head_settings["task"] != "labels" else None
    numbers = glue.labels if glue and [*map(str.casefold, labels)] != [*glue.labels] else None
    return LabelTask(
        known,
        names,
        labels,
        kind.metrics,
        (glue or kind).answer,
        numbers=numbers,
        positive=positive(glue, labels) if glue else kind.positive,
    )


def predicted(
    model: Model, data: Encoded, batch_size: int, options: RunOptions, progress: str | None = None
) -> np.ndarray:
    """Probabilities of the labels, or predicted numbers, of every row, float64 [rows, outputs].

    softmax(logits), or sigmoid(logits) for several labels per row. (`observe` applies no head.)

    Raises:
      ValueError: non-finite predictions.
    """
    params, head = jax.device_put(model.params), model.config.head.settings
    made = np.zeros((len(data), head["outputs"]))
    size, most = min(batch_size, len(data)), _longest(model.config)
    lengths = [length for length in _LENGTHS if length < most] + [most]
    for rows, batch in _with_bar(labelled.in_order_of_length(data, size, lengths), progress, data):
        values = np.asarray(logits_of(model.config, options, params, batch), np.float64)
        made[rows] = values[: len(rows)]
    problem = head.get("problem", "")
    if problem == "multi_label_classification":
        made = expit(made)
    elif head["labels"] and not problem:
        made = softmax(made, axis=1)
    if not np.isfinite(made).all():
        raise ValueError("predictions are not finite: try compute_dtype=float32")
    return made


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits_of(config: ModelConfig, options: RunOptions, params: dict, batch: dict) -> jax.Array:
    assert config.head is not None
    head = make_head(config, config.head)
    outputs = forward(config, params, batch, options=options, probes=head.probes)
    return head.apply(params, outputs, batch, lambda x: x)


def columns_of(head: HeadConfig, made: np.ndarray) -> dict[str, list]:
    """Columns of the predictions, {name: values}.

    They are "prediction" (a label, or a list of those above 0.5) and "probability_<label>", or
    "value", with several outputs "value_<name>".
    """
    labels, problem = head.settings["labels"], head.settings.get("problem", "")
    if problem == "regression" or not labels:
        names = ["value"] if made.shape[1] == 1 else [f"value_{name}" for name in labels]
        return {name: made[:, i].tolist() for i, name in enumerate(names)}
    if problem:
        said = [[name for name, p in zip(labels, row, strict=True) if p > 0.5] for row in made]
    else:
        said = [labels[i] for i in made.argmax(1)]
    return {"prediction": said} | {
        f"probability_{x}": made[:, i].tolist() for i, x in enumerate(labels)
    }


def table_of(source: Source, columns: Mapping[str, list]) -> str:
    """Return a CSV of the source's records and the columns.

    Raises:
      DataError: the records already have a column of that name.
    """
    rows = [source[i] for i in range(len(source))]
    names = list(dict.fromkeys(name for row in rows for name in row))
    if taken := [name for name in columns if name in names]:
        raise DataError(f"{source.name} has a column {taken[0]!r} already: rename it")
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, [*names, *columns])
    table.writeheader()
    for i, row in enumerate(rows):
        cells = {name: _cell(value) for name, value in row.items()}
        table.writerow(cells | {name: _cell(values[i]) for name, values in columns.items()})
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Lists and objects as JSON."""
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _measured(task: LabelTask, made: np.ndarray, answers: np.ndarray) -> dict[str, Any]:
    """The task's metrics over the rows with an answer, and the number of rows without (NaN).

    "accuracy_rows": of each row with an answer, for comparisons of two models row by row.
    """
    rows, results = ~np.isnan(answers), {}
    if task.regression and np.all(answers[rows] == -1):
        rows[:] = False  # GLUE's hidden answers
    if without := int(np.sum(~rows)):
        results["rows_without_answer"] = without
        message = f"{without} of {len(rows)} rows have no single answer in {some(task.answer)}"
        print(f"{message}: excluded from the metrics", file=sys.stderr)
    if task.numbers:
        print(f"labels that are numbers mean {some(task.numbers)}", file=sys.stderr)
    if rows.any():
        given = made[:, 0] if task.regression else made.argmax(1)
        results["interval"] = "bootstrap"
        results |= task_metrics(task, given[rows], answers[rows])
        if "accuracy" in results:  # 1: right
            results["accuracy_rows"] = (given == answers)[rows].astype(int).tolist()
    return results


def form_of(config: ModelConfig) -> Form:
    """Form of rows; a classifier of another library reads its tokenizer's output unchanged."""
    task = config.head.settings["task"]
    return row_form(config, task, _longest(config), foreign=not task)


def _longest(config: ModelConfig) -> int:
    trained = config.head.settings.get("max_length") if config.head else 0
    return min(trained or config.max_position, config.max_position)


def _with_bar(batches: Iterator[Any], label: str | None, data: Encoded) -> Iterator[Any]:
    with bar(label, total=len(data), unit="row") as shown:
        for rows, batch in batches:
            yield rows, batch
            shown.update(len(rows))
