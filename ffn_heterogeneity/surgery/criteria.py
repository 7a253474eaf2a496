"""Removal criteria: functions of ONE block's leaves -> scores [m]; the highest is removed first.

NUCL, section 4.2. r_i = |W_i| / sum_j |W_ij| is the distribution of neuron i's outgoing weights,
W = down/kernel [m, n], one row per inner neuron. Scores are computed in float64 on the host, one
layer and a few neurons at a time, so rounding does not decide which neurons are removed. The
streaming surgery uses the same code.

A neuron whose outgoing weights are all zero has no effect: every data-free criterion removes it
first (a case that the paper does not treat; the removal is exact).

"similarity" is a criterion without scores: each choice depends on the earlier removals
(`similarity.py`).
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.io.pieces import by_rows
from ffn_heterogeneity.losses.nucl_exact import STATISTICS, distributions
from ffn_heterogeneity.surgery.weights import CACHED, blocks, finite_kernel, outgoing
from ffn_heterogeneity.wording import check_known, naming

# A layer's entry of `seen.seen_states`; None: no activations were recorded.
Seen = Mapping[str, Any] | None


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
    """H(r_i) = -sum_j r_ij log r_ij (nats): highest for neurons with the most uniform weights."""
    return _heterogeneity(ffn, "entropy")


def gini(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """1 - sum_j r_ij^2."""
    return _heterogeneity(ffn, "gini")


def mstd(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """-std_j(r_ij), the population standard deviation."""
    return _heterogeneity(ffn, "mstd")


def magnitude(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """-sum_j W_ij^2: neurons with the smallest outgoing norm are removed first."""

    def scores(rows: np.ndarray) -> np.ndarray:
        # Sums of squares of float32 weights neither overflow nor vanish in float64.
        return _dead_first(-np.einsum("mn,mn->m", rows, rows), ~rows.any(axis=1))

    return _row_by_row(ffn, scores)


def largest_outgoing(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """-max_j |W_ij| [ours]: the neuron with the smallest maximum is removed first."""
    return _row_by_row(ffn, lambda rows: _dead_first(-np.abs(rows).max(1), ~rows.any(axis=1)))


def _incoming(
    ffn: dict, function: Callable[[np.ndarray], np.ndarray], join: Callable = np.add
) -> np.ndarray:
    """-join(function(gate's columns), function(up's)), rows float64 [b, p] -> [b]; dead ones first.

    OptiPFair's rules (0.4, arXiv 2512.22671) remove the lowest values first. They are defined for
    gated FFNs only; for a plain FFN only "up" counts [ours].
    """
    scores = [_columns(ffn, name, function) for name in ("gate", "up") if name in ffn]
    dead = _row_by_row(ffn, lambda rows: ~rows.any(axis=1))
    return _dead_first(-functools.reduce(join, scores), dead)


def _columns(ffn: dict, name: str, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`function` (columns of an incoming kernel as rows [b, p], float64) -> [b], all neurons."""
    columns = by_rows(finite_kernel(ffn[name], f"ffn/{name}/kernel").T)
    parts = blocks(columns.shape, CACHED)
    return np.concatenate([function(columns[x].astype(np.float64)) for x in parts])


