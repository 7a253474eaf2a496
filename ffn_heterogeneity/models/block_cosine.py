"""Cosine between a block's input and its output, with a gradient that recomputes no output.

With full rematerialization a layer saves only its input. The backward pass recomputes the rest,
except the block's last product, because nothing needs the block's output. A loss on
cos(h_{l-1}, h_l) would need it (its gradient contains h_l): 5% more operations, although the vector
is in memory as the next layer's input. So the backward pass passes it on: every layer carries a
`link`, shaped like the residual stream, whose forward value is meaningless. In the backward pass
its "cotangent" is the next layer's input, which is this layer's output.

    h_{l-1}, link = lend(h_{l-1}, link)         back: link gets h_{l-1}, for the layer below
    h_l           = block(h_{l-1})
    cos, link     = linked_cosine(h_{l-1}, h_l, link)          back: link holds h_l
    ... and after the last layer:  h_L, seen = end_link(h_L, link, seen)

Only these functions may use the link. It starts as an array that is batched and sharded like the
residual stream. Reverse mode only.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# Three numbers per token that rematerialization policies save, so that nothing is recomputed.
BLOCK_COSINE = "block_cosine"


@jax.custom_vjp
def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """cos(a, b) over the last axis, at least float32; 0 with gradient 0 if a vector is zero.

    Gradient: d cos / da = (b / |b| - cos a / |a|) / |a|, computed so that intermediate values do
    not overflow.
    """
    return _scalars(a, b)[0]


def _scalars(a, b) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(cos, 1 / |a|, 1 / |b|), all 0 if a vector is zero; at least float32."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    a, b = a.astype(wide), b.astype(wide)
    squares = [jnp.sum(x * x, -1) for x in (a, b)]
    # Not "> 0": NaN must stay NaN.
    defined = (squares[0] != 0) & (squares[1] != 0)
    inverse_a, inverse_b = (
        jnp.where(defined, jax.lax.rsqrt(jnp.where(defined, square, 1)), 0) for square in squares
    )
    value = jnp.sum((a * inverse_a[..., None]) * (b * inverse_b[..., None]), -1)
    return value, inverse_a, inverse_b


def _slopes(a, b, scalars, cotangent):
    value, inverse_a, inverse_b, cotangent = (x[..., None] for x in (*scalars, cotangent))
    unit_a, unit_b = a.astype(value.dtype) * inverse_a, b.astype(value.dtype) * inverse_b
    slope_a = (unit_b - value * unit_a) * (cotangent * inverse_a)
    slope_b = (unit_a - value * unit_b) * (cotangent * inverse_b)
    return slope_a.astype(a.dtype), slope_b.astype(b.dtype)


def _cosine_forward(a, b):
    scalars = _scalars(a, b)
    return scalars[0], (a, b, scalars)


def _cosine_backward(residuals, cotangent):
    a, b, scalars = residuals
    return _slopes(a, b, scalars, cotangent)


cosine.defvjp(_cosine_forward, _cosine_backward)


@jax.custom_vjp
def lend(x_btd: jax.Array, link_btd: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (x, link); in the backward pass the link's cotangent is x."""
    return x_btd, link_btd


lend.defvjp(lambda x, link: ((x, link), x), lambda x, cts: (cts[0], x))


@jax.custom_vjp
def end_link(x_btd: jax.Array, link_btd: jax.Array, seen: Any) -> tuple[jax.Array, Any]:
    """Return (x, seen); in the backward pass the link's cotangent is x.

    `seen`: the probes' values computed from the cosines. Must be called even if the loss uses only
    `seen`: the gradient flows through `link`.
    """
    return x_btd, seen


def _end_backward(x, cotangents):
    return cotangents[0], x, cotangents[1]


end_link.defvjp(lambda x, link, seen: ((x, seen), x), _end_backward)


@jax.custom_vjp
def linked_cosine(
    input_btd: jax.Array, output_btd: jax.Array, link_btd: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(cos(input, output) [B, T], link): `cosine` with the output from the link when backward."""
    return cosine(input_btd, output_btd), link_btd


def _linked_forward(a, b, link):
    scalars = tuple(checkpoint_name(x, BLOCK_COSINE) for x in _scalars(a, b))
    # Without b, which would be saved or recomputed.
    return (scalars[0], link), (a, scalars)


def _linked_backward(residuals, cotangents):
    (a, scalars), (cotangent, b) = residuals, cotangents
    return *_slopes(a, b, scalars, cotangent), b


linked_cosine.defvjp(_linked_forward, _linked_backward)
