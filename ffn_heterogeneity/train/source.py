"""The initial weights of a run: those of an existing model, or new ones of a given shape.

Also as shapes only, so that a run is planned before weights are read.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.data.corpus.shards import check_vocabulary
from ffn_heterogeneity.heads import ROOT, with_head
from ffn_heterogeneity.io.load import Model, load_model, load_shapes, load_tokenizer
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import HeadConfig, LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import switch, t5
from ffn_heterogeneity.models.leaves import parameters_text
from ffn_heterogeneity.parallel.processes import say
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.wording import check_number


@dataclasses.dataclass(frozen=True)
class Start:
    """A run's initial model, and the surgeries before training.

    Attributes:
      model, revision: as for `load_model`; model "": a new one of `shape`.
      tokenizer: the tokenizer of a new model.
      shape: layers, d_model, n_heads, ffn_width, vocab_size, tied; None: no new model.
      seed: seed of new weights, and of surgeries.
      seq_len: minimum number of positions of a new model.
      prepare: name of a surgery -> settings, in the order in which they apply.
    """

    model: str
    revision: str | None
    tokenizer: str
    shape: Mapping[str, Any] | None
    seed: int
    seq_len: int
    prepare: Mapping[str, Mapping[str, Any]]

    @property
    def is_fresh(self) -> bool:
        """True if the run starts from random weights: it has a shape, and no model is named."""
        return not self.model and self.shape is not None


def found_shapes(source: Start) -> tuple[Model, tuple[str, ...]]:
    """Return (`found_model` with shapes and dtypes instead of arrays, notes on assumptions).

    A new model has its tokenizer, for its special tokens; other models have none here.

    Raises:
      ValueError (e.g. ConfigError, CheckpointError): no such model, or an invalid shape.
    """
    if source.is_fresh:
        model = _new_shape(source)
        return dataclasses.replace(model, params=causal_lm.abstract_params(model.config)), ()
    model, assumed = load_shapes(source.model, revision=source.revision)
    assumptions = (SURGERIES[name].assumed(settings) for name, settings in source.prepare.items())
    return model, tuple(text for text in (assumed, *assumptions) if text)


def _new_shape(source: Start) -> Model:
    """A new model without its weights."""
    shape: Mapping[str, Any] = source.shape or {}
    experts = shape.get("experts") or None
    sparse = ("experts", "top_k" if "top_k" in shape else "capacity") if experts else ()
    for key in ("layers", "d_model", "n_heads", *sparse):
        check_number(f"shape.{key}", shape[key], "[1, inf)")
    width, heads = shape["d_model"], shape["n_heads"]
    if width % heads:
        raise ValueError(f"shape.d_model={width} must be a multiple of shape.n_heads={heads}")
    tokenizer, ids = None, dict.fromkeys(("bos_id", "eos_id"))
    if source.tokenizer:
        tokenizer = load_tokenizer(source.tokenizer)
        what = f"of shape.vocab_size={shape['vocab_size']}"
        check_vocabulary(tokenizer, shape["vocab_size"], what)
        names = ("bos", "eos", "pad")
        ids = {f"{name}_id": getattr(tokenizer, f"{name}_token_id") for name in names}
    size = f"{shape['layers']}x{width}/{shape['ffn_width']}"
    if shape.get("encoder_layers"):
        config = _new_t5(shape, ids)
        size = f"{shape['encoder_layers']} + {size}"
        about = f"new {size}, {parameters_text(config)}, seed {source.seed}"
        return Model(config, {}, tokenizer, about)
    layer = LayerConfig(shape["ffn_width"], experts=experts, top_k=shape.get("top_k", 2))
    config = ModelConfig(
        family="mixtral" if experts else "llama",
        vocab_size=shape["vocab_size"],
        d_model=width,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=width // heads,
        layers=(layer,) * shape["layers"],
        tied=shape["tied"],
        max_position=max(source.seq_len, 2048),
        **ids,
    )
    return Model(
        config, {}, tokenizer, f"new {size}, {parameters_text(config)}, seed {source.seed}"
    )


def _new_t5(shape: Mapping[str, Any], ids: Mapping[str, int | None]) -> ModelConfig:
    """A T5 1.1 of `shape`, or with `experts` a Switch with experts in every second layer.

    Answers begin with the padding token, as in T5.
    """
    check_number("shape.encoder_layers", shape["encoder_layers"], "[1, inf)")
    encoder, heads, width = shape["encoder_layers"], shape["n_heads"], shape["d_model"]
    sizes = {"vocab_size": shape["vocab_size"], "d_model": width, "n_heads": heads}
    start = ids.get("pad_id") if ids.get("pad_id") is not None else ids.get("bos_id")
    sizes |= {"n_kv_heads": heads, "head_dim": width // heads, "tied": shape["tied"]}
    special = {"bos_id": start, "eos_id": ids["eos_id"], "pad_id": start}
    widths = [shape["ffn_width"]] * (encoder + shape["layers"])
    experts = {name: shape[name] for name in ("experts", "capacity", "jitter") if name in shape}
    ffn = "relu" if experts else "gated-gelu"
    config = t5.model(widths, encoder, ffn, sizes | special)
    if not experts:
        return config
    sparse = {stack: max((end - start) // 2, 1) for stack, (start, end) in config.stacks.items()}
    return switch.model(config, sparse, **experts)


def starting_model(
    source: Start, head: HeadConfig | None, load: Callable[..., Model] = load_model
) -> Model:
    """The model at the start of training: after the surgeries, with the objective's head.

    Raises:
      ValueError: as `found_model` and the surgeries.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        model = headed(source, head, prepared(source, found_model(source, load)))
    return dataclasses.replace(model, params=jax.tree.map(np.asarray, model.params))


