"""Losses: each a small pure function and a line of `TERMS`; a config's groups choose among them."""

from __future__ import annotations

from collections.abc import Callable

from ffn_heterogeneity.losses.classification import classification_term, regression_term
from ffn_heterogeneity.losses.diversity import diversity_term
from ffn_heterogeneity.losses.jreg import jreg_term
from ffn_heterogeneity.losses.layerwise import layerwise_term
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.sparsity_terms import score_norm_term, size_term
from ffn_heterogeneity.losses.terms import LossTerm

# Name in a config -> function (context, **settings) -> LossTerm. A loss is summed in this order.
TERMS: dict[str, Callable[..., LossTerm]] = {
    "nll": nll_term,
    "classification": classification_term,
    "regression": regression_term,
    "nucl": nucl_term,
    "diversity": diversity_term,
    "jreg": jreg_term,
    "layerwise": layerwise_term,
    "size": size_term,
    "score_norm": score_norm_term,
}
