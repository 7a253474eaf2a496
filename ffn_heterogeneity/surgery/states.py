"""Compensation by states: refit the kept neurons' outgoing weights to the dense block's output.

Notation, over calibration text without bos: g [c] are the smaller block's states after the
activation (and its factors), y is the dense block's output, r = y - g W the residual of the smaller
block's W; G = mean g g^T, B = mean g r^T. D is added to W:

- state_ridge [ours]: D = diag(1 / u) (Z + lambda I)^-1 diag(1 / u) B, where u is a unit per neuron
  and Z = diag(1 / u) G diag(1 / u). lambda is the value of `LAMBDAS` with the smallest error on
  held-out rows; D is then fitted to all rows. For removed neurons r = h_R W_R, so D = C W_R, where
  h_R ~ h_S C regresses their states on those of the kept ones. u is the neuron's rms, but at least
  1 / `LOUD` of its |h| on bos. Otherwise the fitted contribution of massive neurons would be far
  too large on bos (SmolLM2 without the 25% of highest entropy: 17 times the norm of the residual
  stream).
- gram (GRAIL, arXiv 2602.23795): W + D = (G + lambda I)^-1 mean g y^T, lambda `GRAM` times the mean
  of G's diagonal [ours: the paper's value is not known here]. Shrinks neurons with small states.
- bias (FLAP): mean r is added to the output's bias; W is unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LAMBDAS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
GRAM = 0.01
LOUD = 10.0


@dataclasses.dataclass(frozen=True)
class Moments:
    """Weighted sums over tokens (weight 1 by default), float64.

    Attributes:
      states: g g^T, [c, c].
      crossed: g r^T, [c, n].
      missed: r, [n].
      squares: |r|^2.
      weight: total weight of the tokens.
      tokens: number of tokens.
      first: g^2 on bos, which is not counted among the tokens, [c].
      rows: number of bos tokens in `first`.
    """

    states: np.ndarray
    crossed: np.ndarray
    missed: np.ndarray
    squares: float
    weight: float
    tokens: float
    first: np.ndarray
    rows: float

    def __add__(self, other: Moments) -> Moments:
        fields = (field.name for field in dataclasses.fields(self))
        return Moments(*(getattr(self, name) + getattr(other, name) for name in fields))

    def error(self, added: np.ndarray) -> float:
        """mean |r - g D|^2, the error with D added to W."""
        inside = np.vdot(added, self.states @ added) - 2 * np.vdot(added, self.crossed)
        return max(float(self.squares + inside), 0.0) / self.weight

    def units(self) -> np.ndarray:
        """u [c]: the unit of each neuron in state_ridge."""
        typical = np.diag(self.states) / self.weight
        loud = self.first / self.rows * self.tokens / self.weight
        return np.sqrt(np.maximum(typical, loud / LOUD**2))


class Fit(NamedTuple):
    """Corrections of W and of the output's bias, and their report."""

    kernel: np.ndarray | float
    bias: np.ndarray | None
    report: dict[str, float]


def state_ridge(fitted: Moments, held: Moments, kernel: np.ndarray) -> Fit:
    """Fit state_ridge; see this module.

    The report has "lambda", "residual" (the remaining error of the output, relative to its norm
    before) and "held_residual" (the same on held-out rows, fitted without them).
    """
    errors = {ridge: held.error(explained(fitted, ridge)) for ridge in LAMBDAS}
    best = min(errors, key=errors.__getitem__)
    pooled = fitted + held
    added = explained(pooled, best)
    shares = {"residual": _share(pooled, pooled.error(added))}
    shares["held_residual"] = _share(held, errors[best])
    return Fit(added, None, {"lambda": best} | shares)


def explained(moments: Moments, ridge: float) -> np.ndarray:
    """D [c, n] of state_ridge; the row of a neuron whose states are all 0 is 0."""
    from scipy.linalg import solve

    units = moments.units()
    scale = np.divide(1, units, out=np.zeros_like(units), where=units > 0)[:, None]
    system = moments.states / moments.weight * scale * scale[:, 0] + ridge * np.eye(len(units))
    return scale * solve(system, scale * moments.crossed / moments.weight, assume_a="pos")


def gram(fitted: Moments, held: Moments, kernel: np.ndarray) -> Fit:
    """Fit gram; see this module. Uses held-out rows for the fit, too."""
    from scipy.linalg import solve

    pooled = fitted + held
    moment = pooled.states / pooled.weight
    ridge = GRAM * max(float(np.diag(moment).mean()), np.finfo(float).tiny)
    wanted = moment @ kernel + pooled.crossed / pooled.weight
    added = solve(moment + ridge * np.eye(len(moment)), wanted, assume_a="pos") - kernel
    return Fit(added, None, {"residual": _share(pooled, pooled.error(added))})


def bias(fitted: Moments, held: Moments, kernel: np.ndarray) -> Fit:
    """Fit the correction of the output's bias; see this module."""
    pooled = fitted + held
    mean = pooled.missed / pooled.weight
    left = pooled.squares / pooled.weight - mean @ mean
    return Fit(0.0, mean, {"residual": _share(pooled, max(float(left), 0.0))})


def _share(moments: Moments, left: float) -> float:
    plain = moments.squares / moments.weight
    return (left / plain) ** 0.5 if plain else 0.0


METHODS: dict[str, Callable[[Moments, Moments, np.ndarray], Fit]] = {
    "bias": bias,
    "gram": gram,
    "state_ridge": state_ridge,
}
