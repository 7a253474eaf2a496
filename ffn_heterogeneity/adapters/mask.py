"""A mask on a kernel: a fixed one, W * mask, or one from scores that train instead of weights.

Each weight of a frozen kernel has a score in [0, 1] (GEM-MINER): W * 1[score > 1/2]. The mask's
gradient is passed to the score unchanged (straight-through). The authors clip the scores to [0, 1]
after each step; here scores are not clipped, but a gradient that would move a score further out of
[0, 1] is 0.
"""

import jax
import jax.numpy as jnp


def apply_mask(kernel: jax.Array, leaves: dict[str, jax.Array]) -> jax.Array:
    """kernel * mask; a mask of fewer dimensions broadcasts against the kernel's last ones.

    Zeros are selected, not multiplied, so that a masked non-finite weight is removed.
    """
    mask = leaves["mask"]
    masked = kernel * mask.astype(kernel.dtype)
    return jnp.where(mask == 0, jnp.zeros((), kernel.dtype), masked)


def apply_score(kernel: jax.Array, leaves: dict[str, jax.Array]) -> jax.Array:
    """kernel * 1[score > 1/2]; a product, because scores of masked weights have a gradient too."""
    return kernel * binary(jnp.asarray(leaves["score"])).astype(kernel.dtype)


@jax.custom_vjp
def binary(score: jax.Array) -> jax.Array:
    """1[clip(score, 0, 1) > 1/2], in the score's dtype."""
    return (score > 0.5).astype(score.dtype)


def _straight_through(score: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    outward = jnp.where(g > 0, score <= 0, score >= 1)  # a step goes against the gradient
    return (jnp.where(outward, jnp.zeros((), g.dtype), g),)


binary.defvjp(lambda score: (binary(score), score), _straight_through)
