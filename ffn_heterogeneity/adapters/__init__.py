"""Adapters: extra leaves beside a kernel, read by the one module that owns the kernel.

An adapter is pure maths on leaves and imports nothing of ours. `KERNEL_ADAPTERS` lists those that
change the kernel of a `Linear`, in the order in which they apply; `effective_kernel` in
`models/linear.py` is the one place that applies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from ffn_heterogeneity.adapters import mask


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Extra leaves of a `Linear`.

    Attributes:
      name: the adapter's name in configs.
      leaves: names of the leaves it owns beside "kernel"; all of them or none are present.
      kernel: (kernel, leaves) -> the kernel as the forward pass uses it.
      refresh: (leaves, step, key) -> leaves, called once per optimiser step before the forward
        pass, or None. Masks redrawn every step and schedules of gates live here.
    """

    name: str
    leaves: tuple[str, ...]
    kernel: Callable[[jax.Array, dict[str, jax.Array]], jax.Array]
    refresh: Callable[[dict[str, jax.Array], jax.Array, jax.Array], dict] | None = None


KERNEL_ADAPTERS: tuple[Adapter, ...] = (
    Adapter(name="mask", leaves=("mask",), kernel=mask.apply_mask),
)
