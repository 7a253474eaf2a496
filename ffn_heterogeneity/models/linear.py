"""Linear layers with adapters, and access of modules to their leaves."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from ffn_heterogeneity.adapters import ADAPTERS, Adapter, adapters_of, kernel_readers
from ffn_heterogeneity.models.kept import named
from ffn_heterogeneity.models.options import RunOptions

# Name of the rounded output of `wide_product`, which rematerialization saves (not the float32 one).
WIDE_PRODUCT = "wide_product"
# The random stream of adapters' dropout.
DROP = "adapter"


def leaf(module: nn.Module, name: str, shape: tuple[int, ...]) -> Any:
    """Return the parameter `name` of `module`, which `models.leaves.init` creates.

    Raises:
      ValueError: the leaf is missing or has another shape; the message names its path.
    """
    if not module.has_variable("params", name):
        raise ValueError(f"missing parameter {_path(module, name)} of shape {shape}")
    value = module.get_variable("params", name)
    if value.shape != shape:
        raise ValueError(f"{_path(module, name)} has shape {value.shape}, expected {shape}")
    return value


def optional_leaf(module: nn.Module, name: str):
    """Return the leaf `name` if the tree has it (adapters, P), else None."""
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return None


def _path(module: nn.Module, name: str) -> str:
    return "/".join((*module.path, name))


def effective_kernel(leaves: Mapping[str, jax.Array]) -> jax.Array:
    """Return the kernel as the forward pass uses it: dequantized, masked, adapted.

    Args:
      leaves: {"kernel": [..., in, out], adapters' leaves}. Leading layer axes broadcast.

    Raises:
      ValueError: an adapter is present with only some of its leaves.
    """
    return _kernel(leaves, lambda adapter: True)[0]


def _kernel(
    leaves: Mapping[str, Any], applies: Callable[[Adapter], Any]
) -> tuple[Any, list[Adapter]]:
    """(the kernel with the adapters that `applies` chooses, the other adapters)."""
    kernel, rest = leaves.get("kernel"), []
    for adapter in adapters_of(leaves):
        if kernel is None and adapter.base is not None:
            kernel = adapter.base(leaves)
        elif applies(adapter) and adapter.kernel is not None:
            kernel = adapter.kernel(kernel, leaves)
        else:
            rest.append(adapter)
    return kernel, rest


def applied(leaves: Mapping[str, Any]) -> Mapping[str, Any]:
    """The leaves of a `Linear` after the adapters that act on the kernel are applied to it.

    Adapters that act on the product are left, and factors that need no kernel.
    """
    if kernel_readers(leaves) == []:
        return leaves
    kernel, rest = _kernel(leaves, lambda adapter: adapter.product is None)
    names = [name for adapter in rest for name in adapter.leaves]
    return {"kernel": kernel} | {name: leaves[name] for name in (*names, "bias") if name in leaves}


def product(
    leaves: Mapping[str, Any],
    x: jax.Array,
    dot: Callable[[jax.Array, jax.Array], jax.Array],
    drop: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Any:
    """x K with the effective kernel K, which is materialized only if its factors need it.

    Args:
      leaves: of one kernel, or of the kernels [E, in, out] of experts.
      x: [rows, in].
      dot, drop: as in `Adapter.product`.
    """
    leaves = applied(leaves)
    kernel = leaves.get("kernel")
    y = None if kernel is None else dot(x, kernel)
    for adapter in adapters_of(leaves):
        if adapter.product is not None:
            y = adapter.product(y, x, leaves, kernel, dot, drop)
    return y


@jax.custom_vjp
def wide_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [n, in] w [in, out] in x's half precision, through float32 (`RunOptions.wide_products`).

    XLA:CPU uses the bfloat16 unit only for products that contract the left operand's last axis with
    the right operand's first. So for both gradients an operand is first transposed in memory.
    Reverse mode only.
    """
    y = jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)
    return named(y, WIDE_PRODUCT)


def turned(x: jax.Array) -> jax.Array:
    """Transpose x [n, m] to [m, n] in memory (XLA would only change the order of reading)."""
    return jax.lax.optimization_barrier(x.T.reshape(-1)).reshape(x.shape[::-1])


def _wide_bwd(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    # Transpose the narrower operand: for a wide one that takes longer than the product.
    if x.shape[1] <= g.shape[1]:
        dw = jnp.dot(turned(x), g, preferred_element_type=jnp.float32)
    else:
        dw = jnp.dot(turned(g), x, preferred_element_type=jnp.float32)
        dw = jax.lax.optimization_barrier(dw).T
    dx = jnp.dot(g, turned(w), preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype)


# The primal function itself, so that rematerialization can see inside it.
wide_product.defvjp(lambda x, w: (wide_product.fun(x, w), (x, w)), _wide_bwd)


@jax.custom_vjp
def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y [n, out] + bias [out], in y's half precision; the bias's gradient is a product.

    For a sum over rows, XLA:CPU would first make a float32 copy of them. Reverse mode only.
    """
    return y + bias.astype(y.dtype)


def _bias_bwd(bias: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = jnp.dot(jnp.ones((1, len(g)), g.dtype), g, preferred_element_type=jnp.float32)
    return g, total[0].astype(bias.dtype)


add_bias.defvjp(lambda y, bias: (add_bias(y, bias), bias), _bias_bwd)


def dropout(x: jax.Array, key: jax.Array, rate: jax.Array) -> jax.Array:
    """Zero elements with probability `rate` (traced; to 2^-16) and rescale the rest."""
    return jnp.where(drawn(key, x.shape, rate), rescaled(x, rate), jnp.zeros((), x.dtype))


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiply x by a factor that is not rounded to x's dtype (1/12 in bfloat16 is 0.2% off)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * factor).astype(x.dtype)


def rescaled(x: jax.Array, rate: jax.Array) -> jax.Array:
    """x / (1 - rate), the scaling of dropout, in float32 (in half precision 0.9 is 0.8984)."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide / (1.0 - rate)).astype(x.dtype)


def drawn(key: jax.Array, shape: tuple[int, ...], rate: jax.Array) -> jax.Array:
    """Draw the elements that dropout keeps, bool.

    One random word is used for two elements, because drawing dominates the cost of dropout.
    """
    *rows, size = shape
    words = jax.random.bits(key, (*rows, -(-size // 2)), jnp.uint32)
    halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*rows, -1)[..., :size]
    return halves.astype(jnp.float32) >= rate * 2.0**16


class Linear(nn.Module):
    """y = x K + b with the effective kernel K, which is materialized only if its factors need it.

    Attributes:
      features: size of the output.
      use_bias: whether a bias leaf [features] exists.
      options: uses `wide_products` (for `wide_product`), and `adapter_dropout`, which is active if
        the random stream "adapter" is given, i.e. in training.
    """

    features: int
    use_bias: bool = False
    options: RunOptions = RunOptions()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., in] in the compute dtype -> [..., features] in the same dtype."""
        names = [name for adapter in ADAPTERS.values() for name in adapter.leaves]
        leaves = {name: optional_leaf(self, name) for name in names}
        leaves = {name: value for name, value in leaves.items() if value is not None}
        if not any(adapter.base for adapter in adapters_of(leaves)):
            leaves["kernel"] = leaf(self, "kernel", (x.shape[-1], self.features))

        def dot(x: jax.Array, w: jax.Array) -> jax.Array:
            return (wide_product if self.options.wide_products else jnp.dot)(x, w.astype(x.dtype))

        # One matrix product over all positions: XLA:CPU's gradient of the batched form, with two
        # contracted axes, is 1.4 times slower (block backward 1.5 times).
        rows = x.reshape(-1, x.shape[-1])
        y = product(leaves, rows, dot, self._drop)
        if self.use_bias:
            bias = leaf(self, "bias", (self.features,))
            wide = self.options.wide_products
            y = add_bias(y, bias) if wide else y + bias.astype(x.dtype)
        return y.reshape(*x.shape[:-1], self.features)

    def _drop(self, x: jax.Array) -> jax.Array:
        """Inverted dropout of an adapter's input; the identity outside training."""
        rate = self.options.adapter_dropout
        if not rate or not self.has_rng(DROP):
            return x
        return dropout(x, self.make_rng(DROP), jnp.float32(rate))
