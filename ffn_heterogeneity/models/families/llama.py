"""Llama 1, 2, 3, 3.1, 3.2, and the models that share its architecture: SmolLM2, DeepSeek-LLM."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import ConfigError, LayerConfig, ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_LLAMA1 = {"vocab_size": 32_000, "norm_eps": 1e-6, "max_position": 2048}
_LLAMA2 = {"vocab_size": 32_000, "max_position": 4096}
_IDS3 = {"bos_id": 128_000, "eos_id": 128_001}
_LLAMA3 = {"vocab_size": 128_256, **_IDS3, "max_position": 8192, "theta": 500_000.0}
_LLAMA31 = _LLAMA3 | {"max_position": 131_072}
_LLAMA32 = _LLAMA31 | {"tied": True}
_SMOLLM2 = {"vocab_size": 49_152, "tied": True, "bos_id": 0, "eos_id": 0, "theta": 100_000.0}
_DEEPSEEK = {"vocab_size": 102_400, "norm_eps": 1e-6, "bos_id": 100_000, "eos_id": 100_001}
_DEEPSEEK |= {"max_position": 4096}


def _preset(kind, layers, width, d_model, n_heads, n_kv_heads, factor=None) -> ModelConfig:
    kind = {"tied": False, "theta": 10_000.0} | kind
    rope = RopeConfig(kind.pop("theta"), llama3=(factor, 1.0, 4.0, 8192) if factor else None)
    return ModelConfig(
        family="llama",
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=d_model // n_heads,
        layers=common.uniform_layers(layers, width, rope),
        **kind,
    )


_SHAPES = {  # layers, FFN width, d_model, heads, key-value heads, factor of Llama 3.1's scaling
    "llama1_7b": ("huggyllama/llama-7b", _LLAMA1, 32, 11008, 4096, 32, 32),
    "llama1_13b": ("huggyllama/llama-13b", _LLAMA1, 40, 13824, 5120, 40, 40),
    "llama1_30b": ("huggyllama/llama-30b", _LLAMA1, 60, 17920, 6656, 52, 52),
    "llama1_65b": ("huggyllama/llama-65b", _LLAMA1, 80, 22016, 8192, 64, 64),
    "llama2_7b": ("meta-llama/Llama-2-7b-hf", _LLAMA2, 32, 11008, 4096, 32, 32),
    "llama2_13b": ("meta-llama/Llama-2-13b-hf", _LLAMA2, 40, 13824, 5120, 40, 40),
    "llama2_70b": ("meta-llama/Llama-2-70b-hf", _LLAMA2, 80, 28672, 8192, 64, 8),
    "llama3_8b": ("meta-llama/Meta-Llama-3-8B", _LLAMA3, 32, 14336, 4096, 32, 8),
    "llama3_70b": ("meta-llama/Meta-Llama-3-70B", _LLAMA3, 80, 28672, 8192, 64, 8),
    "llama3_1_8b": ("meta-llama/Llama-3.1-8B", _LLAMA31, 32, 14336, 4096, 32, 8, 8.0),
    "llama3_1_70b": ("meta-llama/Llama-3.1-70B", _LLAMA31, 80, 28672, 8192, 64, 8, 8.0),
    "llama3_1_405b": ("meta-llama/Llama-3.1-405B", _LLAMA31, 126, 53248, 16384, 128, 8, 8.0),
    "llama3_2_1b": ("meta-llama/Llama-3.2-1B", _LLAMA32, 16, 8192, 2048, 32, 8, 32.0),
    "llama3_2_3b": ("meta-llama/Llama-3.2-3B", _LLAMA32, 28, 8192, 3072, 24, 8, 32.0),
    "smollm2_135m": ("HuggingFaceTB/SmolLM2-135M", _SMOLLM2, 30, 1536, 576, 9, 3),
    "smollm2_360m": ("HuggingFaceTB/SmolLM2-360M", _SMOLLM2, 32, 2560, 960, 15, 5),
    "smollm2_1_7b": (
        "HuggingFaceTB/SmolLM2-1.7B", _SMOLLM2 | {"theta": 130_000.0}, 24, 8192, 2048, 32, 32,
    ),
    "deepseek_llm_7b": ("deepseek-ai/deepseek-llm-7b-base", _DEEPSEEK, 30, 11008, 4096, 32, 32),
    "deepseek_llm_67b": ("deepseek-ai/deepseek-llm-67b-base", _DEEPSEEK, 95, 22016, 8192, 64, 8),
}  # fmt: skip
PRESETS = {name: (_preset(*shape), hub_id) for name, (hub_id, *shape) in _SHAPES.items()}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a LlamaForCausalLM."""
    fields = common.base_from_hf(values, _DEFAULTS)
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = values.get("rope_theta") or 10_000.0
    rope = common.rope_from_hf(scaling, theta, fields["max_position"])
    layers = common.uniform_layers(values["num_hidden_layers"], values["intermediate_size"], rope)
    activation = common.activation_from_hf(values.get("hidden_act", "silu"))
    return ModelConfig(family="llama", layers=layers, activation=activation, **fields)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    rope = common.rope_to_hf(config.layers[0].rope)
    return common.base_to_hf(config, "llama", "LlamaForCausalLM") | {
        "hidden_act": common.activation_to_hf(config.activation),
        "mlp_bias": config.ffn_bias,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": common.classic_scaling(rope),
        "rope_parameters": rope,
    }


