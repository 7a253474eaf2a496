"""Assembly of stored tensors into a parameter tree by name rules; each is used exactly once."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import Rule, expected_shapes
from ffn_heterogeneity.models.leaves import required, sizes
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.tree import unflatten
from ffn_heterogeneity.wording import some

HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")  # names in all families and files
FLOATS = tuple(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)))
_EXPONENTS = {np.dtype(ml_dtypes.bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file, or a part of one.

    Attributes:
      name: the tensor's name in the file ("": same as ours).
      start: its first byte in the file, if it can be copied from there.
    """

    shape: tuple[int, ...]
    file: str
    load: Callable[[], np.ndarray]
    name: str = ""
    dtype: Any = np.dtype(np.float32)
    start: int = 0


def all_finite(array: np.ndarray, chunk: int = 1 << 18) -> bool:
    """True if no element is NaN or infinite; 16-bit types are checked by their exponent bits."""
    flat = array.reshape(-1)
    infinity = _EXPONENTS.get(array.dtype)
    for start in range(0, flat.size, chunk):
        values = flat[start : start + chunk]
        if infinity is None:
            if not np.isfinite(values).all():
                return False
        elif (values.view(np.uint16) & 0x7FFF).max() >= infinity:  # without the sign
            return False
    return True


def is_index(dtype: np.dtype) -> bool:
    """True for the dtypes of leaves that hold indices (`expert_of`), which are never cast."""
    return np.issubdtype(dtype, np.integer)


