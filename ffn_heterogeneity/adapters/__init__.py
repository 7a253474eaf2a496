"""Adapters: extra leaves of a `Linear`, read by the module that owns its kernel.

An adapter is a set of pure functions on leaves and imports no other subpackage. `ADAPTERS` lists
them in the order in which they apply; only `models/linear.py` applies them. Each leaf is declared
once (`leaf.Leaf`: its axes, and whether it trains); sharding, removal of neurons, weight decay and
trainability follow from the declaration (models/leaves.py).
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.adapters import dora, gates, lora, low_rank, macdrop, mask, nf4
from ffn_heterogeneity.tree import Leaf, data, weights

Leaves = Mapping[str, jax.Array]
# Leaves of a `Linear` without adapters.
KERNEL_LEAVES = ("kernel", "bias")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Extra leaves of a `Linear`, and their effect on y = x K.

    Every function gets ALL leaves of that `Linear`.

    Attributes:
      name: the adapter's name in configs.
      leaves: name of a leaf -> its declaration, in roles; all of them or none are present.
      base: leaves -> the kernel [..., in, out], if there is no leaf "kernel"; None: it needs one.
      kernel: (kernel, leaves) -> the kernel as the forward pass uses it. Leading axes broadcast.
      product: (y, x, leaves, kernel, dot, drop) -> y, for an adapter that acts on the product
        y = x K, so that no full-size gradient of a frozen kernel is built. `dot(x, w)` is the
        product in x's dtype, `drop(x)` applies the adapters' dropout, and `kernel` is the kernel
        of y. The attribute `kernel` above must then be equivalent: losses on weights, surgery and
        export use it. For an adapter with `base`, `product` comes first, y and `kernel` are None,
        and the step does not materialize the kernel (low-rank factors) unless there are
        `kernel_readers`.
      reads_kernel: whether `product` reads `kernel`.
      for_losses: leaves that only a loss reads (Lagrange multipliers).
    """

    name: str
    leaves: Mapping[str, Leaf]
    base: Callable[[Leaves], jax.Array] | None = None
    kernel: Callable[[jax.Array, Leaves], jax.Array] | None = None
    product: Callable[..., jax.Array] | None = None
    reads_kernel: bool = False
    for_losses: tuple[str, ...] = ()


_EVERY = ("in", "out")
_MADE = (
    Adapter(
        "nf4",
        {
            "nf4_codes": data("half", "out", dtype=np.uint8, holds=2, reads=1.0),
            "nf4_scales": data("block", "out", dtype=np.uint8),
            "nf4_absmax": data("some", sums=_EVERY),
            "nf4_mean": data("one", sums=_EVERY),
        },
        base=nf4.kernel,
    ),
    Adapter(
        "low_rank",
        {"low_rank_a": weights("in", "rank"), "low_rank_b": weights("rank", "out")},
        base=low_rank.kernel,
        product=low_rank.product,
    ),
    Adapter(
        "gates",
        {
            gates.A: weights("in", "rank"),
            gates.B: weights("rank", "out"),
            gates.LOG_ALPHA: Leaf(("rank",)),
            gates.DRAW: data("rank"),
            gates.MULTIPLIERS: Leaf(("pair",)),
        },
        base=gates.kernel,
        product=gates.product,
        for_losses=(gates.MULTIPLIERS,),
    ),
    Adapter("mask", {"mask": data("in", "out", broadcasts=True)}, kernel=mask.apply_mask),
    Adapter("score", {"score": Leaf(_EVERY, decays=True)}, kernel=mask.apply_score),
    Adapter(
        "macdrop",
        {
            macdrop.ROWS: data("picked", numbers="out", dtype=np.int32),
            macdrop.KEEP: data("in", "picked"),
        },
        kernel=macdrop.drop,
    ),
    Adapter(
        "lora",
        {
            "lora_a": weights("in", "rank"),
            "lora_b": weights("rank", "out"),
            "lora_scale": data("one"),
        },
        kernel=lora.add_to_kernel,
        product=lora.add_to_product,
    ),
    Adapter(
        "dora",
        {"dora_m": Leaf(("out",), sums=("in",))},
        kernel=dora.scale_kernel,
        product=dora.scale_product,
        reads_kernel=True,
    ),
)
# By name, in the order in which they apply.
ADAPTERS: dict[str, Adapter] = {adapter.name: adapter for adapter in _MADE}


# Leaves of a feed-forward block itself, not of its `Linear`s: factors of the inner neurons,
# y = (h * factor) W: row i of W is factor_i times the kernel's in losses, surgery and export.
# Their axes are those of a block without experts. P of MLP Fusion: "not trained, not decayed".
FFN_LEAVES: dict[str, Leaf] = {"neuron_scale": data("neurons")}


def neuron_factor(ffn: Mapping[str, Any]) -> jax.Array | None:
    """Product of all factors among a block's leaves, [..., m]; None if there are none."""
    factors = [ffn[name] for name in FFN_LEAVES if ffn.get(name) is not None]
    return functools.reduce(operator.mul, factors) if factors else None


# name -> settings -> function(params, step, key, hyper, train) -> params: applied to the whole tree
# before the forward pass of every step (train), of evaluation and of export (not train, key None),
# and never stored: masks redrawn every step, gates and schedules. `config.refresh` names them.
REFRESHES: dict[str, Callable[..., Callable[..., Any]]] = {
    "macdrop": macdrop.refresh,
    "gates": gates.refresh,
}
# name -> (settings, steps) -> function of the finished steps -> its value `hyper[name]`.
RATES: dict[str, Callable[..., Callable[[int], float]]] = {"macdrop": macdrop.rate}


def adapter_leaves() -> dict[str, Leaf]:
    """Declarations, in roles, of all adapters' leaves, by name."""
    return {k: v for adapter in ADAPTERS.values() for k, v in adapter.leaves.items()}


def is_linear(node: Mapping[str, Any]) -> bool:
    """True if a node of a tree has a kernel, or leaves that represent one."""
    return "kernel" in node or any(adapter.base for adapter in adapters_of(node))


def kernel_readers(leaves: Mapping[str, Any]) -> list[str] | None:
    """Names of the adapters that need a materialized kernel although its factors have a product.

    None if there are no such factors.
    """
    adapters = adapters_of(leaves)
    if "kernel" in leaves or not any(adapter.base and adapter.product for adapter in adapters):
        return None
    others = (adapter for adapter in adapters if not adapter.base)
    return [one.name for one in others if one.product is None or one.reads_kernel]


def adapters_of(leaves: Mapping[str, Any]) -> list[Adapter]:
    """Return the adapters whose leaves are present, in the order in which they apply.

    Raises:
      ValueError: an adapter has only some of its leaves, or no kernel.
    """
    adapters = []
    for adapter in ADAPTERS.values():
        present = [name for name in adapter.leaves if name in leaves]
        if present and len(present) < len(adapter.leaves):
            needed = tuple(adapter.leaves)
            raise ValueError(f"adapter {adapter.name!r} needs {needed}, found {present}")
        if present and adapter.base is None and adapter.kernel is None:
            raise ValueError(
                f"adapter {adapter.name!r} needs kernel= or base=, which losses on "
                "weights, surgery and export read (adapters/__init__.py)"
            )
        adapters += [adapter] if present else []
    return adapters
