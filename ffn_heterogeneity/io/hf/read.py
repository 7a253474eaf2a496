"""Reading of Hugging Face directories and hub ids: only safetensors, without PyTorch or pickle.

`read_pretrained` is strict: every tensor is mapped exactly once, or an error names it and its file.
Its inverse, `save_pretrained`, is in `export.py`.
"""

import dataclasses
import functools
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ffn_heterogeneity.heads import HEADS, ROOT, head_shapes, make_head
from ffn_heterogeneity.io import safetensors, tokenizer_files
from ffn_heterogeneity.io.assemble import (
    Stored,
    assemble,
    leaf_shapes,
    with_embedding,
    without_tied,
)
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf import classifiers, peft
from ffn_heterogeneity.io.hf.export import GENERATION, NATIVE_KEY, with_generation
from ffn_heterogeneity.io.hf.structure import FOLDER, KEY, put_back, read_structure
from ffn_heterogeneity.io.read import read_object
from ffn_heterogeneity.io.safetensors import Tensor, open_directory
from ffn_heterogeneity.models.config import ConfigError, HeadConfig, ModelConfig, config_from_dict
from ffn_heterogeneity.models.families import Family, Rule, config_from_hf, family_by_name
from ffn_heterogeneity.wording import first_line, some

_HUB_PATTERNS = ["config.json", GENERATION, "model.safetensors", "model-*.safetensors"]
_HUB_PATTERNS += [safetensors.INDEX, "structure/*", *tokenizer_files.FILES]
_HUB_PATTERNS += [peft.CONFIG, peft.WEIGHTS]  # of a repository with adapters alone


def read_config(directory: str | os.PathLike) -> ModelConfig:
    """Read the model's config from config.json; a native section takes priority.

    Raises:
      CheckpointError: no config.json, not JSON, an unknown kind of model, or missing fields.
    """
    return _described(directory)[0]


