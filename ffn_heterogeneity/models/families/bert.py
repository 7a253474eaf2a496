"""BERT (uncased base and large) and MiniLM: encoders with a norm after every sum.

Learned positions and two token types, norms, biases and plain FFNs with exact GELU, and a pooler
on the first token. What they were pre-trained with on top (`cls.*`) has no place here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import common, rules

_DEFAULTS = {
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "attention_probs_dropout_prob": 0.1,
    "pad_token_id": 0,
}
# Of config.json: ours alone, since transformers takes it as an argument.
_POOLER = "add_pooling_layer"
# Of every encoder of this kind.
_KIND = {
    "norm_kind": "layer",
    "attention_bias": True,
    "attention_out_bias": True,
    "ffn_bias": True,
    "lm_head": False,
    "positions": "learned",
    "embedding_norm": True,
}
# Keys of `common.base_to_hf` that its class does not have.
_NOT_ITS = (
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
)


def encoder(family: str, widths, sizes: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """An encoder of BERT's kind with these FFN widths."""
    layers = tuple(
        LayerConfig(width, ffn_kind="plain", rope=None, causal=False, norm_placement="post")
        for width in widths
    )
    return ModelConfig(family, layers=layers, **{**sizes, **_KIND, **fields})


def published(family: str, shape: tuple[int, ...], **fields: Any) -> ModelConfig:
    """A published encoder of layers, d_model and heads of its family."""
    layers, d_model, heads = shape
    sizes = {"d_model": d_model, "n_heads": heads, "n_kv_heads": heads}
    sizes |= {"head_dim": d_model // heads, "activation": "gelu", "attention_dropout": True}
    return encoder(family, [4 * d_model] * layers, sizes, max_position=512, **fields)


def _preset(*shape: int) -> ModelConfig:
    ids = {"bos_id": None, "eos_id": None, "pad_id": 0}
    more = {"vocab_size": 30_522, "token_types": 2, "norm_eps": 1e-12, "pooler": True}
    return published("bert", shape, **more, **ids)


PRESETS = {
    "bert_base_uncased": (_preset(12, 768, 12), "google-bert/bert-base-uncased"),
    "bert_large_uncased": (_preset(24, 1024, 16), "google-bert/bert-large-uncased"),
    "minilm_l6": (_preset(6, 384, 12), "sentence-transformers/all-MiniLM-L6-v2"),
}


def encoder_from_hf(
    family: str, values: Mapping[str, Any], defaults: Mapping[str, Any], pooler: bool
) -> ModelConfig:
    """config.json of an encoder of this kind.

    Args:
      pooler: whether its models have one, where config.json does not say.

    Raises:
      ConfigError: other positions than absolute ones, a decoder, cross-attention.
    """
    values = common.with_defaults(values, defaults)
    kind = values.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ConfigError(f"position_embedding_type={kind!r}: absolute positions alone are read")
    for key in ("is_decoder", "add_cross_attention"):
        if values.get(key):
            raise ConfigError(f"{key}=true: {family} is read as an encoder alone")
    own = {"rms_norm_eps": values["layer_norm_eps"], "num_key_value_heads": None, "head_dim": None}
    fields = common.base_from_hf({**values, **own, "tie_word_embeddings": True}, {})
    return encoder(
        family,
        [values["intermediate_size"]] * values["num_hidden_layers"],
        fields,
        activation=common.activation_from_hf(values["hidden_act"]),
        token_types=values["type_vocab_size"],
        pooler=bool(values.get(_POOLER, pooler)),
        attention_dropout=values["attention_probs_dropout_prob"] > 0,
    )


def encoder_to_hf(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """config.json of an encoder of this kind, which transformers 4 and 5 read."""
    values = common.base_to_hf(config, config.family, architecture)
    values = {key: value for key, value in values.items() if key not in _NOT_ITS}
    return values | {
        "layer_norm_eps": config.norm_eps,
        "hidden_act": common.activation_to_hf(config.activation),
        "max_position_embeddings": config.position_rows,
        "position_embedding_type": "absolute",
        "type_vocab_size": config.token_types,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1 if config.attention_dropout else 0.0,
        _POOLER: config.pooler,
    }


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a BertModel, or of a model with a head on one."""
    return encoder_from_hf("bert", values, _DEFAULTS, pooler=True)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json of a BertModel."""
    return encoder_to_hf(config, "BertModel")


NAMES = rules.name_table(
    {
        "embed/embedding": "embeddings.word_embeddings.weight",
        "embed/position": "embeddings.position_embeddings.weight",
        "embed/token_type": "embeddings.token_type_embeddings.weight",
        "embed/norm/scale": "embeddings.LayerNorm.weight",
        "embed/norm/bias": "embeddings.LayerNorm.bias",
        "pooler/kernel": "pooler.dense.weight",
        "pooler/bias": "pooler.dense.bias",
    },
    "encoder.layer.{i}.",
    {
        "attention/q": "attention.self.query",
        "attention/k": "attention.self.key",
        "attention/v": "attention.self.value",
        "attention/out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "ffn/up": "intermediate.dense",
        "ffn/down": "output.dense",
        "ffn_norm": "output.LayerNorm",
    },
)


def tensor_rules(config: ModelConfig) -> list[rules.Rule]:
    """One tensor per leaf, named as in a BertModel by itself."""
    return rules.one_to_one(config, NAMES)


def own_name(name: str) -> str:
    """Without the prefix that a model with a head gives, and the norms as PyTorch calls them."""
    name = re.sub(r"^(bert|roberta)\.", "", name)
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)


def by_tensors(
    config: ModelConfig, values: Mapping[str, Any], names: Collection[str]
) -> ModelConfig:
    """With a pooler iff the file holds one: which head a model was saved with does not tell."""
    if _POOLER in values:
        return config
    return dataclasses.replace(config, pooler=NAMES["pooler/kernel"] in names)


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Raises ConfigError: an encoder's GGUF file is not read."""
    raise ConfigError("GGUF files of encoders are not read: use a directory of safetensors")


FAMILY = common.Family(
    "bert",
    "BertModel",
    PRESETS,
    from_hf,
    to_hf,
    from_gguf,
    rules=tensor_rules,
    redundant=(r"embeddings\.position_ids",),
    left_out=(r"cls\..*",),
    own_name=own_name,
    by_tensors=by_tensors,
)
