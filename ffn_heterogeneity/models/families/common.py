"""Parts that the families share: the `Family` record, and readers of config fields.

A family is one module that ends in `FAMILY = Family(...)` and is listed in `families/__init__`.
For a model whose checkpoint holds one tensor per leaf it needs presets, `from_hf`, `to_hf` and
two name tables (`names.py`); `rules.py` makes rules of a table, and of fused tensors (GPT-NeoX's).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import (
    ConfigError,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    check_count,
)
from ffn_heterogeneity.models.families.names import GGUF_NAMES, HF_NAMES, HF_POST_NORM_NAMES
from ffn_heterogeneity.models.families.rules import Rule, one_to_one

ByTensors = Callable[[ModelConfig, Mapping[str, Any], Collection[str]], ModelConfig]
# A file's word is not enough to build more.
MAX_LAYERS = 10_000


def hf_rules(config: ModelConfig) -> list[Rule]:
    """One tensor per leaf, with Llama's names."""
    return one_to_one(config, HF_NAMES)


def hf_post_norm_rules(config: ModelConfig) -> list[Rule]:
    """One tensor per leaf, with the names of Gemma 2 and 3, which have post-norms."""
    return one_to_one(config, HF_POST_NORM_NAMES)


def gguf_rules(config: ModelConfig) -> list[Rule]:
    """One tensor per leaf, with llama.cpp's names."""
    return one_to_one(config, GGUF_NAMES)


def no_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Raises ConfigError: `Family.from_gguf` of a family that has no GGUF files here."""
    raise ConfigError("GGUF files of this family are neither read nor written")


def _keep(config: ModelConfig, path: str, array: np.ndarray) -> np.ndarray:
    return array


def add_one(config: ModelConfig, path: str, array: np.ndarray) -> np.ndarray:
    """Inverse of `subtract_one`."""
    return array + np.float32(1) if path.endswith("/scale") else array


def subtract_one(config: ModelConfig, path: str, array: np.ndarray) -> np.ndarray:
    """GGUF stores Gemma's norms as 1 + weight (float32); ours are the raw weights."""
    return array - np.float32(1) if path.endswith("/scale") else array


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models and how it is written by others.

    Attributes:
      architecture: the class in config.json's `architectures`.
      presets: {name: (config, hub id)} with the published shapes.
      from_hf, to_hf: config.json's dict -> `ModelConfig` and back.
      from_gguf: metadata (keys without the architecture's prefix; "vocab_size", "tied", token ids
        and, where the file has it, the tensor "rope_freqs" added by the reader) -> `ModelConfig`;
        or `no_gguf`.
      model_type, gguf_architecture: config.json's `model_type` and GGUF's `general.architecture`,
        where they are not the family's name.
      rules: `ModelConfig` -> the `Rule`s of a safetensors checkpoint.
      redundant: regexes of tensors that carry no information of their own and may be ignored.
      left_out: regexes of tensors that have no place here (heads of pre-training): the reader says
        that they are not read.
      own_name: a tensor's name in somebody's file -> its name in `rules`.
      by_tensors: `(config, config.json's dict, names of the tensors)` -> the config, with what
        config.json leaves open; None: it says all.
      width_key: an FFN's width in config.json's `per_layer_config`.
      prefix, classifier: what a model's tensors are called behind in a classifier's file, and the
        tensors of its head by their leaves (io/classifiers.py).
      classifier_stem: of the classifier's class, where it is not the architecture's.
      torch_final_norm: where transformers' model has its final norm.
      gguf_rules, gguf_transform: the `Rule`s of a GGUF file, and `(config, path, float32 leaf) ->
        leaf` undoing what llama.cpp's converter did; gguf_untransform: doing it.
      gguf_uneven: the architecture whose graph in llama.cpp takes a width for each layer; "": none.
    """

    name: str
    architecture: str
    presets: Mapping[str, tuple[ModelConfig, str]]
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    from_gguf: Callable[[Mapping[str, Any]], ModelConfig]
    model_type: str = ""
    gguf_architecture: str = ""
    rules: Callable[[ModelConfig], list[Rule]] = hf_rules
    redundant: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    left_out: tuple[str, ...] = ()
    own_name: Callable[[str], str] = str
    by_tensors: ByTensors | None = None
    width_key: str = "intermediate_size"
    prefix: str = ""
    classifier: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"out/kernel": "score.weight"}
    )
    classifier_stem: str = ""
    torch_final_norm: str = "model.norm"
    gguf_rules: Callable[[ModelConfig], list[Rule]] = gguf_rules
    gguf_transform: Callable[[ModelConfig, str, np.ndarray], np.ndarray] = _keep
    gguf_untransform: Callable[[ModelConfig, str, np.ndarray], np.ndarray] = _keep
    gguf_uneven: str = ""


_HF_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


def activation_from_hf(name: str) -> str:
    if name not in _HF_ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not known: {sorted(_HF_ACTIVATIONS)}")
    return _HF_ACTIVATIONS[name]


def activation_to_hf(name: str) -> str:
    return next(hf for hf, ours in _HF_ACTIVATIONS.items() if ours == name)


def rope_from_hf(
    values: Mapping[str, Any], theta: float, max_position: int, fraction: float = 1.0
) -> RopeConfig:
    """`rope_scaling` (classic) or one `rope_parameters` dict (transformers 5) -> `RopeConfig`.

    `fraction` is given by families that rotate a part of each head, in place of the key.
    """
    theta = float(values.get("rope_theta") or theta)
    kind = values.get("rope_type") or values.get("type") or "default"
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial rotary embeddings (partial_rotary_factor) are not supported")
    if kind == "default":
        return RopeConfig(theta, fraction=fraction)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=float(values["factor"]), fraction=fraction)
    if kind == "llama3":
        old = int(values.get("original_max_position_embeddings") or max_position)
        scaling = (values["factor"], values["low_freq_factor"], values["high_freq_factor"])
        return RopeConfig(theta, llama3=(*map(float, scaling), old), fraction=fraction)
    raise ConfigError(f"rope type {kind!r} is not known: default, linear, llama3")


def shared_rope_from_hf(
    values: Mapping[str, Any], max_position: int, fraction: float | None = None
) -> RopeConfig:
    """The rope of a config.json whose layers share one.

    Args:
      fraction: for families that rotate a part of each head: where the rope does not say which.
    """
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = values.get("rope_theta") or 10_000.0
    if fraction is not None:
        fraction = scaling.pop("partial_rotary_factor", None) or fraction
    return rope_from_hf(scaling, theta, max_position, float(fraction or 1.0))


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """`RopeConfig` -> one `rope_parameters` dict, theta included."""
    if rope.llama3 is not None:
        factor, low, high, old = rope.llama3
        return {
            "rope_type": "llama3",
            "rope_theta": rope.theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": old,
        }
    if rope.linear_factor != 1.0:
        return {"rope_type": "linear", "rope_theta": rope.theta, "factor": rope.linear_factor}
    return {"rope_type": "default", "rope_theta": rope.theta}


def classic_scaling(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` value that transformers 4 and vLLM read; None without scaling."""
    if parameters["rope_type"] == "default":
        return None
    return {key: value for key, value in parameters.items() if key != "rope_theta"}


