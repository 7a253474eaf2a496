"""Losses: small pure functions, listed in `TERMS`; a config's groups select among them."""

from collections.abc import Callable, Mapping
from typing import Any

from ffn_heterogeneity.losses.classification import classification_term, regression_term
from ffn_heterogeneity.losses.diversity import diversity_term
from ffn_heterogeneity.losses.jreg import jreg_term
from ffn_heterogeneity.losses.layerwise import layerwise_term
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.router import load_balance_term, router_z_term
from ffn_heterogeneity.losses.sparsity_terms import score_norm_term, size_term
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, probe_term, strict
from ffn_heterogeneity.probes import PROBES
from ffn_heterogeneity.wording import check_known, unknown

# Name in a config -> function (context, **settings) -> LossTerm. Terms are summed in this order.
TERMS: dict[str, Callable[..., LossTerm]] = {
    "nll": nll_term,
    "classification": classification_term,
    "regression": regression_term,
    "nucl": nucl_term,
    "diversity": diversity_term,
    "jreg": jreg_term,
    "layerwise": layerwise_term,
    "load_balance": load_balance_term,
    "router_z": router_z_term,
    "size": size_term,
    "score_norm": score_norm_term,
}


def term_of(context: TermContext, group: Mapping[str, Any], monitor: bool) -> tuple[int, LossTerm]:
    """Return (position in the sum, the term) of one group of a config.

    Raises:
      ValueError: an unknown term or setting, or a function that does not return a term.
    """
    name, settings = group.get("term", context.name), dict(group)
    if monitor and "probe" in group:
        if group["probe"] not in PROBES:
            new = "a new one needs a line in PROBES (probes/__init__.py)"
            raise ValueError(f"{unknown('probe', group['probe'], tuple(PROBES))}; {new}")
        check_known(group, ("probe",))
        return len(TERMS), probe_term(context, PROBES[group["probe"]])
    if name not in TERMS:
        new = "a new one needs a line in TERMS (losses/__init__.py), a probe probe=<its name>"
        raise ValueError(f"{unknown('term', name, tuple(TERMS))}; {new}")
    for key in ("term", "weight"):
        settings.pop(key, None)
    term = strict(TERMS[name])(context, **settings)
    if not isinstance(term, LossTerm):
        raise ValueError(f"term {name!r} returned {term!r:.60}: it must return a LossTerm")
    return list(TERMS).index(name), term
