"""Structure that a plain checkpoint cannot hold: masks, adapters, P, and the kernels they touch.

A directory that keeps its structure holds

    model.safetensors     the folded weights, which other tools read: the same function
    structure/            the structural leaves and their kernels, unfolded, by path
    config.json           under "ffn_heterogeneity": "structure": digests of both

`load_model` restores the leaves. It raises an error if a file of structure/ is missing or altered,
or if the folded weights have changed (e.g. another tool trained them).
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ffn_heterogeneity.adapters import FFN_LEAVES, adapter_leaves, adapters_of, neuron_factor
from ffn_heterogeneity.adapters.nf4 import BLOCK, SCALES
from ffn_heterogeneity.heads import HEADS, ROOT, head_shapes
from ffn_heterogeneity.io.assemble import FLOATS, all_finite, narrowed
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.pieces import Spec, open_pieces
from ffn_heterogeneity.io.safetensors import open_directory
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import expected_shapes
from ffn_heterogeneity.models.leaves import Place, declared_at, sizes
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.options import products
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.tree import Leaf, LeafError, flatten, no_indices, unflatten
from ffn_heterogeneity.wording import naming

FOLDER, KEY = "structure", "structure"


def structural_leaves(leaves: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Leaves of an unstacked tree that folding would lose, and the kernels that they modify."""
    adapter_names, touched = adapter_leaves(), set()
    for path in leaves:
        module, _, name = path.rpartition("/")
        if name in adapter_names:
            touched.add(module)
        elif name in FFN_LEAVES:
            touched.add(f"{module}/down")

    def structural(path: str) -> bool:
        module, _, name = path.rpartition("/")
        return name in FFN_LEAVES or module in touched and name in {*adapter_names, "kernel"}

    return {path: leaf for path, leaf in leaves.items() if structural(path)}


def checked_leaves(config: ModelConfig, tree: dict) -> dict[str, np.ndarray]:
    """Flat leaves of a folded, unstacked tree, checked against the config's names and shapes."""
    with naming(f"a {config.family} checkpoint", LeafError, CheckpointError):
        leaves = flatten(fold(config, tree))
    shapes = expected_shapes(config)
    if missing := [path for path in shapes if path not in leaves]:
        raise CheckpointError(f"the parameter tree lacks {missing[:5]}")
    if unknown := [path for path in leaves if path not in shapes]:
        raise CheckpointError(f"a {config.family} checkpoint has no place for {unknown[:5]}")
    for path, shape in shapes.items():
        if leaves[path].shape != shape:
            raise CheckpointError(f"{path} has shape {leaves[path].shape}; expected {shape}")
    return leaves


@products()
def fold(config: ModelConfig, tree: dict) -> dict:
    """Fold masks and adapters into kernels, and neuron factors into the rows of down.

    Args:
      tree: unstacked.

    Raises:
      LeafError: a leaf in the layers is not declared, or has other axes than declared.
    """
    for layer, leaves in enumerate(tree["layers"]):
        declared_at(config, Place(layer, None, ""), leaves)
    return _folded(tree)