def prepared(source: Start, model: Model) -> Model:
    """Apply the surgeries of `source.prepare` in order; also works under `jax.eval_shape`.

    Each surgery's random key depends on the seed and its name.
    """
    places = {}
    for name, settings in source.prepare.items():
        model, report = SURGERIES[name](model, settings, key=_key(source, name))
        places |= {name: report["layer_index"]} if "layer_index" in report else {}
    if len(set(places.values())) > 1:
        layers = ", ".join(f"{layer} for {name}" for name, layer in places.items())
        say(f"the layer that surgeries look for moved on the way (from 0): {layers}")
    return model


def headed(source: Start, head: HeadConfig | None, model: Model) -> Model:
    """Return `model` with a head: its own, or a new one."""
    config, params = with_head(model.config, model.params, head, _key(source, ROOT))
    return dataclasses.replace(model, config=config, params=params)


def _key(source: Start, name: str) -> jax.Array:
    return jax.random.fold_in(jax.random.key(source.seed), zlib.crc32(name.encode()))


def found_model(source: Start, load: Callable[..., Model] = load_model) -> Model:
    """The initial model before surgeries.

    A new one has the weights of `models.leaves.init` (the paper does not specify them) from the
    seed, made on the host's CPU: the same values on every machine and in every process.

    Args:
      load: function that loads an existing model.

    Raises:
      ValueError: a new model without a tokenizer, or a tokenizer with ids beyond the vocabulary.
    """
    if source.is_fresh:
        model = _new_shape(source)
        if model.tokenizer is None:
            raise ValueError(
                "tokenizer is empty: a new model needs one, --config.tokenizer=<directory, .gguf "
                "file or hub id> (scripts/prepare_data.py trains one)"
            )
        params = causal_lm.init(model.config, jax.random.key(source.seed))
        return dataclasses.replace(model, params=params)
    model = load(source.model, revision=source.revision)
    if model.tokenizer is not None:
        check_vocabulary(model.tokenizer, model.config.vocab_size, model.source)
    return model
