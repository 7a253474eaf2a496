"""Phi-3 (mini and medium, 4k): Llama's block with fused projections and a window."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common, ropes, rules

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
    "pad_token_id": 32_000,
}


def _preset(*shape: int) -> ModelConfig:
    ids = {"bos_id": 1, "eos_id": 32_000, "pad_id": 32_000}
    more = {"vocab_size": 32_064, "tied": False, "max_position": 4096}
    return common.published("phi3", shape, RopeConfig(), 2047, **more, **ids)


PRESETS = {
    "phi3_mini": (_preset(32, 8192, 3072, 32, 32), "microsoft/Phi-3-mini-4k-instruct"),
    "phi3_medium": (_preset(40, 17_920, 5120, 40, 10), "microsoft/Phi-3-medium-4k-instruct"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a Phi3ForCausalLM; ConfigError for the long-context models' "longrope"."""
    fields = common.base_from_hf(values, _DEFAULTS)
    # Outside the rope's keys, as in Phi-4-mini's config.json and transformers 4.
    fraction = values.get("partial_rotary_factor") or 1.0
    window = values.get("sliding_window")
    return common.decoder_from_hf("phi3", values, fields, window, fraction)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    return common.base_to_hf(config, "phi3", "Phi3ForCausalLM") | {
        "sliding_window": common.one_window(config),
        "partial_rotary_factor": config.layers[0].rope.fraction,
        "original_max_position_embeddings": config.max_position,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _rules_of(names: Mapping[str, str], qkv: str, gate_up: str):
    """Rules of a file with those two fused tensors ("{i}" for the layer)."""

    def made(config: ModelConfig) -> list[rules.Rule]:
        heads = {"q": config.n_heads, "k": config.n_kv_heads, "v": config.n_kv_heads}
        rows = [count * config.head_dim for count in heads.values()]
        all_rules = rules.one_to_one(config, names, but=r"/attention/[qkv]/|/ffn/(gate|up)/")
        for i, width in enumerate(config.ffn_widths):
            paths = [f"layers/{i}/attention/{name}/kernel" for name in heads]
            all_rules.append(rules.stacked(paths, qkv.format(i=i), rows))
            if config.layers[i].experts is not None:
                continue  # named by `one_to_one`
            paths = [f"layers/{i}/ffn/{name}/kernel" for name in ("gate", "up")]
            all_rules.append(rules.stacked(paths, gate_up.format(i=i), [width, width]))
        return all_rules

    return made


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = phi3."""
    rotated = meta.get("rope.dimension_count")
    fields = common.base_from_gguf({**meta, "rope.dimension_count": None})
    fraction = rotated / fields["head_dim"] if rotated else 1.0
    rope = ropes.rope_from_gguf(meta, fraction=fraction)
    window = meta.get("attention.sliding_window") or None
    return common.decoder_from_gguf("phi3", meta, fields, rope, window)


_LAYER = "model.layers.{i}."
FAMILY = common.Family(
    "phi3",
    "Phi3ForCausalLM",
    PRESETS,
    from_hf,
    to_hf,
    from_gguf,
    rules=_rules_of(
        common.HF_NAMES, f"{_LAYER}self_attn.qkv_proj.weight", f"{_LAYER}mlp.gate_up_proj.weight"
    ),
    gguf_rules=_rules_of(common.GGUF_NAMES, "blk.{i}.attn_qkv.weight", "blk.{i}.ffn_up.weight"),
)