def narrowed(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Cast the array to another dtype, except indices.

    Raises:
      CheckpointError: a finite value becomes infinite.
    """
    dtype = np.dtype(dtype)
    if is_index(array.dtype):
        return array
    if dtype == array.dtype or ml_dtypes.finfo(dtype).max >= ml_dtypes.finfo(array.dtype).max:
        return array.astype(dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(dtype)
    if not all_finite(made):
        lost = array[np.isfinite(array) & ~np.isfinite(made)]
        if lost.size:
            largest = lost.flat[np.argmax(np.abs(lost))]
            raise CheckpointError(f"{name}: {largest:g} is infinite in {dtype}: choose float32")
    return made


def assemble(
    config: ModelConfig,
    rules: Iterable[Rule],
    tensors: Mapping[str, Stored],
    redundant: Iterable[str] = (),
    extra_shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    transform: Callable[[ModelConfig, str, np.ndarray], np.ndarray] | None = None,
    dtype: Any = None,
    check_finite: bool = True,
) -> dict:
    """Assemble the stacked tree of numpy arrays.

    Args:
      rules: the family's rules for this kind of file.
      redundant: regexes of tensors that may be ignored. A head tensor next to tied embeddings is
        also ignored if it equals them.
      extra_shapes: {path: shape} of additional leaves that are not part of the model.
      transform: `(config, path, leaf) -> leaf` applied to each leaf.
      dtype: dtype to cast to; None keeps each tensor's dtype.

    Raises:
      CheckpointError: a tensor is missing, extra, of the wrong shape or dtype, or has NaN,
        infinity, or an index out of range.
    """
    rules, leaves, ends = list(rules), {}, _index_ends(config)
    leaf_shapes(config, rules, tensors, redundant, extra_shapes)
    tensors = without_tied(config, rules, tensors)
    for rule in rules:
        arrays = [checked(name, tensors[name], check_finite) for name in rule.names]
        if (end := ends.get(rule.paths[0])) and not all(0 <= i < end for i in arrays[0].flat):
            what = f"{tensors[rule.names[0]].file}: tensor {rule.names[0]!r}"
            raise CheckpointError(f"{what} has indices outside 0 to {end - 1}")
        for path, leaf in zip(rule.paths, rule.load(arrays), strict=True):
            leaf = transform(config, path, leaf) if transform else leaf
            leaves[path] = leaf if dtype is None else narrowed(path, leaf, dtype)
    tree = restack(config, unflatten(leaves))
    # Stacking has copied most leaves; the others must not remain views of a mapped file.
    return jax.tree.map(lambda leaf: np.require(leaf, requirements=["C", "E", "O", "W"]), tree)


def _index_ends(config: ModelConfig) -> dict[str, int]:
    """{path of a leaf of indices: the number of things that they index}."""
    return {
        path: sizes(config, layer)[leaf.numbers]
        for path, leaf, layer in required(config)
        if leaf.numbers
    }


def leaf_shapes(
    config: ModelConfig,
    rules: Sequence[Rule],
    tensors: Mapping[str, Stored],
    redundant: Iterable[str],
    extra_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return `{path: shape and dtype}` of the leaves of `assemble` without reading a tensor.

    Raises:
      CheckpointError: a tensor is missing, extra, of the wrong shape or type.
    """
    shapes, leaves = expected_shapes(config) | dict(extra_shapes or {}), {}
    ends = _index_ends(config)
    wanted = {name for rule in rules for name in rule.names}
    if missing := [name for rule in rules for name in rule.names if name not in tensors]:
        source = next(iter(tensors.values())).file if tensors else "the checkpoint"
        raise CheckpointError(f"{source}: missing tensors: {some(missing)}")
    ignored = [*redundant, *map(re.escape, HEADS if config.tied else ())]
    extra = [name for name in tensors if name not in wanted]
    if extra := [name for name in extra if not any(re.fullmatch(r, name) for r in ignored)]:
        raise CheckpointError(
            f"{tensors[extra[0]].file}: tensors that this {config.family} model has no place for: "
            f"{some(extra)}"
        )
    for rule in rules:
        for name, shape in zip(rule.names, rule.stored_shapes(shapes), strict=True):
            stored = tensors[name]
            what = f"{stored.file}: tensor {name!r}"
            if tuple(stored.shape) != tuple(shape):
                asked = f"the config asks for {tuple(shape)}"
                raise CheckpointError(f"{what} has shape {tuple(stored.shape)}, {asked}")
            kind = "an index type" if rule.paths[0] in ends else "a float type"
            if not (is_index(stored.dtype) if rule.paths[0] in ends else stored.dtype in FLOATS):
                raise CheckpointError(f"{what} is {stored.dtype}, not {kind}")
        dtype = np.result_type(*{tensors[name].dtype for name in rule.names})
        leaves |= {path: jax.ShapeDtypeStruct(shapes[path], dtype) for path in rule.paths}
    return leaves


def checked(name: str, stored: Stored, check_finite: bool) -> np.ndarray:
    """Load the tensor; with `check_finite` raise CheckpointError if it has NaN or infinity."""
    array = stored.load()
    if check_finite and not all_finite(array):
        raise CheckpointError(
            f"{stored.file}: tensor {name!r} contains NaN or infinity "
            "(check_finite=False loads it anyway)"
        )
    return array


def without_tied(
    config: ModelConfig, rules: Sequence[Rule], tensors: Mapping[str, Stored]
) -> dict[str, Stored]:
    """Return the tensors without a head that equals the embedding to which the config ties it.

    Raises:
      CheckpointError: the head differs from the embedding.
    """
    heads = [name for name in HEADS if config.tied and name in tensors]
    embedding = _embedding(rules)
    for name in heads:
        if not _equal(tensors[name].load(), tensors[embedding].load()):
            raise CheckpointError(
                f"{tensors[name].file}: {name!r} differs from {embedding!r} but the config ties "
                "them (tie_word_embeddings): set it to false, or drop the tensor"
            )
    return {name: stored for name, stored in tensors.items() if name not in heads}


def with_embedding(
    config: ModelConfig,
    rules: Sequence[Rule],
    tensors: Mapping[str, Stored],
    tables: Sequence[str] = (),
) -> dict[str, Stored]:
    """Return the tensors with the embedding under its own name.

    Of tensors that share memory some writers keep one, under any of its names: one of `tables`, or
    the head to which the config ties the embedding.
    """
    own, names = _embedding(rules), [*tables, *(HEADS if config.tied else ())]
    found = next((name for name in (own, *names) if name in tensors), own)
    return {own if name == found else name: stored for name, stored in tensors.items()}


def _embedding(rules: Sequence[Rule]) -> str:
    """The name of the embedding's tensor."""
    return next(rule.names[0] for rule in rules if rule.paths == ("embed/embedding",))


def _equal(a: np.ndarray, b: np.ndarray, chunk: int = 1 << 24) -> bool:
    """Return np.array_equal(a, b), computed in chunks to save memory."""
    if a.shape != b.shape:
        return False
    a, b = a.reshape(-1), b.reshape(-1)
    parts = (slice(start, start + chunk) for start in range(0, a.size, chunk))
    return all(np.array_equal(a[span], b[span]) for span in parts)