def _folded(node: Any, place: str = "") -> Any:
    if isinstance(node, list):
        return [_folded(item, f"{place}{i}/") for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    adapters = {name for adapter in adapters_of(node) for name in adapter.leaves}
    if adapters:
        dtype = node["kernel"].dtype if "kernel" in node else np.float32
        kernel = narrowed(f"{place}kernel", np.asarray(effective_kernel(node)), dtype)
        # Other leaves stay, so that the check of names rejects them.
        return {"kernel": kernel} | {
            k: v for k, v in node.items() if k != "kernel" and k not in adapters
        }
    node = {key: _folded(value, f"{place}{key}/") for key, value in node.items()}
    factor = neuron_factor(node)
    if factor is not None and "down" in node:
        down = node["down"]["kernel"]
        # "neurons" is the factor's last axis and the kernel's last but one, experts before both.
        scaled = down.astype(np.float32) * np.asarray(factor, np.float32)[..., None]
        scaled = narrowed(f"{place}down/kernel", scaled, down.dtype)
        node["down"] = node["down"] | {"kernel": scaled}
        node = {name: leaf for name, leaf in node.items() if name not in FFN_LEAVES}
    return node


def write_structure(
    directory: Path, structural: Mapping[str, np.ndarray], folded: Mapping[str, np.ndarray]
) -> dict[str, str]:
    """Write `<directory>/structure/`; return its section of config.json with the digests.

    Args:
      structural: from `structural_leaves`.
      folded: path -> leaf of the weights in the checkpoint.
    """
    folder = directory / FOLDER
    folder.mkdir()
    specs = {path: Spec(leaf.shape, leaf.dtype) for path, leaf in structural.items()}
    with open_pieces(folder, specs, 5 * 10**9) as pieces:
        for path, leaf in structural.items():
            pieces.write(path, leaf)
    return {"files": _digest_of_files(folder), "folded": _digest(folded, _kernels(structural))}


def read_structure(
    directory: Path, config: ModelConfig, params: dict, section: Mapping[str, Any], dtype: Any
) -> dict:
    """Return the stacked tree with the structure restored.

    Args:
      params: the folded weights, stacked, in the stored dtypes.
      section: the section of config.json, see `write_structure`.
      dtype: see `cast`.

    Raises:
      CheckpointError: structure/ or the folded weights are not those that were written, or a leaf
        does not fit the model; the message names it.
    """
    folder, leaves = directory / FOLDER, flatten(unstack(params))
    if not folder.is_dir():
        raise CheckpointError(
            f"{directory}: {FOLDER}/ is missing, but config.json refers to it: copy the whole "
            "directory, or remove the section from config.json to read the folded weights alone"
        )
    if _digest_of_files(folder) != section.get("files"):
        raise CheckpointError(f"{folder} was altered or cut: copy the directory again")
    structural = _read(folder, config)
    if _digest(leaves, _kernels(structural)) != section.get("folded"):
        raise CheckpointError(
            f"{directory}: the weights are not those that {FOLDER}/ was written with (trained by "
            f"another tool?): remove {FOLDER}/ and its section in config.json to read them alone"
        )
    return put_back(config, cast(leaves, dtype), cast(structural, dtype))


def put_back(config: ModelConfig, leaves: Mapping[str, Any], structural: Mapping[str, Any]) -> dict:
    """Stack the folded weights with the leaves of structure/; also works on shapes."""
    # Quantized codes replace the kernel that they represent.
    gone = {f"{path.rpartition('/')[0]}/kernel" for path in structural} - set(structural)
    plain = {path: leaf for path, leaf in leaves.items() if path not in gone}
    return restack(config, unflatten(plain | dict(structural)))


def cast(leaves: Mapping[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """Cast the leaves to `dtype` (None: unchanged), except those that are data."""
    declared, new = adapter_leaves() | FFN_LEAVES, dict(leaves)
    data = {name for name, leaf in declared.items() if not leaf.trains}
    for path, leaf in leaves.items():
        if dtype is not None and path.split("/")[-1] not in data:
            new[path] = narrowed(path, leaf, dtype)
    return new


def _head_shapes(
    folder: Path, config: ModelConfig, structural: Mapping[str, Any]
) -> dict[str, tuple]:
    """{leaf: shape} that the head in structure/ must have.

    A head whose module is not imported may have any leaves.
    """
    stored = {path: leaf.shape for path, leaf in structural.items() if path.startswith(f"{ROOT}/")}
    if not (stored and config.head and config.head.name in HEADS):
        return stored
    shapes = head_shapes(config)
    # (In an older version a head on RoBERTa's pooler had no dense layer.)
    if lacking := {*shapes} - {*stored, f"{ROOT}/dense/kernel", f"{ROOT}/dense/bias"}:
        raise CheckpointError(f"{folder}: the head lacks {sorted(lacking)}")
    return shapes


def _read(folder: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Read the leaves in structure/ and check their declared shapes, dtypes and ranges.

    Raises:
      CheckpointError: a leaf is not declared or differs from its declaration; names the leaf.
    """
    structural = {path: np.array(leaf.load()) for path, leaf in open_directory(folder).items()}
    modules: dict[str, dict[str, np.ndarray]] = {}
    heads = _head_shapes(folder, config, structural)
    for path, leaf in structural.items():
        module, _, name = path.rpartition("/")
        said, sized = _declared(config, path, leaf)
        # Axes without a declared size (a rank) may have any.
        axes = zip(said.axes, leaf.shape, strict=True) if said else ()
        wanted = tuple(sized.get(axis, size) for axis, size in axes) if said else None
        if heads.get(path, wanted) != leaf.shape:
            raise CheckpointError(f"{folder}: the model has no place for {path!r} {leaf.shape}")
        expected = said and said.dtype
        wanted = np.dtype(expected).name if expected else "floating"
        allowed = (np.dtype(expected),) if expected else FLOATS
        if leaf.dtype not in allowed:
            raise CheckpointError(f"{folder}: {path!r} is {leaf.dtype}, not {wanted}")
        if not expected and not all_finite(leaf):
            raise CheckpointError(f"{folder}: {path!r} contains NaN or infinity")
        if said and said.numbers:  # indices of neurons, unique and ascending
            end = sized[said.numbers]
            rows = leaf.reshape(-1, leaf.shape[-1])
            if "expert" in said.axes:  # those of an expert without any come after the end
                rows = rows[np.any(rows != no_indices(end, rows.shape[1]), axis=1)]
            if not leaf.size or any(np.any(np.diff([-1, *row, end]) <= 0) for row in rows.tolist()):
                raise CheckpointError(f"{folder}: {path!r} must rise, from 0 to below {end}")
        modules.setdefault(module, {})[name] = leaf
    for module, leaves in modules.items():
        with naming(f"{folder}: {module}", raised=CheckpointError):
            axes = [pair for adapter in adapters_of(leaves) for pair in adapter.leaves.items()]
        if "dora_m" in leaves and "lora_a" not in leaves:
            raise CheckpointError(f"{folder}: {module}: DoRA's lengths without LoRA's factors")
        ranked = ((leaves[name].shape, leaf.axis("rank")) for name, leaf in axes)
        ranks = {shape[axis] for shape, axis in ranked if axis is not None}
        if len(ranks) > 1:
            raise CheckpointError(f"{folder}: {module}: its leaves differ in rank {sorted(ranks)}")
    return structural


def _declared(
    config: ModelConfig, path: str, leaf: np.ndarray
) -> tuple[Leaf | None, dict[str, int]]:
    """(the declaration of a layer's leaf, the sizes that its axes must have); or (None, {})."""
    match = re.fullmatch(r"layers/(\d+)/(.*)", path)
    if not match or int(match[1]) >= config.n_layers:
        return None, {}
    layer = int(match[1])
    sized = sizes(config, config.layers[layer])
    try:
        said = declared_at(config, Place(layer, None, ""), unflatten({match[2]: leaf}))[match[2]]
    except LeafError:
        return None, {}
    sized |= {"one": 1} | {f"{name}/half": n // 2 for name, n in sized.items()}
    sized |= {f"{name}/block": n // BLOCK for name, n in sized.items()}
    if "some" in said.axes:
        sized["some"] = -(-math.prod(sized[axis] for axis in said.sums) // (BLOCK * SCALES))
    return said, sized


def _kernels(paths: Iterable[str]) -> list[str]:
    """Paths of the folded weights that the structure replaces."""
    modules = set()
    for path in paths:
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
        if not path.is_file():  # reading a pipe would block
            raise CheckpointError(f"{path} is no regular file: copy the directory again")
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()
