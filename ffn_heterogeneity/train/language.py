"""Language modeling, the default objective: predict the next token at every position."""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.data.pipeline import Pipeline, make_pipeline
from ffn_heterogeneity.io.hf.card import compared, public_text
from ffn_heterogeneity.models.causal_lm import require_decoder
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.parallel.processes import say
from ffn_heterogeneity.train.objectives import LANGUAGE, Data, Objective, ObjectiveSettings

_ROWS = ("B", "T")


def language(config: ObjectiveSettings, model: ModelConfig) -> Objective:
    """Rows of `config.seq_len` tokens from `config.data`; evaluates the mean NLL of held-out rows.

    Raises:
      ValueError: an encoder.
    """
    require_decoder(model, "training on next words (and on packed rows)")
    return Objective(
        name=LANGUAGE,
        batch={
            "tokens": (_ROWS, np.int32),
            "targets": (_ROWS, np.int32),
            "segment_ids": (_ROWS, np.int32),
            "positions": (_ROWS, np.int32),
            "loss_mask": (_ROWS, np.bool_),
        },
        lengths=({"T": config.seq_len},),
        data=functools.partial(_data, config, model.vocab_size),
        terms={"nll": {"weight": 1.0}},
        counts=counts,
    )


def counts(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of tokens that are not padding, and of target tokens."""
    return {
        "tokens": jnp.sum(batch["segment_ids"] > 0),
        "target_tokens": jnp.sum(batch["loss_mask"]),
    }


def _data(config: ObjectiveSettings, vocab_size: int, tokenizer: Any, rows: Sequence[int]) -> Data:
    """Training batches and the held-out part of `config.data`.

    Raises:
      ValueError (or DataError): no tokenizer, or unreadable data.
    """
    if tokenizer is None:
        source = config.model or "the new model"
        raise ValueError(f"{source} has no tokenizer, so no text can be read: add its files")
    pipeline = make_pipeline(
        config.data,
        tokenizer,
        config.batch_size,
        config.seq_len,
        config.seed,
        accumulation=config.accumulation,
        rows=rows,
        vocab_size=vocab_size,
    )
    batches = pipeline.train_iterator()

    def says(results: Mapping[str, Any]) -> dict[str, Any]:
        summary = _perplexities(config, pipeline, results)
        if hasattr(batches, "shares"):
            summary["shares"] = batches.shares
            shares = [f"{share:.1%} of rows from {name}" for name, share in batches.shares.items()]
            say(", ".join(shares))
        return summary

    def held_out() -> Any:
        return pipeline.validation_iterator(config.max_batches)

    return Data(batches, {} if pipeline.held_out is None else {"held_out": held_out}, says)


def _perplexities(
    config: ObjectiveSettings, pipeline: Pipeline, results: Mapping[str, Any]
) -> dict[str, Any]:
    """Perplexity of the held-out rows before the first and at the exported step; {} if unknown.

    The rows are counted over the batches of all processes, which this process reads again.
    """
    history, step = results.get("history", ()), results.get("exported_step")
    # A row without an accuracy has the NLL of whole documents (reduction="sum").
    means = [row for row in history if "validation/nll/accuracy" in row]
    nll = {row["step"]: row["validation/nll"] for row in means}
    if not {0, step} <= nll.keys():
        return {}
    full_pipeline = copy.copy(pipeline)
    full_pipeline.rows = np.arange(pipeline.batch_size)
    windows = tokens = 0
    for batch in full_pipeline.validation_iterator(config.max_batches):
        windows += int(batch["loss_mask"].any(1).sum())
        tokens += int(batch["loss_mask"].sum())
    data = config.data
    text = (
        data.get("validation_path")
        or f"held-out part of {public_text(data['path'] or data['task'])}"
    )
    return compared(
        *(float(np.exp(nll[at])) for at in (0, step)),
        text=text,
        window=config.seq_len,
        windows=windows,
        tokens=tokens,
        dtype=results["compute_dtype"],
    )
