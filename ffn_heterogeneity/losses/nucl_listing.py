"""The NUCL paper's listing, as printed; used only as a reference in tests and benchmarks.

With automatic differentiation it is slow, and fails in cases that `losses/nucl.py` handles: an
all-zero row is NaN in all three, a uniform row has an infinite mstd gradient, a zero weight an
infinite ent gradient. Training never calls it.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import entr


def compute_nucl_listing(w_param: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(ent_loss, gini_loss, mstd_loss) of rows of [..., m, n], summed."""
    w = jnp.abs(w_param)
    z = jnp.sum(w, axis=-1, keepdims=True)
    r = w / z
    ent_loss = jnp.sum(jnp.log(z) + jnp.sum(entr(w), axis=-1, keepdims=True) / z)
    gini_loss = jnp.sum(1 - jnp.sum(r * r, axis=-1))
    mstd_loss = -jnp.sum(jnp.std(r, axis=-1))
    return ent_loss, gini_loss, mstd_loss
