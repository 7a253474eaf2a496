"""Llama 1, 2, 3, 3.1, 3.2, and the models that share its architecture (`llama_presets.py`)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import ConfigError, ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common, ropes
from ffn_heterogeneity.models.families.llama_presets import PRESETS

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a LlamaForCausalLM."""
    return common.decoder_from_hf("llama", values, common.base_from_hf(values, _DEFAULTS))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    return common.base_to_hf(config, "llama", "LlamaForCausalLM") | {"mlp_bias": config.ffn_bias}


def _rope_from_gguf(meta: Mapping[str, Any], head_dim: int) -> RopeConfig:
    rope = ropes.rope_from_gguf(meta, divisors=True)
    if (factors := meta.get("rope_freqs")) is None:
        return rope
    if rope.linear_factor != 1.0:
        raise ConfigError("GGUF tensor rope_freqs.weight and a linear factor: expected one of them")
    # llama.cpp stores Llama 3.1's scaling only as per-frequency divisors; every published model
    # uses low 1, high 4, original length 8192, so the overall factor is enough to check them.
    scaled = dataclasses.replace(rope, llama3=(float(np.round(factors.max(), 4)), 1.0, 4.0, 8192))
    expected = rope_factors(scaled, head_dim)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigError("GGUF tensor rope_freqs.weight is not Llama 3.1's scaling (1, 4, 8192)")
    return scaled


def rope_factors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """[head_dim / 2]: divisors of the frequencies in Llama 3.1's scaling."""
    factor, low, high, old = rope.llama3 or (1.0, 1.0, 4.0, 8192)
    wavelength = 2 * math.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((old / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = llama, a Mixtral's if it has experts."""
    fields = common.base_from_gguf(meta)
    rope = _rope_from_gguf(meta, fields["head_dim"])
    family = "mixtral" if meta.get("expert_count") else "llama"
    return common.decoder_from_gguf(family, meta, fields, rope)


def gguf_transform(config: ModelConfig, path: str, array: np.ndarray) -> np.ndarray:
    """Undo llama.cpp's reordering of query and key columns (pairs interleaved per head)."""
    if path.endswith(("attention/q/kernel", "attention/k/kernel", "q/bias", "k/bias")):
        lead, half = array.shape[:-1], config.head_dim // 2
        return array.reshape(*lead, -1, half, 2).swapaxes(-1, -2).reshape(array.shape)
    return array


def gguf_untransform(config: ModelConfig, path: str, array: np.ndarray) -> np.ndarray:
    """Inverse of `gguf_transform`."""
    if path.endswith(("attention/q/kernel", "attention/k/kernel", "q/bias", "k/bias")):
        lead, half = array.shape[:-1], config.head_dim // 2
        return array.reshape(*lead, -1, 2, half).swapaxes(-1, -2).reshape(array.shape)
    return array


FAMILY = common.Family(
    "llama",
    "LlamaForCausalLM",
    PRESETS,
    from_hf,
    to_hf,
    from_gguf,
    gguf_transform=gguf_transform,
    gguf_untransform=gguf_untransform,
    gguf_uneven="deci",
)
