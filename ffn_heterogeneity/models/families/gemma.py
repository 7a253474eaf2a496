"""Gemma 1 (2B, 7B), and the common part of all Gemmas: norms minus one, scaled embeddings."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import ConfigError, ModelConfig
from ffn_heterogeneity.models.families import common

DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def gemma_fields(d_model: int) -> dict[str, Any]:
    """Fields that are the same in every Gemma."""
    return {
        "activation": "gelu_tanh",
        "norm_offset": 1.0,
        "embedding_multiplier": math.sqrt(float(d_model)),
    }


def preset_fields(d_model: int) -> dict[str, Any]:
    """Fields that are the same in every published Gemma."""
    ids = {"bos_id": 2, "eos_id": 1, "pad_id": 0}
    return {"norm_eps": 1e-6, **ids, **gemma_fields(d_model)}


def fields_from_hf(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that are read in the same way for every Gemma.

    The activation is `hidden_activation`, else `hidden_act`; "gelu" in early files on the hub means
    the tanh form.

    Raises:
      ConfigError: attention that sees both ways.
    """
    if values.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention=true is not a causal language model")
    fields = common.base_from_hf(values, defaults) | gemma_fields(values["hidden_size"])
    name = values.get("hidden_activation") or values.get("hidden_act") or "gelu"
    return fields if name == "gelu" else fields | {"activation": common.activation_from_hf(name)}


def post_norm_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 add: post-norms, a scale of queries, soft-caps."""
    return {
        "post_norms": True,
        "query_scale": values["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": values["attn_logit_softcapping"],
        "final_softcap": values["final_logit_softcapping"],
    }


def query_scalar(config: ModelConfig) -> float:
    """`query_pre_attn_scalar`, whose inverse square root multiplies the attention logits."""
    scalar = config.scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar


def post_norm_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Keys of config.json that Gemma 2 and 3 have in addition to the common ones."""
    return {
        "hidden_activation": common.activation_to_hf(config.activation),
        "query_pre_attn_scalar": query_scalar(config),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        **common.windows_to_hf(config),
    }


def _preset(*shape: int) -> ModelConfig:
    more = {"vocab_size": 256_000, "head_dim": 256, "max_position": 8192}
    return common.published("gemma", shape, **more, **preset_fields(shape[2]))


PRESETS = {
    "gemma_2b": (_preset(18, 16384, 2048, 8, 1), "google/gemma-2b"),
    "gemma_7b": (_preset(28, 24576, 3072, 16, 16), "google/gemma-7b"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a GemmaForCausalLM."""
    return common.decoder_from_hf("gemma", values, fields_from_hf(values, DEFAULTS))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    values = common.base_to_hf(config, "gemma", "GemmaForCausalLM")
    return values | {"hidden_activation": values["hidden_act"]}


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = gemma."""
    fields = common.base_from_gguf(meta) | gemma_fields(meta["embedding_length"])
    return common.decoder_from_gguf("gemma", meta, fields)


def add_one(config: ModelConfig, path: str, array: np.ndarray) -> np.ndarray:
    """Inverse of `subtract_one`."""
    return array + np.float32(1) if path.endswith("/scale") else array


def subtract_one(config: ModelConfig, path: str, array: np.ndarray) -> np.ndarray:
    """GGUF stores Gemma's norms as 1 + weight (float32); ours are the raw weights."""
    return array - np.float32(1) if path.endswith("/scale") else array


# GGUF arguments of every Gemma, and of those with post-norms.
gemma_family = functools.partial(
    common.Family, gguf_transform=subtract_one, gguf_untransform=add_one
)
post_norm_family = functools.partial(gemma_family, rules=common.hf_post_norm_rules)
FAMILY = gemma_family("gemma", "GemmaForCausalLM", PRESETS, from_hf, to_hf, from_gguf)
