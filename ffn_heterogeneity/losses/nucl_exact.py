"""NUCL's row statistics in float64 on the host, for the choice of neurons and for reports.

r_i = |W_i| / sum_j |W_ij|. The differentiable float32 form of the same formulas is `nucl_rows.py`.
"""

import jax
import numpy as np

from ffn_heterogeneity.models.linear import effective_kernel


def exact_kernel(leaves: dict, name: str = "ffn/down/kernel") -> np.ndarray:
    """The effective kernel [m, n] in float64; of E experts [E m, n].

    Raises:
      ValueError: a weight is NaN or infinite; the message names `name` and the place.
    """
    kernel = np.asarray(jax.device_get(effective_kernel(leaves))).astype(np.float64)
    kernel = kernel.reshape(-1, kernel.shape[-1])
    bad = ~np.isfinite(kernel)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"{name} holds {int(bad.sum())} non-finite weights (NaN or infinite; first: row {row}, "
            f"column {column} is {kernel[row, column]}): check the checkpoint it came from"
        )
    return kernel


def distributions(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(r [m, n], dead [m]): the rows of |W| normalized to sum 1; dead rows stay 0."""
    magnitudes = np.abs(weights)
    # Divided by the largest first, so that sums of rows of 1e-300 do not underflow.
    largest = magnitudes.max(axis=1, keepdims=True)
    dead = largest[:, 0] == 0
    magnitudes /= np.where(largest > 0, largest, 1.0)
    totals = magnitudes.sum(axis=1, keepdims=True)
    return magnitudes / np.where(totals > 0, totals, 1.0), dead


def row_entropy(r: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """H(r) in nats [m]; 0 for dead rows."""
    return -np.einsum("mn,mn->m", r, np.log(np.where(r > 0, r, 1.0)))


def row_gini(r: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """1 - sum r^2 [m]; 0 for dead rows."""
    return np.where(dead, 0.0, 1.0 - np.einsum("mn,mn->m", r, r))


def row_mstd(r: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """-std(r) [m]; 0 for dead rows."""
    return -r.std(axis=1)


STATISTICS = {"entropy": row_entropy, "gini": row_gini, "mstd": row_mstd}


def row_statistics(r: np.ndarray, dead: np.ndarray) -> dict[str, np.ndarray]:
    """All of `STATISTICS`, each [m]."""
    return {name: statistic(r, dead) for name, statistic in STATISTICS.items()}
