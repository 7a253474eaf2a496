"""Feed-forward blocks as bundles of neurons: one row each, and back (MLP Fusion, section IV-B)."""

from collections.abc import Sequence

import numpy as np

from ffn_heterogeneity.adapters import KERNEL_LEAVES
from ffn_heterogeneity.io.assemble import all_finite
from ffn_heterogeneity.tree import flatten, is_abstract

# A part of a neuron's row: (module, leaf) in the block.
Part = tuple[str, str]


def plain(ffn: dict, layer: int, allowed: Sequence[str] = ()) -> dict:
    """Return the block after checking that it has only kernels, biases and the leaves `allowed`.

    Raises:
      ValueError: another leaf, or NaN or infinity in one; the message names the layer and the leaf.
    """
    for path, leaf in flatten(ffn).items():
        if path.split("/")[-1] not in (*KERNEL_LEAVES, *allowed):
            raise ValueError(f"layer {layer} has ffn/{path}: fold the model first (surgery fold)")
        if not is_abstract(leaf) and not all_finite(np.asarray(leaf)):
            raise ValueError(f"layer {layer}: ffn/{path} holds NaN or infinity: check the file")
    return ffn


def rows_of(ffn: dict, layer: int) -> dict[Part, np.ndarray]:
    """Return the parts of a plain block's neurons, each with one row per neuron [m, ..].

    Their order for gated blocks: gate's column and bias, up's column and bias, down's row; without
    gate otherwise [the gated form is ours]. Biases are [m, 1]. Float64 if a leaf is, else float32.

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
    """Concatenate the parts: one row per neuron, [m, p]."""
    return np.concatenate(list(rows.values()), axis=1)


def split(points: np.ndarray, like: dict[Part, np.ndarray]) -> dict[Part, np.ndarray]:
    """Split rows into parts; the inverse of `joined`."""
    ends = np.cumsum([row.shape[1] for row in like.values()])[:-1]
    return dict(zip(like, np.split(points, ends, axis=1), strict=True))


def times(rows: dict[Part, np.ndarray], names: Sequence[str], factor: np.ndarray) -> dict:
    """Multiply the parts of the modules `names` by one factor per neuron."""
    return {
        (name, leaf): row * factor[:, None] if name in names else row
        for (name, leaf), row in rows.items()
    }


def block_of(rows: dict[Part, np.ndarray], like: dict) -> dict:
    """Build a block from neurons, with the dtypes and the output bias of `like`."""
    block = {name: dict(leaves) for name, leaves in like.items()}
    for (name, leaf), row in rows.items():
        value = row[:, 0] if leaf == "bias" else row if name == "down" else row.T
        block[name][leaf] = np.ascontiguousarray(value, like[name][leaf].dtype)
    return block


def canonical(rows: dict[Part, np.ndarray]) -> dict[Part, np.ndarray]:
    """Rescale gated neurons so that up and down have equal norms and a fixed sign [ours].

    act(g) u w = act(g) (s u) (w / s) for every s, so a trained model's s is arbitrary. Here
    |s u| = |w / s|, with the bias as part of u, and the sum of the cubes of s u is not negative.
    Exact up to rounding; a neuron whose up or down is zero is unchanged.

    Raises:
      ValueError: the block is not gated.
    """
    if ("gate", "kernel") not in rows:
        raise ValueError("canonical=True needs a gated block: in a plain one up is inside act")
    up = np.concatenate([row for (name, _), row in rows.items() if name == "up"], axis=1)
    up, down = up.astype(np.float64), rows["down", "kernel"].astype(np.float64)
    norms = [np.linalg.norm(side, axis=1) for side in (up, down)]
    alive = (norms[0] > 0) & (norms[1] > 0)
    factor = np.ones(len(up))
    factor[alive] = np.sqrt(norms[1][alive] / norms[0][alive])
    factor *= np.where(np.sum((up / np.where(alive, norms[0], 1)[:, None]) ** 3, 1) < 0, -1, 1)
    return times(times(rows, ("up",), factor), ("down",), 1 / factor)
