"""The language-modeling loss as a term; `cross_entropy.py` computes it."""

import jax
import jax.numpy as jnp
from jax import lax

from ffn_heterogeneity.losses.cross_entropy import chunked_nll
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue
from ffn_heterogeneity.models.causal_lm import head_kernel
from ffn_heterogeneity.wording import check_choice


def nll_term(context: TermContext, reduction: str = "mean") -> LossTerm:
    """The language-modeling loss.

    The NUCL paper does not state its reduction (its equations sum over the sequence). Here it is
    "mean" over target tokens (default), or "sum": the sum over the target tokens of each document
    in a row, and the mean over documents (running text counts as one document in each of its rows).
    Both are ratios of sums, exact under accumulation.

    Metrics: "accuracy" of the next token ("mean" only; a sum like the total, divided by the same
    denominator).

    Raises:
      ValueError: unknown reduction.
    """
    check_choice("reduction", reduction, ("mean", "sum"))

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        kernel, layout = head_kernel(context.model, params)
        sums = chunked_nll(
            outputs["hidden"],
            kernel,
            batch["targets"],
            batch["loss_mask"],
            layout=layout,
            softcap=context.model.final_softcap,
            mesh=context.mesh,
        )
        if reduction == "mean":
            return TermValue(sums.total, sums.count, {"accuracy": sums.correct})
        return TermValue(sums.total, _documents(batch), {})

    return LossTerm(context.name, function, context.weight)


def _documents(batch: dict) -> jax.Array:
    """Number of documents with at least one target; without segments a row is one document."""
    mask_bt = batch["loss_mask"]
    segments_bt = batch.get("segment_ids")
    if segments_bt is None:
        return jnp.sum(jnp.any(mask_bt, axis=1), dtype=jnp.float32)
    # Documents are numbered from 1 in a row: a target starts one if no earlier has its number.
    seen_bt = lax.cummax(jnp.where(mask_bt, segments_bt, 0), axis=1)
    before_bt = jnp.pad(seen_bt, ((0, 0), (1, 0)))[:, :-1]
    return jnp.sum(mask_bt & (segments_bt > before_bt), dtype=jnp.float32)
