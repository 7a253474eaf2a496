"""Export of GGUF files (F32, F16 or Q8_0) for llama.cpp and tools based on it."""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.files import atomic_path, reject_bucket
from ffn_heterogeneity.io.gguf.read import TOKEN_IDS
from ffn_heterogeneity.io.gguf.tokenizer_export import tokenizer_fields
from ffn_heterogeneity.io.hf.card import hub_of, licence_of, public_text
from ffn_heterogeneity.io.hf.structure import checked_leaves
from ffn_heterogeneity.models.config import ConfigError, ModelConfig
from ffn_heterogeneity.models.families import Family, family_by_name
from ffn_heterogeneity.models.families.llama import rope_factors
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.wording import check_choice, naming

# general.file_type of each.
TYPES = {"f32": 0, "f16": 1, "q8_0": 7}
_CANNOT = "GGUF cannot express this {} model"


def save_gguf(
    config: ModelConfig,
    params: dict,
    path: str | os.PathLike,
    *,
    tokenizer: Any = None,
    type: str = "f16",
    overwrite: bool = False,
    source: str = "",
) -> Path:
    """Write one .gguf file; masks, adapters and factors are folded into the kernels.

    A Llama with FFNs of unequal widths is written under llama.cpp's architecture `deci`, which has
    a width for each layer; other families need one width for all layers.

    Args:
      params: stacked or unstacked, numpy or jax.
      tokenizer: included in the file; None: a file without a tokenizer.
      type: dtype of matrices ("q8_0": if their rows are whole blocks of 32, otherwise f16);
        vectors are always float32.
      overwrite: replace an existing file.
      source: what the model was made from; its last part, or its hub id, becomes general.name in
        the file, and its license the file's license.

    Raises:
      CheckpointError: a model that the format cannot express, a leaf missing or of the wrong shape,
        an unknown kind of tokenizer, an existing file, NaN, or a weight too large for float16.
    """
    from gguf import GGUFWriter

    check_choice("type", type, tuple(TYPES), CheckpointError)
    reject_bucket(path)
    path = Path(path)
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists: choose another name, or pass overwrite=True")
    if any(layer.rope is None for layer in config.layers):
        raise CheckpointError(
            f"{_CANNOT.format(config.family)}: its layers have no rotary embedding"
        )
    family = family_by_name(config.family)
    if not family.stacked and any(layer.experts is not None for layer in config.layers):
        raise CheckpointError(f"{_CANNOT.format(config.family)}: llama.cpp's has no experts")
    leaves = checked_leaves(config, unstack(jax.tree.map(np.asarray, params)))
    architecture = family.gguf_architecture or family.name
    if not config.uniform_width:
        architecture = family.gguf_uneven
        if not architecture:
            raise CheckpointError(
                f"llama.cpp gives all layers of a {config.family} model one width: write it with "
                "export='padded' to a directory first, and that to GGUF"
            )
    fields = {f"{architecture}.{key}": value for key, value in metadata(config).items()}
    if tokenizer is not None:
        fields |= tokenizer_fields(tokenizer, config)
    fields |= {
        key: i for key, i in zip(TOKEN_IDS.values(), _ids(config), strict=True) if i is not None
    }
    fields |= {"general.file_type": TYPES[type], "general.quantization_version": 2}
    facts = {"name": hub_of(source) or public_text(source), "license": licence_of(source)}
    fields |= {f"general.{key}": value for key, value in facts.items() if source and value}
    tensors = _tensors(config, family, leaves)
    back = _read_back(config, family, tensors)
    # Several families may have one architecture (Mistral is read as a Llama).
    names = [name for name in vars(config) if name not in ("eos_id", "generation", "family")]
    if differ := [name for name in names if getattr(back, name) != getattr(config, name)]:
        raise CheckpointError(
            f"{_CANNOT.format(config.family)}: {', '.join(differ)} would be read as something else"
        )
    with atomic_path(path) as temporary:
        writer = GGUFWriter(os.fspath(temporary), architecture)
        for key, value in fields.items():
            _add(writer, key, value)
        _write_tensors(writer, tensors, type)
    return path


