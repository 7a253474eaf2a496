"""NUCL in float64 numpy, written from the formulas; shared by the tests."""

import numpy as np


def rows(w, variant):
    """Value of every row of [..., m, n]."""
    a = np.abs(np.asarray(w, np.float64))
    n = a.shape[-1]
    z = a.sum(-1)
    r = a / np.where(z > 0, z, 1)[..., None]
    q = (r * r).sum(-1)
    if variant == "ent":
        value = -(r * np.log(np.where(r > 0, r, 1))).sum(-1)
    elif variant == "gini":
        value = 1 - q
    else:
        value = -np.sqrt(np.maximum(q - 1 / n, 0) / n)
    return np.where(z > 0, value, 0)


def gradient(w, variant):
    """d(sum of rows)/dw; 0 in all-zero rows, at zero weights, and for mstd in uniform rows."""
    w = np.asarray(w, np.float64)
    a, n = np.abs(w), w.shape[-1]
    z = a.sum(-1, keepdims=True)
    z1 = np.where(z > 0, z, 1)
    r = a / z1
    q = (r * r).sum(-1, keepdims=True)
    if variant == "ent":
        log_r = np.log(np.where(r > 0, r, 1))
        g = -(log_r - (r * log_r).sum(-1, keepdims=True)) / z1
    elif variant == "gini":
        g = -2 * (r - q) / z1
    else:
        s = np.sqrt(np.maximum(q - 1 / n, 0) / n)
        uniform = a.max(-1, keepdims=True) == a.min(-1, keepdims=True)
        g = np.where(uniform, 0, -(r - q) / (n * np.where(s > 0, s, 1) * z1))
    return np.where(z > 0, g * np.sign(w), 0)


def gap(got, expected):
    """Norm of the difference divided by the norm of the expected value."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    scale = np.abs(expected).max()
    if scale == 0:
        return np.abs(got).max()
    return np.linalg.norm((got - expected) / scale) / np.linalg.norm(expected / scale)
