"""Reading of GGUF files, as float32: every quantization that the `gguf` package can dequantize.

llama.cpp's converter permutes or shifts some tensors; each family's `gguf_transform` undoes that.
"""

import os
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.io.assemble import Stored, assemble, leaf_shapes
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.gguf.file import GGUFFile, GGUFTensor, open_gguf
from ffn_heterogeneity.models.config import ConfigError, ModelConfig
from ffn_heterogeneity.models.families import Family, family_by_name, family_from_gguf
from ffn_heterogeneity.models.families.common import token_id
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.tree import unflatten

TOKEN_IDS = {
    "bos_id": "tokenizer.ggml.bos_token_id",
    "eos_id": "tokenizer.ggml.eos_token_id",
    "pad_id": "tokenizer.ggml.padding_token_id",
}
_ROPE_FREQS = "rope_freqs.weight"


def read_gguf(
    path: str | os.PathLike | GGUFFile, *, dtype: Any = None, check_finite: bool = True
) -> tuple[ModelConfig, dict]:
    """Return `(config, stacked tree of numpy arrays)`, in float32 or `dtype`.

    Raises:
      CheckpointError: damaged file, unknown architecture or quantization, a tensor missing, extra,
        of the wrong shape, or with NaN or infinity.
    """
    file = path if isinstance(path, GGUFFile) else open_gguf(path)
    config, family, tensors = _read_header(file)
    options = {"transform": family.gguf_transform, "dtype": dtype, "check_finite": check_finite}
    return config, assemble(config, family.gguf_rules(config), tensors, **options)


def read_gguf_shapes(path: str | os.PathLike) -> tuple[ModelConfig, dict]:
    """Return the result of `read_gguf` with shapes and dtypes as leaves; no weight is read."""
    config, family, tensors = _read_header(open_gguf(path))
    leaves = leaf_shapes(config, family.gguf_rules(config), tensors, ())
    return config, jax.eval_shape(lambda flat: restack(config, unflatten(flat)), leaves)


def read_gguf_config(path: str | os.PathLike) -> ModelConfig:
    """Return the model's config without reading weights.

    Raises:
      CheckpointError: damaged file or unknown architecture.
    """
    return _read_header(open_gguf(path))[0]


def _read_header(file: GGUFFile) -> tuple[ModelConfig, Family, dict[str, Stored]]:
    tensors = {t.name: Stored(t.shape, file.path, _loader(t, file)) for t in file.tensors.values()}
    architecture = file.fields.get("general.architecture")
    try:
        read = family_from_gguf(architecture).from_gguf
        config = read(_metadata(file, architecture, tensors))
        family = family_by_name(config.family)  # Mixtral's architecture is Llama's
        family.gguf_rules(config)
    except ConfigError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{file.path}: malformed metadata: {error!r}") from None
    return config, family, tensors


def _metadata(file: GGUFFile, architecture: str, tensors: dict[str, Stored]) -> dict[str, Any]:
    """Input of `Family.from_gguf`; moves the rope tensor, which is metadata, out of `tensors`."""
    prefix = f"{architecture}."
    meta = {k.removeprefix(prefix): v for k, v in file.fields.items() if k.startswith(prefix)}
    for ours, key in TOKEN_IDS.items():
        if key in file.fields:
            meta[ours] = token_id(file.fields[key])
    if "token_embd.weight" not in tensors:
        raise ConfigError("missing tensors: 'token_embd.weight'")
    meta["vocab_size"] = tensors["token_embd.weight"].shape[0]
    meta["tied"] = "output.weight" not in tensors
    if _ROPE_FREQS in tensors:
        meta["rope_freqs"] = tensors.pop(_ROPE_FREQS).load()
    return meta


def _loader(tensor: GGUFTensor, file: GGUFFile):
    def load() -> np.ndarray:
        try:
            return tensor.dequantize()
        except NotImplementedError:
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name!r} has type {tensor.type.name}, which the gguf "
                "package cannot dequantise"
            ) from None

    return load