def metadata(config: ModelConfig) -> dict[str, Any]:
    """Return llama.cpp's metadata keys without their architecture prefix."""
    layer = next((each for each in config.layers if each.window is None), config.layers[0])
    local = next((each for each in config.layers if each.window is not None), None)
    widths = list(config.ffn_widths)
    epsilon = "layer_norm_rms_epsilon" if config.norm_kind == "rms" else "layer_norm_epsilon"
    fields: dict[str, Any] = {
        "context_length": config.max_position,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": widths[0] if config.uniform_width else widths,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{epsilon}": float(config.norm_eps),
        "rope.dimension_count": layer.rope.rotated(config.head_dim),
        "rope.freq_base": float(layer.rope.theta),
        "vocab_size": config.vocab_size,
    }
    if layer.experts is not None:
        fields |= {"expert_count": layer.experts, "expert_used_count": layer.top_k}
        fields["expert_feed_forward_length"] = layer.ffn_width
    if layer.rope.linear_factor != 1.0:
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": layer.rope.linear_factor}
    if local is not None:
        full = [i for i, each in enumerate(config.layers) if each.window is None]
        fields |= {
            "attention.sliding_window": local.window,
            "attention.sliding_window_pattern": full[0] + 1 if full else config.n_layers + 1,
            "rope.freq_base_swa": float(local.rope.theta),
        }
    if config.attention_softcap is not None:
        fields["attn_logit_softcapping"] = float(config.attention_softcap)
    if config.final_softcap is not None:
        fields["final_logit_softcapping"] = float(config.final_softcap)
    if config.qkv_clip is not None:
        fields["attention.clamp_kqv"] = float(config.qkv_clip)
    if config.family == "gpt_neox":
        fields["use_parallel_residual"] = config.parallel_residual
    return fields


def _read_back(config: ModelConfig, family: Family, tensors: dict[str, np.ndarray]) -> ModelConfig:
    """Return the config that a reader of the file makes of its metadata."""
    meta = metadata(config) | dict(zip(TOKEN_IDS, _ids(config), strict=True))
    meta["tied"] = "output.weight" not in tensors
    if "rope_freqs.weight" in tensors:
        meta["rope_freqs"] = tensors["rope_freqs.weight"]
    with naming(_CANNOT.format(config.family), (ConfigError, KeyError), CheckpointError):
        return family.from_gguf({key: v for key, v in meta.items() if v is not None})


def _ids(config: ModelConfig) -> tuple[int | None, ...]:
    """Return the ids of bos, eos (the first of several: the format has only one) and pad."""
    eos, *others = config.stop_ids or (None,)
    if others:
        print(f"GGUF has one eos: {eos}; left out: {others}", file=sys.stderr)
    return config.bos_id, eos, config.pad_id


def _tensors(
    config: ModelConfig, family: Family, leaves: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """{name: float32 array or a view}, in the family's order."""
    tensors = {}
    for rule in family.gguf_rules(config):
        turned = [
            family.gguf_untransform(config, path, np.asarray(leaves[path], np.float32))
            for path in rule.paths
        ]
        tensors |= dict(zip(rule.names, rule.save(turned), strict=True))
    rope = config.layers[0].rope
    if rope.llama3 is not None:
        tensors["rope_freqs.weight"] = rope_factors(rope, config.head_dim).astype(np.float32)
    return tensors


def _add(writer: Any, key: str, value: Any) -> None:
    from gguf import GGUFValueType

    kind = GGUFValueType.get_type(value)
    kind = GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind
    writer.add_key_value(key, value, kind)


def _write_tensors(writer: Any, tensors: dict[str, np.ndarray], type: str) -> None:
    """Write the tensors with only one converted tensor in memory in addition to the model."""
    from gguf import GGMLQuantizationType
    from gguf.constants import GGML_QUANT_SIZES

    kinds = {}
    for name, tensor in tensors.items():
        kind = GGMLQuantizationType[type.upper()] if tensor.ndim > 1 else GGMLQuantizationType.F32
        if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = GGMLQuantizationType.F16
        if name.endswith("ffn_gate_inp.weight"):  # a router, in float32 as in llama.cpp's files
            kind = GGMLQuantizationType.F32
        block, size = GGML_QUANT_SIZES[kind]
        kinds[name] = kind
        bytes_ = tensor.size // block * size
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), bytes_, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors.items():
        writer.write_tensor_data(_quantized(name, tensor, kinds[name]))
    writer.close()


def _quantized(name: str, tensor: np.ndarray, kind: Any) -> np.ndarray:
    """Return the tensor in the file's encoding of that kind."""
    from gguf.quants import quantize

    largest = np.abs(tensor).max(initial=0)
    if not largest <= (65_504 if kind.name != "F32" else np.inf):
        raise CheckpointError(f"{name}: {largest:g} is beyond float16: write it with type='f32'")
    return quantize(np.ascontiguousarray(tensor), kind)
