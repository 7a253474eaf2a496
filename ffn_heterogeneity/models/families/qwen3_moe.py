"""Qwen3-MoE: Qwen3's block, with experts in all layers but those of `mlp_only_layers`."""

import functools
from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, ModelConfig, RopeConfig, check_count
from ffn_heterogeneity.models.families import common, names, qwen2, rules

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
_30B = common.published(
    "qwen3_moe",
    (48, 768, 2048, 32, 4),
    RopeConfig(1_000_000.0),
    vocab_size=151_936,
    head_dim=128,
    qk_norm=True,
    tied=False,
    norm_eps=1e-6,
    max_position=40_960,
    bos_id=151_643,
    eos_id=151_645,
)
PRESETS = {"qwen3_30b_a3b": (common.with_experts(_30B, 128, top_k=8), "Qwen/Qwen3-30B-A3B")}


def _dense_layers(values: Mapping[str, Any]) -> set[int]:
    """Layers without experts."""
    layers, step = values["num_hidden_layers"], values["decoder_sparse_step"]
    check_count("decoder_sparse_step", step)
    only = values["mlp_only_layers"]
    if wrong := [i for i in only if type(i) is not int or not 0 <= i < layers]:
        raise ConfigError(
            f"mlp_only_layers: got {wrong[0]!r:.60}; expected layers 0 to {layers - 1}"
        )
    return {i for i in range(layers) if i in only or (i + 1) % step}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Qwen3MoeForCausalLM; one window for all layers, or none."""
    # An absent key means the class's default, null the number of heads.
    values = common.with_defaults({"num_key_value_heads": 4, **values}, _DEFAULTS)
    fields = common.base_from_hf(values, {}) | {"qk_norm": True}
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
    common.check_counts({"moe_intermediate_size": values["moe_intermediate_size"]})
    return common.with_experts(
        common.decoder_from_hf("qwen3_moe", values, fields, window),
        **common.experts_from_hf(values),
        dense=_dense_layers(values),
        ffn_width=values["moe_intermediate_size"],
        gates="renormalized" if values.get("norm_topk_prob") else "softmax",
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    dense = [i for i, layer in enumerate(config.layers) if layer.experts is None]
    sparse = [layer for layer in config.layers if layer.experts is not None] or config.layers
    window = common.one_window(config)
    return common.base_to_hf(config, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        "intermediate_size": max((config.ffn_widths[i] for i in dense), default=6144),
        "moe_intermediate_size": max(layer.ffn_width for layer in sparse),
        "num_experts": sparse[0].experts,
        "num_experts_per_tok": sparse[0].top_k,
        "norm_topk_prob": sparse[0].gates == "renormalized",
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = qwen3moe."""
    return qwen2.model_from_gguf("qwen3_moe", meta, qk_norm=True)


_MODULES = ("gate_proj", "up_proj", "down_proj")
FAMILY = common.Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    PRESETS,
    from_hf,
    to_hf,
    from_gguf,
    gguf_architecture="qwen3moe",
    gguf_rules=common.gguf_expert_rules,
    expert_width_key="moe_intermediate_size",
    rules=functools.partial(rules.one_to_one, names=names.hf_expert_names("mlp", *_MODULES)),
    # In transformers 5, gate and up are one tensor.
    stacked={
        ".experts.gate_up_proj": (".experts.{e}.gate_proj.weight", ".experts.{e}.up_proj.weight"),
        ".experts.down_proj": (".experts.{e}.down_proj.weight",),
    },
)
