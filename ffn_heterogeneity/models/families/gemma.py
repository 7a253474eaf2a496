"""Gemma 1 (2B, 7B), and what all Gemmas share: norms stored minus one, scaled embeddings."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common

DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "head_dim": 256,
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
    """Fields that are read alike for every Gemma.

    The activation is `hidden_activation`, else `hidden_act`; the hub's early "gelu" meant the tanh
    form.
    """
    fields = common.base_from_hf(values, defaults) | gemma_fields(values["hidden_size"])
    name = values.get("hidden_activation") or values.get("hidden_act") or "gelu"
    return fields if name == "gelu" else fields | {"activation": common.activation_from_hf(name)}


def _preset(*shape: int) -> ModelConfig:
    more = {"vocab_size": 256_000, "head_dim": 256, "max_position": 8192}
    return common.published("gemma", shape, **more, **preset_fields(shape[2]))


PRESETS = {
    "gemma_2b": (_preset(18, 16384, 2048, 8, 1), "google/gemma-2b"),
    "gemma_7b": (_preset(28, 24576, 3072, 16, 16), "google/gemma-7b"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a GemmaForCausalLM."""
    fields = fields_from_hf(values, DEFAULTS)
    rope = common.shared_rope_from_hf(values, fields["max_position"])
    widths = [values["intermediate_size"]] * values["num_hidden_layers"]
    return ModelConfig(family="gemma", layers=common.layers_of(widths, rope), **fields)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    activation = common.activation_to_hf(config.activation)
    return common.base_to_hf(config, "gemma", "GemmaForCausalLM") | {
        "hidden_act": activation,
        "hidden_activation": activation,
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = gemma."""
    fields = common.base_from_gguf(meta) | gemma_fields(meta["embedding_length"])
    rope = RopeConfig(theta=common.short_float(meta.get("rope.freq_base", 10_000.0)))
    layers = common.layers_of(common.gguf_widths(meta), rope)
    return ModelConfig(family="gemma", layers=layers, **fields)


# Of every Gemma; and of those with post-norms.
gemma_family = functools.partial(
    common.Family, gguf_transform=common.subtract_one, gguf_untransform=common.add_one
)
post_norm_family = functools.partial(gemma_family, rules=common.hf_post_norm_rules)
FAMILY = gemma_family("gemma", "GemmaForCausalLM", PRESETS, from_hf, to_hf, from_gguf)
