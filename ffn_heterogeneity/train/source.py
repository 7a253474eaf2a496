"""Where a run's weights come from: a model that is there, or a new one of a given shape."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from ffn_heterogeneity.data.corpus.shards import check_vocabulary
from ffn_heterogeneity.io.load import Model, load_config, load_model, load_tokenizer
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.shapes import count_parameters
from ffn_heterogeneity.surgery import SURGERIES


def is_fresh(config: ConfigDict) -> bool:
    """Whether the run starts from random weights: it has a `shape`, and no model is named."""
    return not config.model and "shape" in config


def model_shape(config: ConfigDict) -> ModelConfig:
    """The config of the model that the run trains, without its weights.

    Raises:
      ValueError (ConfigError, CheckpointError are some): no such model, or a shape that is none.
    """
    if not is_fresh(config):
        return load_config(config.model, revision=config.revision)
    shape = config.shape
    for key in ("layers", "d_model", "n_heads"):
        if shape[key] < 1:
            raise ValueError(f"shape.{key}={shape[key]} must be at least 1")
    if shape.d_model % shape.n_heads:
        raise ValueError(
            f"shape.d_model={shape.d_model} must be a multiple of shape.n_heads={shape.n_heads}"
        )
    layer = LayerConfig(ffn_width=shape.ffn_width)
    return ModelConfig(
        family="llama",
        vocab_size=shape.vocab_size,
        d_model=shape.d_model,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_heads,
        head_dim=shape.d_model // shape.n_heads,
        layers=(layer,) * shape.layers,
        tied=shape.tied,
        max_position=max(config.seq_len, 2048),
        bos_id=None,
        eos_id=None,
    )


def starting_model(config: ConfigDict, load: Callable[..., Model] = load_model) -> Model:
    """The model as it trains: as the run finds it, after the surgeries of `config.prepare`.

    Raises:
      ValueError: as `found_model` and the surgeries.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        model = prepared(config, found_model(config, load))
    return dataclasses.replace(model, params=jax.tree.map(np.asarray, model.params))


def prepared(config: ConfigDict, model: Model) -> Model:
    """`model` after the surgeries that `config.prepare` names, in that order.

    Each draws from `config.seed` and its own name; of shapes alone under `jax.eval_shape`.
    """
    for name in config.get("prepare", ()):
        key = jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(name.encode()))
        model, _ = SURGERIES[name](model, config[name], key=key)
    return model


def found_model(config: ConfigDict, load: Callable[..., Model] = load_model) -> Model:
    """The model as the run finds it.

    A fresh one has the weights of `causal_lm.init` (normal, 0.02; the paper is silent) from
    `config.seed`, made on the host's CPU: the same numbers on every machine and in every process.
    Its tokenizer is `config.tokenizer`'s, and its special tokens are the tokenizer's.

    Args:
      load: what reads a model that is there.

    Raises:
      ValueError: a tokenizer that a new model lacks, or one with ids beyond the vocabulary.
    """
    if not is_fresh(config):
        model = load(config.model, revision=config.revision)
        if model.tokenizer is not None:
            check_vocabulary(model.tokenizer, model.config.vocab_size, model.source)
        return model
    shape = model_shape(config)
    if not config.tokenizer:
        raise ValueError(
            "tokenizer is empty: a new model needs one, --config.tokenizer=<directory, .gguf file "
            "or hub id> (scripts/prepare_data.py trains one)"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    check_vocabulary(tokenizer, shape.vocab_size, f"of shape.vocab_size={shape.vocab_size}")
    shape = _with_special_tokens(shape, tokenizer)
    params = causal_lm.init(shape, jax.random.key(config.seed))
    size = f"{shape.n_layers}x{shape.d_model}/{shape.ffn_widths[0]}"
    total = count_parameters(shape)["total"]
    source = f"new {size}, {total:,} parameters, seed {config.seed}"
    return Model(shape, params, tokenizer, source)


def _with_special_tokens(shape: ModelConfig, tokenizer: Any) -> ModelConfig:
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return dataclasses.replace(shape, **ids)
