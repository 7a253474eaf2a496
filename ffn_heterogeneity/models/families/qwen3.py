"""Qwen3, dense (0.6B to 32B): Llama's block with norms over each head of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common

_THETA = 1_000_000.0
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "head_dim": 128,
    "max_window_layers": 28,
    "sliding_window": 4096,
}


def _preset(*shape: int, tied: bool = False) -> ModelConfig:
    ids = {"bos_id": 151_643, "eos_id": 151_645}
    more = {"vocab_size": 151_936, "head_dim": 128, "qk_norm": True, "tied": tied, **ids}
    more |= {"norm_eps": 1e-6, "max_position": 40_960}
    return common.published("qwen3", shape, RopeConfig(_THETA), **more)


PRESETS = {
    "qwen3_0_6b": (_preset(28, 3072, 1024, 16, 8, tied=True), "Qwen/Qwen3-0.6B"),
    "qwen3_1_7b": (_preset(28, 6144, 2048, 16, 8, tied=True), "Qwen/Qwen3-1.7B"),
    "qwen3_4b": (_preset(36, 9728, 2560, 32, 8, tied=True), "Qwen/Qwen3-4B"),
    "qwen3_8b": (_preset(36, 12288, 4096, 32, 8), "Qwen/Qwen3-8B"),
    "qwen3_14b": (_preset(40, 17408, 5120, 40, 8), "Qwen/Qwen3-14B"),
    "qwen3_32b": (_preset(64, 25600, 5120, 64, 8), "Qwen/Qwen3-32B"),
}


def _windows(values: Mapping[str, Any]) -> list[int | None]:
    """Window per layer; the published models have none."""
    count = values["num_hidden_layers"]
    if not values.get("use_sliding_window"):
        return [None] * count
    full = min(values["max_window_layers"], count)
    kinds = ["full_attention"] * full + ["sliding_attention"] * (count - full)
    return common.windows_from_hf({"layer_types": kinds, **values}, every=1)


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Qwen3ForCausalLM."""
    fields = common.base_from_hf(values, _DEFAULTS) | {"qk_norm": True}
    values = common.with_defaults(values, _DEFAULTS)
    # Without a theta transformers' own default; every published config.json names it.
    return common.decoder_from_hf("qwen3", values, fields, _windows(values))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    windows = common.windows_to_hf(config)
    local = "sliding_attention" in windows["layer_types"]
    return common.base_to_hf(config, "qwen3", "Qwen3ForCausalLM") | {
        **windows,
        "use_sliding_window": local,
        "sliding_window": windows["sliding_window"] if local else None,
        "max_window_layers": config.n_layers,
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = qwen3."""
    fields = common.base_from_gguf(meta) | {"qk_norm": True}
    kind = meta.get("rope.scaling.type", "none")
    if kind != "none":
        raise ConfigError(f"GGUF rope.scaling.type={kind!r} of a qwen3 file is not known: none")
    rope = RopeConfig(common.short_float(meta.get("rope.freq_base", _THETA)))
    return common.decoder_from_gguf("qwen3", meta, fields, rope)


FAMILY = common.Family("qwen3", "Qwen3ForCausalLM", PRESETS, from_hf, to_hf, from_gguf)
