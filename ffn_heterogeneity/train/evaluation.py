"""Validation metrics of a tree of parameters, exact over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.losses.terms import LossTerm, TermValue
from ffn_heterogeneity.parallel.placement import place_batch
from ffn_heterogeneity.train.objectives import Objective


def make_evaluator(
    eval_step: Any,
    params_metrics: Any,
    batches: Callable[[], Iterator[dict[str, np.ndarray]]],
    *,
    terms: Sequence[LossTerm] = (),
    sharding: Any = None,
    prefix: str = "validation/",
    objective: Objective = Objective(),
) -> Callable[..., dict[str, Any]]:
    """`evaluate(params, check_stop=...) -> {"validation/<term>": ...}` over one pass of `batches`.

    Token-exact: totals and denominators of all batches are summed in float64 on the host, then
    divided; then come the metrics that `terms` derive, and those of the `objective`, of the rows
    of all batches. `params_metrics` (from `make_params_metrics`, or None) is added under the same
    prefix.

    Raises:
      ValueError: `batches()` is empty.
    """

    def fetch(sums, running, rows):
        value, found = jax.device_get(running)
        if found:
            rows.append({k: v[found["valid"]] for k, v in found.items() if k != "valid"})
        value = jax.tree.map(lambda x: np.asarray(x, np.float64), value)
        return value if sums is None else jax.tree.map(np.add, sums, value)

    def evaluate(params, check_stop: Callable[[], None] = lambda: None) -> dict[str, Any]:
        sums, running, rows = None, None, []
        for batch in batches():
            check_stop()
            following = eval_step(params, place_batch(batch, sharding))
            if running is not None:
                sums = fetch(sums, running, rows)
            running = following
        if running is None:
            raise ValueError("the validation data is empty: give a larger part of it")
        sums = fetch(sums, running, rows)
        metrics = _divide(sums, {term.name: term.derived for term in terms if term.derived})
        if params_metrics is not None:
            metrics |= jax.device_get(params_metrics(params))
        if objective.metrics is not None:
            metrics |= objective.metrics({k: np.concatenate([x[k] for x in rows]) for k in rows[0]})
        return {prefix + name: value for name, value in metrics.items()}

    return evaluate


def _divide(sums: dict[str, TermValue], derived: dict[str, Callable]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for name, (total, denominator, extra) in sums.items():
        if denominator == 0:
            raise ValueError(f"the validation data holds no target for the term {name!r}")
        metrics[name] = total / denominator
        averages = {key: value / denominator for key, value in extra.items()}
        if name in derived:
            averages = jax.device_get(derived[name](averages))
        metrics |= {f"{name}/{key}": value for key, value in averages.items()}
    return metrics
