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
    _check_tokens(seen, kept)
    (fitted, held), outgoing = seen["moments"], weights(gone)
    errors = {}
    for ridge in LAMBDAS:
        added = explained(fitted, kept, gone, ridge) @ outgoing
        errors[ridge] = output_error(held, kept, gone, added, outgoing)
    best = min(errors, key=errors.__getitem__)
    whole = _whole(seen)
    c = explained(whole, kept, gone, best)
    added = c @ outgoing
    plain = output_error(whole, kept, gone, np.zeros_like(added), outgoing)
    left = output_error(whole, kept, gone, added, outgoing)
    report = _report(c, left, plain) | {"lambda": best}
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
    gram: np.ndarray, kept: np.ndarray, gone: np.ndarray, added: np.ndarray, outgoing: np.ndarray
) -> float:
    """mean |h_R W_R - h_S D|^2 over the tokens behind `gram`; D is `added` to the kept rows."""
    crossed = gram[np.ix_(kept, gone)] @ outgoing
    squares = np.vdot(outgoing, gram[np.ix_(gone, gone)] @ outgoing)
    inside = np.vdot(added, gram[np.ix_(kept, kept)] @ added)
    return max(float(squares - 2 * np.vdot(added, crossed) + inside), 0.0)


def gram(seen: Seen, kept: np.ndarray, gone: np.ndarray, weights: Rows) -> tuple[Rows, dict]:
    """See this module."""
    from scipy.linalg import solve

    _check_tokens(seen, kept)
    whole, m = _whole(seen), len(kept) + len(gone)
    own = whole[np.ix_(kept, kept)]
    ridge = GRAM * max(float(np.diag(own).mean()), np.finfo(float).tiny)
    b = solve(own + ridge * np.eye(len(kept)), whole[kept], assume_a="pos")  # B^T [kept, m]
    rows = b @ weights(np.arange(m))
    outgoing = weights(gone)
    plain = output_error(whole, kept, gone, np.zeros_like(rows), outgoing)
    left = output_error(whole, kept, gone, rows - weights(kept), outgoing)
    return lambda part: rows[part], _report(b[:, gone], left, plain)


def bias(seen: Seen, kept: np.ndarray, gone: np.ndarray, weights: Rows) -> tuple[Rows, dict]:
    """See this module; the report's "bias" [n] is what is added to the FFN's output."""
    added = seen["signed"][gone] @ weights(gone)
    report = _report(np.zeros((0, 0)), 0.0, 0.0) | {"residual": None, "bias": added}
    return lambda part: weights(kept[part]), report


def _check_tokens(seen: Seen, kept: np.ndarray) -> None:
    if seen["tokens"] < len(kept):
        raise ValueError(
            f"{seen['tokens']:,} calibration tokens cannot tell {len(kept):,} kept neurons apart: "
            f"give calibration_tokens of at least {len(kept):,}, better four times as many"
        )


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
