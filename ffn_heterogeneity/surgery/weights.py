"""FFN weights of a layer for surgeries: effective, finite, one neuron per row, on the host.

The memory layout of the leaves does not matter (files store transposed kernels): the values are
summed in the same order, so the same neurons are chosen.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from ffn_heterogeneity.adapters import FFN_LEAVES, neuron_factor
from ffn_heterogeneity.io.assemble import all_finite
from ffn_heterogeneity.io.pieces import by_rows, copy_tiles
from ffn_heterogeneity.losses.nucl_exact import exact_kernel
from ffn_heterogeneity.models.linear import effective_kernel

# Float64 elements per block: the block and its temporaries stay in a core's cache.
CACHED = 1 << 15


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """W as the forward pass uses it, one row per neuron.

    Attributes:
      kernel: [m, n], contiguous rows, masked and adapted, in its own dtype.
      scale: the block's `neuron_factor` in float64 [m], or None; row i of W is scale_i kernel_i.
    """

    kernel: np.ndarray
    scale: np.ndarray | None

    def rows(self, which: slice | np.ndarray) -> np.ndarray:
        """Return the given rows of W, a float64 copy."""
        rows = self.kernel[which].astype(np.float64)
        if self.scale is not None:
            rows *= self.scale[which, None]
        return rows

    def blocks(self, elements: int = CACHED) -> Iterator[tuple[slice, np.ndarray]]:
        """(slice, rows) over all neurons."""
        for block in blocks(self.kernel.shape, elements):
            yield block, self.rows(block)


def outgoing(ffn: dict) -> Outgoing:
    """Return the layer's outgoing weights.

    Raises:
      ValueError: a weight is NaN or infinite.
    """
    kernel = finite_kernel(ffn["down"], "ffn/down/kernel")
    scale = neuron_factor(ffn)
    if scale is not None:
        scale = np.asarray(scale).astype(np.float64)
        if not np.isfinite(scale).all():
            raise ValueError(
                f"ffn/{' and '.join(name for name in FFN_LEAVES if name in ffn)} holds NaN or "
                "infinity: check the checkpoint"
            )
    return Outgoing(by_rows(kernel), scale)


def incoming(ffn: dict) -> tuple[np.ndarray, int]:
    """Return (e [m, p], one row per neuron; how many of its p coordinates belong to "gate").

    e is the column and bias of "gate", if any, then those of "up" [ours: Srinivas & Babu have no
    gates]. All are multiplied by one power of two, so that no entry is larger than 1 and ratios do
    not change. Float64 if a leaf is, else float32.

    Raises:
      ValueError: a weight is NaN or infinite.
    """
    parts, gate = [], 0
    for name in ("gate", "up"):
        if name not in ffn:
            continue
        parts.append(finite_kernel(ffn[name], f"ffn/{name}/kernel"))
        if "bias" in ffn[name]:
            parts.append(np.asarray(ffn[name]["bias"])[None])
            if not all_finite(parts[-1]):
                raise ValueError(f"ffn/{name}/bias holds NaN or infinity: check the checkpoint")
        if name == "gate":
            gate = sum(map(len, parts))
    dtype = np.float64 if any(leaf.dtype == np.float64 for leaf in parts) else np.float32
    vectors = np.empty((parts[0].shape[1], sum(map(len, parts))), dtype)
    start = 0
    for leaf in parts:
        copy_tiles(vectors[:, start : start + len(leaf)], leaf.T)
        start += len(leaf)
    _at_most_one(vectors)
    return vectors, gate


def finite_kernel(leaves: dict, name: str) -> np.ndarray:
    """Return the effective kernel on the host, in its dtype.

    Raises:
      ValueError: a weight is NaN or infinite; the message names `name` and the position.
    """
    kernel = np.asarray(effective_kernel(leaves))
    if not all_finite(kernel if kernel.flags.c_contiguous else kernel.T):
        exact_kernel(leaves, name)
    return kernel


def blocks(shape: tuple[int, ...], elements: int) -> list[slice]:
    """Slices of the rows of a matrix, each of at most `elements` elements."""
    rows, width = shape
    step = max(1, elements // max(width, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def power_of_two(kernel: np.ndarray) -> int:
    """The least e such that no entry is larger than 2^e; 0 where all are 0."""
    largest = 0.0
    for block in blocks(kernel.shape, CACHED):
        peak = np.abs(kernel[block]).max()
        largest = max(largest, float(peak))
    return int(np.frexp(largest)[1])


def _at_most_one(vectors: np.ndarray) -> None:
    exponent = power_of_two(vectors)
    if exponent == 0:
        return
    for block in blocks(vectors.shape, CACHED):
        np.ldexp(vectors[block], -exponent, out=vectors[block])
