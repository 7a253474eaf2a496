"""Gemma 1 (2B, 7B), and what all Gemmas share: norms stored minus one, scaled embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import LayerConfig, ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common, rules

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


def activation_from_hf(values: Mapping[str, Any]) -> str:
    """`hidden_activation`, else `hidden_act`; the hub's early "gelu" meant the tanh form."""
    name = values.get("hidden_activation") or values.get("hidden_act") or "gelu"
    return "gelu_tanh" if name == "gelu" else common.activation_from_hf(name)


def special_ids() -> dict[str, Any]:
    return {"bos_id": 2, "eos_id": 1, "pad_id": 0}


def _preset(layers, width, d_model, n_heads, n_kv_heads) -> ModelConfig:
    return ModelConfig(
        family="gemma",
        vocab_size=256_000,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=256,
        layers=common.uniform_layers(layers, width, RopeConfig()),
        norm_eps=1e-6,
        max_position=8192,
        **special_ids(),
        **gemma_fields(d_model),
    )


PRESETS = {
    "gemma_2b": (_preset(18, 16384, 2048, 8, 1), "google/gemma-2b"),
    "gemma_7b": (_preset(28, 24576, 3072, 16, 16), "google/gemma-7b"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a GemmaForCausalLM."""
    fields = common.base_from_hf(values, DEFAULTS) | gemma_fields(values["hidden_size"])
    fields["activation"] = activation_from_hf(values)
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = values.get("rope_theta") or 10_000.0
    rope = common.rope_from_hf(scaling, theta, fields["max_position"])
    layers = common.uniform_layers(values["num_hidden_layers"], values["intermediate_size"], rope)
    return ModelConfig(family="gemma", layers=layers, **fields)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    rope = common.rope_to_hf(config.layers[0].rope)
    activation = common.activation_to_hf(config.activation)
    return common.base_to_hf(config, "gemma", "GemmaForCausalLM") | {
        "hidden_act": activation,
        "hidden_activation": activation,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": common.classic_scaling(rope),
        "rope_parameters": rope,
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = gemma."""
    fields = common.base_from_gguf(meta) | gemma_fields(meta["embedding_length"])
    rope = RopeConfig(theta=common.short_float(meta.get("rope.freq_base", 10_000.0)))
    layers = tuple(LayerConfig(ffn_width=w, rope=rope) for w in common.gguf_widths(meta))
    return ModelConfig(family="gemma", layers=layers, **fields)


FAMILY = common.Family(
    name="gemma",
    model_types=("gemma",),
    architectures=("GemmaForCausalLM",),
    presets=PRESETS,
    from_hf=from_hf,
    to_hf=to_hf,
    rules=lambda config: rules.one_to_one(config, common.HF_NAMES),
    gguf_architectures=("gemma",),
    from_gguf=from_gguf,
    gguf_rules=lambda config: rules.one_to_one(config, common.GGUF_NAMES),
    gguf_transform=common.subtract_one,
)
