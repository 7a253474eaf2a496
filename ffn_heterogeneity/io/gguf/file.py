"""Parser of GGUF's header and tensor table; types and block sizes come from `gguf`.

`gguf.GGUFReader` needs 17 s for the 262,144 tokens of a Gemma file (each string is several numpy
views) and reports a truncated file as some numpy error; this parser takes 0.3 s and names the byte.
Layout: magic, version, counts, key-value pairs, tensor table, padding, data; little-endian.
"""

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ffn_heterogeneity.io.errors import CheckpointError

# GGUF value types that are one number; 8 is a string, 9 an array.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A stored tensor: axes in PyTorch's order, `data` the raw bytes of the rows."""

    name: str
    shape: tuple[int, ...]
    type: Any
    data: np.ndarray

    def dequantize(self) -> np.ndarray:
        """float32 array of `shape`.

        Raises:
          NotImplementedError: the gguf package cannot dequantize this type.
        """
        from gguf.quants import dequantize

        array = np.asarray(dequantize(self.data, self.type), dtype=np.float32)
        return array.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """`fields`: every key with its Python value; `tensors`: by name."""

    path: str
    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reader of a buffer that raises an error at its end."""

    def __init__(self, buffer: mmap.mmap):
        self.buffer, self.offset = buffer, 0

    def take(self, size: int) -> int:
        """Return the offset of the next `size` bytes and advance."""
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self.buffer):
            raise EOFError(f"byte {self.offset:,} is wanted, the file has {len(self.buffer):,}")
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.buffer, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        size = self.number("Q")
        start = self.take(size)
        return self.buffer[start : start + size].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is not a GGUF type")
        return self.number(_SCALARS[kind])

    def array(self, kind: int, count: int) -> list:
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        code = _SCALARS[kind]
        start = self.take(count * struct.calcsize(code))
        return list(struct.unpack_from(f"<{count}{code}", self.buffer, start))


def open_gguf(path: str | os.PathLike) -> GGUFFile:
    """Map a file into memory; tensors are read on use.

    Raises:
      CheckpointError: no such file, wrong magic or version, truncated or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    with path.open("rb") as file:
        if (magic := file.read(4)) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it begins with {magic!r}")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _parse(path, buffer)
    except EOFError as error:
        raise CheckpointError(f"{path} is truncated ({error}): fetch it again") from None
    except (ValueError, KeyError, MemoryError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): fetch it again") from None


def _parse(path: Path, buffer: mmap.mmap) -> GGUFFile:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    cursor = _Cursor(buffer)
    cursor.take(4)
    version, tensor_count, field_count = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    if version not in (2, 3):
        raise ValueError(f"version {version:#x} is not 2 or 3, little-endian")
    fields = {}
    for _ in range(field_count):
        key = cursor.string()
        fields[key] = cursor.value(cursor.number("I"))
    table = []
    for _ in range(tensor_count):
        name = cursor.string()
        # The fastest axis comes first in the file, last in numpy.
        shape = tuple(reversed([cursor.number("Q") for _ in range(cursor.number("I"))]))
        table.append((name, shape, GGMLQuantizationType(cursor.number("I")), cursor.number("Q")))
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r:.20}: expected a power of two >= 8")
    base = math.ceil(cursor.offset / alignment) * alignment
    raw = np.frombuffer(buffer, np.uint8)
    tensors = {}
    for name, shape, kind, offset in table:
        block, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name!r} of shape {shape} is not whole {kind.name} blocks")
        cursor.offset = base + offset
        start = cursor.take(math.prod(shape) // block * size)
        data = raw[start : cursor.offset].reshape(*shape[:-1], shape[-1] // block * size)
        tensors[name] = GGUFTensor(name, shape, kind, data)
    return GGUFFile(str(path), fields, tensors)
