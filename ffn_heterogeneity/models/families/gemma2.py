"""Gemma 2 (2B, 9B, 27B): alternating windows (even layers local), soft-caps, post-norms."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import common, gemma, ropes

_DEFAULTS = gemma.DEFAULTS | {
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def _preset(*shape: int, head_dim=256, query_scalar=256) -> ModelConfig:
    layers, width, d_model, *_ = shape
    return common.published(
        "gemma2",
        shape,
        vocab_size=256_000,
        head_dim=head_dim,
        layers=(LayerConfig(width, window=4096), LayerConfig(width)) * (layers // 2),
        post_norms=True,
        query_scale=query_scalar**-0.5,
        attention_softcap=50.0,
        final_softcap=30.0,
        max_position=8192,
        **gemma.preset_fields(d_model),
    )


_27B = _preset(46, 36864, 4608, 32, 16, head_dim=128, query_scalar=144)
PRESETS = {
    "gemma2_2b": (_preset(26, 9216, 2304, 8, 4), "google/gemma-2-2b"),
    "gemma2_9b": (_preset(42, 14336, 3584, 16, 8), "google/gemma-2-9b"),
    "gemma2_27b": (_27B, "google/gemma-2-27b"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Gemma2ForCausalLM (an explicit null soft-cap disables it)."""
    fields = gemma.fields_from_hf(values, _DEFAULTS)
    values = _DEFAULTS | dict(values)
    fields |= gemma.post_norm_fields(values)
    windows = common.windows_from_hf(values, every=2)
    return common.decoder_from_hf("gemma2", values, fields, windows)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    values = common.base_to_hf(config, "gemma2", "Gemma2ForCausalLM")
    return values | gemma.post_norm_to_hf(config) | {"cache_implementation": "hybrid"}


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = gemma2.

    GGUF does not store the query scaling. As in llama.cpp, the 27B (46 layers) divides by
    sqrt(d_model / heads), the others by sqrt(head_dim).
    """
    fields = common.base_from_gguf(meta) | gemma.gemma_fields(meta["embedding_length"])
    window, layers = meta.get("attention.sliding_window", 4096), meta["block_count"]
    scalar = fields["d_model"] / fields["n_heads"] if layers == 46 else fields["head_dim"]
    fields |= {
        "post_norms": True,
        "query_scale": scalar**-0.5,
        "attention_softcap": ropes.short_float(meta.get("attn_logit_softcapping", 50.0)),
        "final_softcap": ropes.short_float(meta.get("final_logit_softcapping", 30.0)),
    }
    windows = [None if i % 2 else window for i in range(layers)]
    return common.decoder_from_gguf("gemma2", meta, fields, windows=windows)


FAMILY = gemma.post_norm_family("gemma2", "Gemma2ForCausalLM", PRESETS, from_hf, to_hf, from_gguf)
