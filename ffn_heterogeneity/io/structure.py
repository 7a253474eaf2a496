"""Structure that a plain checkpoint cannot hold: masks, adapters, P, and the kernels they touch.

A directory that keeps its structure holds

    model.safetensors     the folded weights: what any other tool reads, the same function
    structure/            the structural leaves and the kernels beside them, unfolded, by path
    config.json           under "ffn_heterogeneity": "structure": digests of both

A reader of ours puts the leaves back; where a file of structure/ is missing or altered, or the
folded weights are no longer those that were written (another tool trained them), it refuses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ffn_heterogeneity.adapters import ADAPTERS, FFN_LEAVES, INTEGERS, adapters_of, data_leaves
from ffn_heterogeneity.adapters.macdrop import ROWS
from ffn_heterogeneity.adapters.nf4 import BLOCK, SCALES
from ffn_heterogeneity.heads import HEADS, ROOT
from ffn_heterogeneity.io.assemble import FLOATS, all_finite, narrowed
from ffn_heterogeneity.io.classifiers import head_shapes
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.pieces import Spec, open_pieces
from ffn_heterogeneity.io.safetensors import open_directory
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.shapes import expected_shapes
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.paths import flatten, unflatten
from ffn_heterogeneity.wording import naming

FOLDER, KEY = "structure", "structure"


def structural_leaves(leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The leaves of an unstacked tree that folding would lose, and the kernels they touch."""
    own = {name for adapter in ADAPTERS for name in adapter.leaves}
    touched = set()
    for path in leaves:
        module, _, name = path.rpartition("/")
        if name in own:
            touched.add(module)
        elif name in FFN_LEAVES:
            touched.add(f"{module}/down")

    def structural(path: str) -> bool:
        module, _, name = path.rpartition("/")
        return name in FFN_LEAVES or module in touched and name in own | {"kernel"}

    return {path: leaf for path, leaf in leaves.items() if structural(path)}


def write_structure(
    directory: Path, kept: Mapping[str, np.ndarray], folded: Mapping[str, np.ndarray]
) -> dict[str, str]:
    """Writes `<directory>/structure/`; returns the section of config.json that vouches for it.

    Args:
      kept: from `structural_leaves`.
      folded: path -> leaf of the weights as they stand in the checkpoint.
    """
    folder = directory / FOLDER
    folder.mkdir()
    specs = {path: Spec(leaf.shape, leaf.dtype) for path, leaf in kept.items()}
    with open_pieces(folder, specs, 5 * 10**9) as pieces:
        for path, leaf in kept.items():
            pieces.write(path, leaf)
    return {"files": _digest_of_files(folder), "folded": _digest(folded, _kernels(kept))}


def read_structure(
    directory: Path, config: ModelConfig, params: dict, section: Mapping[str, Any], dtype: Any
) -> dict:
    """The stacked tree with the structure put back.

    Args:
      params: the folded weights, stacked, as they were read (not cast).
      section: of config.json, see `write_structure`.
      dtype: see `cast`.

    Raises:
      CheckpointError: structure/ or the folded weights are not those that were written, or a leaf
        does not fit the model; the message names it.
    """
    folder, leaves = directory / FOLDER, flatten(unstack(params))
    if not folder.is_dir():
        raise CheckpointError(
            f"{directory}: {FOLDER}/ is missing, which config.json speaks of: copy the directory "
            "whole, or remove the section from config.json to read the folded weights alone"
        )
    if _digest_of_files(folder) != section.get("files"):
        raise CheckpointError(f"{folder} was altered or cut: copy the directory again")
    kept = {path: np.array(view) for path, (view, _) in open_directory(folder).items()}
    _check(folder, kept, expected_shapes(config) | _head_shapes(folder, config, kept))
    if _digest(leaves, _kernels(kept)) != section.get("folded"):
        raise CheckpointError(
            f"{directory}: the weights are not those that {FOLDER}/ was written with (trained by "
            f"another tool?): remove {FOLDER}/ and its section in config.json to read them alone"
        )
    return put_back(config, cast(leaves, dtype), cast(kept, dtype))


def put_back(config: ModelConfig, leaves: Mapping[str, Any], kept: Mapping[str, Any]) -> dict:
    """The stacked tree of the folded weights' leaves with those of structure/; of shapes, too."""
    # What quantised codes stand for is no leaf beside them.
    gone = {f"{path.rpartition('/')[0]}/kernel" for path in kept} - set(kept)
    whole = {path: leaf for path, leaf in leaves.items() if path not in gone}
    return restack(config, unflatten(whole | dict(kept)))


