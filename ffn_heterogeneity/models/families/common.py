"""Parts that the families share: the `Family` record, and readers of config fields.

A family is one module that ends in `FAMILY = Family(...)` and is listed in `families/__init__`.
For a model whose checkpoint holds one tensor per leaf it needs presets, `from_hf`, `to_hf` and
two name tables (`names.py`); `rules.py` makes rules of a table, and of fused tensors (GPT-NeoX's).
"""

import dataclasses
import functools
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
from ffn_heterogeneity.models.families.names import (
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    HF_NAMES,
    HF_POST_NORM_NAMES,
)
from ffn_heterogeneity.models.families.ropes import (
    rope_from_gguf,
    rope_keys,
    shared_rope_from_hf,
    short_float,
)
from ffn_heterogeneity.models.families.rules import Rule, one_to_one
from ffn_heterogeneity.wording import check_choice

ByTensors = Callable[[ModelConfig, Mapping[str, Any], Collection[str]], ModelConfig]
# Upper bounds for untrusted files; MAX_EXPERTS is for all layers together.
MAX_LAYERS, MAX_EXPERTS = 10_000, 100_000


# Tables for one tensor per leaf: Llama's names, those of Gemma 2 and 3 (with post-norms), and
# llama.cpp's.
hf_rules = functools.partial(one_to_one, names=HF_NAMES)
hf_post_norm_rules = functools.partial(one_to_one, names=HF_POST_NORM_NAMES)
gguf_rules = functools.partial(one_to_one, names=GGUF_NAMES)
gguf_expert_rules = functools.partial(one_to_one, names=GGUF_EXPERT_NAMES)


def no_gguf(meta: Mapping[str, Any]) -> ModelConfig:
    """Raise ConfigError; the `from_gguf` of families without GGUF support."""
    raise ConfigError("GGUF files of this family are neither read nor written")


def _keep(config: ModelConfig, path: str, array: np.ndarray) -> np.ndarray:
    return array


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, and its file formats.

    Attributes:
      architecture: the class in config.json's `architectures`.
      presets: {name: (config, hub id)} with the published shapes.
      from_hf, to_hf: config.json's dict -> `ModelConfig` and back.
      from_gguf: metadata (keys without the architecture's prefix; "vocab_size", "tied", token ids
        and, if the file has it, the tensor "rope_freqs" added by the reader) -> `ModelConfig`; or
        `no_gguf`.
      model_type, gguf_architecture: config.json's `model_type` and GGUF's `general.architecture`,
        if they differ from the family's name.
      rules: `ModelConfig` -> the `Rule`s of a safetensors checkpoint.
      redundant: regexes of tensors that contain no information and may be ignored.
      tables: names that the embedding has in files without its own.
      left_out: regexes of unsupported tensors (pre-training heads); the reader prints that they are
        not read.
      own_name: a tensor's name in a file -> its name in `rules`.
      by_tensors: `(config, config.json's dict, names of the tensors)` -> the config, with settings
        that config.json does not specify; None: it specifies all.
      width_key: an FFN's width in config.json's `per_layer_config`; expert_width_key: that of
        layers with experts, if it differs.
      stacked: {end of the name of a tensor [experts, rows, columns]: ends, with "{e}" for the
        expert, of the names in `rules` of equal parts of its rows}, as transformers 5 stacks them.
      conv1d: kernels are stored [in, out], as in transformers' Conv1D.
      prefix, classifier: prefix of the model's tensors in a classifier's file, and the tensors of
        its head by leaf (io/hf/classifiers.py); {}: transformers has no such class.
      classifier_stem: stem of the classifier's class, if it differs from the architecture's.
      torch_final_norm: name of the final norm in transformers' model.
      gguf_rules, gguf_transform: the `Rule`s of a GGUF file, and `(config, path, float32 leaf) ->
        leaf` that undoes the transforms of llama.cpp's converter; gguf_untransform: its inverse.
      gguf_uneven: the llama.cpp architecture that has a width for each layer; "": none.
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
    tables: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    own_name: Callable[[str], str] = str
    by_tensors: ByTensors | None = None
    width_key: str = "intermediate_size"
    expert_width_key: str = ""
    stacked: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    conv1d: bool = False
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

    @property
    def dense(self) -> bool:
        """True if the family's classifiers have a dense layer (RoBERTa's)."""
        return "dense/kernel" in self.classifier

    def width_key_of(self, layer: LayerConfig) -> str:
        """Key of a layer's FFN width in `per_layer_config`."""
        return layer.experts is not None and self.expert_width_key or self.width_key


