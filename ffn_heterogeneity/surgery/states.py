"""Compensation by what the neurons of a smaller block can say for what its output lost.

Over calibration text, bos left out: g [c] the smaller block's states behind the activation (and
its factors), y the whole block's output, r = y - g W what the smaller one's W misses of it; G =
mean g g^T, B = mean g r^T. What is added to W is D:

- state_ridge [ours]: D = diag(1 / u) (Z + lambda I)^-1 diag(1 / u) B, where u is each neuron's unit
  and Z = diag(1 / u) G diag(1 / u). lambda: that of `LAMBDAS` whose output is nearest on held-out
  rows; D is then fitted to all. Of removed neurons r = h_R W_R: they are explained by the kept
  ones, h_R ~ h_S C, and D = C W_R. u is the neuron's rms, but at least 1 / `LOUD` of its size on
  bos: what a massive neuron says would otherwise be far louder on bos than anything fitted
  (SmolLM2 without its quarter of highest entropy: 17 times the whole residual stream).
- gram (GRAIL, arXiv 2602.23795): W + D = (G + lambda I)^-1 mean g y^T, lambda `GRAM` times the mean
  of G's diagonal [ours: the paper's is not known here]. Neurons that speak quietly go.
- bias (FLAP): mean r is added to the output's bias; W stays.
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
    """Sums over tokens, each of which has a weight (1, if nobody says otherwise), float64.

    Attributes:
      states: g g^T, [c, c].
      crossed: g r^T, [c, n].
      missed: r, [n].
      squares: |r|^2.
      weight: of all tokens.
      tokens: how many.
      first: g^2 on bos, which is not among the tokens, [c].
      rows: how many of those.
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
        """mean |r - g D|^2, of D added to W."""
        inside = np.vdot(added, self.states @ added) - 2 * np.vdot(added, self.crossed)
        return max(float(self.squares + inside), 0.0) / self.weight

    def units(self) -> np.ndarray:
        """u [c]: what state_ridge measures each neuron in."""
        typical = np.diag(self.states) / self.weight
        loud = self.first / self.rows * self.tokens / self.weight
        return np.sqrt(np.maximum(typical, loud / LOUD**2))


class Fit(NamedTuple):
    """Numbers to be added to W and to the output's bias, and what a report says of them."""

    kernel: np.ndarray | float
    bias: np.ndarray | None
    report: dict[str, float]


def state_ridge(fitted: Moments, held: Moments, kernel: np.ndarray) -> Fit:
    """See this module. The report: "lambda", "residual" (what is left of the output's error, a
    share of its length), "held_residual" (of held-out rows, fitted without them)."""
    errors = {ridge: held.error(explained(fitted, ridge)) for ridge in LAMBDAS}
    best = min(errors, key=errors.__getitem__)
    whole = fitted + held
    added = explained(whole, best)
    shares = {"residual": _share(whole, whole.error(added))}
    shares["held_residual"] = _share(held, errors[best])
    return Fit(added, None, {"lambda": best} | shares)


def explained(moments: Moments, ridge: float) -> np.ndarray:
    """D [c, n] of state_ridge; of a neuron that never speaks the row is 0."""
    from scipy.linalg import solve

    units = moments.units()
    scale = np.divide(1, units, out=np.zeros_like(units), where=units > 0)[:, None]
    system = moments.states / moments.weight * scale * scale[:, 0] + ridge * np.eye(len(units))
    return scale * solve(system, scale * moments.crossed / moments.weight, assume_a="pos")


def gram(fitted: Moments, held: Moments, kernel: np.ndarray) -> Fit:
    """See this module; nothing is held out."""
    from scipy.linalg import solve

    whole = fitted + held
    own = whole.states / whole.weight
    ridge = GRAM * max(float(np.diag(own).mean()), np.finfo(float).tiny)
    wanted = own @ kernel + whole.crossed / whole.weight
    added = solve(own + ridge * np.eye(len(own)), wanted, assume_a="pos") - kernel
    return Fit(added, None, {"residual": _share(whole, whole.error(added))})


def bias(fitted: Moments, held: Moments, kernel: np.ndarray) -> Fit:
    """See this module."""
    whole = fitted + held
    mean = whole.missed / whole.weight
    left = whole.squares / whole.weight - mean @ mean
    return Fit(0.0, mean, {"residual": _share(whole, max(float(left), 0.0))})


def _share(moments: Moments, left: float) -> float:
    plain = moments.squares / moments.weight
    return (left / plain) ** 0.5 if plain else 0.0


METHODS: dict[str, Callable[[Moments, Moments, np.ndarray], Fit]] = {
    "bias": bias,
    "gram": gram,
    "state_ridge": state_ridge,
}
