"""Rules that choose experts: functions of one layer's experts -> a score each, the highest goes.

Data-free rules read the experts' weights, the others what experts do on calibration text
(`probes.experts.expert_probe`). An expert to which no token is sent goes first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.surgery import criteria
from ffn_heterogeneity.surgery.weights import finite_kernel
from ffn_heterogeneity.wording import naming

# The sums of `expert_probe` of one layer, [E, ...].
Sums = Mapping[str, np.ndarray]


# ---- data-free: an expert's leaves -> its score


def aimer(ffn: dict) -> float:
    """mean |w| / rms(w) over the weights of all kernels (AIMER, 2603.18492).

    With r = |w| / sum |w| over the N weights it is 1 / sqrt(N sum r^2): the order of NUCL's gini,
    1 - sum r^2, of the whole expert.
    """
    total = squares = count = 0.0
    for name in ("gate", "up", "down"):
        if name not in ffn:
            continue
        kernel = np.abs(finite_kernel(ffn[name], f"ffn/{name}/kernel").astype(np.float64))
        total += kernel.sum()
        squares += np.square(kernel).sum()
        count += kernel.size
    return float(total / np.sqrt(count * squares)) if squares else np.inf


def _mean_of(criterion: Callable[..., np.ndarray], ffn: dict) -> float:
    """Mean of a criterion over the neurons that are not dead; dead experts go first."""
    scores = criterion(ffn, np.random.default_rng(0))
    alive = scores[np.isfinite(scores)]
    return float(alive.mean()) if alive.size else np.inf


def entropy(ffn: dict) -> float:
    """NUCL's entropy of the outgoing weights, mean over the neurons [ours for experts]."""
    return _mean_of(criteria.entropy, ffn)


def gini(ffn: dict) -> float:
    """NUCL's gini of the outgoing weights, mean over the neurons [ours for experts]."""
    return _mean_of(criteria.gini, ffn)


# ---- on text: sums -> scores [E]


def reap(sums: Sums) -> np.ndarray:
    """-mean of gate times |y|_2 over the tokens sent to it (REAP, 2510.13999), gates as applied."""
    return -_mean(sums, "gated")


def frequency(sums: Sums) -> np.ndarray:
    """-number of tokens sent to it."""
    return -sums["tokens"]


def output_norm(sums: Sums) -> np.ndarray:
    """-mean |y|_2 over the tokens sent to it, without the gate."""
    return -_mean(sums, "norms")


def man(sums: Sums) -> np.ndarray:
    """-mean |h| over its neurons and tokens (MAN, 2606.15716), without the gate."""
    return -_mean(sums, "absolute")


def msan(sums: Sums) -> np.ndarray:
    """-mean h^2 over its neurons and tokens (MSAN, 2606.15716), without the gate."""
    return -_mean(sums, "energy")


def mone(sums: Sums) -> np.ndarray:
    """-number of tokens times the variance of y (MoNE, 2507.00390, says: low frequency and low
    variance go; the product is ours)."""
    mean = sums["outputs"] / np.maximum(sums["tokens"], 1)[:, None]
    return -(sums["squares"] - sums["tokens"] * np.square(mean).sum(axis=1))


def _mean(sums: Sums, name: str) -> np.ndarray:
    """The mean over an expert's tokens; -inf, the first to go, without any."""
    visited = sums["tokens"] > 0
    return np.where(visited, sums[name] / np.where(visited, sums["tokens"], 1), -np.inf)


ON_WEIGHTS: dict[str, Callable[[dict], float]] = {"aimer": aimer, "entropy": entropy, "gini": gini}
ON_TEXT: dict[str, Callable[[Sums], np.ndarray]] = {
    "reap": reap,
    "frequency": frequency,
    "output_norm": output_norm,
    "man": man,
    "msan": msan,
    "mone": mone,
}
RULES = (*ON_TEXT, *ON_WEIGHTS, "random")


def expert_scores(
    rule: str, layer: int, experts: Sequence[dict], sums: Sums | None, seed: int = 0
) -> np.ndarray:
    """Scores of one layer's experts, float64 [E]; a random one depends on (seed, layer).

    Args:
      experts: the leaves of each.
      sums: for a rule on text.

    Raises:
      ValueError: weights or sums that are not finite; the message names the layer.
    """
    if rule == "random":
        rng = np.random.default_rng([seed, layer, 3])
        return rng.permutation(len(experts)).astype(np.float64)
    with naming(f"layer {layer}"):
        if rule in ON_WEIGHTS:
            return np.array([ON_WEIGHTS[rule](ffn) for ffn in experts])
        assert sums is not None
        bad = [name for name, one in sums.items() if not np.isfinite(one).all()]
        if bad:
            raise ValueError(f"sums over tokens ({bad[0]}) are not finite: check the checkpoint")
        scores = ON_TEXT[rule](sums)
    return np.where(sums["tokens"] > 0, scores, np.inf)


def bos_experts(states: Sequence[Any], times: float = 100.0) -> dict[int, np.ndarray]:
    """{layer: experts with a massive weight}: "super experts" (2507.23279), found on bos alone.

    An expert is massive if its largest |h| on a lone bos is `times` the median of the layer's
    positive |h| [ours: the sources print no number for intermediate states].

    Args:
      states: `Massive.states`; layers with experts [E, m].
    """
    chosen = {}
    for layer, one in enumerate(states):
        if one.ndim == 2 and (one > 0).any():
            large = one.max(axis=1) >= times * np.median(one[one > 0])
            if large.any():
                chosen[layer] = np.flatnonzero(large)
    return chosen
