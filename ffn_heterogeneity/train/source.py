"""The weights that a run starts from: of a model that is there, or new ones of a given shape."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable

import jax
import numpy as np

from ffn_heterogeneity.data.corpus.shards import check_vocabulary
from ffn_heterogeneity.heads import ROOT, with_head
from ffn_heterogeneity.io.load import Model, load_config, load_model, load_tokenizer
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.leaves import count_parameters
from ffn_heterogeneity.parallel.processes import say
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.build import objective_of
from ffn_heterogeneity.train.settings import TrainConfig
from ffn_heterogeneity.wording import check_number


def model_shape(config: TrainConfig) -> ModelConfig:
    """The config of the model that the run trains, without its weights.

    Raises:
      ValueError (ConfigError, CheckpointError are some): no such model, or a shape that is none.
    """
    if config.model or config.shape is None:
        return load_config(config.model, revision=config.revision)
    shape = config.shape
    for key in ("layers", "d_model", "n_heads"):
        check_number(f"shape.{key}", shape[key], "[1, inf)")
    width, heads = shape["d_model"], shape["n_heads"]
    if width % heads:
        raise ValueError(f"shape.d_model={width} must be a multiple of shape.n_heads={heads}")
    layer = LayerConfig(ffn_width=shape["ffn_width"])
    return ModelConfig(
        family="llama",
        vocab_size=shape["vocab_size"],
        d_model=width,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=width // heads,
        layers=(layer,) * shape["layers"],
        tied=shape["tied"],
        max_position=max(config.seq_len, 2048),
        bos_id=None,
        eos_id=None,
    )


def starting_model(config: TrainConfig, load: Callable[..., Model] = load_model) -> Model:
    """The model as it trains: as the run finds it, after the surgeries of `config.prepare`.

    Raises:
      ValueError: as `found_model` and the surgeries.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        model = prepared(config, found_model(config, load))
    return dataclasses.replace(model, params=jax.tree.map(np.asarray, model.params))


def prepared(config: TrainConfig, model: Model) -> Model:
    """`model` after the surgeries that `config.prepare` names, in that order, and with the head
    that its objective needs.

    Each draws from `config.seed` and its own name; of shapes alone under `jax.eval_shape`.
    """

    def key(name: str) -> jax.Array:
        return jax.random.fold_in(jax.random.key(config.seed), zlib.crc32(name.encode()))

    places = {}
    for name, settings in config.prepare.items():
        model, report = SURGERIES[name](model, settings, key=key(name))
        places |= {name: report["layer_index"]} if "layer_index" in report else {}
    if len(set(places.values())) > 1:
        layers = ", ".join(f"{layer} for {name}" for name, layer in places.items())
        say(f"the layer that surgeries look for moved on the way (from 0): {layers}")
    head = objective_of(config, model.config).head
    changed, params = with_head(model.config, model.params, head, key(ROOT))
    return dataclasses.replace(model, config=changed, params=params)


def found_model(config: TrainConfig, load: Callable[..., Model] = load_model) -> Model:
    """The model as the run finds it.

    A fresh one has the weights of `causal_lm.init` (normal, 0.02; the paper is silent) from
    `config.seed`, made on the host's CPU: the same numbers on every machine and in every process.
    Its tokenizer is `config.tokenizer`'s, and its special tokens are the tokenizer's.

    Args:
      load: what reads a model that is there.

    Raises:
      ValueError: a tokenizer that a new model lacks, or one with ids beyond the vocabulary.
    """
    if not config.is_fresh:
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
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    shape = dataclasses.replace(shape, **ids)
    params = causal_lm.init(shape, jax.random.key(config.seed))
    size = f"{shape.n_layers}x{shape.d_model}/{shape.ffn_widths[0]}"
    total = count_parameters(shape)["total"]
    source = f"new {size}, {total:,} parameters, seed {config.seed}"
    return Model(shape, params, tokenizer, source)