def _rope_from_gguf(meta: Mapping[str, Any], head_dim: int) -> RopeConfig:
    rope = RopeConfig(theta=common.short_float(meta.get("rope.freq_base", 10_000.0)))
    kind = meta.get("rope.scaling.type", "none")
    if kind == "linear":
        factor = common.short_float(meta["rope.scaling.factor"])
        return dataclasses.replace(rope, linear_factor=factor)
    if kind != "none":
        raise ConfigError(f"GGUF rope.scaling.type={kind!r} is not known: none, linear")
    if (factors := meta.get("rope_freqs")) is None:
        return rope
    # llama.cpp stores Llama 3.1's scaling only as per-frequency divisors; every published model
    # uses low 1, high 4, original length 8192, so the overall factor is enough to check them.
    scaling = (float(np.round(factors.max(), 4)), 1.0, 4.0, 8192)
    wavelength = 2 * math.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((scaling[3] / wavelength - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling[0] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigError("GGUF tensor rope_freqs.weight is not Llama 3.1's scaling (1, 4, 8192)")
    return dataclasses.replace(rope, llama3=scaling)


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = llama."""
    if meta.get("expert_count"):
        raise ConfigError("GGUF llama files with experts (expert_count) are not supported")
    fields = common.base_from_gguf(meta)
    rope = _rope_from_gguf(meta, fields["head_dim"])
    layers = tuple(LayerConfig(ffn_width=w, rope=rope) for w in common.gguf_widths(meta))
    return ModelConfig(family="llama", layers=layers, **fields)


def gguf_transform(config: ModelConfig, path: str, array: np.ndarray) -> np.ndarray:
    """Undoes llama.cpp's reordering of query and key columns (pairs interleaved per head)."""
    if path.endswith(("attention/q/kernel", "attention/k/kernel", "q/bias", "k/bias")):
        lead, half = array.shape[:-1], config.head_dim // 2
        return array.reshape(*lead, -1, half, 2).swapaxes(-1, -2).reshape(array.shape)
    return array


FAMILY = common.Family(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM",),
    presets=PRESETS,
    from_hf=from_hf,
    to_hf=to_hf,
    rules=lambda config: common.one_to_one(config, common.HF_NAMES),
    gguf_architectures=("llama",),
    from_gguf=from_gguf,
    gguf_rules=lambda config: common.one_to_one(config, common.GGUF_NAMES),
    gguf_transform=gguf_transform,
)
