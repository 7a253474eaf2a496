"""GPT-NeoX: Pythia (70M to 12B), StableCode-completion-alpha and -instruct-alpha 3B.

LayerNorms with bias, biases everywhere, plain FFNs with exact GELU, attention and FFN in parallel
on the residual stream, 25% of each head rotated, one tensor for queries, keys and values.
"""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, LayerConfig, ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common, names, ropes, rules

_DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "use_parallel_residual": True,
    "hidden_act": "gelu",
}
_FRACTION = 0.25
_BIASES = dict.fromkeys(("attention_bias", "attention_out_bias", "ffn_bias"), True)


def _config(widths, rope: RopeConfig, fields: Mapping[str, Any], **more) -> ModelConfig:
    layers = tuple(LayerConfig(width, ffn_kind="plain", rope=rope) for width in widths)
    return ModelConfig("gpt_neox", layers=layers, norm_kind="layer", **fields, **more)


def _preset(vocab_size, layers, d_model, n_heads, max_position=2048) -> ModelConfig:
    sizes = {"vocab_size": vocab_size, "d_model": d_model, "n_heads": n_heads}
    sizes |= {"n_kv_heads": n_heads, "head_dim": d_model // n_heads, "max_position": max_position}
    more = {"activation": "gelu", "parallel_residual": True, "tied": False, "bos_id": 0}
    rope = RopeConfig(fraction=_FRACTION)
    return _config([4 * d_model] * layers, rope, sizes | _BIASES, **more, eos_id=0)


_PYTHIA = {  # vocabulary, layers, d_model, heads
    "70m": (50_304, 6, 512, 8),
    "160m": (50_304, 12, 768, 12),
    "410m": (50_304, 24, 1024, 16),
    "1b": (50_304, 16, 2048, 8),
    "1.4b": (50_304, 24, 2048, 16),
    "2.8b": (50_304, 32, 2560, 32),
    "6.9b": (50_432, 32, 4096, 32),
    "12b": (50_688, 36, 5120, 40),
}
# name, hub's name, positions; the instruct model is in P-32's Table 1
_STABLECODE = (("alpha", "completion-alpha", 16_384), ("instruct_alpha", "instruct-alpha", 4096))
PRESETS = {
    f"pythia_{size.replace('.', '_')}": (_preset(*shape), f"EleutherAI/pythia-{size}")
    for size, shape in _PYTHIA.items()
} | {
    f"stablecode_{name}_3b": (_preset(49_152, 32, 2560, 32, n), f"stabilityai/stablecode-{hub}-3b")
    for name, hub, n in _STABLECODE
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a GPTNeoXForCausalLM."""
    values = common.with_defaults(values, _DEFAULTS)
    base = {"rms_norm_eps": values["layer_norm_eps"], "num_key_value_heads": None, "head_dim": None}
    fields = common.base_from_hf(values | base, {})
    theta = {"rope_theta": values.get("rotary_emb_base") or 10_000.0}
    fraction = values.get("rotary_pct", _FRACTION)
    return _config(
        [values["intermediate_size"]] * values["num_hidden_layers"],
        ropes.shared_rope_from_hf(values | theta, fields["max_position"], fraction),
        fields,
        activation=common.activation_from_hf(values["hidden_act"]),
        parallel_residual=bool(values["use_parallel_residual"]),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read; ConfigError without FFN biases."""
    if not config.ffn_bias:
        raise ConfigError("gpt_neox with ffn_bias=False cannot be written: its FFN has biases")
    values = common.base_to_hf(config, "gpt_neox", "GPTNeoXForCausalLM")
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps"):
        del values[key]
    fraction = config.layers[0].rope.fraction
    return values | {
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "rotary_pct": fraction,
        "rotary_emb_base": values["rope_theta"],
        "rope_parameters": values["rope_parameters"] | {"partial_rotary_factor": fraction},
    }


_NAMES = names.name_table(
    {
        "embed/embedding": "gpt_neox.embed_in.weight",
        "final_norm/scale": "gpt_neox.final_layer_norm.weight",
        "final_norm/bias": "gpt_neox.final_layer_norm.bias",
        "head/kernel": "embed_out.weight",
    },
    "gpt_neox.layers.{i}.",
    {
        "attention_norm": "input_layernorm",
        "attention/out": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn/up": "mlp.dense_h_to_4h",
        "ffn/down": "mlp.dense_4h_to_h",
    },
)


def _rules(config: ModelConfig) -> list[rules.Rule]:
    name = "gpt_neox.layers.{i}.attention.query_key_value"
    return rules.fused_qkv(config, _NAMES, name, config.n_heads)


def from_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Metadata of a GGUF file with general.architecture = gptneox."""
    rotated = meta.get("rope.dimension_count")
    fields = common.base_from_gguf({**meta, "rope.dimension_count": None}, rms=False)
    fraction = rotated / fields["head_dim"] if rotated else _FRACTION
    rope = ropes.rope_from_gguf(meta, fraction=fraction)
    parallel = bool(meta.get("use_parallel_residual", True))
    more = {"activation": "gelu", "parallel_residual": parallel}
    return _config(common.gguf_widths(meta), rope, fields | _BIASES, **more)


FAMILY = common.Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    PRESETS,
    from_hf,
    to_hf,
    from_gguf,
    gguf_architecture="gptneox",
    torch_final_norm="model.final_layer_norm",
    rules=_rules,
    # llama.cpp's converter puts all queries first, then all keys, then all values.
    gguf_rules=lambda config: rules.fused_qkv(config, common.GGUF_NAMES, "blk.{i}.attn_qkv", 1),
    redundant=(r".*rotary_emb\.inv_freq", r".*\.attention\.(masked_)?bias"),
)
