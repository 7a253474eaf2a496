"""Reading of safetensors files (bf16 through ml_dtypes); `pieces` writes them.

The `safetensors` library validates the header. A tensor is memory-mapped while it is in use, so a
checkpoint is never in memory twice, and its files together may exceed the address space (the
library maps one whole file at a time).
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.read import parse_json, read_object
from ffn_heterogeneity.wording import some

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# From narrow to wide, in the library's order.
_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
}
DTYPE_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class Tensor(NamedTuple):
    """A tensor in a file, without its values.

    Attributes:
      start: its first byte in the file.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int

    def load(self) -> np.ndarray:
        """Return the values, mapped from the file (read-only) until the array is freed."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        array = np.memmap(self.file, self.dtype, "r", self.start, self.shape or (1,))
        return array.view(np.ndarray).reshape(self.shape)

    def rows(self, count: int) -> Iterator["Tensor"]:
        """Yield `count` equal parts along the first axis."""
        shape = (self.shape[0] // count, *self.shape[1:])
        size = math.prod(shape) * self.dtype.itemsize
        for part in range(count):
            yield self._replace(shape=shape, start=self.start + part * size)


def open_file(path: str | os.PathLike) -> dict[str, Tensor]:
    """Return the tensors of one file by name; their values are not read.

    Raises:
      CheckpointError: truncated, not safetensors, or a type that numpy cannot hold.
    """
    import safetensors

    path = Path(path)
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): fetch or write it again"
        ) from None
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = parse_json(file.read(size).decode(), os.fspath(path), CheckpointError)
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name!r} has type {entry['dtype']}, not one of {list(_DTYPES)}"
            )
        dtype, start = np.dtype(_DTYPES[entry["dtype"]]), 8 + size + entry["data_offsets"][0]
        tensors[name] = Tensor(path, dtype, tuple(entry["shape"]), start)
    return tensors


def is_there(directory: str | os.PathLike) -> bool:
    """True if `open_directory` has something to open."""
    return any((Path(directory) / name).is_file() for name in (SINGLE, INDEX))


def is_run(directory: str | os.PathLike) -> bool:
    """True for a work directory, whose model is in the folder `model`."""
    has_model = (Path(directory) / "model" / "config.json").is_file()
    return has_model and not any(Path(directory).glob("*.safetensors*"))


def open_directory(directory: str | os.PathLike) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors, or of the shards that its index lists, by name.

    Raises:
      CheckpointError: no safetensors; a missing shard; index and shards disagree about a tensor.
    """
    directory = Path(directory)
    index = None if (directory / SINGLE).is_file() else _index(directory)
    tensors: dict[str, Tensor] = {}
    for shard in [SINGLE] if index is None else sorted(set(index.values())):
        file = directory / shard
        if not shard.isprintable() or Path(shard).name != shard or not file.is_file():
            raise CheckpointError(f"{directory / INDEX} lists the shard {shard!r}: no such file")
        for name, tensor in open_file(file).items():
            if index is not None and index.get(name) != shard:
                raise CheckpointError(
                    f"{file} holds tensor {name!r}, the index places it in {index.get(name)!r}"
                )
            tensors[name] = tensor
    if lost := sorted(set(index or ()) - set(tensors)):
        raise CheckpointError(f"{directory / INDEX}: tensors {some(lost)} are in no shard")
    return tensors


def _index(directory: Path) -> dict[str, str]:
    """{tensor: its file} of a directory with shards."""
    if (directory / INDEX).is_file():
        index = read_object(directory / INDEX).get("weight_map")
        named = isinstance(index, dict) and all(isinstance(file, str) for file in index.values())
        if not (index and named):
            raise CheckpointError(
                f"{directory / INDEX} is not a shard index: expected weight_map, {{tensor: file}}"
            )
        return index
    pickles = sorted(p.name for p in directory.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise CheckpointError(
            f"{directory} holds only pickled weights ({some(pickles)}), which can run code when "
            "opened and are never read: convert them to safetensors first (save_pretrained in "
            "transformers does)"
        )
    raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}")


def plan_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """{file name: its tensors}: one file, or shards filled in the order of `sizes`."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    total = len(shards)
    return {
        f"model-{i + 1:05d}-of-{total:05d}.safetensors": names for i, names in enumerate(shards)
    }


def write_index(directory: Path, sizes: Mapping[str, int], shards: Mapping[str, list[str]]) -> None:
    """Write the index of tensors to files if there are several files."""
    if len(shards) == 1:
        return
    total = {"total_size": sum(sizes.values())}
    index = {name: file for file, names in shards.items() for name in names}
    text = json.dumps({"metadata": total, "weight_map": index}, indent=2)
    (directory / INDEX).write_text(text + "\n")
