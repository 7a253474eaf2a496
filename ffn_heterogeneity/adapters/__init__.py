"""Adapters: extra leaves beside a kernel, read by the one module that owns the kernel.

An adapter is pure maths on leaves and imports nothing of ours. `ADAPTERS` lists them in the order
in which they apply; `models/linear.py` is the one place that applies them. What a leaf's axes run
over, and whether it trains, is said here once: sharding, removal of neurons, weight decay and what
trains follow from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.adapters import dora, gates, lora, low_rank, macdrop, mask, nf4

Leaves = Mapping[str, jax.Array]
# A leaf's axes, behind the stack's layer axis: "in" and "out" are the kernel's, "rank", "one",
# "picked" (some of "out"), "half" and "block" (of "in"), "some" and "pair" the adapter's own.
KERNEL_LEAVES: dict[str, tuple[str, ...]] = {"kernel": ("in", "out"), "bias": ("out",)}


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Extra leaves of a `Linear`, and how they enter y = x K.

    Every function is given ALL leaves of that `Linear`.

    Attributes:
      name: the adapter's name in configs.
      leaves: name of a leaf -> its axes; all of them or none are present.
      trained: those that train unless a config says otherwise; the others are data, and never do.
      base: leaves -> the kernel [..., in, out], where no leaf "kernel" is; None: it needs one.
      kernel: (kernel, leaves) -> the kernel as the forward pass uses it. Leading axes broadcast.
      product: (y, x, leaves, kernel, dot, drop) -> y, for an adapter that acts on the product
        y = x K instead, so that no full-size gradient of a frozen kernel is ever built; `dot(x, w)`
        is the product in x's dtype, `drop(x)` x under the adapters' dropout, `kernel` what y was
        made with. `kernel` above is then the same thing on the kernel: what losses on weights,
        surgery and export read. Of an adapter with `base` it comes first, y and `kernel` are None,
        and no whole kernel is made in the step (low-rank factors), unless `kernel_readers` are
        beside it.
      reads_kernel: whether `product` reads `kernel`.
      for_losses: those of `trained` that a loss alone reads (Lagrange multipliers).
    """

    name: str
    leaves: Mapping[str, tuple[str, ...]]
    trained: tuple[str, ...] = ()
    base: Callable[[Leaves], jax.Array] | None = None
    kernel: Callable[[jax.Array, Leaves], jax.Array] | None = None
    product: Callable[..., jax.Array] | None = None
    reads_kernel: bool = False
    for_losses: tuple[str, ...] = ()


ADAPTERS: tuple[Adapter, ...] = (
    Adapter(
        "nf4",
        {
            "nf4_codes": ("half", "out"),
            "nf4_scales": ("block", "out"),
            "nf4_absmax": ("some",),
            "nf4_mean": ("one",),
        },
        base=nf4.kernel,
    ),
    Adapter(
        "low_rank",
        {"low_rank_a": ("in", "rank"), "low_rank_b": ("rank", "out")},
        trained=("low_rank_a", "low_rank_b"),
        base=low_rank.kernel,
        product=low_rank.product,
    ),
    Adapter(
        "gates",
        {
            gates.A: ("in", "rank"),
            gates.B: ("rank", "out"),
            gates.LOG_ALPHA: ("rank",),
            gates.DRAW: ("rank",),
            gates.MULTIPLIERS: ("pair",),
        },
        trained=(gates.A, gates.B, gates.LOG_ALPHA, gates.MULTIPLIERS),
        base=gates.kernel,
        product=gates.product,
        for_losses=(gates.MULTIPLIERS,),
    ),
    Adapter("mask", {"mask": ("in", "out")}, kernel=mask.apply_mask),
    Adapter("score", {"score": ("in", "out")}, trained=("score",), kernel=mask.apply_score),
    Adapter(
        "macdrop",
        {"macdrop_rows": ("picked",), "macdrop_keep": ("in", "picked")},
        kernel=macdrop.drop,
    ),
    Adapter(
        "lora",
        {"lora_a": ("in", "rank"), "lora_b": ("rank", "out"), "lora_scale": ("one",)},
        trained=("lora_a", "lora_b"),
        kernel=lora.add_to_kernel,
        product=lora.add_to_product,
    ),
    Adapter(
        "dora",
        {"dora_m": ("out",)},
        trained=("dora_m",),
        kernel=dora.scale_kernel,
        product=dora.scale_product,
        reads_kernel=True,
    ),
)

