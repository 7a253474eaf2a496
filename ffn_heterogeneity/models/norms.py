"""RMSNorm in float32, Llama's (scale) and Gemma's (1 + scale) in one."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.linear import leaf


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (offset + scale), over the last axis.

    Computed in float32 (float64 for float64 inputs), and returned in the input's. The scale is
    multiplied before the cast back (Gemma's order; Llama's multiplies after it, which in float32
    is the same and in bf16 differs by one rounding).
    """

    eps: float
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.constant(1.0 - self.offset)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scale = leaf(self, "scale", (x.shape[-1],), init).astype(wide)
        x_wide = x.astype(wide)
        mean_square = jnp.mean(x_wide * x_wide, axis=-1, keepdims=True)
        y = x_wide * jax.lax.rsqrt(mean_square + self.eps) * (self.offset + scale)
        return y.astype(x.dtype)
