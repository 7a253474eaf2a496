"""T5: 1.0 (plain ReLU, tied), 1.1 and Flan (gated GELU, untied), and its encoder alone.

Attention has no scale, norms have no bias, and each stack has a table of biases by distance.
"""

from collections.abc import Collection, Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import common, t5_names

_DEFAULTS = {
    "vocab_size": 32_128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
# Field of `ModelConfig` -> its key.
_KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "n_heads": "num_heads",
    "head_dim": "d_kv",
    "norm_eps": "layer_norm_epsilon",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_distance": "relative_attention_max_distance",
    "bos_id": "decoder_start_token_id",
    "pad_id": "pad_token_id",
}
_SIZES = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
_GATED = {"gated-gelu": ("gated", "gelu_tanh"), "gated-silu": ("gated", "silu")}
_FFN = {"relu": ("plain", "relu")} | _GATED


def model(
    widths: Collection[int], encoder: int, ffn: str, fields: Mapping[str, Any]
) -> ModelConfig:
    """A T5 with these FFN widths, the first `encoder` of them the encoder's; all: it alone.

    Args:
      ffn: "relu" | "gated-gelu" | ..., config.json's `feed_forward_proj`.
      fields: with "tied"; the input of a tied head is divided by sqrt(d_model).
    """
    (kind, activation), alone = _FFN[ffn], encoder == len(widths)
    layers = tuple(
        LayerConfig(width, kind, rope=None, causal=i >= encoder, cross_attention=i >= encoder)
        for i, width in enumerate(widths)
    )
    return ModelConfig(
        "t5",
        layers=layers,
        **{"activation": activation, "norm_eps": 1e-6, "query_scale": 1.0, **fields},
        positions="relative",
        n_encoder_layers=0 if alone else encoder,
        lm_head=not alone,
        output_multiplier=fields["d_model"] ** -0.5 if fields["tied"] and not alone else 1.0,
    )


def preset(layers: int, d_model: int, width: int, heads: int, ffn: str) -> ModelConfig:
    """A published shape, with equally many layers in both stacks."""
    ids = {"bos_id": 0, "eos_id": 1, "pad_id": 0, "vocab_size": 32_128, "max_position": 512}
    sizes = {"d_model": d_model, "n_heads": heads, "n_kv_heads": heads, "head_dim": 64}
    return model([width] * (2 * layers), layers, ffn, sizes | ids | {"tied": ffn == "relu"})


_OLD = {"small": (6, 512, 2048, 8), "base": (12, 768, 3072, 12), "large": (24, 1024, 4096, 16)}
_NEW = {"small": (8, 512, 1024, 6), "base": (12, 768, 2048, 12), "large": (24, 1024, 2816, 16)}
_NEW |= {"xl": (24, 2048, 5120, 32), "xxl": (24, 4096, 10_240, 64)}
PRESETS = {f"t5_{x}": (preset(*its, "relu"), f"google-t5/t5-{x}") for x, its in _OLD.items()}
for _size, _shape in _NEW.items():
    PRESETS[f"t5_v1_1_{_size}"] = (preset(*_shape, "gated-gelu"), f"google/t5-v1_1-{_size}")
    PRESETS[f"flan_t5_{_size}"] = (preset(*_shape, "gated-gelu"), f"google/flan-t5-{_size}")


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a T5ForConditionalGeneration, or of a T5EncoderModel.

    Raises:
      ConfigError: no start token for the decoder, or another feed-forward block.
    """
    alone = "T5EncoderModel" in (values.get("architectures") or ())
    values = common.with_defaults(values, _DEFAULTS)
    behind = values.get("num_decoder_layers") or values["num_layers"]
    common.check_counts({key: values[key] for key in _SIZES} | {"num_decoder_layers": behind})
    if values["num_layers"] + behind > common.MAX_LAYERS:
        raise ConfigError(f"num_layers={values['num_layers']}: at most {common.MAX_LAYERS:,}")
    ffn, eos = values["feed_forward_proj"], values["eos_token_id"]
    if ffn not in _FFN:
        raise ConfigError(f"feed_forward_proj={ffn!r}: expected one of {', '.join(_FFN)}")
    if values["decoder_start_token_id"] is None:
        raise ConfigError("decoder_start_token_id is null: give the token that answers begin with")
    # transformers 4 has one key for both, and transformers 5 ties always and has another.
    scaled = bool(values.get("scale_decoder_outputs", values.get("tie_word_embeddings", True)))
    fields = {field: values[key] for field, key in _KEYS.items()} | {
        "n_kv_heads": values["num_heads"],
        "tied": scaled,
        "max_position": values.get("n_positions", 512),
        "eos_id": tuple(eos) if isinstance(eos, list) else eos,
    }
    widths = [values["d_ff"]] * (values["num_layers"] + behind * (not alone))
    return model(widths, values["num_layers"], ffn, fields)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers reads."""
    block = (config.layers[0].ffn_kind, config.activation)
    alone = config.kind == "encoder"
    encoder = config.n_layers if alone else config.n_encoder_layers
    return {
        "architectures": ["T5EncoderModel" if alone else "T5ForConditionalGeneration"],
        "model_type": "t5",
        **{key: getattr(config, field) for field, key in _KEYS.items()},
        "d_ff": max(config.ffn_widths),
        "num_layers": encoder,
        "num_decoder_layers": config.n_layers - encoder or encoder,
        "n_positions": config.max_position,
        "feed_forward_proj": next(name for name, its in _FFN.items() if its == block),
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.tied if alone else config.output_multiplier != 1.0,
        "eos_token_id": list(config.eos_id) if isinstance(config.eos_id, tuple) else config.eos_id,
        "is_encoder_decoder": not alone,
    }


FAMILY = common.Family(
    "t5",
    "T5ForConditionalGeneration",
    PRESETS,
    from_hf,
    to_hf,
    common.no_gguf,
    rules=t5_names.tensor_rules,
    redundant=(*t5_names.TABLES, r".*EncDecAttention\.relative_.*"),
    tables=t5_names.TABLES,
    own_name=t5_names.own_name,
    by_tensors=t5_names.by_tensors,
    width_key="d_ff",
    prefix="transformer.",
    classifier=t5_names.CLASSIFIER,
)