def with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """config.json over the class defaults of transformers, because the hub's files leave those out.

    A null is as if left out, but for special tokens: there it says that the model has none.
    """
    said = {k: v for k, v in values.items() if v is not None or k.endswith("_token_id")}
    return {**defaults, **said}


def base_from_hf(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` that every decoder spells alike, as `with_defaults` reads them."""
    values = with_defaults(values, defaults)
    needed = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
    missing = [k for k in (*needed, "intermediate_size") if k not in values]
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(missing)}")
    check_counts({key: values[key] for key in (*needed, "intermediate_size")})
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    check_counts({key: values[key] for key in optional if values.get(key) is not None})
    layers = values["num_hidden_layers"]
    if layers > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers={layers}: at most {MAX_LAYERS:,} are built")
    heads, eos = values["num_attention_heads"], values.get("eos_token_id")
    return {
        "vocab_size": values["vocab_size"],
        "d_model": values["hidden_size"],
        "n_heads": heads,
        "n_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
        "norm_eps": float(values["rms_norm_eps"]),
        "attention_bias": bool(values.get("attention_bias", False)),
        "attention_out_bias": bool(values.get("attention_bias", False)),
        "ffn_bias": bool(values.get("mlp_bias", False)),
        "tied": bool(values["tie_word_embeddings"]),
        "max_position": values["max_position_embeddings"],
        "bos_id": token_id(values.get("bos_token_id")),
        "eos_id": tuple(eos) if isinstance(eos, list) else token_id(eos),
        "pad_id": token_id(values.get("pad_token_id")),
    }


def token_id(value: Any) -> Any:
    """None for -1, which stands for no token in Llama's files (in GGUF as 2^32 - 1)."""
    return None if value in (-1, (1 << 32) - 1) else value


def base_to_hf(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """Inverse of `base_from_hf`, and the first layer's rope for transformers 4 and 5 and vLLM.

    `intermediate_size` is the widest layer's.
    """
    rope = config.layers[0].rope
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": max(config.ffn_widths),
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_id) if isinstance(config.eos_id, tuple) else config.eos_id,
        "pad_token_id": config.pad_id,
        "use_cache": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        **({} if rope is None else _rope_keys(rope_to_hf(rope))),
    }


def _rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": classic_scaling(rope),
        "rope_parameters": rope,
    }


def base_from_gguf(meta: Mapping[str, Any], rms: bool = True) -> dict[str, Any]:
    """Fields of `ModelConfig` that llama.cpp writes alike for every decoder; `rms`: its norms."""
    needed = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count")
    epsilon = f"attention.layer_norm_{'rms_' if rms else ''}epsilon"
    missing = [k for k in (*needed, epsilon) if k not in meta]
    if missing:
        raise ConfigError(f"GGUF metadata lacks {', '.join(missing)}")
    check_counts({key: meta[key] for key in needed if key != "feed_forward_length"})
    if meta["block_count"] > MAX_LAYERS:
        raise ConfigError(f"block_count={meta['block_count']}: at most {MAX_LAYERS:,} are built")
    heads, d = meta["attention.head_count"], meta["embedding_length"]
    head_dim = meta.get("attention.key_length") or meta.get("rope.dimension_count") or d // heads
    return {
        "vocab_size": meta["vocab_size"],
        "d_model": d,
        "n_heads": heads,
        "n_kv_heads": meta.get("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "norm_eps": short_float(meta[epsilon]),
        "tied": meta["tied"],
        "max_position": meta.get("context_length", 8192),
        "bos_id": meta.get("bos_id"),
        "eos_id": meta.get("eos_id"),
        "pad_id": meta.get("pad_id"),
    }


def gguf_widths(meta: Mapping[str, Any]) -> list[int]:
    """FFN widths, one per layer (the key holds a number, or a list where layers differ)."""
    widths, count = meta["feed_forward_length"], meta["block_count"]
    widths = widths if isinstance(widths, list) else [widths] * count
    if len(widths) != count:
        raise ConfigError(f"feed_forward_length holds {len(widths)} widths for {count} layers")
    check_counts({f"feed_forward_length of layer {i}": width for i, width in enumerate(widths)})
    return widths


def check_counts(values: Mapping[str, Any]) -> None:
    """Refuses what is no number of things, before anything is built from it."""
    for key, value in values.items():
        check_count(key, value)


def short_float(value: float) -> float:
    """The shortest decimal that is this float32: 9.99999975e-06 in the file means 1e-05."""
    return float(str(np.float32(value)))


def layers_of(
    widths: Sequence[int], rope: RopeConfig, window: int | None = None
) -> tuple[LayerConfig, ...]:
    """Layers that differ in width alone."""
    return tuple(LayerConfig(width, window=window, rope=rope) for width in widths)


def published(family, shape, rope=RopeConfig(), window=None, **fields: Any) -> ModelConfig:
    """A published model of layers, FFN width, d_model, heads and key-value heads."""
    layers, width, d_model, heads, kv_heads = shape
    sizes = {"d_model": d_model, "n_heads": heads, "n_kv_heads": kv_heads}
    sizes |= {"head_dim": d_model // heads, "layers": layers_of([width] * layers, rope, window)}
    return ModelConfig(family=family, **(sizes | fields))


def one_window(config: ModelConfig) -> int | None:
    """The window of a family whose layers share it; ConfigError where they do not."""
    windows = {layer.window for layer in config.layers}
    if len(windows) > 1:
        raise ConfigError(f"family {config.family!r} has one window for all layers, not {windows}")
    return windows.pop()


def windows_from_hf(values: Mapping[str, Any], every: int) -> list[int | None]:
    """Window per layer from `layer_types`, else every `every`-th layer is global."""
    count = values["num_hidden_layers"]
    kinds = values.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)
    ]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != count:
        raise ConfigError(
            f"layer_types needs {count} of full_attention, sliding_attention; got {kinds}"
        )
    if values.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention=true is not a causal language model")
    return [None if kind == "full_attention" else values["sliding_window"] for kind in kinds]


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types`."""
    windows = [layer.window for layer in config.layers]
    local = [w for w in windows if w is not None]
    return {
        "sliding_window": local[0] if local else 4096,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def query_scalar(config: ModelConfig) -> float:
    """`query_pre_attn_scalar`, whose inverse square root multiplies the attention logits."""
    scalar = config.scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar
