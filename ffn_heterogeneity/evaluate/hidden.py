"""Hidden states of every layer, in the convention of transformers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.data.labelled import Form, encode_texts
from ffn_heterogeneity.evaluate.inputs import text_rows, tokenizer_of
from ffn_heterogeneity.io.load import Model, one_model
from ffn_heterogeneity.models.causal_lm import forward
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.generate import check_vocabulary
from ffn_heterogeneity.models.options import RunOptions, products
from ffn_heterogeneity.models.stack import encoder_part
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import token_batches

_INPUTS = Probe("block_inputs", lambda seen, batch, per_layer: seen.block_input, kind="example")


def hidden_states(
    model: Model,
    texts: str | Sequence[str] | Sequence[Sequence[str]] | np.ndarray,
    mask: np.ndarray | None = None,
    *,
    batch_size: int = 32,
    options: RunOptions = RunOptions(),
) -> tuple[np.ndarray, np.ndarray]:
    """Return (states [B, L + 1, T, D], mask bool [B, T]) of texts, text pairs or token ids [B, T].

    State 0 is the input of the first block, state L the output of the last, after the final norm if
    the model has one. States at padding are meaningless. Of an encoder-decoder, the encoder's.

    Args:
      texts: texts or pairs as in `encode_texts`, padded at the end (one string is one text, B = 1);
        or an array of integers, the ids.
      mask: for ids: False at padding, which may be on either side; None: no padding.

    Raises:
      ValueError: a model without a tokenizer, invalid texts, ids outside the vocabulary.
    """
    model = one_model(model)
    if model.config.kind == "encoder_decoder":
        config, params = encoder_part(model.config, model.params)
        model = dataclasses.replace(model, config=config, params=params)
    if isinstance(texts, np.ndarray) and texts.dtype.kind in "iu":
        ids, types = np.asarray(texts, np.int32), np.zeros(texts.shape, np.int32)
        real = np.ones(ids.shape, bool) if mask is None else np.asarray(mask, bool)
        if ids.ndim != 2 or real.shape != ids.shape:
            raise ValueError(f"ids {ids.shape}, mask {real.shape}: both must be [B, T]")
    else:
        ids, types, real = _padded(model, texts)
    check_vocabulary(ids[real], model.config.vocab_size)
    params, states = jax.device_put(model.params), []
    for start in range(0, len(ids), batch_size):
        rows = slice(start, start + batch_size)
        batch = {
            "tokens": np.where(real[rows], ids[rows], 0),
            "segment_ids": real[rows].astype(np.int32),
            "token_types": types[rows],
        }
        with products(options.compute_dtype):
            states.append(np.asarray(_states(model.config, options, params, batch)))
    return np.concatenate(states), real


def _padded(model: Model, texts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    config = model.config
    rows = text_rows(texts)
    if not rows or not all(isinstance(text, str) for row in rows for text in row):
        raise ValueError("texts must be strings, or pairs of strings, at least one; or integer ids")
    if len({len(row) for row in rows}) > 1:
        raise ValueError("texts must be all single ones, or all pairs")
    tokenizer = tokenizer_of(model, "no text can be read: add its files, or give ids")
    form = Form(config.is_encoder, config.padding_id, config.max_position)
    (ids,), (types,) = (
        token_batches(each, len(rows)) for each in encode_texts(tokenizer, rows, form)[:2]
    )
    return ids["tokens"], types["tokens"], ids["segment_ids"] > 0


@functools.partial(jax.jit, static_argnums=(0, 1))
def _states(config: ModelConfig, options: RunOptions, params: dict, batch: dict) -> Any:
    outputs = forward(config, params, batch, options=options, probes=(_INPUTS,))
    inputs_lbtd = outputs["probes"]["block_inputs"]
    return jnp.concatenate([inputs_lbtd, outputs["hidden"][None]]).swapaxes(0, 1)
