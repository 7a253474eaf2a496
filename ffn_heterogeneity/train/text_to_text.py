"""Objectives of encoder-decoders: span corruption of a text, and responses to prompts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.span_corruption import Corruption, corrupted_batch, sentinels_of
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.train.language import counts
from ffn_heterogeneity.train.objectives import Batch, Data, Objective, ObjectiveSettings
from ffn_heterogeneity.wording import check_number

# The held-out rows are always corrupted alike.
HELD_OUT_SEED = 0
SPANS = {"density": 0.15, "mean_span": 3.0}
TARGET_LEN = 64


def span_corruption(config: ObjectiveSettings, model: ModelConfig) -> Objective:
    """Rows of text whose encoder's part has `config.seq_len` tokens, corrupted as in T5.

    `config.own` may contain "density" and "mean_span" (`Corruption`).

    Raises:
      ValueError: no encoder-decoder, or invalid settings (DataError).
    """
    _require_both(model, "span corruption")
    spans = {key: config.own.get(key, value) for key, value in SPANS.items()}
    shapes = Corruption((0,) * 2**16, 0, **spans)
    tokens = shapes.row_length(config.seq_len)
    inputs, targets = shapes.lengths(tokens)
    data = functools.partial(_data, config, model, tokens, spans)
    return _objective("span_corruption", inputs, targets, data)


def text_to_text(config: ObjectiveSettings, model: ModelConfig) -> Objective:
    """Prompts of `config.data`, at most `config.seq_len` tokens, and their responses.

    Both end with an eos. `config.own` may contain "target_len", the longest response in tokens.

    Raises:
      ValueError: no encoder-decoder, or invalid settings (DataError).
    """
    _require_both(model, "text to text")
    targets = config.own.get("target_len", TARGET_LEN)
    check_number("target_len", targets, f"[2, {2**31})")
    data = functools.partial(_pairs, config, model, targets)
    return _objective("text_to_text", config.seq_len, targets, data)


def _require_both(model: ModelConfig, what: str) -> None:
    if model.kind != "encoder_decoder":
        raise ValueError(
            f"a {model.family} model is a{'n' * (model.kind == 'encoder')} {model.kind}: {what} "
            "trains encoder-decoders"
        )


def _objective(name: str, inputs: int, targets: int, data: Any) -> Objective:
    """Rows of `inputs` tokens for the encoder and `targets` for the decoder."""
    encoder, decoder = ("B", "S"), ("B", "T")
    return Objective(
        name=name,
        batch={
            "encoder_tokens": (encoder, np.int32),
            "encoder_segment_ids": (encoder, np.int32),
            "tokens": (decoder, np.int32),
            "segment_ids": (decoder, np.int32),
            "targets": (decoder, np.int32),
            "loss_mask": (decoder, np.bool_),
        },
        lengths=({"S": inputs, "T": targets},),
        data=data,
        terms={"nll": {"weight": 1.0}},
        counts=_counts,
    )


def _counts(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of both stacks, and targets."""
    encoder = (batch["encoder_segment_ids"] > 0).sum()
    return counts(batch) | {"tokens": counts(batch)["tokens"] + encoder}


def _data(
    config: ObjectiveSettings,
    model: ModelConfig,
    tokens: int,
    spans: Mapping[str, float],
    tokenizer: Any,
    rows: Sequence[int],
) -> Data:
    """Training batches and the held-out part of `config.data`; errors as `make_pipeline`."""
    eos, start = _ends(config, model, tokenizer)
    how = Corruption(sentinels_of(tokenizer, model.vocab_size), eos, **spans)
    how.row_length(config.seq_len)  # checks the number of sentinels
    pipeline = _pipeline(config, model, tokenizer, rows, tokens)
    padding = start if model.padding_id is None else model.padding_id
    corrupt = functools.partial(
        corrupted_batch, how=how, start_id=start, pad_id=padding, rows=pipeline.rows
    )
    batches = Corrupted(pipeline.train_iterator(), corrupt, config.seed)

    def held_out() -> Iterator[Batch]:
        for number, batch in enumerate(pipeline.validation_iterator(config.max_batches)):
            # By the row's number in the stream: the same spans at any batch size.
            places = [number * config.batch_size + row for row in pipeline.rows]
            yield corrupt(batch, seed=(HELD_OUT_SEED,), rows=places)

    return Data(batches, {} if pipeline.held_out is None else {"held_out": held_out})


def _pairs(
    config: ObjectiveSettings, model: ModelConfig, targets: int, tokenizer: Any, rows: Sequence[int]
) -> Data:
    """Training batches and the held-out part of `config.data`; errors as `make_pipeline`."""
    decoder = (targets, _ends(config, model, tokenizer)[1])
    pipeline = _pipeline(config, model, tokenizer, rows, config.seq_len, decoder)
    held_out = functools.partial(pipeline.validation_iterator, config.max_batches)
    sets = {} if pipeline.held_out is None else {"held_out": held_out}
    return Data(pipeline.train_iterator(), sets)


def _ends(config: ObjectiveSettings, model: ModelConfig, tokenizer: Any) -> tuple[int, int]:
    """Ids that end a text and begin the decoder's."""
    if tokenizer is None:
        source = config.model or "the new model"
        raise ValueError(f"{source} has no tokenizer, so no text can be read: add its files")
    eos = model.eos_id[0] if isinstance(model.eos_id, tuple) else model.eos_id
    if eos is None or model.bos_id is None:
        raise ValueError(f"eos_id={eos}, bos_id={model.bos_id}: {config.objective} needs both")
    return eos, model.bos_id


def _pipeline(config, model, tokenizer, rows, length: int, decoder=None) -> Any:
    return make_pipeline(
        config.data,
        tokenizer,
        config.batch_size,
        length,
        config.seed,
        accumulation=config.accumulation,
        rows=rows,
        vocab_size=model.vocab_size,
        decoder=decoder,
    )


class Corrupted:
    """Training batches whose spans depend on the seed, the batch's number and the row."""

    def __init__(self, batches: Any, corrupt: Any, seed: int):
        self._batches, self._corrupt, self._seed, self._number = batches, corrupt, seed, 0

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._number += 1
        return self._corrupt(batch, seed=(self._seed, self._number))

    def get_state(self) -> dict[str, Any]:
        """The position of the rows, and the number of batches so far."""
        return {"batches": self._batches.get_state(), "number": self._number}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position."""
        self._batches.set_state(state["batches"])
        self._number = state["number"]

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()
