"""Qwen2, Qwen2.5 and Qwen2.5-Coder, dense (0.5B to 72B): Llama's block with biases in q, k and v.

`qwen3.py` shares its readers.
"""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common

DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
}
# The class always has these biases, regardless of config.json.
_BIASES = {"attention_bias": True, "attention_out_bias": False}


def _preset(*shape: int, **changes: Any) -> ModelConfig:
    tied = shape[2] <= 2048
    more = {"vocab_size": 151_936 if tied else 152_064, "tied": tied, **_BIASES}
    more |= {"bos_id": 151_643, "eos_id": 151_643, "norm_eps": 1e-6, "max_position": 131_072}
    return common.published("qwen2", shape, RopeConfig(1_000_000.0), **(more | changes))


_SMALLEST = (24, 4864, 896, 14, 2)
PRESETS = {
    "qwen2_5_0_5b": (_preset(*_SMALLEST, max_position=32_768), "Qwen/Qwen2.5-0.5B"),
    "qwen2_5_1_5b": (_preset(28, 8960, 1536, 12, 2), "Qwen/Qwen2.5-1.5B"),
    "qwen2_5_3b": (_preset(36, 11008, 2048, 16, 2, max_position=32_768), "Qwen/Qwen2.5-3B"),
    "qwen2_5_7b": (_preset(28, 18944, 3584, 28, 4), "Qwen/Qwen2.5-7B"),
    "qwen2_5_14b": (_preset(48, 13824, 5120, 40, 8, norm_eps=1e-5), "Qwen/Qwen2.5-14B"),
    "qwen2_5_32b": (_preset(64, 27648, 5120, 40, 8, norm_eps=1e-5), "Qwen/Qwen2.5-32B"),
    "qwen2_5_72b": (_preset(80, 29568, 8192, 64, 8, norm_eps=1e-5), "Qwen/Qwen2.5-72B"),
    "qwen2_5_coder_0_5b_instruct": (
        _preset(*_SMALLEST, max_position=32_768, eos_id=151_645),
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
}


def windows_from_hf(values: Mapping[str, Any]) -> list[int | None]:
    """Window per layer, from `layer_types`; by default none in the first `max_window_layers`.

    The published models use no windows. An absent `sliding_window` means 4,096, null means none.
    """
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
    values = common.with_defaults(values, DEFAULTS) | {"sliding_window": window}
    count = values["num_hidden_layers"]
    full = count if window is None else min(values["max_window_layers"], count)
    kinds = ["full_attention"] * full + ["sliding_attention"] * (count - full)
    values = {"layer_types": kinds, **values}
    if window is None and "sliding_attention" in values["layer_types"]:
        raise ConfigError(
            "layer_types: got 'sliding_attention' without a window; set use_sliding_window=true "
            "and sliding_window"
        )
    return common.windows_from_hf(values, every=1)


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Inverse of `windows_from_hf`, also for readers that ignore `layer_types`."""
    keys = common.windows_to_hf(config)
    kinds = [*keys["layer_types"], "sliding_attention"]
    local = kinds.index("sliding_attention")
    if local == config.n_layers:
        keys["sliding_window"] = None
    return keys | {"use_sliding_window": local < config.n_layers, "max_window_layers": local}


def model_from_hf(
    family: str, values: Mapping[str, Any], defaults: Mapping[str, Any], **fields: Any
) -> ModelConfig:
    """The model of a config.json with Qwen2's windows; `fields` are the family's own."""
    # An absent key means the class's default, null the number of heads.
    values = {"num_key_value_heads": 32, **values}
    fields = common.base_from_hf(values, defaults) | fields
    windows = windows_from_hf(values)
    return common.decoder_from_hf(family, common.with_defaults(values, defaults), fields, windows)


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Qwen2ForCausalLM; ConfigError for the long-context setting "yarn"."""
    return model_from_hf("qwen2", values, DEFAULTS, **_BIASES)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    values = common.base_to_hf(config, "qwen2", "Qwen2ForCausalLM")
    del values["attention_bias"]
    return values | windows_to_hf(config)


def model_from_gguf(family: str, meta: Mapping[str, Any], **fields: Any) -> ModelConfig:
    """Return the config of a GGUF file; llama.cpp's Qwen2 and Qwen3 have no windows."""
    return common.decoder_from_gguf(family, meta, common.base_from_gguf(meta) | fields)


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = qwen2."""
    return model_from_gguf("qwen2", meta, **_BIASES)


FAMILY = common.Family("qwen2", "Qwen2ForCausalLM", PRESETS, from_hf, to_hf, from_gguf)
