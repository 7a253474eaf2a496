"""Vectors of a `Linear` in products: the same for all rows, or one for each expert's rows."""

from typing import Any

import jax.numpy as jnp


def of_rows(vector: Any, x: Any, dot: Any) -> Any:
    """A vector [n] itself, or the vectors [E, n] of experts as those of the rows, [rows, n].

    The latter by a product of ones, whose gradient is a sum over each expert's rows.

    Args:
      x: the rows, [rows, in]; the result has their dtype.
      dot: the product of rows with kernels, as in `Adapter.product`.
    """
    if vector.ndim == 1:
        return vector.astype(x.dtype)
    return dot(jnp.ones((len(x), 1), x.dtype), vector[:, None, :])
