"""Writer of safetensors checkpoints piece by piece, without a whole file in memory.

The result has the same bytes as that of the `safetensors` library.
"""

import contextlib
import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ffn_heterogeneity.io.assemble import narrowed
from ffn_heterogeneity.io.safetensors import DTYPE_NAMES, plan_shards, write_index

_RANKS = {dtype: rank for rank, dtype in enumerate(DTYPE_NAMES)}
_TILE = 128  # side of the tiles that are copied, in elements
# Bytes processed and written at a time: they fit in a core's cache.
PIECE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The open files of a checkpoint.

    Attributes:
      specs: {tensor name: its spec}.
      order: the names in the order of the files' data.
    """

    specs: Mapping[str, Spec]
    order: tuple[str, ...]
    _places: Mapping[str, tuple[int, int]]  # (file descriptor, offset)

    def write(self, name: str, array: np.ndarray) -> None:
        """Write the whole tensor, cast to its dtype.

        Raises:
          ValueError: another shape; a finite value that becomes infinite in the dtype.
        """
        if array.shape != self.specs[name].shape:
            raise ValueError(f"{name} has shape {array.shape}, planned as {self.specs[name].shape}")
        row_major = by_rows(array) if array.ndim == 2 else array
        self.write_part(name, 0, row_major.reshape(-1))

    def write_part(self, name: str, first: int, flat: np.ndarray) -> None:
        """Write part of a tensor, from element `first` on, cast to its dtype."""
        dtype = self.specs[name].dtype
        file, offset = self._places[name]
        step = PIECE // dtype.itemsize
        for start in range(0, flat.size, step):
            piece = narrowed(name, flat[start : start + step], dtype)
            _write_all(file, piece.view(np.uint8), offset + (first + start) * dtype.itemsize)


def by_rows(kernel: np.ndarray) -> np.ndarray:
    """Return `kernel` with contiguous rows: itself, or a copy."""
    if kernel.flags.c_contiguous:
        return kernel
    copy = np.empty(kernel.shape, kernel.dtype)
    copy_tiles(copy, kernel)
    return copy


def copy_tiles(target: np.ndarray, source: np.ndarray) -> None:
    """Copy source to target[:], five times faster if one is stored as the other's transpose."""
    for a in range(0, source.shape[0], _TILE):
        for b in range(0, source.shape[1], _TILE):
            tile = (slice(a, a + _TILE), slice(b, b + _TILE))
            target[tile] = source[tile]


@contextlib.contextmanager
def open_pieces(
    directory: Path, specs: Mapping[str, Spec], max_shard_bytes: int
) -> Iterator[Pieces]:
    """Create the files, with their headers, and the index; the tensors are written later.

    Args:
      specs: in the order in which tensors fill the files.
    """
    sizes = {name: spec.nbytes for name, spec in specs.items()}
    shards = plan_shards(sizes, max_shard_bytes)
    order: list[str] = []
    places = {}
    with contextlib.ExitStack() as stack:
        for name, tensors in shards.items():
            # The library's order: wide dtypes first, then by name.
            tensors = sorted(tensors, key=lambda t: (-_RANKS[specs[t].dtype], t))
            header, offsets = _header({t: specs[t] for t in tensors})
            file = stack.enter_context((directory / name).open("wb"))
            file.write(header)
            file.flush()
            total = sum(sizes[t] for t in tensors)
            os.truncate(file.fileno(), len(header) + total)
            places |= {t: (file.fileno(), len(header) + offsets[t]) for t in tensors}
            order += tensors
        yield Pieces(dict(specs), tuple(order), places)
    write_index(directory, sizes, shards)


def _header(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int]]:
    """(header with its length, {name: offset of the data after it})."""
    # transformers rejects files without this metadata.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, spec in specs.items():
        offsets[name], end = end, end + spec.nbytes
        entries[name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets


def _write_all(file: int, data: np.ndarray, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