def maw(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """Maximum absolute weight (PPM): max + |min| of gate's column, plus the same for up's."""
    return _incoming(ffn, lambda rows: rows.max(1) + np.abs(rows.min(1)))


def vow(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """Variance of weights: variance of gate's column plus variance of up's column."""
    return _incoming(ffn, lambda rows: rows.var(1))


def pon(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """Product of norms: L1 norm of gate's column times L1 norm of up's column."""
    return _incoming(ffn, lambda rows: np.abs(rows).sum(1), np.multiply)


def bos(ffn: dict, rng: np.random.Generator, activations: Seen = None) -> np.ndarray:
    """-|h| on a lone bos token [ours]: neurons with the smallest states are removed first."""
    return _of_states(ffn, activations, _on_bos)


def mean_state(ffn: dict, rng: np.random.Generator, activations: Seen = None) -> np.ndarray:
    """-mean |h| over calibration text without bos (Minitron's ranking, 2407.14679)."""
    return _of_states(ffn, activations, lambda seen: seen["mean"])


def optipfair(ffn: dict, rng: np.random.Generator, activations: Seen = None) -> np.ndarray:
    """OptiPFair's hybrid: (p2p(gate) / max + p2p(up) / max + p2p(down) / max) ||h||_2.

    The lowest is removed first. p2p is a neuron's largest weight minus its smallest; each max is
    over the layer's neurons; h is taken over calibration text without the first token of a row, as
    one norm [ours: OptiPFair 0.4.2 counts that token, and adds the norms of its batches. On SmolLM2
    1.8% of the removed neurons are others, 12% in the first layer].
    """

    def spread(rows: np.ndarray) -> np.ndarray:
        return np.ptp(rows, axis=1)

    parts = [_columns(ffn, name, spread) for name in ("gate", "up") if name in ffn]
    parts.append(_row_by_row(ffn, spread))
    shares = sum(spreads / max(spreads.max(), np.finfo(float).tiny) for spreads in parts)
    return _of_states(ffn, activations, lambda seen: shares * seen["norm"])


def wanda_sp(ffn: dict, rng: np.random.Generator, activations: Seen = None) -> np.ndarray:
    """Wanda-sp's score with an L2 norm: ||h||_2 over calibration text times |W_i|_2, lowest first.

    As published it is "wanda_sp_published" (`published.py`).
    """
    return _of_states(ffn, activations, lambda seen: seen["norm"] * np.sqrt(_squares(ffn)))


def flap(ffn: dict, rng: np.random.Generator, activations: Seen = None) -> np.ndarray:
    """FLAP's score: the variance of h over calibration text times |W_i|^2, lowest first.

    As published, with its search over layers, it is "flap_published" (`published.py`).
    """

    def variance(seen: dict) -> np.ndarray:
        return np.maximum(seen["norm"] ** 2 / seen["tokens"] - seen["signed"] ** 2, 0)

    return _of_states(ffn, activations, lambda seen: variance(seen) * _squares(ffn))


def _squares(ffn: dict) -> np.ndarray:
    """|W_i|^2 of each neuron."""
    return _row_by_row(ffn, lambda rows: np.einsum("mn,mn->m", rows, rows))


def _on_bos(seen: Any) -> np.ndarray:
    if not np.any(seen["bos"]):
        raise ValueError("bos is not sent to this expert, so no |h| on it orders its neurons")
    return seen["bos"]


def _of_states(ffn: dict, activations: Seen, function: Callable[[Any], np.ndarray]) -> np.ndarray:
    """-function(the layer's entry of `seen.seen_states`); dead neurons first."""
    try:
        values = function(activations or {})
    except KeyError as error:
        raise ValueError(
            f"this criterion needs activations ({error}), and none were recorded: see "
            "surgery/seen.py"
        ) from None
    dead = _row_by_row(ffn, lambda rows: ~rows.any(axis=1))
    return _dead_first(-np.asarray(values, np.float64), dead)


def random(ffn: dict, rng: np.random.Generator) -> np.ndarray:
    """A seeded permutation of 0, 1/m, ... (m - 1)/m, so that layers compare; reads no weight."""
    width = ffn["down"]["kernel"].shape[0]
    return rng.permutation(width) / width


Criterion = Callable[..., np.ndarray]

# Name -> (FFN leaves of one block, generator, activations=None) -> float64 [m], the highest removed
# first. A criterion that uses no activations may omit the last argument. With budget="global",
# scores of different layers are compared.
CRITERIA: dict[str, Criterion] = {
    "entropy": entropy,
    "gini": gini,
    "mstd": mstd,
    "magnitude": magnitude,
    "random": random,
    "largest_outgoing": largest_outgoing,
    "maw": maw,
    "vow": vow,
    "pon": pon,
    "bos": bos,
    "mean_state": mean_state,
    "optipfair": optipfair,
    "wanda_sp": wanda_sp,
    "flap": flap,
}
# Criteria that use activations on bos, and on calibration text. Append a new one that does.
ON_BOS, ON_TEXT = ["bos"], ["mean_state", "optipfair", "wanda_sp", "flap"]

# Criteria of `published.published_cuts`, which choose for a whole model, and the budget of each.
PUBLISHED = {"flap_published": "global", "wanda_sp_published": "layer"}

# The criterion that merges neurons step by step (Srinivas & Babu 2015).
SIMILARITY = "similarity"


def scoring(name: str) -> Callable[..., np.ndarray]:
    """Return the criterion of that name, which scores neurons.

    Raises:
      ValueError: an unknown criterion, or the one that has no scores.
    """
    check_known([name], sorted((*CRITERIA, SIMILARITY)), "criterion")
    if name == SIMILARITY:
        raise ValueError(
            f"budget='global' compares scores of different layers, and criterion {name!r} has "
            f"none: use budget='layer', or one of {sorted(CRITERIA)}"
        )
    return CRITERIA[name]


def check_named(setting: str, spec: str) -> tuple[str, float]:
    """Parse a value of `RemovalPlan.protect` or `RemovalPlan.lose`: "bos:5" -> ("bos", 5.0).

    Raises:
      ValueError: the value is malformed, or it is "random" and the setting is `protect`.
    """
    kind, _, size = spec.partition(":")
    drawn, more = ((), "") if setting == "protect" else (("random",), ", random:5 or random:0.01")
    with contextlib.suppress(ValueError):
        number = float(size)
        if kind in ("bos", "massive", *drawn) and number >= 1 and number.is_integer():
            return kind, number
        if kind in ("entropy", *drawn) and 0 < number < 1:
            return kind, number
    raise ValueError(f"{setting}={spec!r}: bos:5, massive:5 or entropy:0.01{more}")


def named(kind: str, size: float, ffn: dict, activations: Seen = None) -> np.ndarray:
    """Neurons of a layer that `RemovalPlan.protect` or `RemovalPlan.lose` names.

    They are ordered by descending |h| on bos, or by ascending entropy.
    """
    if kind == "entropy":
        scores = entropy(ffn, np.random.default_rng(0))
        return np.argsort(scores, kind="stable")[: math.ceil(size * len(scores))]
    seen = activations or {}
    if kind == "massive" and not seen["massive"]:
        return np.zeros(0, int)
    return np.argsort(-_on_bos(seen), kind="stable")[: int(size)]


def layer_scores(
    name: str,
    ffn: dict,
    *,
    layer: int,
    expert: int | None = None,
    activations: Seen = None,
    seed: int = 0,
    reverse: bool = False,
    protect: str = "",
) -> np.ndarray:
    """Scores [m] of one block, float64.

    `reverse` inverts the order (a sanity check); neurons that `protect` names get -inf. The random
    generator depends only on (seed, layer, expert), so a layer's choice does not depend on which
    other layers are chosen, and experts draw independently.

    Args:
      activations: the layer's entry of `seen.seen_states`; None: not recorded.

    Raises:
      ValueError: unknown criterion or one without scores, or non-finite weights (the message names
        the layer).
    """
    criterion = scoring(name)
    rng = np.random.default_rng([seed, layer] + ([] if expert is None else [2, expert]))
    takes = "activations" in inspect.signature(criterion).parameters
    with naming(f"layer {layer}"):
        scores = criterion(ffn, rng, **{"activations": activations} if takes else {})
    width = ffn["down"]["kernel"].shape[0]
    if np.shape(scores) != (width,):
        raise ValueError(
            f"layer {layer}: criterion {name!r} returned the shape {np.shape(scores)}: it must "
            f"return a score for each of the {width} neurons (CRITERIA in surgery/criteria.py)"
        )
    scores = -scores if reverse else scores
    if protect:
        scores = scores.copy()
        with naming(f"layer {layer}"):
            scores[named(*check_named("protect", protect), ffn, activations)] = -np.inf
    return scores
