"""Losses of labels and of numbers, over the rows of a batch that have an answer."""

import jax
import jax.numpy as jnp

from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue


def classification_term(context: TermContext) -> LossTerm:
    """Cross-entropy of labels, -log softmax(logits)[label], mean over the valid rows.

    It reads `outputs["predictions"]` [B, C] and the batch's "target" [B] and "valid" [B].
    Metrics: "accuracy".
    """

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        logits_bc, valid_b = outputs["predictions"], batch["valid"]
        label_b = batch["target"].astype(jnp.int32)
        log_p_bc = jax.nn.log_softmax(logits_bc)
        nll_b = -jnp.take_along_axis(log_p_bc, label_b[:, None], axis=1)[:, 0]
        right_b = jnp.argmax(logits_bc, axis=1) == label_b
        metrics = {"accuracy": jnp.sum(right_b & valid_b) * 1.0}
        return TermValue(jnp.sum(jnp.where(valid_b, nll_b, 0)), jnp.sum(valid_b) * 1.0, metrics)

    return LossTerm(context.name, function, context.weight)


def regression_term(context: TermContext) -> LossTerm:
    """Squared error of a number, mean over the valid rows; reads the same as `classification`."""

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        error_b = outputs["predictions"][:, 0] - batch["target"]
        squares_b = jnp.where(batch["valid"], error_b * error_b, 0)
        return TermValue(jnp.sum(squares_b), jnp.sum(batch["valid"]) * 1.0)

    return LossTerm(context.name, function, context.weight)