# Leaves that are no real numbers, by name.
INTEGERS = {"nf4_codes": np.uint8, "nf4_scales": np.uint8, "macdrop_rows": np.int32}


@dataclasses.dataclass(frozen=True)
class FfnLeaf:
    """A leaf of a feed-forward block itself, beside its `Linear`s: a factor of the inner neurons.

    y = (h * factor) W: row i of W is factor_i times the kernel's, for whoever reads the weights.

    Attributes:
      factor: the leaf -> [..., m].
      axes: "neurons" are the inner ones.
      trained: whether it trains unless a config says otherwise; else it is data, and never does.
    """

    factor: Callable[[jax.Array], jax.Array]
    axes: tuple[str, ...] = ("neurons",)
    trained: bool = False


# P of MLP Fusion, sizes of clusters: "not trained, not decayed".
FFN_LEAVES: dict[str, FfnLeaf] = {"neuron_scale": FfnLeaf(lambda leaf: leaf)}


def neuron_factor(ffn: Mapping[str, Any]) -> jax.Array | None:
    """[..., m], all factors of a block's leaves together; None: it has none."""
    own = ((ffn.get(name), leaf.factor) for name, leaf in FFN_LEAVES.items())
    factors = [factor(leaf) for leaf, factor in own if leaf is not None]
    return math.prod(factors[1:], start=factors[0]) if factors else None


# name -> settings -> function(params, step, key, hyper, train) -> params: applied to the whole tree
# before the forward pass of every step (train), of evaluation and of export (not train, key None),
# and never stored: masks redrawn every step, gates and schedules. `config.refresh` names them.
REFRESHES: dict[str, Callable[..., Callable[..., Any]]] = {
    "macdrop": macdrop.refresh,
    "gates": gates.refresh,
}
# name -> (settings, steps) -> function of the steps done -> what it reads as `hyper[name]`.
RATES: dict[str, Callable[..., Callable[[int], float]]] = {"macdrop": macdrop.rate}


def leaf_axes() -> dict[str, tuple[str, ...]]:
    """Axes of every leaf that a `Linear` or a feed-forward block may have, by name."""
    of_blocks = {name: leaf.axes for name, leaf in FFN_LEAVES.items()}
    of_adapters = {k: v for adapter in ADAPTERS for k, v in adapter.leaves.items()}
    return KERNEL_LEAVES | of_adapters | of_blocks


def data_leaves() -> tuple[str, ...]:
    """Names of the leaves that are data, not weights: they never train and are never cast."""
    of_adapters = (k for adapter in ADAPTERS for k in adapter.leaves if k not in adapter.trained)
    return (*of_adapters, *(name for name, leaf in FFN_LEAVES.items() if not leaf.trained))


def is_linear(node: Mapping[str, Any]) -> bool:
    """True of a node of a tree that holds a kernel, or what stands for one."""
    return "kernel" in node or any(adapter.base for adapter in adapters_of(node))


def parameters_in(path: str, leaf: Any) -> int:
    """Parameters that a leaf holds: none of data (masks, scales), but two a byte of NF4's codes."""
    name, size = path.rpartition("/")[2], math.prod(leaf.shape)
    return 2 * size if name == "nf4_codes" else 0 if name in data_leaves() else size


def kernel_readers(leaves: Mapping[str, Any]) -> list[str] | None:
    """Names of the adapters for which a whole kernel is made of factors that have a product of
    their own; None where there are no such factors."""
    adapters = adapters_of(leaves)
    if "kernel" in leaves or not any(adapter.base and adapter.product for adapter in adapters):
        return None
    others = (adapter for adapter in adapters if not adapter.base)
    return [one.name for one in others if one.product is None or one.reads_kernel]


def adapters_of(leaves: Mapping[str, Any]) -> list[Adapter]:
    """The adapters whose leaves are there, in the order in which they apply.

    Raises:
      ValueError: an adapter is present with only some of its leaves, or has no kernel to read.
    """
    found = []
    for adapter in ADAPTERS:
        present = [name for name in adapter.leaves if name in leaves]
        if present and len(present) < len(adapter.leaves):
            needed = tuple(adapter.leaves)
            raise ValueError(f"adapter {adapter.name!r} needs {needed}, found {present}")
        if present and adapter.base is None and adapter.kernel is None:
            raise ValueError(
                f"adapter {adapter.name!r} needs kernel= or base=, which losses on "
                "weights, surgery and export read (adapters/__init__.py)"
            )
        found += [adapter] if present else []
    return found
