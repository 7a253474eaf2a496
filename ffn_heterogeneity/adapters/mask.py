"""A fixed mask on a kernel: W * mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def apply_mask(kernel: jax.Array, leaves: dict[str, jax.Array]) -> jax.Array:
    """kernel * mask; a mask of fewer dimensions broadcasts against the kernel's last ones.

    Zeros are selected, not multiplied, so that a masked non-finite weight is really gone.
    """
    mask = leaves["mask"]
    kept = kernel * mask.astype(kernel.dtype)
    return jnp.where(mask == 0, jnp.zeros((), kernel.dtype), kept)
