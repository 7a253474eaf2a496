"""Compensation of the remaining weights for the removed neurons, W_rest += Lambda^T W_gone.

Row i of Lambda [gone, survivors] approximates removed neuron i by a combination of the survivors:

- none: 0.
- sum (Srinivas & Babu 2015): 1 for the survivor that the neuron was merged into, if the selection
  merges; else [ours] for the survivor with the nearest incoming vector.
- least_squares (Stahlberg & Byrne 2017, data-free form): argmin |E_gone - Lambda E_rest|^2 for all
  removed neurons together, where E are the incoming vectors; the minimum-norm solution.
- ridge: the same with + mu |Lambda|^2, mu = RIDGE times the mean squared length of a survivor's
  vector, which is the mean diagonal of the survivors' Gram matrix.
- scaled [ours]: c for the survivor i whose multiple is nearest. Gated: c multiplies U_i alone,
  min_c |G_j - G_i|^2 + |U_j - c U_i|^2, exact for every activation where G_j = G_i, U_j = c U_i.
  Plain: min_{c >= 0} |e_j - c e_i|^2, exact for ReLU where e_j = c e_i.

Compensations that use states on calibration text (`states.METHODS`) run after the removal
(`blockwise.compensated`). Ties go to the lowest survivor. The systems are solved in float64; W is
cast back to its dtype at the end.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from ffn_heterogeneity.io.assemble import all_finite
from ffn_heterogeneity.surgery import neighbours, states
from ffn_heterogeneity.surgery.least_squares import solve_together
from ffn_heterogeneity.surgery.weights import CACHED, Outgoing, blocks, incoming, outgoing
from ffn_heterogeneity.wording import check_choice

RIDGE = 0.1
_PRODUCTS = 1 << 21  # elements in a block of products with all survivors


@dataclasses.dataclass(frozen=True)
class Problem:
    """One layer's neurons.

    Attributes:
      vectors: E [m, p], from `weights.incoming`; the first `gate` coordinates belong to "gate".
      weights: W.
      kept, gone: indices, ascending.
      merges: (survivor, removed) of each step of a selection that merges, else None.
    """

    vectors: np.ndarray
    gate: int
    weights: Outgoing
    kept: np.ndarray
    gone: np.ndarray
    merges: np.ndarray | None

    def squares(self, neurons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Squared norms of those neurons' incoming vectors: (of "gate", of "up")."""
        squared = np.empty((2, len(neurons)))
        for block in blocks((len(neurons), self.vectors.shape[1]), _PRODUCTS):
            rows = self.vectors[neurons[block]].astype(np.float64) ** 2
            squared[0, block] = rows[:, : self.gate].sum(axis=1)
            squared[1, block] = rows[:, self.gate :].sum(axis=1)
        return squared[0], squared[1]


# Maps a slice of the survivors to their new rows of W, float64.
Rows = Callable[[slice], np.ndarray]


def outgoing_of_survivors(
    name: str, ffn: dict, gone: np.ndarray, merges: np.ndarray | None = None
) -> tuple[np.ndarray, dict]:
    """Return the survivors' W [s, n] after compensation, in the dtype of W, and a report.

    Masks, adapters and neuron factors of W are folded into it.

    Returns:
      (W, {"lambda_norm": Frobenius norm, "lambda_max": largest |entry|, "residual":
      |E_gone - Lambda E_rest| / |E_gone| (scaled: with U_i scaled), "condition": the ratio
      of the system's extreme singular values; None if no system is solved}).

    Raises:
      ValueError: unknown name; non-finite weights; the result does not fit in W's dtype.
    """
    check_choice("compensation", name, COMPENSATIONS)
    vectors, gate = incoming(ffn)
    survivors = np.setdiff1d(np.arange(len(vectors)), gone)
    problem = Problem(vectors, gate, outgoing(ffn), survivors, np.sort(gone), merges)
    rows, report = _METHODS[name](problem)
    kernel = np.empty(
        (len(survivors), problem.weights.kernel.shape[1]), problem.weights.kernel.dtype
    )
    with np.errstate(over="ignore"):  # raises the error below
        for block in blocks(kernel.shape, CACHED):
            kernel[block] = rows(block)
    if not all_finite(kernel):
        raise ValueError(
            f"compensation={name!r}: the survivors' weights no longer fit in {kernel.dtype} "
            f"(largest |lambda| {report['lambda_max']:.3g}): use 'ridge', or a float32 model"
        )
    return kernel, report


def _sum(problem: Problem) -> tuple[Rows, dict]:
    weights, vectors = problem.weights, problem.vectors
    if problem.merges is None:
        groups = neighbours.duplicate_groups(vectors[problem.kept])
        alive = np.zeros(len(vectors), bool)
        alive[problem.kept[groups]] = True  # the lowest index represents equal vectors
        into, squared = neighbours.Neighbours(vectors, alive).nearest(problem.gone)
        steps = zip(into.tolist(), problem.gone.tolist(), strict=True)
    else:
        steps = problem.merges.tolist()
        last = {gone: into for into, gone in steps}
        into = np.array([_root(last, gone) for gone in problem.gone.tolist()])
        squared = neighbours.squared_distances(vectors, problem.gone, into)
    changed: dict[int, np.ndarray] = {}

    def row(neuron: int) -> np.ndarray:
        return changed[neuron] if neuron in changed else weights.rows(np.array([neuron]))[0]

    for survivor, removed in steps:
        changed[survivor] = row(survivor) + row(removed)
    report = _report(problem, np.ones(len(problem.gone)), squared)
    return _changed_rows(problem, changed), report