def _described(directory: str | os.PathLike) -> tuple[ModelConfig, Family, dict[str, Any]]:
    """(the model's config, its family, the contents of config.json)."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: not a Hugging Face model directory")
    values = read_object(path)
    try:
        native = values.get(NATIVE_KEY, {})
        is_native = "config" in native
        config = config_from_dict(native["config"]) if is_native else config_from_hf(values)
        family = family_by_name(config.family)
        by_tensors = None if is_native else family.by_tensors
        # The tensors' names decide what config.json does not specify.
        asked = by_tensors is not None or not values.get("architectures")
        names = _names(directory, family) if asked else set()
        if by_tensors is not None and names:
            config = by_tensors(config, values, names)
        head = config.head
        if classifiers.is_class(values, family, names):
            head, config = classifiers.read_head(values), classifiers.as_class(config, family)
        if ROOT in native:
            head = HeadConfig.of(native[ROOT]["name"], native[ROOT]["settings"])
        config = dataclasses.replace(config, head=head)
        if head and head.name in HEADS:
            make_head(config, head)  # checks the head's settings
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} is incomplete or malformed: {error!r}") from None
    if is_native and list(config.ffn_widths) != native.get("ffn_widths", list(config.ffn_widths)):
        raise CheckpointError(f"{path}: {NATIVE_KEY}.ffn_widths disagrees with its config")
    return with_generation(config, Path(directory)), family, values


def _names(directory: str | os.PathLike, family: Family) -> set[str]:
    """Names of the directory's tensors in the family's form; empty if it has none."""
    tensors = safetensors.open_directory(directory) if safetensors.is_there(directory) else ()
    return {family.own_name(name) for name in tensors}


def read_pretrained(
    directory: str | os.PathLike, *, dtype: Any = None, check_finite: bool = True
) -> tuple[ModelConfig, dict]:
    """Return `(config, stacked tree of numpy arrays)` of a directory.

    Args:
      dtype: dtype of every leaf; None keeps the stored dtypes (bf16 through ml_dtypes).
      check_finite: raise an error for NaN and infinity.

    Raises:
      CheckpointError: see `read_config`, `safetensors.open_directory`, `assemble` and
        `structure.read_structure`.
    """
    config, family, values = _described(directory)
    section = _structure_section(directory, values)
    options = {"check_finite": check_finite, "dtype": None if section else dtype}
    params = assemble(config, *_tables(directory, config, family, values), **options)
    if section:
        params = read_structure(Path(directory), config, params, section, dtype)
    return config, params


def read_shapes(directory: str | os.PathLike) -> tuple[ModelConfig, dict]:
    """Return the result of `read_pretrained` with shapes and dtypes as leaves; reads only headers.

    Raises the same errors, except those about values.
    """
    config, family, values = _described(directory)
    section = _structure_section(directory, values)
    leaves = leaf_shapes(config, *_tables(directory, config, family, values, verbose=False))
    stored = open_directory(Path(directory) / FOLDER) if section else {}
    structural = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in stored.items()
    }
    return config, jax.eval_shape(functools.partial(put_back, config), leaves, structural)


def _tables(
    directory: str | os.PathLike,
    config: ModelConfig,
    family: Family,
    values: Mapping[str, Any],
    verbose: bool = True,
) -> tuple:
    """(rules, tensors, regexes of redundant ones, shapes of additional leaves)."""
    tensors, rules = _stored(directory, config, family, verbose), family.rules(config)
    if classifiers.is_class(values, family, tensors):
        rules = [*rules, *classifiers.head_rules(family)]
        return rules, tensors, family.redundant, head_shapes(config)
    return rules, tensors, family.redundant, {}


def open_pretrained(
    directory: str | os.PathLike,
) -> tuple[ModelConfig, Family, list[Rule], dict[str, Stored]]:
    """Return (config, family, its rules, its tensors) of a directory, to read tensors one by one.

    Raises:
      CheckpointError: as `read_pretrained`, except for values; a directory with structure.
    """
    config, family, values = _described(directory)
    if _structure_section(directory, values):
        raise CheckpointError(
            f"{directory} keeps structure (masks, adapters, P), which a streaming surgery does not "
            "read: leave streaming=true out"
        )
    rules, tensors = family.rules(config), _stored(directory, config, family)
    leaf_shapes(config, rules, tensors, family.redundant)
    return config, family, rules, without_tied(config, rules, tensors)


def _structure_section(directory: str | os.PathLike, values: Mapping[str, Any]) -> dict:
    """Section of config.json about saved structure (io/hf/structure.py); empty if there is none."""
    native = values.get(NATIVE_KEY, {})
    section = native.get(KEY, {}) if isinstance(native, dict) else None
    if not isinstance(section, dict):
        raise CheckpointError(f"{directory}/config.json: {NATIVE_KEY}.{KEY} is no object")
    return section


def _stored(
    directory: str | os.PathLike, config: ModelConfig, family: Family, verbose: bool = True
) -> dict[str, Stored]:
    """Return the directory's tensors by the family's names, without unused ones.

    Unused are pre-training heads, and a pooler that the model's class does not read; with `verbose`
    they are listed on stderr.

    Raises:
      CheckpointError: a tensor under two names; and as `safetensors.open_directory` and `parts`.
    """
    tensors: dict[str, Stored] = {}
    left_out = []
    unused = (*family.left_out, *(() if config.pooler else (r"pooler\..*",)))
    for name, tensor in open_directory(directory).items():
        tensor_name = family.own_name(name)
        if any(re.fullmatch(pattern, tensor_name) for pattern in unused):
            left_out.append(name)
            continue
        for part_name, part in parts(family, tensor_name, tensor):
            if part_name in tensors:
                other = tensors[part_name].name
                raise CheckpointError(
                    f"{tensor.file}: {name!r} and {other!r} are the same tensor of the model"
                )
            tensors[part_name] = Stored(
                part.shape, str(part.file), part.load, name, part.dtype, part.start
            )
    if left_out and verbose:
        what = f"{len(left_out)} tensors that the model does not use"
        print(f"left out: {what}: {some(left_out, 2)}", file=sys.stderr)
    return with_embedding(config, family.rules(config), tensors, family.tables)


def parts(family: Family, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each expert's tensors in a stacked one; any other is its only part.

    Raises:
      CheckpointError: a stacked tensor that cannot be split into the parts of `Family.stacked`.
    """
    end = next((end for end in family.stacked if name.endswith(end)), None)
    if end is None:
        yield name, tensor
        return
    ends, shape = family.stacked[end], tensor.shape
    if len(shape) != 3 or shape[1] % len(ends):
        what = f"{len(ends)} equal parts of rows per expert"
        raise CheckpointError(f"tensor {name!r} has shape {shape}; expected {what}")
    rows = tensor._replace(shape=(shape[0] * shape[1], shape[2])).rows(shape[0] * len(ends))
    for expert, part in itertools.product(range(shape[0]), ends):
        yield name.removesuffix(end) + part.format(e=expert), next(rows)


def download(
    repo_id: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    only: Sequence[str] | None = None,
) -> Path:
    """Download a hub repository's config, safetensors and tokenizer; return the local directory.

    Args:
      weights: False: only config.json, or that of adapters.
      only: patterns of the files to fetch instead.

    Raises:
      CheckpointError: offline, not found, gated, or not a valid id; the message names the fix.
    """
    import huggingface_hub

    patterns = list(only or (_HUB_PATTERNS if weights else ["config.json", peft.CONFIG]))
    at = f" at revision {revision!r}" if revision else ""
    try:
        local = huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=patterns
        )
    except (OSError, ValueError, RuntimeError, huggingface_hub.errors.EntryNotFoundError) as error:
        raise CheckpointError(
            f"cannot fetch {repo_id!r}{at} from the Hugging Face hub "
            f"({type(error).__name__}: {first_line(error)}): check the name, the network and "
            "`hf auth login`, or pass a local directory or .gguf file"
        ) from None
    return Path(local)
