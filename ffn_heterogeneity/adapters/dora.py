"""DoRA: LoRA for the directions of a kernel's columns, with trained norms (Liu et al.).

    K' = K + s A B;   K'' = K' diag(m / ||K'_j||)

with norms over inputs and a magnitude m_j for each output, initially ||K_j||. As in the authors'
code, the norm has no gradient. It is computed without K':

    ||K'_j||^2 = ||K_j||^2 + 2 s <(K^T A)_j, B_j> + s^2 B_j^T (A^T A) B_j
"""

import jax
import jax.numpy as jnp

from ffn_heterogeneity.adapters.rows import of_rows


def scale_kernel(kernel: jax.Array, leaves: dict[str, jax.Array]) -> jax.Array:
    """K' [..., in, out] -> K''; a column of zeros stays zero."""
    return kernel * _factor(jnp.sum(jnp.square(kernel), axis=-2), leaves)[..., None, :]


def scale_product(y, x, leaves: dict[str, jax.Array], kernel, dot, drop) -> jax.Array:
    """x K' -> x K'' with `kernel` K: 2 r in out operations per step, one pass over K and y."""
    squares = jnp.sum(jnp.square(kernel.astype(jnp.float32)), axis=-2)
    if "lora_a" in leaves:
        a, b = (jax.lax.stop_gradient(leaves[name]) for name in ("lora_a", "lora_b"))
        scale = jax.lax.stop_gradient(leaves["lora_scale"])
        kernel = jax.lax.stop_gradient(kernel)
        turned = jnp.einsum("...io,...ir->...ro", kernel, a, preferred_element_type=jnp.float32)
        inner = jnp.einsum("...ir,...iq->...rq", a, a, preferred_element_type=jnp.float32) @ b
        squares += 2 * scale * jnp.sum(turned * b, -2) + scale**2 * jnp.sum(b * inner, -2)
    factor = _factor(jnp.maximum(squares, 0.0), leaves)
    # Rounded to half precision, a factor would be wrong by up to 0.4% for a whole column.
    wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
    return (wide * of_rows(factor, wide, dot)).astype(y.dtype)


def _factor(squares: jax.Array, leaves: dict[str, jax.Array]) -> jax.Array:
    norms = jnp.sqrt(jax.lax.stop_gradient(squares))
    return leaves["dora_m"] / jnp.where(norms > 0, norms, 1.0)


def init(kernel) -> dict[str, jax.Array]:
    """Initial magnitudes of an effective kernel [in, out], float32."""
    return {"dora_m": jnp.linalg.norm(jnp.asarray(kernel, jnp.float32), axis=-2)}
