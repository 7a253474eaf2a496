"""The objective of labels and numbers: one answer per row, pooled over depth (P-32)."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.data import labelled
from ffn_heterogeneity.data.glue import LabelTask, get_task
from ffn_heterogeneity.data.labelled import Batch, Encoded, LabelSettings
from ffn_heterogeneity.data.sources import DataError, files_of
from ffn_heterogeneity.evaluate.inputs import row_form
from ffn_heterogeneity.evaluate.label_metrics import task_metrics
from ffn_heterogeneity.heads import classification as heads
from ffn_heterogeneity.models.config import HeadConfig, ModelConfig
from ffn_heterogeneity.train.objectives import Data, Objective, ObjectiveSettings
from ffn_heterogeneity.wording import settings_of

# Lengths of batches in tokens, with one program each.
ENCODER_LENGTHS, DECODER_LENGTHS = (32, 64, 128), (64, 128, 256)
MOST_LENGTHS = 3


def labels(config: ObjectiveSettings, model: ModelConfig) -> Objective:
    """Rows of `config.data` with their answers; the task's metrics over each held-out set.

    `config.own` may contain "pooling" and "final_norm" (of the head), "lambda_rate" (the learning
    rate of the layers' weights; None: the model's), "lengths" and "together" (of the objective),
    and "fields" and "labels" of the user's task.

    Raises:
      ValueError: invalid settings (or DataError).
    """
    options, settings = config.own, settings_of(LabelSettings, config.data)
    task = task_of(settings, options)
    usual = DECODER_LENGTHS if model.kind == "decoder" else ENCODER_LENGTHS
    lengths = tuple(options.get("lengths") or usual)
    valid = all(type(length) is int and length >= 4 for length in lengths)
    if not valid or not 0 < len(lengths) <= MOST_LENGTHS:
        raise ValueError(f"lengths={lengths}: give one to {MOST_LENGTHS} integers from 4, or ()")
    if max(lengths) > model.max_position:
        raise ValueError(f"lengths={lengths}: the model has {model.max_position} positions")
    together = check_together(options.get("together", 1), config, lengths, model)
    pooling, final_norm = options.get("pooling", "last"), options.get("final_norm", "pooled")
    head = heads.Classification(
        pooling=pooling,
        final_norm=final_norm,
        outputs=task.outputs,
        task=task.name,
        fields=[*map(list, task.fields)],
        labels=list(task.labels),
        max_length=max(lengths),
    )
    rows, number = ("B", "T"), np.int32
    rate = options.get("lambda_rate")
    return Objective(
        name="labels",
        batch={
            "tokens": (rows, number),
            "segment_ids": (rows, number),
            "token_types": (rows, number),
            "target": (("B",), np.float32),
            "valid": (("B",), np.bool_),
        },
        lengths=tuple({"T": length} for length in sorted(lengths)),
        data=functools.partial(_data, config, model, task, lengths, together),
        head=HeadConfig.of("classification", vars(head)),
        terms={"regression" if task.regression else "classification": {"weight": 1.0}},
        counts=counts,
        predictions=functools.partial(predictions, task),
        metrics=functools.partial(metrics, task),
        best=f"max:validation/{_first_set(task, settings)}{task.metrics[0]}",
        rates=((heads.LEARNT, rate),) if rate is not None and pooling in heads.LEARNING else (),
        together=together,
    )


def task_of(settings: LabelSettings, options: Mapping[str, Any]) -> LabelTask:
    """The task; labels of a user's task are taken from the training file."""
    fields, names = (_words(options.get(key) or "") for key in ("fields", "labels"))
    if settings.task == "labels" and not names:
        if not settings.path:
            raise DataError("task 'labels' needs --config.data.path=<file>")
        names = labelled.found_labels(labelled.open_rows(settings.path))
    return get_task(settings.task, fields, names)


