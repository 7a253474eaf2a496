"""Common part of BERT and RoBERTa: an encoder with a norm after every sum, and its tensor names.

They have learned positions and token types, norms, biases and plain FFNs with exact GELU. Their
pre-training heads are not supported.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import common, rules
from ffn_heterogeneity.models.families.names import BERT_NAMES

_DEFAULTS = {
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "attention_probs_dropout_prob": 0.1,
}
# Key of config.json that only we write: transformers takes it as an argument.
_POOLER = "add_pooling_layer"
# Keys of `common.base_to_hf` that their classes do not have.
_NOT_THEIRS = {"num_key_value_heads", "head_dim", "rms_norm_eps"}
_NOT_THEIRS |= {"attention_bias", "attention_dropout"}


def encoder(family: str, widths, fields: Mapping[str, Any], **more: Any) -> ModelConfig:
    """An encoder of this kind with these FFN widths; `more` takes priority over `fields`."""
    kind = {"ffn_kind": "plain", "rope": None, "causal": False, "norm_placement": "post"}
    biases = dict.fromkeys(("attention_bias", "attention_out_bias", "ffn_bias"), True)
    fixed = {"norm_kind": "layer", "positions": "learned", "embedding_norm": True, "lm_head": False}
    layers = tuple(LayerConfig(width, **kind) for width in widths)
    return ModelConfig(family, layers=layers, **{**fields, **biases, **fixed, **more})


def published(family: str, shape: tuple[int, int, int], **fields: Any) -> ModelConfig:
    """Config of a published encoder from (layers, d_model, heads)."""
    layers, d_model, heads = shape
    sizes = {"d_model": d_model, "n_heads": heads, "n_kv_heads": heads}
    sizes |= {"head_dim": d_model // heads, "activation": "gelu", "attention_dropout": True}
    return encoder(family, [4 * d_model] * layers, sizes, max_position=512, **fields)


def from_hf(
    family: str, values: Mapping[str, Any], defaults: Mapping[str, Any], pooler: bool
) -> ModelConfig:
    """Read config.json of such a model, with or without a head.

    Args:
      defaults: the class's defaults, if they differ from BERT's.
      pooler: whether there is a pooler if config.json does not specify it.

    Raises:
      ConfigError: other positions than absolute ones, a decoder, cross-attention.
    """
    values = common.with_defaults(values, {**_DEFAULTS, **defaults})
    kind = values.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ConfigError(f"position_embedding_type={kind!r}: only absolute is supported")
    for key in ("is_decoder", "add_cross_attention"):
        if values.get(key):
            raise ConfigError(f"{key}=true: {family} is supported only as an encoder")
    base = {"rms_norm_eps": values["layer_norm_eps"], "num_key_value_heads": None, "head_dim": None}
    fields = common.base_from_hf({**values, **base, "tie_word_embeddings": True}, {})
    fields["activation"] = common.activation_from_hf(values["hidden_act"])
    return encoder(
        family,
        [values["intermediate_size"]] * values["num_hidden_layers"],
        fields,
        token_types=values["type_vocab_size"],
        pooler=bool(values.get(_POOLER, pooler)),
        attention_dropout=values["attention_probs_dropout_prob"] > 0,
    )


def to_hf(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """config.json that transformers 4 and 5 read."""
    values = common.base_to_hf(config, config.family, architecture)
    values = {key: value for key, value in values.items() if key not in _NOT_THEIRS}
    return values | {
        "layer_norm_eps": config.norm_eps,
        "max_position_embeddings": config.position_rows,
        "position_embedding_type": "absolute",
        "type_vocab_size": config.token_types,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1 if config.attention_dropout else 0.0,
        _POOLER: config.pooler,
    }


def tensor_rules(config: ModelConfig) -> list[rules.Rule]:
    """Rules of one tensor per leaf, named as in a model without a head."""
    return rules.one_to_one(config, BERT_NAMES)


def own_name(name: str) -> str:
    """A tensor's name without the prefix of models with a head, and with PyTorch's norm names."""
    name = re.sub(r"^(bert|roberta)\.", "", name)
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)


def by_tensors(
    config: ModelConfig, values: Mapping[str, Any], names: Collection[str]
) -> ModelConfig:
    """Return the config with a pooler iff the file has one, unless config.json specifies it.

    (BERT-base's config.json names a class without a pooler, but its file has one.)
    """
    if _POOLER in values:
        return config
    return dataclasses.replace(config, pooler=BERT_NAMES["pooler/kernel"] in names)


def family(
    name: str, architecture: str, presets, from_hf, to_hf, heads: str, classifier: dict[str, str]
) -> common.Family:
    """The record of a family of this kind; `heads`: regex of the tensors of pre-training heads.

    Args:
      classifier: {module of a classifier's head: its name in a file}.
    """
    parts = (("kernel", "weight"), ("bias", "bias"))
    return common.Family(
        name,
        architecture,
        presets,
        from_hf,
        to_hf,
        common.no_gguf,
        rules=tensor_rules,
        redundant=(r"embeddings\.position_ids",),
        left_out=(heads,),
        own_name=own_name,
        by_tensors=by_tensors,
        prefix=f"{name}.",
        classifier={
            f"{module}/{leaf}": f"{stored}.{tensor}"
            for module, stored in classifier.items()
            for leaf, tensor in parts
        },
    )
