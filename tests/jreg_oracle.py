"""JREG's formulas in float64, written from the paper: displacement, jump rates, the penalty."""

import numpy as np


def displacement(states: list[np.ndarray], counted: np.ndarray) -> np.ndarray:
    """Psi_1 .. Psi_L of hidden states h_0 .. h_L ([B, T, D] each), averaged over counted tokens."""
    psi = []
    for before, after in zip(states[:-1], states[1:], strict=True):
        a, b = np.asarray(before, np.float64), np.asarray(after, np.float64)
        total, count = 0.0, 0
        for i, j in np.argwhere(counted):
            norms = np.linalg.norm(a[i, j]) * np.linalg.norm(b[i, j])
            total += (1 - (a[i, j] @ b[i, j] / norms if norms else 0.0)) / 2
            count += 1
        psi.append(total / count)
    return np.array(psi)


def jump_rate(psi: np.ndarray, first: int) -> float:
    """zeta_l with l = `first`, counted from 1 as in the paper; percent."""
    total = 0.0
    for k in range(first, len(psi) + 1):
        total += max(0.0, psi[k - 1] - psi[k - 2])
    return 100 * total


def penalty(psi: np.ndarray, alpha: float) -> float:
    weights = [np.exp(alpha * layer) for layer in range(1, len(psi) + 1)]
    return sum(w / sum(weights) * p for w, p in zip(weights, psi, strict=True))
