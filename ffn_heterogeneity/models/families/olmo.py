"""OLMo 1 (1B, 7B, 7B April 2024): Llama's block with norms that have no parameters."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import common, ropes
from ffn_heterogeneity.models.families.llama import gguf_transform, gguf_untransform

_DEFAULTS = {
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 50_279,
}
# The same for all models: config.json does not have it.
_NORM = {"norm_kind": "layer_without_parameters", "norm_eps": 1e-5}


def _preset(layers, width, d_model, heads, tied, max_position=2048, clip=None) -> ModelConfig:
    ids = {"bos_id": None, "eos_id": 50_279, "pad_id": 1}
    more = {"vocab_size": 50_304, "qkv_clip": clip, "tied": tied, "max_position": max_position}
    return common.published("olmo", (layers, width, d_model, heads, heads), **more, **ids, **_NORM)


PRESETS = {
    "olmo_1b": (_preset(16, 8192, 2048, 16, True), "allenai/OLMo-1B-hf"),
    "olmo_7b": (_preset(32, 11008, 4096, 32, False), "allenai/OLMo-7B-hf"),
    "olmo_7b_0424": (_preset(32, 11008, 4096, 32, False, 4096, 8.0), "allenai/OLMo-7B-0424-hf"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of an OlmoForCausalLM."""
    norm_eps = {"rms_norm_eps": _NORM["norm_eps"]}
    fields = common.base_from_hf({**values, **norm_eps}, _DEFAULTS) | _NORM
    return common.decoder_from_hf("olmo", values, fields | {"qkv_clip": values.get("clip_qkv")})


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    values = common.base_to_hf(config, "olmo", "OlmoForCausalLM")
    del values["rms_norm_eps"]
    return values | {"clip_qkv": config.qkv_clip}


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = olmo."""
    fields = common.base_from_gguf(meta, rms=False)
    clip = meta.get("attention.clamp_kqv") or None
    fields["qkv_clip"] = None if clip is None else ropes.short_float(clip)
    return common.decoder_from_gguf("olmo", meta, fields | {"norm_kind": _NORM["norm_kind"]})


# llama.cpp's converter reorders queries and keys as for Llama.
FAMILY = common.Family(
    "olmo",
    "OlmoForCausalLM",
    PRESETS,
    from_hf,
    to_hf,
    from_gguf,
    gguf_transform=gguf_transform,
    gguf_untransform=gguf_untransform,
)
