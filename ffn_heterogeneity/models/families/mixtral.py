"""Mixtral 8x7B: Mistral's block with experts, of which each token is sent to two."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common, mistral, names, rules

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131_072,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_8X7B = common.with_experts(
    common.published(
        "mixtral",
        (32, 14_336, 4096, 32, 8),
        RopeConfig(1_000_000.0),
        vocab_size=32_000,
        tied=False,
        max_position=32_768,
    ),
    8,
)
PRESETS = {
    "mixtral_8x7b": (_8X7B, "mistralai/Mixtral-8x7B-v0.1"),
    "mixtral_8x7b_instruct": (_8X7B, "mistralai/Mixtral-8x7B-Instruct-v0.1"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a MixtralForCausalLM."""
    # An absent key means the class's default, null the number of heads.
    fields = common.base_from_hf({"num_key_value_heads": 8, **values}, _DEFAULTS)
    values = common.with_defaults(values, _DEFAULTS)
    if noise := values.get("router_jitter_noise"):
        raise ConfigError(f"router_jitter_noise={noise!r:.60} is not supported: set it to 0")
    config = common.decoder_from_hf("mixtral", values, fields, values.get("sliding_window"))
    return common.with_experts(config, **common.experts_from_hf(values))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    return common.base_to_hf(config, "mixtral", "MixtralForCausalLM") | {
        "sliding_window": common.one_window(config),
        "num_local_experts": config.layers[0].experts,
        "num_experts_per_tok": config.layers[0].top_k,
    }


# llama.cpp has no separate architecture for Mixtral: its files are a Llama's with experts.
FAMILY = dataclasses.replace(
    mistral.FAMILY,
    name="mixtral",
    architecture="MixtralForCausalLM",
    presets=PRESETS,
    from_hf=from_hf,
    to_hf=to_hf,
    gguf_rules=common.gguf_expert_rules,
    rules=functools.partial(
        rules.one_to_one, names=names.hf_expert_names("block_sparse_moe", "w1", "w3", "w2")
    ),
    # In transformers 5 the block is `mlp`, and gate and up are one tensor.
    own_name=lambda name: re.sub(r"\.mlp\.(?=gate\.|experts\.)", ".block_sparse_moe.", name),
    stacked={
        ".experts.gate_up_proj": (".experts.{e}.w1.weight", ".experts.{e}.w3.weight"),
        ".experts.down_proj": (".experts.{e}.w2.weight",),
    },
)