def counts(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of tokens that are not padding, and of rows with an answer."""
    return {"tokens": jnp.sum(batch["segment_ids"] > 0), "target_tokens": jnp.sum(batch["valid"])}


def predictions(task: LabelTask, params: Any, outputs: Any, batch: Any) -> dict[str, Any]:
    """The predicted label or number of each row, and its answer."""
    made = outputs["predictions"]
    answer = made[:, 0] if task.regression else jnp.argmax(made, axis=1)
    return {"prediction": answer, "target": batch["target"], "valid": batch["valid"]}


def metrics(task: LabelTask, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The task's metrics, with intervals."""
    return task_metrics(task, rows["prediction"], rows["target"])


def _data(
    config: ObjectiveSettings,
    model: ModelConfig,
    task: LabelTask,
    lengths: Sequence[int],
    together: int,
    tokenizer: Any,
    rows: Sequence[int],
) -> Data:
    """Training batches, held-out sets, and the sets evaluated at the end.

    Raises:
      ValueError (or DataError): no tokenizer, or data that cannot be read or learned from.
    """
    if tokenizer is None:
        raise ValueError(f"{config.model} has no tokenizer, so no text can be read: add its files")
    settings, size = settings_of(LabelSettings, config.data), config.batch_size
    form = row_form(model, task.name, max(lengths))

    def read(path: str, split: str) -> Encoded:
        source = labelled.open_rows(path or task.hub, split)
        return labelled.encode_rows(task, source, tokenizer, form)

    train, sets = _sets(settings, task, read)
    if most := (config.max_batches or 0) * size:  # drawn, because batches are sorted by length
        rng = np.random.default_rng(0)
        sets = {
            name: labelled.chosen_rows(data, np.sort(rng.permutation(len(data))[:most]))
            for name, data in sets.items()
        }
    tests = {"test": read(settings.test_path, "test")} if settings.test_path else {}
    if len(np.unique(train.targets)) < 2:
        first = train.targets[0] if task.regression else repr(task.labels[int(train.targets[0])])
        raise DataError(
            f"all {len(train)} training rows have the answer {first}: there is nothing to learn"
        )
    train = labelled.chosen_rows(
        train, labelled.part_of(len(train), settings.fraction, config.seed)
    )

    def batches_of(data: Encoded) -> Callable[[], Iterator[Batch]]:
        def batches() -> Iterator[Batch]:
            for _, batch in labelled.in_order_of_length(data, size, lengths, together):
                yield {name: leaf[np.asarray(rows)] for name, leaf in batch.items()}

        return batches

    def says(results: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {"train": train, **sets, **tests}
        return {
            "task": task.name,
            "constant_loss": labelled.constant_loss(task, train.targets),
            "rows": {name: len(data) for name, data in sizes.items()},
            "tokens_a_row": {name: data.mean_length for name, data in sizes.items()},
            "rows_cut": {name: int(data.cut.sum()) for name, data in sizes.items()},
        }

    drawn = labelled.Shuffled(train, size, rows, config.seed, lengths, together)
    held_out = {name: batches_of(data) for name, data in sets.items()}
    at_end = {name: batches_of(data) for name, data in tests.items()}
    return Data(drawn, held_out, says, at_end)


def _sets(
    settings: LabelSettings, task: LabelTask, read: Callable[[str, str], Encoded]
) -> tuple[Encoded, dict[str, Encoded]]:
    """(all training rows, the held-out sets by name)."""
    train, sets, paths = read(settings.path, "train"), {}, {}
    if settings.validation_path:
        paths = labelled.named_paths(settings.validation_path)
    for name, path in (paths | {"test": settings.test_path}).items():
        if both := files_of(settings.path) & files_of(path):
            raise DataError(
                f"{min(both)}: training and {name!r} both read it: name other files, or hold out a "
                "part (data.validation_fraction)"
            )
    if paths:
        sets = {name: read(path, "validation") for name, path in paths.items()}
    elif not settings.path:
        sets = {name: read("", split) for name, split in task.validation.items()}
    elif settings.validation_fraction:
        train_rows, out = labelled.held_out_part(len(train), settings.validation_fraction)
        sets = {"validation": labelled.chosen_rows(train, out)}
        train = labelled.chosen_rows(train, train_rows)
    return train, sets


def check_together(
    together: int, config: ObjectiveSettings, lengths: Sequence[int], model: ModelConfig
) -> int:
    """Return `together` after checking that it divides micro-batches and that rows fit."""
    micro, places = config.batch_size // config.accumulation, together * max(lengths)
    if together < 1 or micro % together:
        raise ValueError(
            f"together={together} rows: {micro} rows a micro-batch are no multiple of it"
        )
    if together > 1 and model.kind == "encoder_decoder":
        raise ValueError(
            f"together={together}: an encoder-decoder reads one text a row; set it to 1"
        )
    if together > 1 and places > model.max_position:
        raise ValueError(
            f"together={together} rows of {max(lengths)} tokens: the model has "
            f"{model.max_position} positions; set together=1 or shorter lengths"
        )
    return together


def _first_set(task: LabelTask, settings: LabelSettings) -> str:
    """Prefix of the set that selects the best checkpoint, if there are several."""
    if settings.validation_path:
        names = [*labelled.named_paths(settings.validation_path)]
    else:
        names = ["validation"] if settings.path else [*task.validation]
    return f"{names[0]}/" if len(names) > 1 else ""


def _words(text: Any) -> tuple[str, ...]:
    """Words of "a,b" or of a tuple."""
    parts = text.split(",") if isinstance(text, str) else text
    return tuple(str(word).strip() for word in parts if str(word).strip())
