"""Rotary position embeddings, half-rotation form (Hugging Face's order of the head dimension)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """float32 [rotated / 2]: theta^(-2i/rotated), with the config's scaling.

    `rotated` is head_dim, or the config's fraction of it.

    Llama 3.1's scaling [its reference code]: frequencies of wavelengths above original_max /
    low_freq_factor are divided by `factor`, those below original_max / high_freq_factor are
    unchanged, with linear interpolation between.
    """
    rotated = rope.rotated(head_dim)
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    frequencies = (1.0 / np.power(np.float32(rope.theta), exponents)).astype(np.float32)
    frequencies = frequencies / np.float32(rope.linear_factor)
    if rope.llama3 is None:
        return frequencies
    factor, low, high, original = rope.llama3
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = np.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return np.where(between, blended, scaled).astype(np.float32)


def rotary_tables(
    rope: RopeConfig | None, head_dim: int, positions_bt: jax.Array
) -> tuple[jax.Array, jax.Array] | None:
    """cos and sin, float32 [B, T, rotated / 2], of the angles position x frequency.

    None without a rope.
    """
    if rope is None:
        return None
    angles = positions_bt[..., None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x_btnh: jax.Array, tables: tuple[jax.Array, jax.Array] | None) -> jax.Array:
    """Rotate the pairs (x[i], x[i + R/2]) by the angle of frequency i; the dtype is kept.

    R is twice the tables' last axis; dimensions from R on are unchanged (without tables, all are).
    """
    if tables is None:
        return x_btnh
    wide = jnp.promote_types(x_btnh.dtype, jnp.float32)
    cos, sin = (table[:, :, None, :] for table in tables)
    rotated = 2 * cos.shape[-1]
    first, second = jnp.split(x_btnh[..., :rotated].astype(wide), 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rotated < x_btnh.shape[-1]:
        parts.append(x_btnh[..., rotated:].astype(wide))
    return jnp.concatenate(parts, axis=-1).astype(x_btnh.dtype)
