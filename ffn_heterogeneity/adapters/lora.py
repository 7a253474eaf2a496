"""LoRA: a kernel plus a product of two thin matrices, K + s A B (Hu et al.).

A [in, r] and B [r, out] train; the scale s = alpha / r is a leaf [1]. Initially A ~ U(-1/sqrt(in),
1/sqrt(in)) and B = 0, so that an adapter changes nothing.
"""

import jax
import jax.numpy as jnp

from ffn_heterogeneity.adapters.rows import of_rows


def add_to_kernel(kernel: jax.Array, leaves: dict[str, jax.Array]) -> jax.Array:
    """K + s A B, [..., in, out], in the wider of the two dtypes."""
    thin = leaves["lora_a"] @ leaves["lora_b"]
    return kernel + leaves["lora_scale"][..., None] * thin


def add_to_product(y, x, leaves: dict[str, jax.Array], kernel, dot, drop) -> jax.Array:
    """y + s (drop(x) A) B: 2 r (in + out) operations per token, in addition to K's 2 in out."""
    scale = of_rows(leaves["lora_scale"], y, dot)
    return y + scale * dot(dot(drop(x), leaves["lora_a"]), leaves["lora_b"])


def init(key: jax.Array, kernel, rank: int, alpha: float) -> dict[str, jax.Array]:
    """The three leaves for a kernel [in, out], float32."""
    fan_in, fan_out = kernel.shape
    bound = fan_in**-0.5
    return {
        "lora_a": jax.random.uniform(key, (fan_in, rank), jnp.float32, -bound, bound),
        "lora_b": jnp.zeros((rank, fan_out), jnp.float32),
        "lora_scale": jnp.full((1,), alpha / rank, jnp.float32),
    }
