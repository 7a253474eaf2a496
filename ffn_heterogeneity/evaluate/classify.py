"""Labels, or numbers, that a trained model gives to texts: from Python, and of a file's rows."""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data import labelled
from ffn_heterogeneity.data.glue import LabelTask, get_task
from ffn_heterogeneity.data.labelled import Encoded, Form
from ffn_heterogeneity.data.sources import DataError, Source
from ffn_heterogeneity.evaluate.inputs import options_of, tokenizer_of
from ffn_heterogeneity.evaluate.labels import task_metrics
from ffn_heterogeneity.heads import make_head
from ffn_heterogeneity.io.files import atomic_path
from ffn_heterogeneity.io.load import Model, one_model
from ffn_heterogeneity.models.causal_lm import forward
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.options import RunOptions, products
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.wording import check_numbers

TABLE = "predictions.csv"
# Tokens of a batch's rows, up to the longest that the model was trained on.
_LENGTHS = tuple(2**i for i in range(5, 15))


def check_classify(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded; errors as `classify_file`."""
    check_numbers(config, batch_size="[1, inf)")
    if not config.input:
        raise ValueError("--config.input is empty: give a .csv, .tsv or .jsonl file of rows")
    labelled.open_rows(config.input)


def classify_file(config: ConfigDict, model: Model, workdir: epath.Path) -> dict:
    """Writes `<workdir>/predictions.csv`: the input's columns, then "prediction" and
    "probability_<label>" of each label, or "value" of a regression.

    Returns:
      What is counted, and the task's metrics where every row has an answer.

    Raises:
      ValueError (DataError is one): a model without such a head, rows without its fields, columns
        of the names that are to be written.
    """
    task = task_of(model, config.fields)
    source = labelled.open_rows(config.input)
    answered = _has_answers(task, source)
    data = labelled.encode_rows(
        task,
        source,
        tokenizer_of(model, "no text can be read: add its files"),
        _form(model.config),
        answered,
    )
    made = predicted(model, data, config.batch_size, options_of(config), "rows")
    columns = columns_of(task, made)
    write_table(workdir / TABLE, source, columns)
    results = {"input": config.input, "rows": len(data), "rows_cut": data.cut, "task": task.name}
    if not task.regression:
        names, counts = np.unique(columns["prediction"], return_counts=True)
        results["predicted"] = dict(zip(names.tolist(), counts.tolist(), strict=True))
    if not answered:
        return results
    given = made[:, 0] if task.regression else made.argmax(1)
    return results | {"interval": "bootstrap"} | task_metrics(task, given, data.targets)


def classify(
    model: Model,
    texts: Sequence[str | Sequence[str]],
    *,
    batch_size: int = 32,
    options: RunOptions = RunOptions(),
) -> list[dict[str, Any]]:
    """The answers of a model with a trained head to texts, or to pairs of them.

    Returns:
      Of each {"prediction": label, "probabilities": {label: share}}, or {"value": number}.

    Raises:
      ValueError: a model without such a head or a tokenizer, or texts that are none.
    """
    model = one_model(model)
    task, config = task_of(model), model.config
    rows = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
    if not rows:
        return []
    # Somebody else's classifier does not say what it reads.
    count = len(task.fields[0]) if config.head.settings["fields"] else len(rows[0])
    for row in rows:
        if len(row) != count or not all(isinstance(part, str) for part in row):
            what = "a text" if count == 1 else "a pair of texts"
            raise ValueError(f"{row!r:.80} is not {what}, which task {task.name!r} reads")
    tokenizer = tokenizer_of(model, "no text can be read: add its files")
    ids, types, cut = labelled.encode_texts(tokenizer, rows, _form(config))
    data = Encoded(ids, types, np.full(len(ids), np.nan), cut)
    with products(options.compute_dtype):
        columns = columns_of(task, predicted(model, data, batch_size, options))
    if task.regression:
        return [{"value": value} for value in columns["value"]]
    shares = {name: columns[f"probability_{name}"] for name in task.labels}
    return [
        {"prediction": label, "probabilities": {name: shares[name][i] for name in task.labels}}
        for i, label in enumerate(columns["prediction"])
    ]


def task_of(model: Model, fields: str = "") -> LabelTask:
    """The task that a model's head was trained on.

    Args:
      fields: "<a>[,<b>]" of the texts, where a file names them otherwise.

    Raises:
      ValueError: it has no head of labels or numbers.
    """
    head = model.config.head
    if head is None or head.name != "classification":
        raise ValueError(
            f"{model.source} has {f'the head {head.name!r}' if head else 'no head'}, none of labels"
            " or numbers: train one first (configs/p32_glue.py)"
        )
    own = head.settings
    names = tuple(tuple(group) for group in own["fields"]) or (("text",),)
    if fields:
        names = (tuple(part.strip() for part in fields.split(",")),)
    known = own["task"] or ("labels" if own["labels"] else "regression")
    kind = get_task(known, names[0], own["labels"])
    return LabelTask(known, names, tuple(own["labels"]), kind.metrics, kind.answer)


def predicted(
    model: Model, data: Encoded, batch_size: int, options: RunOptions, progress: str | None = None
) -> np.ndarray:
    """Probabilities of the labels, or the number, of every row, float64 [rows, outputs].

    Raises:
      ValueError: something is not finite.
    """
    params, head = jax.device_put(model.params), model.config.head
    made = np.zeros((len(data), head.settings["outputs"]))
    size, most = min(batch_size, len(data)), _longest(model.config)
    lengths = [length for length in _LENGTHS if length < most] + [most]
    for rows, batch in _with_bar(labelled.in_order_of_length(data, size, lengths), progress, data):
        values = np.asarray(logits_of(model.config, options, params, batch), np.float64)
        values = values[: len(rows)]
        if head.settings["labels"]:
            values = np.exp(values - values.max(1, keepdims=True))
            values /= values.sum(1, keepdims=True)
        made[rows] = values
    if not np.isfinite(made).all():
        raise ValueError("predictions are not finite: try compute_dtype=float32")
    return made


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits_of(config: ModelConfig, options: RunOptions, params: dict, batch: dict) -> jax.Array:
    assert config.head is not None
    head = make_head(config, config.head)
    outputs = forward(config, params, batch, options=options, probes=head.probes)
    return head.apply(params, outputs, batch, lambda x: x)


def columns_of(task: LabelTask, made: np.ndarray) -> dict[str, list]:
    """The columns that are written: name -> values."""
    if task.regression:
        return {"value": made[:, 0].tolist()}
    columns: dict[str, list] = {"prediction": [task.labels[i] for i in made.argmax(1)]}
    for i, name in enumerate(task.labels):
        columns[f"probability_{name}"] = made[:, i].tolist()
    return columns


def write_table(path: epath.Path, source: Source, columns: Mapping[str, list]) -> None:
    """CSV of the source's records and the columns, whole or not at all.

    Raises:
      DataError: the records have a column of that name.
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
        table.writerow(cells | {name: values[i] for name, values in columns.items()})
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.getvalue().encode("utf-8", "replace"))


def _cell(value: Any) -> Any:
    """Lists and objects as JSON."""
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _has_answers(task: LabelTask, source: Source) -> bool:
    """True where every row has an answer that the task can read; some alone are not measured."""
    try:
        for row in range(len(source)):
            task.target(source[row])
    except DataError:
        return False
    return True


def _form(config: ModelConfig) -> Form:
    return Form(config.is_encoder, config.padding_id, _longest(config))


def _longest(config: ModelConfig) -> int:
    trained = config.head.settings.get("max_length") if config.head else 0
    return min(trained or config.max_position, config.max_position)


def _with_bar(batches: Iterator[Any], label: str | None, data: Encoded) -> Iterator[Any]:
    with bar(label, total=len(data), unit="row") as shown:
        for rows, batch in batches:
            yield rows, batch
            shown.update(len(rows))
