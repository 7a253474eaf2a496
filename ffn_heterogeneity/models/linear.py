"""The one place where a kernel meets its adapters, and the one way modules read their leaves."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from ffn_heterogeneity.adapters import KERNEL_ADAPTERS

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]

# The standard deviation every family at hand was pre-trained from.
normal_init: Initializer = jax.nn.initializers.normal(stddev=0.02)


def leaf(module: nn.Module, name: str, shape: tuple[int, ...], init: Initializer = normal_init):
    """The parameter `name` of `module`; created under `init`, checked against `shape` otherwise.

    Raises:
      ValueError: the tree holds the leaf in another shape; the message names its path.
    """
    if not module.has_variable("params", name):
        if not module.is_initializing():
            raise ValueError(f"missing parameter {_path(module, name)} of shape {shape}")
        return module.param(name, init, shape)
    value = module.get_variable("params", name)
    if value.shape != shape:
        raise ValueError(f"{_path(module, name)} has shape {value.shape}, expected {shape}")
    return value


def optional_leaf(module: nn.Module, name: str):
    """The leaf `name` where the tree holds it (adapters, P), else None."""
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return None


def _path(module: nn.Module, name: str) -> str:
    return "/".join((*module.path, name))


def effective_kernel(leaves: dict[str, jax.Array]) -> jax.Array:
    """The kernel as the forward pass uses it: masked, adapted.

    Args:
      leaves: {"kernel": [..., in, out], adapters' leaves}. Leading layer axes broadcast.

    Raises:
      ValueError: an adapter is present with only some of its leaves.
    """
    kernel = leaves["kernel"]
    for adapter in KERNEL_ADAPTERS:
        present = [name for name in adapter.leaves if name in leaves]
        if not present:
            continue
        if len(present) < len(adapter.leaves):
            raise ValueError(f"adapter {adapter.name!r} needs {adapter.leaves}, found {present}")
        kernel = adapter.kernel(kernel, {name: leaves[name] for name in adapter.leaves})
    return kernel


class Linear(nn.Module):
    """y = x K + b, with K the effective kernel.

    Attributes:
      features: size of the output.
      use_bias: whether a bias leaf [features] exists.
    """

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] in the compute dtype -> [..., features] in the same dtype."""
        leaves = {"kernel": leaf(self, "kernel", (x.shape[-1], self.features))}
        for adapter in KERNEL_ADAPTERS:
            for name in adapter.leaves:
                value = optional_leaf(self, name)
                if value is not None:
                    leaves[name] = value
        # One matrix product over all positions: XLA:CPU's gradient of the batched form, with two
        # contracted axes, is 1.4 times slower (block backward 1.5 times).
        y = jnp.dot(x.reshape(-1, x.shape[-1]), effective_kernel(leaves).astype(x.dtype))
        if self.use_bias:
            y = y + leaf(self, "bias", (self.features,), nn.initializers.zeros).astype(x.dtype)
        return y.reshape(*x.shape[:-1], self.features)
