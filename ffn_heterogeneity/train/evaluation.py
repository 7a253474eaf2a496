"""Validation metrics of a tree of parameters, exact over all examples of the held-out sets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.losses.terms import LossTerm, TermValue
from ffn_heterogeneity.parallel.placement import place_batch
from ffn_heterogeneity.train.objectives import Batch
from ffn_heterogeneity.train.plan import Evaluation

PREFIX = "validation/"
CheckStop = Callable[[], None]
Evaluate = Callable[..., dict[str, Any]]


def validation(
    built: Evaluation,
    held_out: Mapping[str, Callable[[], Iterator[Batch]]],
    at_end: bool = False,
) -> Evaluate:
    """Return `evaluate(params, check_stop=...)` over every held-out set of a run.

    The metrics of a single set are "validation/<metric>", those of several
    "validation/<set>/<metric>"; terms on parameters are always "validation/<term>".

    Args:
      built: its `accumulation` also splits these batches, so memory is no more than in training.
      at_end: the sets are those of `Data.at_end`: their metrics are "<set>/<metric>".
    """
    objective = built.objective
    evaluators = [
        make_evaluator(
            built.eval_step,
            None,
            lambda batches=batches: _cut(batches(), built.accumulation),
            terms=built.evaluated_terms,
            sharding=built.examples,
            prefix=_prefix(name, len(held_out) == 1, at_end),
            metrics=objective.metrics,
            decode=objective.evaluate,
        )
        for name, batches in held_out.items()
    ]

    def evaluate(params: Any, check_stop: CheckStop = lambda: None) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        for one in evaluators:
            metrics |= one(params, check_stop)
        if at_end:
            return metrics
        of_params = jax.device_get(built.params_metrics(params))
        return metrics | {PREFIX + name: value for name, value in of_params.items()}

    return evaluate


def _prefix(name: str, alone: bool, at_end: bool) -> str:
    if at_end:
        return f"{name}/"
    return PREFIX if alone else f"{PREFIX}{name}/"


def _cut(batches: Iterator[Batch], parts: int) -> Iterator[Batch]:
    """Split batches, including rows of padding: all pieces have one shape, so one compilation."""
    for batch in batches:
        rows = len(next(iter(batch.values()))) // parts
        for index in range(parts):
            yield {name: leaf[index * rows : (index + 1) * rows] for name, leaf in batch.items()}


def make_evaluator(
    eval_step: Any,
    params_metrics: Any,
    batches: Callable[[], Iterator[Batch]],
    *,
    terms: Sequence[LossTerm] = (),
    sharding: Any = None,
    prefix: str = PREFIX,
    metrics: Callable[[Mapping[str, np.ndarray]], Mapping[str, float]] | None = None,
    decode: Callable[..., Mapping[str, float]] | None = None,
) -> Evaluate:
    """Return `evaluate(params, check_stop=...) -> {"validation/<term>": ...}` over `batches`.

    Token-exact: totals and denominators of all batches are summed in float64 on the host, then
    divided. It adds the metrics that `terms` derive, and `metrics` of the rows of all batches.
    `params_metrics` (from `make_params_metrics`, or None) is added under the same prefix.

    Args:
      decode: `Objective.evaluate`.

    Raises:
      ValueError: `batches()` is empty.
    """
    derived = {term.name: term.derived for term in terms if term.derived}

    def fetch(sums, running, rows):
        value, predicted = jax.device_get(running)
        if predicted:
            valid = predicted.pop("valid")
            rows.append({name: leaf[valid] for name, leaf in predicted.items()})
        value = jax.tree.map(lambda x: np.asarray(x, np.float64), value)
        return value if sums is None else jax.tree.map(np.add, sums, value)

    def evaluate(params: Any, check_stop: CheckStop = lambda: None) -> dict[str, Any]:
        sums, running, rows = None, None, []
        for batch in batches():
            check_stop()
            following = eval_step(params, place_batch(batch, sharding))
            if running is not None:
                sums = fetch(sums, running, rows)
            running = following
        if running is None:
            raise ValueError("the validation data is empty: give a larger part of it")
        measured = _divide(fetch(sums, running, rows), derived)
        if params_metrics is not None:
            measured |= jax.device_get(params_metrics(params))
        if metrics is not None:
            predictions = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            measured |= metrics(predictions)
        if decode is not None:
            measured |= decode(params, batches())
        return {prefix + name: value for name, value in measured.items()}

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
