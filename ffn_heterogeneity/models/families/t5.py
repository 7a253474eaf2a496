"""T5: 1.0 (plain ReLU, tied), 1.1 and Flan (gated GELU, untied), and its encoder alone.

No attention has a scale, norms have no bias, and the bias by distance is one table per stack, which
files keep in the stack's first layer.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import common, rules
from ffn_heterogeneity.models.leaves import required

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
_SIZES = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
_FFN = {"relu": ("plain", "relu"), "gated-gelu": ("gated", "gelu_tanh")}
_FFN |= {"gated-silu": ("gated", "silu"), "gelu": ("plain", "gelu")}


def model(
    widths: Collection[int], encoder: int, ffn: str, fields: Mapping[str, Any], scaled: bool = True
) -> ModelConfig:
    """A T5 with these FFN widths, the first `encoder` of them the encoder's; all: it alone.

    Args:
      ffn: "relu" | "gated-gelu" | ..., config.json's `feed_forward_proj`.
      scaled: whether the head's input is divided by sqrt(d_model).
    """
    kind, activation = _FFN[ffn]
    alone = encoder == len(widths)
    layers = tuple(
        LayerConfig(width, kind, rope=None, causal=i >= encoder, cross_attention=i >= encoder)
        for i, width in enumerate(widths)
    )
    scaled = scaled and not alone
    return ModelConfig(
        "t5",
        layers=layers,
        **{"activation": activation, "norm_eps": 1e-6, "query_scale": 1.0, **fields},
        positions="relative",
        n_encoder_layers=0 if alone else encoder,
        lm_head=not alone,
        output_multiplier=fields["d_model"] ** -0.5 if scaled else 1.0,
    )


def _preset(layers: int, d_model: int, width: int, heads: int, ffn: str, head_dim: int = 64):
    ids = {"bos_id": 0, "eos_id": 1, "pad_id": 0, "vocab_size": 32_128, "max_position": 512}
    sizes = {"d_model": d_model, "n_heads": heads, "n_kv_heads": heads, "head_dim": head_dim}
    old = ffn == "relu"
    return model([width] * (2 * layers), layers, ffn, sizes | ids | {"tied": old}, old)


_OLD = {"small": (6, 512, 2048, 8), "base": (12, 768, 3072, 12), "large": (24, 1024, 4096, 16)}
_NEW = {"small": (8, 512, 1024, 6), "base": (12, 768, 2048, 12), "large": (24, 1024, 2816, 16)}
_NEW |= {"xl": (24, 2048, 5120, 32), "xxl": (24, 4096, 10_240, 64)}
PRESETS = {f"t5_{x}": (_preset(*its, "relu"), f"google-t5/t5-{x}") for x, its in _OLD.items()}
for _size, _shape in _NEW.items():
    PRESETS[f"t5_v1_1_{_size}"] = (_preset(*_shape, "gated-gelu"), f"google/t5-v1_1-{_size}")
    PRESETS[f"flan_t5_{_size}"] = (_preset(*_shape, "gated-gelu"), f"google/flan-t5-{_size}")


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a T5ForConditionalGeneration, or of a T5EncoderModel.

    Raises:
      ConfigError: no start token for the decoder, or another feed-forward block.
    """
    alone = "T5EncoderModel" in (values.get("architectures") or ())
    values = common.with_defaults(values, _DEFAULTS)
    common.check_counts({key: values[key] for key in _SIZES})
    behind = values.get("num_decoder_layers") or values["num_layers"]
    common.check_counts({"num_decoder_layers": behind})
    if values["num_layers"] + behind > common.MAX_LAYERS:
        raise ConfigError(f"num_layers={values['num_layers']}: at most {common.MAX_LAYERS:,}")
    ffn, start = values["feed_forward_proj"], values["decoder_start_token_id"]
    if ffn not in _FFN:
        raise ConfigError(f"feed_forward_proj={ffn!r}: expected one of {', '.join(_FFN)}")
    if start is None:
        raise ConfigError("decoder_start_token_id is null: give the token that answers begin with")
    eos, heads = values["eos_token_id"], values["num_heads"]
    # transformers 4 has one key for both, and transformers 5 ties always and has another.
    scaled = values.get("scale_decoder_outputs", values.get("tie_word_embeddings", True))
    fields = {
        "vocab_size": values["vocab_size"],
        "d_model": values["d_model"],
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": values["d_kv"],
        "norm_eps": float(values["layer_norm_epsilon"]),
        "tied": bool(scaled),
        "max_position": values.get("n_positions", 512),
        "relative_buckets": values["relative_attention_num_buckets"],
        "relative_distance": values["relative_attention_max_distance"],
        "bos_id": start,
        "eos_id": tuple(eos) if isinstance(eos, list) else eos,
        "pad_id": values["pad_token_id"],
    }
    before = values["num_layers"]
    widths = [values["d_ff"]] * (before + behind * (not alone))
    return model(widths, before, ffn, fields, bool(scaled))


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers reads."""
    first = config.layers[0]
    both = {"kind": first.ffn_kind, "activation": config.activation}
    ffn = next(name for name, its in _FFN.items() if its == (both["kind"], both["activation"]))
    alone = config.kind == "encoder"
    encoder = config.n_layers if alone else config.n_encoder_layers
    return {
        "architectures": ["T5EncoderModel" if alone else "T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "d_kv": config.head_dim,
        "d_ff": max(config.ffn_widths),
        "num_layers": encoder,
        "num_decoder_layers": config.n_layers - encoder or encoder,
        "num_heads": config.n_heads,
        "n_positions": config.max_position,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_distance,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": ffn,
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.output_multiplier != 1.0,
        "decoder_start_token_id": config.bos_id,
        "eos_token_id": list(config.eos_id) if isinstance(config.eos_id, tuple) else config.eos_id,
        "pad_token_id": config.pad_id,
        "is_encoder_decoder": not alone,
        "use_cache": True,
        "dropout_rate": 0.1,
        "initializer_factor": 1.0,
    }


_ATTENTION = {"q": "q", "k": "k", "v": "v", "out": "o"}
_TOP = {"embed/embedding": "shared", "head/kernel": "lm_head"}


def names(config: ModelConfig) -> dict[str, str]:
    """{path of a leaf: name of its tensor}."""
    found = {}
    for path, _, layer in required(config):
        if layer is None:
            found[path] = _outer_name(config, path)
            continue
        _, number, *inner = path.split("/")
        if layer.experts is not None and inner[0] == "ffn":
            found[path] = rules.OWN + path.replace("/", ".")
            continue
        encoder = config.n_encoder_layers or config.n_layers
        stack, i = divmod(int(number), encoder) if not layer.causal else (1, int(number) - encoder)
        prefix, ffn = f"{('encoder', 'decoder')[stack]}.block.{i}.layer.", 2 if layer.causal else 1
        found[path] = prefix + _inner_name(inner, ffn, layer.ffn_kind == "gated") + ".weight"
    return found


def _outer_name(config: ModelConfig, path: str) -> str:
    if path in _TOP:
        return f"{_TOP[path]}.weight"
    place, _, stack = path.partition("/")
    if place == "relative":
        table = "layer.0.SelfAttention.relative_attention_bias.weight"
        return f"{stack}.block.0.{table}"
    last = "encoder" if place == "encoder_norm" or config.kind == "encoder" else "decoder"
    return f"{last}.final_layer_norm.weight"


def _inner_name(inner: list[str], ffn: int, gated: bool) -> str:
    """Name of a tensor inside a layer's block, without its ending."""
    module, *rest = inner
    numbers = {"attention_norm": 0, "cross_norm": 1, "ffn_norm": ffn}
    if module in numbers:
        return f"{numbers[module]}.layer_norm"
    if module == "attention":
        return f"0.SelfAttention.{_ATTENTION[rest[0]]}"
    if module == "cross_attention":
        return f"1.EncDecAttention.{_ATTENTION[rest[0]]}"
    theirs = {"gate": "wi_0", "up": "wi_1" if gated else "wi", "down": "wo"}
    return f"{ffn}.DenseReluDense.{theirs[rest[0]]}"


def tensor_rules(config: ModelConfig) -> list[rules.Rule]:
    """Rules of one tensor per leaf."""
    return [rules.one_tensor(path, name) for path, name in names(config).items()]


def by_tensors(
    config: ModelConfig, values: Mapping[str, Any], found: Collection[str]
) -> ModelConfig:
    """The config without a head of its own, or without a decoder, if the file has none."""
    if config.kind == "encoder":
        return config
    if any(name.startswith("decoder.") for name in found):
        tied = config.tied or "lm_head.weight" not in found
        return dataclasses.replace(config, tied=tied)
    return config.encoder()


def own_name(name: str) -> str:
    """A tensor's name without the prefix of some files."""
    return re.sub(r"^(transformer|text_model|t5)\.", "", name)


FAMILY = common.Family(
    "t5",
    "T5ForConditionalGeneration",
    PRESETS,
    from_hf,
    to_hf,
    common.no_gguf,
    rules=tensor_rules,
    redundant=(r"(encoder|decoder)\.embed_tokens\.weight", r".*EncDecAttention\.relative_.*"),
    own_name=own_name,
    by_tensors=by_tensors,
    width_key="d_ff",
)