_HF_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # of GPT-NeoX-20B
    "relu": "relu",
}


def activation_from_hf(name: str) -> str:
    check_choice("activation", name, _HF_ACTIVATIONS, ConfigError)
    return _HF_ACTIVATIONS[name]


def activation_to_hf(name: str) -> str:
    return next(hf for hf, ours in _HF_ACTIVATIONS.items() if ours == name)


def with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of transformers' class to config.json, because files on the hub omit them.

    A null counts as omitted, except for special tokens, where it means that the model has none.
    """
    said = {k: v for k, v in values.items() if v is not None or k.endswith("_token_id")}
    return {**defaults, **said}


def base_from_hf(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` with the same keys for every decoder, read by `with_defaults`."""
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
        raise ConfigError(f"num_hidden_layers={layers}: at most {MAX_LAYERS:,} are supported")
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


def decoder_from_hf(
    family: str,
    values: Mapping[str, Any],
    fields: dict[str, Any],
    windows: int | None | Sequence[int | None] = None,
    fraction: float | None = None,
) -> ModelConfig:
    """Return the config of a model whose layers share a width and a rope.

    Args:
      fields: those of `base_from_hf`, and the family's.
      windows: as in `layers_of`; fraction: as in `shared_rope_from_hf`.
    """
    rope = shared_rope_from_hf(values, fields["max_position"], fraction)
    widths = [values["intermediate_size"]] * values["num_hidden_layers"]
    if "activation" not in fields:
        fields |= {"activation": activation_from_hf(values.get("hidden_act", "silu"))}
    return ModelConfig(family=family, layers=layers_of(widths, rope, windows), **fields)


def experts_from_hf(values: Mapping[str, Any]) -> dict[str, int]:
    """`LayerConfig`'s experts and top_k; transformers 5 has its own key for all families."""
    keys = [key for key in ("num_local_experts", "num_experts") if key in values]
    counts = {key: values[key] for key in (keys[0], "num_experts_per_tok")}
    check_counts(counts)
    return dict(zip(("experts", "top_k"), counts.values(), strict=True))


def with_experts(
    config: ModelConfig, experts: int, dense: Collection[int] = (), **fields: Any
) -> ModelConfig:
    """Return the config with `experts` and further fields in all layers but those of `dense`."""
    if experts * config.n_layers > MAX_EXPERTS:
        raise ConfigError(f"{experts} experts per layer: at most {MAX_EXPERTS:,} in all layers")
    layers = (
        each if i in dense else dataclasses.replace(each, experts=experts, **fields)
        for i, each in enumerate(config.layers)
    )
    return dataclasses.replace(config, layers=tuple(layers))


def token_id(value: Any) -> Any:
    """Return None for -1, which means no token in Llama's files (in GGUF: 2^32 - 1)."""
    return None if value in (-1, (1 << 32) - 1) else value