def cast(leaves: Mapping[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """The leaves in `dtype` (None: as they are), but for those that are data."""
    data, new = data_leaves(), dict(leaves)
    for path, leaf in leaves.items():
        if dtype is not None and path.split("/")[-1] not in data:
            new[path] = narrowed(path, leaf, dtype)
    return new


def _head_shapes(folder: Path, config: ModelConfig, kept: Mapping[str, Any]) -> dict[str, tuple]:
    """{leaf: shape} that the head in structure/ has to have; a head whose module is not imported
    has any."""
    found = {path: leaf.shape for path, leaf in kept.items() if path.startswith(f"{ROOT}/")}
    if not (found and config.head and config.head.name in HEADS):
        return found
    shapes = head_shapes(config)
    # (In an older version a head on RoBERTa's pooler had no dense layer.)
    if lacking := {*shapes} - {*found, f"{ROOT}/dense/kernel", f"{ROOT}/dense/bias"}:
        raise CheckpointError(f"{folder}: the head lacks {sorted(lacking)}")
    return shapes


def _check(folder: Path, kept: Mapping[str, np.ndarray], shapes: Mapping[str, tuple]) -> None:
    """Refuses leaves that no adapter has, of shapes, kinds or ranges that its axes do not allow."""
    for path, leaf in kept.items():
        module, _, name = path.rpartition("/")
        kernel = shapes.get(f"{module}/kernel")
        if path.startswith(f"{ROOT}/"):
            fits = leaf.shape == shapes.get(path)
        elif name in FFN_LEAVES:
            fits = leaf.shape == shapes.get(f"{module}/down/kernel", (None,))[:1]
        elif name == "kernel":
            fits = leaf.shape == kernel
        else:
            fits = kernel is not None and _allowed(name, leaf.shape, kernel)
        if not fits:
            raise CheckpointError(f"{folder}: the model has no place for {path!r} {leaf.shape}")
        expected = INTEGERS.get(name)
        wanted = np.dtype(expected).name if expected else "floating"
        allowed = (np.dtype(expected),) if expected else FLOATS
        if leaf.dtype not in allowed:
            raise CheckpointError(f"{folder}: {path!r} is {leaf.dtype}, not {wanted}")
        if not expected and not all_finite(leaf):
            raise CheckpointError(f"{folder}: {path!r} contains NaN or infinity")
        if name == ROWS and kernel and not _rises(leaf, kernel[1]):
            raise CheckpointError(f"{folder}: {path!r} must rise, from 0 to below {kernel[1]}")
    modules: dict[str, dict[str, np.ndarray]] = {}
    for path, leaf in kept.items():
        module, _, name = path.rpartition("/")
        modules.setdefault(module, {})[name] = leaf
    for module, own in modules.items():
        with naming(f"{folder}: {module}", raised=CheckpointError):
            axes = [pair for adapter in adapters_of(own) for pair in adapter.leaves.items()]
        if "dora_m" in own and "lora_a" not in own:
            raise CheckpointError(f"{folder}: {module}: DoRA's lengths without LoRA's factors")
        ranks = {own[name].shape[along.index("rank")] for name, along in axes if "rank" in along}
        if len(ranks) > 1:
            raise CheckpointError(f"{folder}: {module}: its leaves differ in rank {sorted(ranks)}")


def _rises(rows: np.ndarray, below: int) -> bool:
    """Places of neurons, each once and in their order."""
    return rows.size > 0 and rows[0] >= 0 and rows[-1] < below and bool(np.all(np.diff(rows) > 0))


def _allowed(name: str, shape: tuple[int, ...], kernel: tuple[int, ...]) -> bool:
    """Whether an adapter's leaf may have that shape beside that kernel [in, out]."""
    axes = next((a.leaves[name] for a in ADAPTERS if name in a.leaves), ())
    if not shape or len(shape) > len(axes) or len(shape) < len(axes) and name != "mask":
        return False
    sizes = {
        "in": kernel[0],
        "out": kernel[1],
        "one": 1,
        "half": kernel[0] // 2,
        "block": kernel[0] // BLOCK,
        "some": -(-kernel[0] * kernel[1] // (BLOCK * SCALES)),
    }
    # A mask of fewer axes stands for its kernel's last ones.
    pairs = zip(axes[-len(shape) :], shape, strict=True)
    return all(size == sizes.get(axis, size) for axis, size in pairs)


def _kernels(kept: Iterable[str]) -> list[str]:
    """Of the folded weights, those that the structure stands for."""
    modules = set()
    for path in kept:
        module, _, name = path.rpartition("/")
        if not path.startswith(f"{ROOT}/") and name not in FFN_LEAVES:
            modules.add(module)
    return sorted(f"{module}/kernel" for module in modules)


def _digest(leaves: Mapping[str, np.ndarray], paths: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        leaf = np.ascontiguousarray(leaves[path])
        digest.update(f"{path} {leaf.dtype} {leaf.shape}\n".encode())
        digest.update(leaf.view(np.uint8))
    return digest.hexdigest()


def _digest_of_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file():  # a pipe would be waited for
            raise CheckpointError(f"{path} is no regular file: copy the directory again")
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()
