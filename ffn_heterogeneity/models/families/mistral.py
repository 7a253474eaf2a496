"""Mistral 7B: Llama's block, every layer with the same sliding window (v0.1) or none."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common, llama

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131_072,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _preset(vocab_size: int, theta: float, window: int | None) -> ModelConfig:
    shape, rope = (32, 14_336, 4096, 32, 8), RopeConfig(theta)
    more = {"vocab_size": vocab_size, "tied": False, "max_position": 32_768}
    return common.published("mistral", shape, rope, window, **more, bos_id=1, eos_id=2)


PRESETS = {
    "mistral_7b": (_preset(32_000, 10_000.0, 4096), "mistralai/Mistral-7B-v0.1"),
    "mistral_7b_v0_3": (_preset(32_768, 1_000_000.0, None), "mistralai/Mistral-7B-v0.3"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a MistralForCausalLM."""
    fields = common.base_from_hf({"num_key_value_heads": 8, **values}, _DEFAULTS)
    # An absent key means 4,096, null means no window.
    window = values.get("sliding_window", 4096)
    return common.decoder_from_hf("mistral", values, fields, window)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    return common.base_to_hf(config, "mistral", "MistralForCausalLM") | {
        "sliding_window": common.one_window(config),
    }


# llama.cpp has no separate architecture for Mistral: its files are read as a Llama.
FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="mistral",
    architecture="MistralForCausalLM",
    presets=PRESETS,
    from_hf=from_hf,
    to_hf=to_hf,
    gguf_architecture="llama",
    gguf_uneven="",
)
