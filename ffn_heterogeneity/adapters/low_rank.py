"""Low-rank kernels: the product of two trained factors, K = A B, not materialized in a step."""

import jax
import numpy as np


def kernel(leaves: dict[str, jax.Array]) -> jax.Array:
    """A B, [..., in, out]."""
    return leaves["low_rank_a"] @ leaves["low_rank_b"]


def product(y, x, leaves: dict[str, jax.Array], kernel, dot, drop) -> jax.Array:
    """(x A) B: 2 r (in + out) operations per token instead of K's 2 in out."""
    return dot(dot(x, leaves["low_rank_a"]), leaves["low_rank_b"])


def of_kernel(kernel: np.ndarray, rank: int) -> dict[str, np.ndarray]:
    """Factors of the best approximation of that rank: U S and V^T of the SVD, in its dtype.

    The columns of A are orthogonal, and their norms are the singular values.
    """
    u, s, v = np.linalg.svd(np.asarray(kernel, np.float64), full_matrices=False)
    pair = {"low_rank_a": u[:, :rank] * s[:rank], "low_rank_b": v[:rank]}
    return {name: factor.astype(kernel.dtype) for name, factor in pair.items()}
