"""Architecture of a model as a frozen, hashable config.

A model is a `ModelConfig` plus a plain nested dict of arrays. The config is static under `jax.jit`;
values that may change without recompiling (learning rates, loss weights) are not part of it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ffn_heterogeneity.models.layer_config import ConfigError as ConfigError
from ffn_heterogeneity.models.layer_config import LayerConfig as LayerConfig
from ffn_heterogeneity.models.layer_config import RopeConfig as RopeConfig
from ffn_heterogeneity.models.layer_config import check_count as check_count
from ffn_heterogeneity.wording import check_choice, check_number, naming

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
NORM_KINDS = ("rms", "layer", "layer_without_parameters")
POSITIONS = ("rotary", "learned", "relative")
KINDS = ("decoder", "encoder", "encoder_decoder")


# {name in transformers: name here}, for fields with equal values.
_THEIRS = {"hidden_size": "d_model", "num_hidden_layers": "n_layers"}
_THEIRS |= {"num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads"}
_THEIRS |= {"max_position_embeddings": "max_position", "tie_word_embeddings": "tied"}
_THEIRS |= {"bos_token_id": "bos_id", "eos_token_id": "eos_id", "pad_token_id": "pad_id"}


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """A task's head on top of the model, as saved in config.json.

    Attributes:
      name: a name of `heads.HEADS`.
      text: its settings as JSON (a dict would not be hashable).
    """

    name: str
    text: str = "{}"

    @classmethod
    def of(cls, name: str, settings: Mapping[str, Any]) -> HeadConfig:
        """Return a head with settings that can be written as JSON.

        Raises:
          ConfigError: they cannot.
        """
        with naming(
            f"head {name!r}: settings that are no JSON", (TypeError, ValueError), ConfigError
        ):
            return cls(name, json.dumps(dict(settings), sort_keys=True, allow_nan=False))

    @property
    def settings(self) -> dict[str, Any]:
        return json.loads(self.text)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder, an encoder, or both. One `LayerConfig` per layer; layers may differ.

    Attributes:
      family: name of the module in `models/families` that maps it to and from other formats.
      norm_kind: kind of every norm: "rms", "layer" (LayerNorm: scale and bias), or
        "layer_without_parameters" (OLMo 1: no leaf at all); see models/norms.py.
      norm_offset: norms multiply by (norm_offset + scale): 1.0 for Gemma, 0.0 for Llama.
      post_norms: also a norm after attention and after the FFN, before the residual (Gemma 2, 3).
      qk_norm: a norm over the head dimension of queries and keys (Gemma 3, Qwen3).
      qkv_clip: queries, keys and values are clipped to [-qkv_clip, qkv_clip] (OLMo), or None.
      parallel_residual: the FFN reads the block's input, not the sum after attention (GPT-NeoX).
      attention_bias, attention_out_bias, ffn_bias: biases of q, k, v; of the output projection; of
        all of the FFN's kernels.
      embedding_multiplier: embeddings are multiplied by it (Gemma: sqrt(d_model)).
      query_scale: attention logits are multiplied by it (usually head_dim ** -0.5).
      attention_softcap, final_softcap: logits become cap * tanh(logits / cap); None: no cap.
      n_encoder_layers: of an encoder-decoder, how many of the first layers are the encoder's; these
        are bidirectional, the others causal with cross-attention. 0: one stack.
      lm_head: whether there is a head for logits over the vocabulary; False: an encoder.
      tied: the output head is the transposed embedding (no meaning without `lm_head`).
      max_position: maximum number of tokens in a row.
      output_multiplier: the head's input is multiplied by it (T5 1.0: d_model ** -0.5).
      positions: "rotary", in the layers that have a `rope`; "learned": a table of first_position
        + max_position rows is added to the embeddings, with dropout in training; or "relative": a
        bias for each distance and head is added to the attention logits, one table per stack (T5).
      relative_buckets, relative_distance: rows of those tables, and the distance from which all
        positions share a row.
      first_position: the row of that table for a document's first token (RoBERTa: 2).
      token_types: number of token types, for the sentences of a pair; 0: none.
      embedding_norm: a norm after the sum of the embeddings, before that dropout.
      pooler: tanh of a linear layer on the first token (BERT).
      attention_dropout: whether the run's dropout also applies to attention weights.
      bos_id, eos_id, pad_id: special token ids; None if the model has none.
      generation: generation_config.json as JSON if it has more than these ids, else "".
      head: a task's head, with leaves in addition to the model's, or None.
    """

    family: str
    vocab_size: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    activation: str = "silu"
    norm_eps: float = 1e-5
    norm_kind: str = "rms"
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    qkv_clip: float | None = None
    parallel_residual: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    ffn_bias: bool = False
    embedding_multiplier: float = 1.0
    query_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    n_encoder_layers: int = 0
    lm_head: bool = True
    tied: bool = True
    output_multiplier: float = 1.0
    max_position: int = 8192
    positions: str = "rotary"
    relative_buckets: int = 32
    relative_distance: int = 128
    first_position: int = 0
    token_types: int = 0
    embedding_norm: bool = False
    pooler: bool = False
    attention_dropout: bool = False
    bos_id: int | None = 1
    eos_id: int | tuple[int, ...] | None = 2
    pad_id: int | None = None
    generation: str = ""
    head: HeadConfig | None = None

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim", "max_position"):
            check_count(name, getattr(self, name), 1)
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"n_heads={self.n_heads} must be a multiple of n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim % 2 and any(layer.rope is not None for layer in self.layers):
            raise ConfigError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        check_choice("activation", self.activation, ACTIVATIONS, ConfigError)
        check_choice("norm_kind", self.norm_kind, NORM_KINDS, ConfigError)
        check_choice("positions", self.positions, POSITIONS, ConfigError)
        for name in ("first_position", "token_types", "n_encoder_layers"):
            check_count(name, getattr(self, name), 0)
        self._check_relative()
        for name in ("qkv_clip", "attention_softcap", "final_softcap"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, "(0, inf), or None", ConfigError)
        if not self.layers:
            raise ConfigError("layers is empty: a model needs at least one layer")
        check_number("norm_eps", self.norm_eps, "[0, 1)", ConfigError)
        if self.n_encoder_layers >= len(self.layers):
            raise ConfigError(
                f"n_encoder_layers={self.n_encoder_layers} of {len(self.layers)} layers: an "
                "encoder-decoder needs a decoder (an encoder alone has 0)"
            )
        self._check_ids()
        for i, layer in enumerate(self.layers):
            self._check_layer(i, layer)

    def _check_ids(self) -> None:
        """Check the token ids.

        Ids beyond the vocabulary are allowed: some files have them, for tokens that are never used.
        """
        single = {"bos_id": self.bos_id, "pad_id": self.pad_id}
        if isinstance(self.eos_id, tuple) and self.eos_id:
            for one in self.eos_id:
                check_count("eos_id", one, 0)
        else:
            single["eos_id"] = self.eos_id
        for name, value in single.items():
            if value is not None:
                check_count(name, value, 0)

    def _check_relative(self) -> None:
        """Check the table of relative positions: half of its rows, or a quarter, are exact."""
        check_count("relative_buckets", self.relative_buckets, 4)
        check_count("relative_distance", self.relative_distance, 1)
        if self.relative_buckets % 4 or self.relative_distance <= self.relative_buckets // 2:
            raise ConfigError(
                f"relative_buckets={self.relative_buckets} must be a multiple of 4, and "
                f"relative_distance={self.relative_distance} more than half of it"
            )

    def _check_layer(self, i: int, layer: LayerConfig) -> None:
        layer.check(f"layer {i}")
        encodes = i < self.n_encoder_layers
        if encodes == layer.causal and self.n_encoder_layers:
            raise ConfigError(f"layer {i}: causal={layer.causal} in the wrong stack")
        if self.lm_head and not layer.causal and not encodes:
            raise ConfigError(f"layer {i}: causal=False sees the next word: set lm_head=False")
        if layer.cross_attention != (self.kind == "encoder_decoder" and not encodes):
            raise ConfigError(
                f"layer {i}: cross_attention={layer.cross_attention}; the decoder's layers of an "
                "encoder-decoder have it, no others"
            )
        others = self.parallel_residual or self.post_norms or layer.norm_placement == "post"
        if layer.cross_attention and others:
            raise ConfigError(f"layer {i}: cross-attention needs norms before each branch alone")
        if layer.cross_attention and (
            self.qk_norm or self.qkv_clip is not None or self.positions == "learned"
        ):
            raise ConfigError(
                f"layer {i}: cross-attention works with none of qk_norm, qkv_clip and "
                "positions='learned'"
            )
        if layer.norm_placement == "post" and (self.parallel_residual or self.post_norms):
            raise ConfigError(
                f"layer {i}: norm_placement='post' works with neither parallel_residual="
                f"{self.parallel_residual} nor post_norms={self.post_norms}"
            )
        rope = layer.rope
        if rope is None:
            return
        if self.positions != "rotary":
            raise ConfigError(
                f"layer {i}: rope={rope} with positions={self.positions!r}: give None"
            )
        for name in ("theta", "linear_factor"):
            value = getattr(rope, name)
            check_number(f"layer {i}: rope {name}", value, "(0, inf)", ConfigError)
        for value in rope.llama3 or ():
            check_number(f"layer {i}: rope llama3 {rope.llama3}", value, "(0, inf)", ConfigError)
        if rope.llama3 and rope.llama3[1] >= rope.llama3[2]:
            raise ConfigError(f"layer {i}: rope llama3 {rope.llama3}: expected low < high factor")
        rotated = rope.rotated(self.head_dim)
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise ConfigError(
                f"layer {i}: rope.fraction={rope.fraction} rotates {rotated} of "
                f"head_dim={self.head_dim} dimensions: it must be an even number from 2 on"
            )

    if not TYPE_CHECKING:  # a type checker still reports names that are no fields

        def __getattr__(self, name: str) -> Any:
            """Return a field by its name in transformers; else raise AttributeError with a hint.

            `intermediate_size` is the width of all FFNs, if they have the same.
            """
            if name == "intermediate_size" and self.uniform_width:
                return self.ffn_widths[0]
            if name in _THEIRS:
                return getattr(self, _THEIRS[name])
            # Without reading `self`: copy and pickle look up names before any field exists.
            way = "it has ffn_widths (one per layer), n_layers, and dataclasses.fields(config)"
            raise AttributeError(f"a ModelConfig has no {name!r}: {way}")

    @property
    def padding_id(self) -> int | None:
        """Id for padding rows: `pad_id`, by default an end-of-text id."""
        eos = self.eos_id[0] if isinstance(self.eos_id, tuple) else self.eos_id
        return eos if self.pad_id is None else self.pad_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a generated text: those of generation_config.json, else `eos_id`."""
        generation_ids = json.loads(self.generation or "{}").get("eos_token_id")
        ids = self.eos_id if generation_ids is None else generation_ids
        ids = ids if isinstance(ids, (list, tuple)) else (ids,)
        return tuple(one for one in ids if one not in (None, -1))

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.n_encoder_layers:
            return "encoder_decoder"
        return "encoder" if self.is_encoder else "decoder"

    @property
    def stacks(self) -> dict[str, tuple[int, int]]:
        """{"encoder" or "decoder": (its first layer, the layer behind its last)}."""
        first = self.n_encoder_layers
        if not first:
            return {self.kind: (0, self.n_layers)}
        return {"encoder": (0, first), "decoder": (first, self.n_layers)}

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Names of groups of layers: the stacks, and the layers with experts ("sparse")."""
        sparse = tuple(i for i, layer in enumerate(self.layers) if layer.experts is not None)
        return {name: tuple(range(*ends)) for name, ends in self.stacks.items()} | {
            "sparse": sparse
        }

    def encoder(self) -> ModelConfig:
        """The config of an encoder-decoder's encoder alone."""
        changes = {"n_encoder_layers": 0, "lm_head": False, "tied": True, "output_multiplier": 1.0}
        return dataclasses.replace(self, layers=self.layers[: self.n_encoder_layers], **changes)

    @property
    def is_encoder(self) -> bool:
        """True if every layer is bidirectional."""
        return not any(layer.causal for layer in self.layers)

    @property
    def final_norm(self) -> bool:
        """True if a norm follows the last layer, i.e. unless that layer ends with a norm."""
        return self.layers[-1].norm_placement == "pre"

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions; 0 if there is none."""
        return self.first_position + self.max_position if self.positions == "learned" else 0

    @property
    def row_limit(self) -> int:
        """Maximum row length: the number of learned positions; otherwise unlimited."""
        return self.max_position if self.position_rows else sys.maxsize

    @property
    def scale(self) -> float:
        """Multiplier of the attention logits."""
        return 1.0 / math.sqrt(self.head_dim) if self.query_scale is None else self.query_scale

    @property
    def ffn_widths(self) -> tuple[int, ...]:
        return tuple(layer.ffn_width for layer in self.layers)

    @property
    def uniform_width(self) -> bool:
        return len(set(self.ffn_widths)) == 1

    @property
    def widest(self) -> tuple[int, ...]:
        """Largest width of the layers of each layer's kind: dense, or with experts."""
        kinds = [layer.experts is None for layer in self.layers]
        both = list(zip(kinds, self.ffn_widths, strict=True))
        return tuple(max(width for other, width in both if other == kind) for kind in kinds)

    def with_widths(self, widths: Sequence[int]) -> ModelConfig:
        """Return the config with `widths[i]` inner neurons in layer i."""
        if len(widths) != self.n_layers:
            raise ConfigError(f"{len(widths)} widths for {self.n_layers} layers")
        layers = tuple(
            dataclasses.replace(layer, ffn_width=int(w))
            for layer, w in zip(self.layers, widths, strict=True)
        )
        return dataclasses.replace(self, layers=layers)


def config_to_dict(config: ModelConfig) -> dict:
    """JSON-ready dict; `config_from_dict` is its inverse."""
    return dataclasses.asdict(config)


def config_from_dict(values: dict) -> ModelConfig:
    """Rebuild a `ModelConfig` from `config_to_dict` (JSON lists become tuples again)."""
    values = dict(values)
    layers = []
    for layer in values.pop("layers"):
        layer = dict(layer)
        if layer["rope"] is not None:
            rope = dict(layer["rope"])
            if rope.get("llama3") is not None:
                rope["llama3"] = tuple(rope["llama3"])
            layer["rope"] = RopeConfig(**rope)
        layers.append(LayerConfig(**layer))
    if isinstance(values.get("eos_id"), list):
        values["eos_id"] = tuple(values["eos_id"])
    if values.get("head") is not None:
        values["head"] = HeadConfig(**values["head"])
    return ModelConfig(layers=tuple(layers), **values)
