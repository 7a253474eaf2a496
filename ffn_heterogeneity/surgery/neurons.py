"""Feed-forward blocks as bundles of neurons: one row each, and back (MLP Fusion, section IV-B)."""

from collections.abc import Sequence

import numpy as np

from ffn_heterogeneity.adapters import KERNEL_LEAVES
from ffn_heterogeneity.io.assemble import all_finite
from ffn_heterogeneity.tree import flatten

# A part of a neuron's row: what it is of the block.
Part = tuple[str, str]


def plain(ffn: dict, layer: int, beside: Sequence[str] = ()) -> dict:
    """Return a block that has only kernels, biases and the leaves named, all of them finite.

    Raises:
      ValueError: names the layer and another leaf, or one with NaN or infinity.
    """
    for path, leaf in flatten(ffn).items():
        if path.split("/")[-1] not in (*KERNEL_LEAVES, *beside):
            raise ValueError(f"layer {layer} has ffn/{path}: fold the model first (surgery fold)")
        if not all_finite(np.asarray(leaf)):
            raise ValueError(f"layer {layer}: ffn/{path} holds NaN or infinity: check the file")
    return ffn


def rows_of(ffn: dict, layer: int) -> dict[Part, np.ndarray]:
    """Each part of a plain block's neurons, a row a neuron [m, ..], in this order.

    Gated: gate's column and bias, up's column and bias, down's row; plain: without gate [the gated
    form is ours]. Biases are [m, 1]. float64 where a leaf is, else float32.

    Raises:
      ValueError: see `plain`.
    """
    ffn, rows = plain(ffn, layer), {}
    for name in ("gate", "up", "down"):
        if name not in ffn:
            continue
        kernel = np.asarray(ffn[name]["kernel"])
        rows[name, "kernel"] = kernel if name == "down" else kernel.T
        if name != "down" and "bias" in ffn[name]:
            rows[name, "bias"] = np.asarray(ffn[name]["bias"])[:, None]
    dtype = np.result_type(np.float32, *(part.dtype for part in rows.values()))
    return {part: row.astype(dtype) for part, row in rows.items()}


def joined(rows: dict[Part, np.ndarray]) -> np.ndarray:
    """One row a neuron, [m, p]."""
    return np.concatenate(list(rows.values()), axis=1)


def split(points: np.ndarray, like: dict[Part, np.ndarray]) -> dict[Part, np.ndarray]:
    """The parts of rows such as `joined` makes."""
    ends = np.cumsum([row.shape[1] for row in like.values()])[:-1]
    return dict(zip(like, np.split(points, ends, axis=1), strict=True))


def times(rows: dict[Part, np.ndarray], names: Sequence[str], factor: np.ndarray) -> dict:
    """The rows with those modules' parts multiplied by a factor a neuron."""
    return {
        (name, leaf): row * factor[:, None] if name in names else row
        for (name, leaf), row in rows.items()
    }


def block_of(rows: dict[Part, np.ndarray], like: dict) -> dict:
    """The block of these neurons, in the dtypes of `like`, whose output bias it has."""
    block = {name: dict(leaves) for name, leaves in like.items()}
    for (name, leaf), row in rows.items():
        value = row[:, 0] if leaf == "bias" else row if name == "down" else row.T
        block[name][leaf] = np.ascontiguousarray(value, like[name][leaf].dtype)
    return block


def canonical(rows: dict[Part, np.ndarray]) -> dict[Part, np.ndarray]:
    """The same neurons, up and down of each with equal norms and one sign [ours].

    act(g) u w = act(g) (s u) (w / s) for every s: which s a model came to says nothing. Here
    |s u| = |w / s|, biases counted with u, and the sum of s u's cubes is not negative. Exact but
    for rounding; a neuron without up or down stays as it is.

    Raises:
      ValueError: the block is not gated.
    """
    if ("gate", "kernel") not in rows:
        raise ValueError("canonical=True is of gated blocks: in a plain one up is inside act")
    up = np.concatenate([row for (name, _), row in rows.items() if name == "up"], axis=1)
    up, down = up.astype(np.float64), rows["down", "kernel"].astype(np.float64)
    norms = [np.linalg.norm(side, axis=1) for side in (up, down)]
    alive = (norms[0] > 0) & (norms[1] > 0)
    factor = np.ones(len(up))
    factor[alive] = np.sqrt(norms[1][alive] / norms[0][alive])
    factor *= np.where(np.sum((up / np.where(alive, norms[0], 1)[:, None]) ** 3, 1) < 0, -1, 1)
    return times(times(rows, ("up",), factor), ("down",), 1 / factor)
