"""NVIDIA's DeciLM form of a Llama's config.json: `block_configs`, a width for every layer.

Its readers (llama.cpp's converter, mlx-lm, vLLM) take `ffn_mult` and round 2/3 ffn_mult d_model up
to a multiple of 256, so other widths cannot be written. No code comes with it (`auto_map`).
"""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, ModelConfig

MODEL_TYPE, STEP = "nemotron-nas", 256
_NUMBERS = ("n_heads_in_group", "ffn_mult", "intermediate_size")


def to_deci(config: ModelConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert config.json to that form.

    Args:
      values: the family's config.json of the same model.

    Raises:
      ConfigError: the form cannot express the model; the message names the reason and a solution.
    """
    rope, odd = config.layers[0].rope, [w for w in config.ffn_widths if w % STEP]
    lacks = {
        f"the family {config.family}": config.family != "llama",
        f"FFNs of {odd[:3]} neurons (only multiples of {STEP})": bool(odd),
        f"the activation {config.activation}": config.activation != "silu",
        f"heads of {config.head_dim}": config.head_dim * config.n_heads != config.d_model,
        # llama.cpp's converter drops the first, and ignores the second (it uses 8,192).
        "linear rope scaling": rope.linear_factor != 1.0,
        "rope scaling from another length than 8192": bool(rope.llama3) and rope.llama3[3] != 8192,
    }
    if reasons := [reason for reason, there in lacks.items() if there]:
        raise ConfigError(
            f"block_configs cannot express {', '.join(reasons)}: use export='auto' or 'padded'"
        )
    attention = {"n_heads_in_group": config.n_heads // config.n_kv_heads}
    plain = {"no_op": False, "replace_with_linear": False}
    # Half a neuron below the width: readers round the factor to six decimals, and then up.
    factors = [round(1.5 * (width - 0.5) / config.d_model, 6) for width in config.ffn_widths]
    return {k: v for k, v in values.items() if k != "per_layer_config"} | {
        "model_type": MODEL_TYPE,
        "architectures": ["DeciLMForCausalLM"],
        "intermediate_size": None,
        "num_key_value_heads": None,
        "block_configs": [
            {"attention": attention | plain, "ffn": {"ffn_mult": factor} | plain}
            for factor in factors
        ],
    }


def from_deci(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert such a config.json to a Llama's, with widths under `per_layer_config`.

    Raises:
      ConfigError: blocks that are not attention and an FFN, or differ in more than width.
    """
    blocks, groups, widths = values["block_configs"], set(), []
    for i, block in enumerate(blocks):
        attention, ffn = block["attention"], block["ffn"]
        extra = [
            k
            for section in (attention, ffn)
            for k, v in section.items()
            if k not in _NUMBERS and v not in (None, False, "silu")
        ]
        if extra:
            raise ConfigError(f"block_configs of layer {i} sets {', '.join(extra)}: not known here")
        groups.add(attention["n_heads_in_group"])
        inner = int(2 * (ffn.get("ffn_mult") or 0) * values["hidden_size"] / 3)
        widths.append(-(-inner // STEP) * STEP if inner else ffn["intermediate_size"])
    if len(blocks) != values["num_hidden_layers"] or len(groups) != 1 or not min(groups) > 0:
        raise ConfigError(
            f"block_configs: expected one per layer with one n_heads_in_group, "
            f"got {len(blocks)} with {groups}"
        )
    return {
        **values,
        "model_type": "llama",
        "intermediate_size": max(widths),
        "num_key_value_heads": values["num_attention_heads"] // min(groups),
        "per_layer_config": {str(i): {"intermediate_size": w} for i, w in enumerate(widths)},
    }
