"""Compensation by what the neurons that stay can say for the states of those that go.

G = mean h h^T over calibration text, bos left out; S the neurons kept, R those removed. Everything
is linear in W, so what is fitted to the removed states is fitted to the FFN's output too.

- state_ridge [ours]: h_R ~ h_S C in units of each kept neuron's rms, z = h_S / rms(h_S):
  C = diag(1 / rms) (mean z z^T + lambda I)^-1 mean z h_R^T,   W_S + C W_R.
  lambda: that of `LAMBDAS` whose output is nearest on held-out rows; C is then fitted to all.
- gram (GRAIL, arXiv 2602.23795): h ~ B h_S, B = G[:, S] (G[S, S] + lambda I)^-1, and B^T W on the
  kept rows; lambda is `GRAM` times the mean of G[S, S]'s diagonal [ours: the paper's is not known
  here].
- bias (FLAP): mean h_R W_R is added to the FFN's output; W stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

LAMBDAS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
GRAM = 0.01
Seen = Mapping[str, Any]
Rows = Callable[[Any], np.ndarray]


def state_ridge(seen: Seen, kept: np.ndarray, gone: np.ndarray, weights: Rows) -> tuple[Rows, dict]:
    """See this module."""
    fitted, held = _moments(seen, kept)
    outgoing = weights(gone)
    errors = {
        x: output_error(held, kept, gone, explained(fitted, kept, gone, x), outgoing)
        for x in LAMBDAS
    }
    best = min(errors, key=errors.__getitem__)
    whole = _whole(seen)
    c = explained(whole, kept, gone, best)
    plain = output_error(whole, kept, gone, np.zeros_like(c), outgoing)
    left = output_error(whole, kept, gone, c, outgoing)
    report = _report(c, left, plain) | {"lambda": best}
    added = c @ outgoing
    return lambda part: weights(kept[part]) + added[part], report


def explained(gram: np.ndarray, kept: np.ndarray, gone: np.ndarray, ridge: float) -> np.ndarray:
    """C [kept, gone] of state_ridge; of a neuron that never speaks the row is 0."""
    from scipy.linalg import solve

    rms = np.sqrt(np.diag(gram)[kept])
    scale = np.divide(1, rms, out=np.zeros_like(rms), where=rms > 0)
    system = gram[np.ix_(kept, kept)] * scale[:, None] * scale + ridge * np.eye(len(kept))
    wanted = gram[np.ix_(kept, gone)] * scale[:, None]
    return solve(system, wanted, assume_a="pos") * scale[:, None]


def output_error(
    gram: np.ndarray, kept: np.ndarray, gone: np.ndarray, c: np.ndarray, outgoing: np.ndarray
) -> float:
    """mean |h_R W_R - h_S C W_R|^2 over the tokens behind `gram`."""
    added = c @ outgoing
    crossed = gram[np.ix_(kept, gone)] @ outgoing
    squares = np.vdot(outgoing, gram[np.ix_(gone, gone)] @ outgoing)
    inside = np.vdot(added, gram[np.ix_(kept, kept)] @ added)
    return max(float(squares - 2 * np.vdot(added, crossed) + inside), 0.0)


def gram(seen: Seen, kept: np.ndarray, gone: np.ndarray, weights: Rows) -> tuple[Rows, dict]:
    """See this module."""
    from scipy.linalg import solve

    _moments(seen, kept)
    whole, m = _whole(seen), len(kept) + len(gone)
    own = whole[np.ix_(kept, kept)]
    ridge = GRAM * max(float(np.diag(own).mean()), np.finfo(float).tiny)
    b = solve(own + ridge * np.eye(len(kept)), whole[kept], assume_a="pos")  # B^T [kept, m]
    rows = b @ weights(np.arange(m))
    outgoing = weights(gone)
    plain = output_error(whole, kept, gone, np.zeros((len(kept), len(gone))), outgoing)
    change = rows - weights(kept)
    left = np.vdot(outgoing, whole[np.ix_(gone, gone)] @ outgoing)
    left -= 2 * np.vdot(change, whole[np.ix_(kept, gone)] @ outgoing)
    left += np.vdot(change, own @ change)
    return lambda part: rows[part], _report(b[:, gone], max(float(left), 0.0), plain)


def bias(seen: Seen, kept: np.ndarray, gone: np.ndarray, weights: Rows) -> tuple[Rows, dict]:
    """See this module; the report's "bias" [n] is what is added to the FFN's output."""
    added = seen["signed"][gone] @ weights(gone)
    report = _report(np.zeros((0, 0)), 0.0, 0.0) | {"residual": None, "bias": added}
    return lambda part: weights(kept[part]), report


def _moments(seen: Seen, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if seen["tokens"] < len(kept):
        raise ValueError(
            f"{seen['tokens']:,} calibration tokens cannot tell {len(kept):,} kept neurons apart: "
            f"give calibration_tokens of at least {len(kept):,}, better four times as many"
        )
    return seen["moments"]


def _whole(seen: Seen) -> np.ndarray:
    fitted, held = seen["moments"]
    share = seen["held_share"]
    return (1 - share) * fitted + share * held


def _report(factors: np.ndarray, left: float, plain: float) -> dict:
    return {
        "lambda_norm": float(np.linalg.norm(factors)),
        "lambda_max": float(np.abs(factors).max(initial=0.0)),
        "residual": (left / plain) ** 0.5 if plain else 0.0,
        "condition": None,
    }


# Those that need all second moments.
ON_MOMENTS = ("gram", "state_ridge")
METHODS: dict[str, Callable[..., tuple[Rows, dict]]] = {
    "bias": bias,
    "gram": gram,
    "state_ridge": state_ridge,
}
