"""Names for a layer's saved residuals; half precision is saved as integers with the same bits.

XLA:CPU cannot write bfloat16 into a slice. To store one layer's array in the stack of all layers it
converts the whole stack to float32 and back, at every layer, so the cost grows with the square of
the depth. To read it, it makes a float32 copy of the stack. Integers are written and read in place.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# The residual stream at a layer's input.
BLOCK_INPUT = "block_input"


def named(x: jax.Array, name: str) -> jax.Array:
    """`checkpoint_name` of x, through its bits; for use inside a differentiation rule."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return checkpoint_name(x, name)
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint16), name)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def keep(x: jax.Array, name: str) -> jax.Array:
    """`named` with the gradient of the identity. Reverse mode only."""
    return named(x, name)


keep.defvjp(lambda x, name: (named(x, name), None), lambda name, _, g: (g,))
