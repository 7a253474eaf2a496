"""Switch Transformers: T5 1.0 with experts in some layers, of which each token is sent to one.

The output of an expert is multiplied by its probability. An expert accepts `expert_capacity` tokens
of a row; the others pass the layer unchanged.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, ModelConfig
from ffn_heterogeneity.models.families import common, t5
from ffn_heterogeneity.models.layer_config import check_count

_DEFAULTS = {
    "vocab_size": 32_128,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 12,
    "num_heads": 12,
    "num_experts": 8,
    "expert_capacity": 64,
    "num_sparse_encoder_layers": 3,
    "num_sparse_decoder_layers": 3,
    "router_jitter_noise": 0.01,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "dense_act_fn": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
# What a router of ours does not have.
_FIXED = {"router_bias": False, "router_ignore_padding_tokens": False, "router_dtype": "float32"}
_FIXED["dense_act_fn"] = "relu"
_STACKS = ("encoder", "decoder")


def sparse_layers(layers: int, sparse: int) -> tuple[int, ...]:
    """Layers of a stack that have experts (transformers' rule; with `sparse` 0 the second)."""
    step = layers // sparse if sparse else layers
    return tuple(i for i in range(layers) if step == 1 or (step > 1 and i % step == 1))


def model(config: ModelConfig, sparse: Mapping[str, int], **experts: Any) -> ModelConfig:
    """A Switch with the shape of a T5.

    Args:
      sparse: number of layers with experts of each stack.
      experts: fields of these layers' `LayerConfig`.
    """
    layers = list(config.layers)
    for stack, (start, end) in config.stacks.items():
        for i in sparse_layers(end - start, sparse[stack]):
            fields = {"top_k": 1, "gates": "softmax", **experts}
            layers[start + i] = dataclasses.replace(layers[start + i], **fields)
    return dataclasses.replace(config, family="switch", layers=tuple(layers))


def _preset(experts: int) -> ModelConfig:
    shape = t5.preset(12, 768, 3072, 12, "relu")
    return model(shape, dict.fromkeys(_STACKS, 6), experts=experts, capacity=64, jitter=0.01)


PRESETS = {
    f"switch_base_{experts}": (_preset(experts), f"google/switch-base-{experts}")
    for experts in (8, 16, 32, 64, 128, 256)
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a SwitchTransformersForConditionalGeneration.

    Raises:
      ConfigError: no start token for the decoder, or a router or block of another kind.
    """
    values = common.with_defaults(values, _DEFAULTS)
    for key, value in _FIXED.items():
        if values.get(key, value) != value:
            raise ConfigError(f"{key}={values[key]!r:.60} is not supported: expected {value!r}")
    common.check_counts({key: values[key] for key in ("num_experts", "expert_capacity")})
    sparse = {stack: values[f"num_sparse_{stack}_layers"] for stack in _STACKS}
    for stack, count in sparse.items():
        check_count(f"num_sparse_{stack}_layers", count, 0)
    usual = {"feed_forward_proj": "relu", "num_decoder_layers": 12, "tie_word_embeddings": True}
    shape = t5.from_hf(usual | values)
    if values["num_experts"] * shape.n_layers > common.MAX_EXPERTS:
        raise ConfigError(f"num_experts={values['num_experts']}: at most {common.MAX_EXPERTS:,}")
    return model(
        shape,
        sparse,
        experts=values["num_experts"],
        capacity=values["expert_capacity"],
        jitter=values["router_jitter_noise"] or 0.0,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers reads."""
    layers = [layer for layer in config.layers if layer.experts is not None]
    one = layers[0] if layers else config.layers[0]
    counts = {}
    for stack, (start, end) in config.stacks.items():
        found = tuple(i for i in range(end - start) if config.layers[start + i].experts is not None)
        choices = (len(found), *range(end - start + 1))
        same = (k for k in choices if sparse_layers(end - start, k) == found)
        # Without one, config.json holds another model, and the native form is written.
        counts[stack] = next(same, len(found))
    values = t5.to_hf(config)
    del values["feed_forward_proj"], values["scale_decoder_outputs"]
    return values | {
        "architectures": [FAMILY.architecture],
        "model_type": FAMILY.model_type,
        "tie_word_embeddings": config.tied,
        "num_experts": one.experts,
        "expert_capacity": one.capacity,
        "router_jitter_noise": one.jitter,
        "dense_act_fn": "relu",
        **{f"num_sparse_{stack}_layers": count for stack, count in counts.items()},
    }


FAMILY = dataclasses.replace(
    t5.FAMILY,
    name="switch",
    architecture="SwitchTransformersForConditionalGeneration",
    model_type="switch_transformers",
    presets=PRESETS,
    from_hf=from_hf,
    to_hf=to_hf,
    by_tensors=None,
    classifier={},
)
