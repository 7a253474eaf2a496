"""Norms: RMSNorm (Llama's and Gemma's), LayerNorm, LayerNorm without parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.linear import leaf


class Norm(nn.Module):
    """The norm that `config.norm_kind` names, over the last axis; c = x - mean(x).

        "rms": x / sqrt(mean(x^2) + eps) * (offset + scale)
        "layer": c / sqrt(mean(c^2) + eps) * (offset + scale) + bias
        "layer_without_parameters": c / sqrt(mean(c^2) + eps)

    Computed in float32 (float64 for float64 inputs) and returned in the input's dtype. The scale is
    multiplied before the cast back (Gemma's order; Llama multiplies after it, which is equal in
    float32 and differs by one rounding in bf16).
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, shape = self.config, (x.shape[-1],)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x_wide = x.astype(wide)
        if config.norm_kind != "rms":
            x_wide = x_wide - jnp.mean(x_wide, axis=-1, keepdims=True)
        mean_square = jnp.mean(x_wide * x_wide, axis=-1, keepdims=True)
        y = x_wide * jax.lax.rsqrt(mean_square + config.norm_eps)
        if config.norm_kind != "layer_without_parameters":
            y = y * (config.norm_offset + leaf(self, "scale", shape).astype(wide))
        if config.norm_kind == "layer":
            y = y + leaf(self, "bias", shape).astype(wide)
        return y.astype(x.dtype)
