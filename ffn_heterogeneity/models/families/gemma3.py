"""Gemma 3, text models (270M, 1B): five local layers to one global, two thetas, QK-norm."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common, gemma, ropes

_GLOBAL_THETA, _LOCAL_THETA, _EVERY = 1_000_000.0, 10_000.0, 6
_DEFAULTS = gemma.DEFAULTS | {
    "num_key_value_heads": 4,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def _preset(layers, width, d_model) -> ModelConfig:
    windows = [None if (i + 1) % _EVERY == 0 else 512 for i in range(layers)]
    local, full = RopeConfig(_LOCAL_THETA), RopeConfig(_GLOBAL_THETA)
    return common.published(
        "gemma3",
        (layers, width, d_model, 4, 1),
        vocab_size=262_144,
        head_dim=256,
        layers=common.layers_of([width] * layers, full, windows, local),
        post_norms=True,
        qk_norm=True,
        query_scale=256**-0.5,
        max_position=32_768,
        **gemma.preset_fields(d_model),
    )


PRESETS = {
    "gemma3_270m": (_preset(18, 2048, 640), "google/gemma-3-270m"),
    "gemma3_1b": (_preset(26, 6912, 1152), "google/gemma-3-1b-pt"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Gemma3ForCausalLM: classic keys, or transformers 5's nested ones."""
    fields = gemma.fields_from_hf(values, _DEFAULTS)
    values = _DEFAULTS | dict(values)
    nested = values.get("rope_parameters") or {}
    # As in transformers 5, rope_scaling overrides the same keys.
    full_scaling = (nested.get("full_attention") or {}) | (values.get("rope_scaling") or {})
    full_theta = values.get("rope_theta") or _GLOBAL_THETA
    local_theta = values.get("rope_local_base_freq") or _LOCAL_THETA
    local_scaling = nested.get("sliding_attention") or {}
    local = ropes.rope_from_hf(local_scaling, local_theta, fields["max_position"])
    full = ropes.rope_from_hf(full_scaling, full_theta, fields["max_position"])
    windows = common.windows_from_hf(values, every=values.get("sliding_window_pattern") or _EVERY)
    widths = [values["intermediate_size"]] * len(windows)
    return ModelConfig(
        family="gemma3",
        layers=common.layers_of(widths, full, windows, local),
        qk_norm=True,
        **fields,
        **gemma.post_norm_fields(values),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    by_scope = {layer.window is None: layer.rope for layer in reversed(config.layers)}
    full = ropes.rope_to_hf(by_scope.get(True, RopeConfig(_GLOBAL_THETA)))
    local = ropes.rope_to_hf(by_scope.get(False, RopeConfig(_LOCAL_THETA)))
    values = common.base_to_hf(config, "gemma3_text", "Gemma3ForCausalLM")
    del values["hidden_act"]  # its class has only `hidden_activation`
    return values | {
        **gemma.post_norm_to_hf(config),
        "sliding_window_pattern": _EVERY,
        "rope_theta": full["rope_theta"],
        "rope_local_base_freq": local["rope_theta"],
        "rope_scaling": ropes.classic_scaling(full),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = gemma3.

    Files of the small models omit the pattern (6) and the local theta (10,000).
    """
    fields = common.base_from_gguf(meta) | gemma.gemma_fields(meta["embedding_length"])
    local = RopeConfig(ropes.short_float(meta.get("rope.freq_base_swa", _LOCAL_THETA)))
    full = ropes.rope_from_gguf(meta, _GLOBAL_THETA)
    widths = common.gguf_widths(meta)
    every = meta.get("attention.sliding_window_pattern", _EVERY)
    window = meta.get("attention.sliding_window", 512)
    windows = [None if (i + 1) % every == 0 else window for i in range(len(widths))]
    # As in llama.cpp, the 27B (62 layers) divides by sqrt(d_model / heads).
    large = len(widths) == 62
    scalar = fields["d_model"] / fields["n_heads"] if large else fields["head_dim"]
    return ModelConfig(
        family="gemma3",
        layers=common.layers_of(widths, full, windows, local),
        post_norms=True,
        qk_norm=True,
        query_scale=scalar**-0.5,
        **fields,
    )


FAMILY = gemma.post_norm_family(
    "gemma3",
    "Gemma3ForCausalLM",
    PRESETS,
    from_hf,
    to_hf,
    from_gguf,
    model_type="gemma3_text",
    classifier_stem="Gemma3Text",
)
