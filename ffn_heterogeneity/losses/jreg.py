"""JREG: a penalty on angular displacement that weighs the last layers most (JREG, section 4)."""

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue
from ffn_heterogeneity.probes import displacement
from ffn_heterogeneity.wording import check_choice, check_number


def layer_weights(n_layers: int, alpha: float) -> np.ndarray:
    """w = softmax(alpha * (1, ..., L)), float64 [L]; alpha 0: equal weights, large: the last."""
    exponents = alpha * (np.arange(n_layers) - (n_layers - 1.0))
    weights = np.exp(exponents)
    return weights / weights.sum()


def jreg_term(
    context: TermContext, alpha: float = 1.0, final_norm: bool = False, positions: str = "all"
) -> LossTerm:
    """L_disp = sum_l w_l Psi_l with w = softmax(alpha * (1..L)); loss = CE + lambda * L_disp.

    Psi is averaged over the real tokens of the whole batch (see probes/displacement.py for choices
    that the paper leaves open). It is computed inside the layer scan in float32: there are no
    stacked hidden states, and full rematerialization saves one scalar per layer. Metrics: "psi" [L]
    and, from their averages, the jump rates "zeta_L", "zeta_L-1", "zeta_L-2" (percent). A second
    instance as a monitor reports another choice of the norm or of the positions: in validation,
    where both share one pass, without cost for the step.

    The L layers of an encoder-decoder are those of both stacks, the encoder's first [ours]: alpha
    weighs the decoder's most, and zeta_L is of the decoder's last layer. `final_norm` applies to
    the last layer of each stack.

    Args:
      context: its weight is lambda; the paper tries 1, 2 and 3 and trains with 1.
      alpha: sharpness, >= 0; the paper tries 0, 0.1, 0.3, 0.5, 1, 3 and finds 1 best. Part of the
        compiled program, unlike lambda.
      final_norm: use h_L after the final norm instead of before (probes/displacement.py).
      positions: "all" real tokens, or the "last" of each document.

    Raises:
      ValueError: alpha is negative or not finite; `positions` is neither.
    """
    check_number("alpha", alpha, "[0, inf)")
    check_choice("positions", positions, displacement.POSITIONS)
    probe = displacement.DISPLACEMENT_AFTER_NORM if final_norm else displacement.DISPLACEMENT

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        seen = outputs["probes"][probe.name][positions]
        weights = jnp.asarray(layer_weights(len(seen["sum"]), alpha), seen["sum"].dtype)
        # Layers of two stacks have different numbers of tokens; all are divided by one. So their
        # means weigh micro-batches (and batches of evaluations) by the encoder's tokens [ours].
        count = seen["count"][0]
        psi_sums = seen["sum"] * (count / jnp.maximum(seen["count"], 1))
        metrics = {"psi": jax.lax.stop_gradient(psi_sums)}
        return TermValue(jnp.sum(weights * psi_sums), count, metrics)

    def derived(metrics: dict) -> dict:
        return metrics | displacement.jump_rates(metrics["psi"])

    return LossTerm(context.name, function, context.weight, probes=(probe,), derived=derived)
