"""Removal criteria: functions of ONE layer's FFN leaves -> scores [m]; the highest go first.

NUCL, section 4.2. r_i = |W_i| / sum_j |W_ij| is the distribution of neuron i's outgoing weights,
W = down/kernel [m, n], one row per inner neuron. Scores decide which neurons go, so they are
computed in float64 on the host, one layer at a time and a few neurons at a time; the streaming
form is the same code.

A neuron whose outgoing weights are all zero does nothing: every data-free criterion removes it
first (the paper does not meet this case; removing it is exact).

"similarity" is a criterion without scores: what goes next depends on what went before
(`similarity.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ffn_heterogeneity.losses.nucl_exact import STATISTICS, distributions
from ffn_heterogeneity.surgery.weights import outgoing
from ffn_heterogeneity.wording import check_choice


def _row_by_row(ffn: dict, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`function` (rows of W [b, n], float64) -> [b], over all neurons."""
    return np.concatenate([function(rows) for _, rows in outgoing(ffn).blocks()])


def _heterogeneity(ffn: dict, statistic: str) -> np.ndarray:
    def scores(rows: np.ndarray) -> np.ndarray:
        r, dead = distributions(rows)
        return _dead_first(STATISTICS[statistic](r, dead), dead)

    return _row_by_row(ffn, scores)


def _dead_first(scores: np.ndarray, dead: np.ndarray) -> np.ndarray:
    return np.where(dead, np.inf, scores)


def entropy(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """H(r_i) = -sum_j r_ij log r_ij (nats): the most uniform neurons have the highest."""
    return _heterogeneity(ffn, "entropy")


def gini(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """1 - sum_j r_ij^2."""
    return _heterogeneity(ffn, "gini")


def mstd(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """-std_j(r_ij), the population standard deviation."""
    return _heterogeneity(ffn, "mstd")


def magnitude(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """-sum_j W_ij^2: the smallest outgoing norm goes first."""

    def scores(rows: np.ndarray) -> np.ndarray:
        # Sums of squares of float32 weights neither overflow nor vanish in float64.
        return _dead_first(-np.einsum("mn,mn->m", rows, rows), ~rows.any(axis=1))

    return _row_by_row(ffn, scores)


def random(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """A seeded permutation; reads no weight."""
    return rng.permutation(ffn["down"]["kernel"].shape[0]).astype(np.float64)


Criterion = Callable[[dict, np.random.Generator], np.ndarray]

# Name -> (FFN leaves of one layer, generator) -> float64 [m], the highest removed first. Scores of
# different layers are compared where one global budget is asked for.
CRITERIA: dict[str, Criterion] = {
    "entropy": entropy,
    "gini": gini,
    "mstd": mstd,
    "magnitude": magnitude,
    "random": random,
}


# The criterion that merges as it goes (Srinivas & Babu 2015), and all names.
SIMILARITY = "similarity"
NAMES = (*CRITERIA, SIMILARITY)


def check_criterion(name: str, budget: str = "layer") -> None:
    """Raises ValueError where there is no such criterion, or not with this budget."""
    if name not in NAMES:
        raise ValueError(f"criterion {name!r} is unknown: choose one of {sorted(NAMES)}")
    check_choice("budget", budget, ("layer", "global"))
    if name == SIMILARITY and budget == "global":
        raise ValueError(
            f"budget='global' compares scores of different layers, and criterion {name!r} has "
            f"none: use budget='layer', or one of {sorted(CRITERIA)}"
        )


def layer_scores(
    name: str, ffn: dict, *, layer: int, seed: int = 0, reverse: bool = False
) -> np.ndarray:
    """Scores [m] of one layer, float64; `reverse` turns the order round (the sanity row).

    The generator depends on (seed, layer) alone, so a layer's choice does not depend on which other
    layers are chosen.

    Raises:
      ValueError: unknown criterion or one without scores, or non-finite weights (the message names
        the layer).
    """
    check_criterion(name, "global")
    rng = np.random.default_rng([seed, layer])
    try:
        scores = CRITERIA[name](ffn, rng)
    except ValueError as error:
        raise ValueError(f"layer {layer}: {error}") from None
    width = ffn["down"]["kernel"].shape[0]
    if np.shape(scores) != (width,):
        raise ValueError(
            f"layer {layer}: criterion {name!r} returned the shape {np.shape(scores)}: it must "
            f"return a score for each of the {width} neurons (CRITERIA in surgery/criteria.py)"
        )
    return -scores if reverse else scores
