"""Losses of learned sparsity: size kept by gates (FLOP), norm of scores (GEM-MINER)."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from ffn_heterogeneity.adapters import gates
from ffn_heterogeneity.adapters.mask import binary
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue
from ffn_heterogeneity.models.stack import slots
from ffn_heterogeneity.tree import nodes
from ffn_heterogeneity.wording import check_number


def size_term(context: TermContext, target: float = 0.25) -> LossTerm:
    """lambda_1 (s - target) + lambda_2 (s - target)^2, with gradient ascent on the multipliers.

    s = sum (in + out) L0 / sum (in + out) rank is the expected share of the factors' parameters
    that the gates keep. The multipliers are leaves with a reversed gradient that start at 0, so
    both grow until s equals the target. Metrics: "kept_share" and "multipliers" [2].

    Raises:
      ValueError: a target outside (0, 1); when traced: no kernel has gates.
    """
    check_number("target", target, "(0, 1)")

    def function(params: dict) -> TermValue:
        expected, total, pairs = jnp.zeros(()), 0, []
        for leaves in _with(params, gates.LOG_ALPHA):
            log_alpha, pair = leaves[gates.LOG_ALPHA], leaves[gates.MULTIPLIERS]
            width = leaves[gates.A].shape[-2] + leaves[gates.B].shape[-1]
            expected += width * jnp.sum(gates.open_probability(log_alpha))
            total += width * log_alpha.size
            pairs.append(pair.reshape(-1, 2))
        pair = jnp.mean(jnp.concatenate(pairs), axis=0)
        still = jax.lax.stop_gradient(pair)
        first, second = 2 * still - pair  # the same values, the gradient reversed
        share = expected / total
        metrics = {"kept_share": jax.lax.stop_gradient(share), "multipliers": still}
        off = share - target
        return TermValue(first * off + second * off**2, jnp.ones(()), metrics)

    targets = (rf"/({gates.LOG_ALPHA}|{gates.MULTIPLIERS})$",)
    return LossTerm(context.name, function, context.weight, on="params", targets=targets)


def score_norm_term(context: TermContext) -> LossTerm:
    """||score||^2 over all scores. Metrics: "kept_share", the share of scores above 1/2."""

    def function(params: dict) -> TermValue:
        scores = [leaves["score"] for leaves in _with(params, "score")]
        size = sum(leaf.size for leaf in scores)
        share = sum(jnp.sum(binary(leaf)) for leaf in scores) / size
        total = sum((jnp.sum(leaf**2) for leaf in scores), start=jnp.zeros(()))
        return TermValue(total, jnp.ones(()), {"kept_share": jax.lax.stop_gradient(share)})

    return LossTerm(context.name, function, context.weight, on="params", targets=(r"/score$",))


def _with(params: dict, name: str) -> Iterator[dict]:
    """The leaves of every kernel that has a leaf of that name."""
    kernels = [x for slot in slots(params) for _, x in nodes(slot.tree, lambda node: name in node)]
    if not kernels:
        raise ValueError(f"no kernel has a leaf {name!r}: add it with config.prepare")
    yield from kernels
