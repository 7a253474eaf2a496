"""Qwen3, dense (0.6B to 32B): Llama's block with norms over each head of queries and keys."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common, qwen2

_DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128}


def _preset(*shape: int, tied: bool = False) -> ModelConfig:
    ids = {"bos_id": 151_643, "eos_id": 151_645}
    more = {"vocab_size": 151_936, "head_dim": 128, "qk_norm": True, "tied": tied, **ids}
    more |= {"norm_eps": 1e-6, "max_position": 40_960}
    return common.published("qwen3", shape, RopeConfig(1_000_000.0), **more)


PRESETS = {
    "qwen3_0_6b": (_preset(28, 3072, 1024, 16, 8, tied=True), "Qwen/Qwen3-0.6B"),
    "qwen3_1_7b": (_preset(28, 6144, 2048, 16, 8, tied=True), "Qwen/Qwen3-1.7B"),
    "qwen3_4b": (_preset(36, 9728, 2560, 32, 8, tied=True), "Qwen/Qwen3-4B"),
    "qwen3_8b": (_preset(36, 12288, 4096, 32, 8), "Qwen/Qwen3-8B"),
    "qwen3_14b": (_preset(40, 17408, 5120, 40, 8), "Qwen/Qwen3-14B"),
    "qwen3_32b": (_preset(64, 25600, 5120, 64, 8), "Qwen/Qwen3-32B"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Qwen3ForCausalLM."""
    # Default of transformers; every published config.json has a theta.
    return qwen2.model_from_hf("qwen3", values, _DEFAULTS, qk_norm=True)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    values = common.base_to_hf(config, "qwen3", "Qwen3ForCausalLM")
    return values | qwen2.windows_to_hf(config)


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = qwen3."""
    return qwen2.model_from_gguf("qwen3", meta, qk_norm=True)


FAMILY = common.Family("qwen3", "Qwen3ForCausalLM", PRESETS, from_hf, to_hf, from_gguf)
