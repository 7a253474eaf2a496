"""Export of Hugging Face directories that `transformers` and vLLM load unchanged.

There are five forms. Plain: the family's usual config.json, with unequal FFN widths under
`per_layer_config`. Padded: unequal FFNs are padded with zero neurons to the widest; the outputs are
the same. Deci: a Llama's widths under `block_configs` (models/families/deci.py). Native: the whole
config also under "ffn_heterogeneity", for models that config.json cannot express. Classifier: one
of these, with a task's head on the last layer as `...ForSequenceClassification`
(io/hf/classifiers.py).
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from ffn_heterogeneity.heads import ROOT
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.files import atomic_path, copy_tree, is_bucket, walk
from ffn_heterogeneity.io.hf import classifiers
from ffn_heterogeneity.io.hf.structure import (
    KEY,
    cast,
    checked_leaves,
    structural_leaves,
    write_structure,
)
from ffn_heterogeneity.io.pieces import Spec, open_pieces
from ffn_heterogeneity.io.read import read_object
from ffn_heterogeneity.io.tokenizer_files import save_tokenizer
from ffn_heterogeneity.models import families
from ffn_heterogeneity.models.config import (
    ConfigError,
    LayerConfig,
    ModelConfig,
    check_count,
    config_to_dict,
)
from ffn_heterogeneity.models.families.common import token_id
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.tree import AUXILIARY, flatten
from ffn_heterogeneity.wording import check_choice, naming

# Key of config.json for what the native form adds.
NATIVE_KEY = "ffn_heterogeneity"
GENERATION = "generation_config.json"
MAX_SHARD_BYTES = 5 * 10**9
EXPORTS = ("auto", "padded", "native", "deci", "classifier")
STRUCTURES = ("fold", "keep")


def save_pretrained(
    config: ModelConfig,
    params: dict,
    directory: str | os.PathLike,
    *,
    tokenizer: Any = None,
    export: str = "auto",
    dtype: Any = None,
    extra: dict | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    structure: str = "fold",
) -> epath.Path:
    """Write config.json, generation_config.json, safetensors and the tokenizer to `directory`.

    In every form, masks and adapters are folded into their kernels, and neuron factors into the
    rows of `down`. With `structure="keep"` they are also written separately (io/hf/structure.py),
    and `load_model` restores them; a task's head is always restored. The directory is built under a
    temporary name and moved (to a bucket: copied).

    Args:
      params: stacked or unstacked, numpy or jax.
      tokenizer: anything with `save_pretrained(directory)`.
      export: "auto" (plain if the family's config can express the model, else native), "padded",
        "native", "deci", or "classifier": as "auto", but an error for a model without such a head.
      dtype: dtype to cast to; None keeps each leaf's dtype.
      extra: JSON-ready facts for config.json under "ffn_heterogeneity" (removed indices...).
      max_shard_bytes: larger models are written as shards with an index.
      overwrite: replace an existing non-empty directory.
      structure: "fold" or "keep".

    Returns:
      The directory.

    Raises:
      CheckpointError: a leaf missing, unknown or of the wrong shape; "padded" if padding is not
        enough, or with structure to keep; a non-empty directory.
      ConfigError: "deci" for a model that it cannot express.
    """
    check_choice("structure", structure, STRUCTURES, CheckpointError)
    directory = epath.Path(directory)
    if directory.exists() and not overwrite and (directory.is_file() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not empty: choose another, or pass overwrite=True"
        )
    params = {name: subtree for name, subtree in params.items() if name not in AUXILIARY}
    tree = unstack(jax.tree.map(np.asarray, params))
    head, family = config.head, families.family_by_name(config.family)
    heads = flatten({ROOT: tree.pop(ROOT)}) if head else {}
    classifier = classifiers.is_published(config, export)
    config = dataclasses.replace(config, head=None)
    if classifier:
        config, tree, heads = classifiers.parts_of_class(config, family, tree, heads)
    structural = structural_leaves(flatten(tree)) if structure == "keep" else {}
    leaves = checked_leaves(config, tree)
    if structural and export == "padded":
        raise CheckpointError("structure='keep' and export='padded': fold it, or do not pad")
    form = choose_form(config, export)
    shapes = families.expected_shapes(form.config)
    leaves = separate_experts(leaves) if export == "padded" else leaves
    leaves = {path: pad(leaf, shapes[path]) for path, leaf in leaves.items()}
    rules, more = family.rules(form.config), {}
    if classifier:
        rules, more = classifiers.files_of_class(form.config, family, head)
        leaves |= heads
    else:
        structural |= heads  # no other tool has a form for them
    leaves, structural = cast(leaves, dtype), cast(structural, dtype)
    facts = dict(extra or {})
    with local_directory(directory) as temporary:
        with open_pieces(temporary, _specs(rules, leaves), max_shard_bytes) as pieces:
            for rule in rules:
                saved = rule.save([leaves[path] for path in rule.paths])
                for name, array in zip(rule.names, saved, strict=True):
                    pieces.write(name, array)
        if structural:
            facts[KEY] = write_structure(temporary, structural, leaves)
        if head:
            facts[ROOT] = {"name": head.name, "settings": head.settings}
        dtypes = {leaf.dtype for leaf in leaves.values()}
        write_configs(temporary, form, dtypes, facts, more)
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary, config.token_types > 1)
    return directory


@contextlib.contextmanager
def local_directory(directory: epath.Path) -> Iterator[Path]:
    """Yield a temporary directory that becomes `directory` at the end.

    It is a sibling and then moved; for a bucket, it is on the local disk and then copied, with
    config.json last, because a directory without it is not a model.
    """
    if not is_bucket(directory):
        with atomic_path(directory, directory=True) as temporary:
            yield Path(os.fspath(temporary))
        return
    with tempfile.TemporaryDirectory() as held:
        temporary = Path(held)
        yield temporary
        (directory / "config.json").unlink(missing_ok=True)
        for old in walk(directory) if directory.exists() else ():  # of an overwritten model
            old.unlink()
        copy_tree(epath.Path(temporary), directory, last="config.json")


class WrittenForm(NamedTuple):
    """A model in the form in which it is written.

    Attributes:
      config: config of the written leaves: with "padded" wider than the model, see `pad`.
      name: form of config.json: "plain", "native" or "deci".
      values: content of config.json in that form.
    """

    config: ModelConfig
    name: str
    values: dict[str, Any]


def choose_form(config: ModelConfig, export: str) -> WrittenForm:
    """Choose the form in which `export` writes a model.

    Raises:
      CheckpointError, ConfigError: an unknown form, or one that cannot express the model.
    """
    check_choice("export", export, EXPORTS, CheckpointError)
    if export == "padded":
        config = config.with_widths(config.widest)
        config = dataclasses.replace(config, layers=tuple(map(_unmerged, config.layers)))
    values = families.config_to_hf(config)
    if export == "native":
        return WrittenForm(config, export, values)
    # A classifier's class omits the language-model head; no key is needed.
    expected = dataclasses.replace(config, lm_head=not config.is_encoder, generation="")
    expressible = families.config_from_hf(values) == expected
    if export in ("padded", "deci") and not expressible:
        raise CheckpointError(
            f"the {config.family} config.json cannot express this model even with equal widths: "
            "use export='native'"
        )
    if export == "deci":
        return WrittenForm(config, export, families.to_deci(config, values))
    return WrittenForm(config, "plain" if expressible else "native", values)


def _unmerged(layer: LayerConfig) -> LayerConfig:
    """The layer with one expert for each router column."""
    if layer.routes is None:
        return layer
    return dataclasses.replace(layer, experts=layer.routes + layer.shared, routes=None)


def separate_experts(leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the leaves with a copy of a merged expert for each of its router columns.

    Says so on stderr, because the file is as large as that of the model before merging.
    """
    merged = {p.removesuffix("expert_of"): x for p, x in leaves.items() if p.endswith("expert_of")}
    if merged:
        print("merged experts are written once per router column", file=sys.stderr)
    separate = {}
    for path, leaf in leaves.items():
        ffn = next((one for one in merged if path.startswith(one)), None)
        if ffn is None or path.startswith(f"{ffn}router"):
            separate[path] = leaf
        elif not path.endswith("expert_of"):
            separate[path] = leaf[merged[ffn]]
    return separate


def pad(leaf: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pad each axis with zeros at the end: zero neurons that have no effect."""
    if leaf.shape == shape:
        return leaf
    return np.pad(leaf, [(0, new - old) for old, new in zip(leaf.shape, shape, strict=True)])


def transformers_class(output: str | os.PathLike) -> str:
    """Class of transformers that loads all of a directory written here; "" if none does."""
    path = epath.Path(output) / "config.json"
    values = read_object(path) if path.exists() else {}
    native = values.get(NATIVE_KEY, {})
    if not values or "config" in native or {"block_configs", "per_layer_config"} & set(values):
        return ""
    name = str(values["architectures"][0])
    if name.endswith(classifiers.CLASS):
        return "AutoModelForSequenceClassification"
    if ROOT in native:
        return ""
    if name.endswith("ForConditionalGeneration"):
        return "AutoModelForSeq2SeqLM"
    if name == "T5EncoderModel":  # AutoModel would make a decoder, too
        return "AutoModelForTextEncoding"
    encoder = re.search(r"(?<!LMHead)Model$", name)
    return "AutoModel" if encoder else "AutoModelForCausalLM"


def loads_in(output: str | os.PathLike) -> str:
    """One-line list of the programs that load a directory or .gguf file written here."""
    if os.fspath(output).endswith(".gguf"):
        return "loads in: llama.cpp and what is built on it, this library"
    if not (epath.Path(output) / "config.json").exists():
        return "loads in: PEFT on that base, this library"
    loaded = {
        "AutoModelForSequenceClassification": "transformers (AutoModelForSequenceClassification)",
        "AutoModelForCausalLM": "transformers, vLLM, llama.cpp's converter",
        "AutoModelForSeq2SeqLM": "transformers (AutoModelForSeq2SeqLM)",
        "AutoModelForTextEncoding": "transformers (AutoModelForTextEncoding)",
        "AutoModel": "transformers",
    }
    if name := transformers_class(output):
        return f"loads in: {loaded[name]}, this library"
    values = read_object(epath.Path(output) / "config.json")
    if "config" in values.get(NATIVE_KEY, {}):
        return "loads in: this library alone (its config.json cannot say all of the model)"
    if ROOT in values.get(NATIVE_KEY, {}):
        return "loads in: this library; in others without the head (README.md may have its lines)"
    if "block_configs" in values:
        return (
            "loads in: this library, mlx-lm, llama.cpp's converter (tokenizers of Llama 2 and 3); "
            "vLLM and transformers with NVIDIA's DeciLM code, which is not in it"
        )
    return (
        "loads in: this library (FFN widths differ by layer; transformers reads the config and "
        "rejects the weights: write it padded for it and vLLM, Llama's as .gguf for llama.cpp)"
    )


def _specs(rules: list[families.Rule], leaves: dict[str, np.ndarray]) -> dict[str, Spec]:
    """{tensor name: its shape and dtype}, in file order."""
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    specs = {}
    for rule in rules:
        dtype = np.result_type(*(leaves[path].dtype for path in rule.paths))
        for name, shape in zip(rule.names, rule.stored_shapes(shapes), strict=True):
            specs[name] = Spec(shape, dtype)
    return specs


def write_configs(
    directory: Path,
    form: WrittenForm,
    dtypes: set[np.dtype],
    extra: dict | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and, for a language model, generation_config.json.

    Arguments are as in `save_pretrained`.

    Args:
      more: further keys of config.json.
    """
    # The narrowest dtype that can hold every leaf: transformers casts all leaves to it.
    dtype = str(jnp.result_type(*dtypes))
    config, values = form.config, form.values | {"dtype": dtype, "torch_dtype": dtype}
    section = dict(extra or {})
    if form.name == "native":
        stored_config = dataclasses.replace(config, generation="")  # it has a separate file
        section |= {"config": config_to_dict(stored_config), "ffn_widths": list(config.ffn_widths)}
    values |= {NATIVE_KEY: section} if section else {}
    values |= more or {}
    _write_json(directory / "config.json", values)
    if config.lm_head:
        _write_json(directory / GENERATION, _generation_json(config))


def _generation_json(config: ModelConfig) -> dict:
    """Content of generation_config.json: the model's, or the ids of config.json."""
    if config.generation:
        return json.loads(config.generation)
    eos = list(config.eos_id) if isinstance(config.eos_id, tuple) else config.eos_id
    ids = {"bos_token_id": config.bos_id, "eos_token_id": eos, "pad_token_id": config.pad_id}
    return {"_from_model_config": True} | {k: v for k, v in ids.items() if v is not None}


def with_generation(config: ModelConfig, directory: Path) -> ModelConfig:
    """Return the config with generation_config.json if that contains more than the ids.

    Raises:
      CheckpointError: the file is not JSON, `eos_token_id` is not an id, or `do_sample` not a bool.
    """
    path = directory / GENERATION
    if not config.lm_head or not path.is_file():
        return config
    values = read_object(path)
    said = {key: value for key, value in values.items() if key != "transformers_version"}
    if {"_from_model_config": True} | said == _generation_json(config):
        return config
    eos = said.get("eos_token_id")
    with naming(str(path), ConfigError, CheckpointError):
        for one in eos if isinstance(eos, list) else [eos]:
            if token_id(one) is not None:
                check_count("eos_token_id", one, 0)
    if not isinstance(said.get("do_sample"), bool | None):
        raise CheckpointError(f"{path}: do_sample={said['do_sample']!r:.60}: write true or false")
    return dataclasses.replace(config, generation=json.dumps(values, sort_keys=True))


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")