def _root(into: dict[int, int], neuron: int) -> int:
    while neuron in into:
        neuron = into[neuron]
    return neuron


def _scaled(problem: Problem) -> tuple[Rows, dict]:
    into, factor, squared = _nearest_multiple(problem)
    changed: dict[int, np.ndarray] = {}
    for survivor, removed, c in zip(into.tolist(), problem.gone.tolist(), factor, strict=True):
        if survivor not in changed:
            changed[survivor] = problem.weights.rows(np.array([survivor]))[0]
        changed[survivor] += c * problem.weights.rows(np.array([removed]))[0]
    report = _report(problem, factor, squared)
    return _changed_rows(problem, changed), report


def _nearest_multiple(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (survivor, its factor c, squared distance) for each removed neuron."""
    into = np.empty(len(problem.gone), np.int64)
    factor, squared = np.empty(len(problem.gone)), np.empty(len(problem.gone))
    gate = problem.gate
    gate_squares, up_squares = problem.squares(problem.kept)
    for block in blocks((len(problem.gone), len(problem.kept)), _PRODUCTS):
        gone = problem.vectors[problem.gone[block]].astype(np.float64)
        lengths = np.einsum("mp,mp->m", gone, gone)[:, None]
        distance, factors = np.empty((2, len(gone), len(problem.kept)))
        for some in blocks((len(problem.kept), gone.shape[1]), _PRODUCTS):
            rest = problem.vectors[problem.kept[some]].astype(np.float64)
            factors[:, some] = _factors(gone[:, gate:] @ rest[:, gate:].T, up_squares[some], gate)
            distance[:, some] = gate_squares[some] - 2 * (gone[:, :gate] @ rest[:, :gate].T)
        explained = factors**2 * up_squares
        distance += lengths - explained
        # The products have rounding errors: the candidates' distances are measured exactly.
        margin = 1e-12 * (lengths + gate_squares + explained)
        limit = (distance + margin).min(axis=1, keepdims=True)
        row, column = np.nonzero(distance - margin <= limit)
        scale, measured = _measured_multiples(problem, block, row, column)
        best = neighbours.least_of_rows(row, measured, column)
        into[block], factor[block] = problem.kept[column[best]], scale[best]
        squared[block] = measured[best]
    return into, factor, squared


def _measured_multiples(
    problem: Problem, block: slice, row: np.ndarray, column: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(c, squared distance) of pairs of a removed neuron and a survivor, given by position."""
    c, squared = np.empty(len(row)), np.empty(len(row))
    for some in blocks((len(row), problem.vectors.shape[1]), _PRODUCTS):
        gone = problem.vectors[problem.gone[block][row[some]]].astype(np.float64)
        rest = problem.vectors[problem.kept[column[some]]].astype(np.float64)
        up = rest[:, problem.gate :]
        products = np.einsum("rp,rp->r", gone[:, problem.gate :], up)
        c[some] = _factors(products, np.einsum("rp,rp->r", up, up), problem.gate)
        up *= c[some, None]
        gone -= rest
        squared[some] = np.einsum("rp,rp->r", gone, gone)
    return c, squared


def _factors(products: np.ndarray, squares: np.ndarray, gated: int) -> np.ndarray:
    """Best factors c for vectors with these squared norms; not negative without a gate."""
    c = np.divide(products, squares, out=np.zeros_like(products), where=squares > 0)
    return c if gated else np.maximum(c, 0)


def _solved(problem: Problem, ridge: float) -> tuple[Rows, dict]:
    survivors, weights = problem.kept, problem.weights
    added, report = solve_together(problem.vectors, survivors, problem.gone, weights.rows, ridge)
    return lambda block: weights.rows(survivors[block]) + added(block), report


def _changed_rows(problem: Problem, changed: dict[int, np.ndarray]) -> Rows:
    """Rows of the survivors: those in `changed`, and the others unchanged."""

    def rows(block: slice) -> np.ndarray:
        neurons = problem.kept[block]
        kernel_rows = problem.weights.rows(neurons)
        for place, neuron in enumerate(neurons.tolist()):
            if neuron in changed:
                kernel_rows[place] = changed[neuron]
        return kernel_rows

    return rows


def _report(problem: Problem, factors: np.ndarray, squared: np.ndarray) -> dict:
    total = sum(float(squares.sum()) for squares in problem.squares(problem.gone))
    return {
        "lambda_norm": float(np.linalg.norm(factors)),
        "lambda_max": float(np.abs(factors).max(initial=0.0)),
        "residual": math.sqrt(float(squared.sum()) / total) if total else 0.0,
        "condition": None,
    }


_METHODS: dict[str, Callable[[Problem], tuple[Rows, dict]]] = {
    "sum": _sum,
    "least_squares": functools.partial(_solved, ridge=0.0),
    "ridge": functools.partial(_solved, ridge=RIDGE),
    "scaled": _scaled,
}
OF_WEIGHTS = tuple(_METHODS)
COMPENSATIONS = ("none", *OF_WEIGHTS, *states.METHODS)