def base_to_hf(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """Inverse of `base_from_hf`, with the first layer's rope for transformers 4 and 5 and vLLM.

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
        "hidden_act": activation_to_hf(config.activation),
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_position,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_id) if isinstance(config.eos_id, tuple) else config.eos_id,
        "pad_token_id": config.pad_id,
        "use_cache": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        **({} if rope is None else rope_keys(rope)),
    }


def base_from_gguf(meta: Mapping[str, Any], rms: bool = True) -> dict[str, Any]:
    """Fields of `ModelConfig` with the same GGUF keys for every decoder; `rms`: kind of norms."""
    needed = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count")
    epsilon = f"attention.layer_norm_{'rms_' if rms else ''}epsilon"
    missing = [k for k in (*needed, epsilon) if k not in meta]
    if missing:
        raise ConfigError(f"GGUF metadata lacks {', '.join(missing)}")
    check_counts({key: meta[key] for key in needed if key != "feed_forward_length"})
    if meta["block_count"] > MAX_LAYERS:
        raise ConfigError(f"block_count={meta['block_count']}: at most {MAX_LAYERS:,} supported")
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


def decoder_from_gguf(
    family: str,
    meta: Mapping[str, Any],
    fields: Mapping[str, Any],
    rope: RopeConfig | None = None,
    windows: int | None | Sequence[int | None] = None,
) -> ModelConfig:
    """Config of a GGUF file whose layers share a rope, with the fields of `base_from_gguf`."""
    layers = layers_of(gguf_widths(meta), rope or rope_from_gguf(meta), windows)
    config = ModelConfig(family=family, layers=layers, **fields)
    if not (experts := meta.get("expert_count")):
        return config
    width = meta.get("expert_feed_forward_length")
    more = {"ffn_width": width} if width else {}
    return with_experts(config, experts, top_k=meta["expert_used_count"], **more)


def gguf_widths(meta: Mapping[str, Any]) -> list[int]:
    """Return the FFN widths, one per layer (the key has a number, or a list if layers differ)."""
    widths, count = meta["feed_forward_length"], meta["block_count"]
    widths = widths if isinstance(widths, list) else [widths] * count
    if len(widths) != count:
        raise ConfigError(f"feed_forward_length holds {len(widths)} widths for {count} layers")
    check_counts({f"feed_forward_length of layer {i}": width for i, width in enumerate(widths)})
    return widths


def check_counts(values: Mapping[str, Any]) -> None:
    """Check that all values are counts, before anything is built from them."""
    for key, value in values.items():
        check_count(key, value)


def layers_of(
    widths: Sequence[int],
    rope: RopeConfig,
    windows: int | None | Sequence[int | None] = None,
    local: RopeConfig | None = None,
) -> tuple[LayerConfig, ...]:
    """Layers that differ only in width and window.

    Args:
      windows: one per layer, or one for all.
      local: the rope of the layers with a window, if it differs.
    """
    each = windows if isinstance(windows, Sequence) else [windows] * len(widths)
    return tuple(
        LayerConfig(width, window=window, rope=rope if window is None else local or rope)
        for width, window in zip(widths, each, strict=True)
    )


def published(family, shape, rope=RopeConfig(), window=None, **fields: Any) -> ModelConfig:
    """Config of a published model from (layers, FFN width, d_model, heads, key-value heads)."""
    layers, width, d_model, heads, kv_heads = shape
    sizes = {"d_model": d_model, "n_heads": heads, "n_kv_heads": kv_heads}
    sizes |= {"head_dim": d_model // heads, "layers": layers_of([width] * layers, rope, window)}
    return ModelConfig(family=family, **(sizes | fields))


def one_window(config: ModelConfig) -> int | None:
    """Return the window that all layers share; ConfigError if they differ."""
    windows = {layer.window for layer in config.layers}
    if len(windows) > 1:
        raise ConfigError(f"family {config.family!r} has one window for all layers, not {windows}")
    return windows.pop()


def windows_from_hf(values: Mapping[str, Any], every: int) -> list[int | None]:
    """Window per layer from `layer_types`; by default every `every`-th layer is global."""
    count = values["num_hidden_layers"]
    kinds = values.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)
    ]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != count:
        raise ConfigError(
            f"layer_types needs {count} of full_attention, sliding_attention; got {kinds}"
        )
    return [None if kind == "full_attention" else values["sliding_window"] for kind in kinds]


def windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    """`sliding_window` and `layer_types`."""
    windows = [layer.window for layer in config.layers]
    local = [w for w in windows if w is not None]
    return {
        "sliding_window": local[0] if local else 4096,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }
