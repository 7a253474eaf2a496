"""Names for what a layer keeps for its backward pass; half precision is kept as its bits.

XLA:CPU writes no bfloat16 into a slice: to put one layer's array into the stack of all layers it
turns the whole stack into float32 and back, at every layer, so that the cost grows with the square
of the depth; and to read it back it makes a float32 copy of the stack. Integers it writes and reads
in place.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# The residual stream that a layer begins with.
BLOCK_INPUT = "block_input"


def named(x: jax.Array, name: str) -> jax.Array:
    """`checkpoint_name` of x, by way of its bits; for use inside a rule of differentiation."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return checkpoint_name(x, name)
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint16), name)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def keep(x: jax.Array, name: str) -> jax.Array:
    """`named`, whose gradient is the identity's. Reverse mode only."""
    return named(x, name)


keep.defvjp(lambda x, name: (named(x, name), None), lambda name, _, g: (g,))
