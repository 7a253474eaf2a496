"""One optimizer step as one compiled function that donates its state: `train_step`."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ffn_heterogeneity.losses.terms import LossTerm, TermValue
from ffn_heterogeneity.parallel.partition import by_layer
from ffn_heterogeneity.train.state import TrainState, merge_params, split_params
from ffn_heterogeneity.wording import check_number

# (params, batch, *, probes, dropout[, per_layer]) -> outputs; dropout is None or (key, rate)
ForwardFn = Callable[..., dict]


def check_terms(terms: Sequence[LossTerm], trainable: Mapping[str, bool]) -> None:
    """Reject terms without an effect.

    Raises:
      ValueError: no terms, duplicate names, or a "params" term with a target pattern that matches
        no trainable leaf (it would silently have no effect).
    """
    if not terms:
        raise ValueError("a train step needs at least one loss term")
    check_names(terms)
    for term in terms:
        for pattern in term.targets if term.on == "params" else ():
            matches = [path for path in trainable if re.search(pattern, path)]
            if not any(trainable[path] for path in matches):
                why = (
                    f"all {len(matches)} leaves it matches are frozen (first: {matches[0]!r})"
                    if matches
                    else "it matches no leaf of the model"
                )
                raise ValueError(
                    f"loss term {term.name!r} has no trainable leaf for its target {pattern!r}: "
                    f"{why}. Let them train or drop the term"
                )


def check_names(terms: Sequence[LossTerm]) -> None:
    """Reject terms (or monitors) with the same name, whose metrics would overwrite each other."""
    names = [term.name for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two loss terms are named {name!r}: give each its own name")


def make_train_step(
    forward_fn: ForwardFn,
    terms: Sequence[LossTerm],
    optimizer: optax.GradientTransformationExtraArgs,
    trainable: Mapping[str, bool],
    *,
    accumulation: int = 1,
    dropout: bool | str = False,
    refresh: Callable[..., Any] | None = None,
    counts: Callable[[Mapping[str, jax.Array]], dict] = lambda batch: {},
    shardings: tuple[Any, Any, Any] | None = None,
    donate: bool = True,
):
    """Build `train_step(state, batch, hyper) -> (state, metrics)`, jitted, donating `state`.

    total = sum_i w_i * (sum over micro-batches of total_i) / (sum of denominator_i)
            + sum_j w_j * total_j / denominator_j            ("params" terms, once per step)

    Accumulation is exact for any mixture of denominators: they do not depend on the parameters
    (`TermValue`'s contract), so a first scan sums them - the compiler removes the forward pass from
    it, since only masks are read - and the second scan differentiates
    sum_i (w_i / D_i) total_i of each micro-batch into float32 accumulators. A term whose
    denominators sum to 0 (no target in the whole batch) contributes 0.

    Args:
      forward_fn: `(params, batch, *, probes, dropout) -> outputs`.
      terms: the loss.
      optimizer: from `make_optimizer`, for the trainable leaves.
      trainable: `{path: trains}` over every leaf. The gradient is taken with respect to the
        trainable ones only; there is no buffer for the others. If it is a tuple of one bool per
        layer, the gradient of the other layers is 0 and they stay unchanged, bit for bit.
      accumulation: A, the number of micro-batches in a step.
      dropout: whether there is dropout (static); the rate is `hyper["dropout"]`. "adapters":
        dropout only in adapters (`RunOptions.adapter_dropout`), and routers' noise.
      refresh: optional `(params, step, key, hyper, train) -> params`, applied to the tree before
        the forward pass, `train` true, and never stored (adapters that redraw a mask every step).
      counts: batch -> numbers to report (`Objective.counts`).
      shardings: optional `(state, batch, replicated)` shardings for the jit.
      donate: the state's buffers are reused. False only for tests.

    Returns:
      The jitted step. Batch leaves are [A, B, ...]; `hyper` is a dict of scalar float32 arrays with
      "learning_rate", the terms' weights by name, and "dropout" if it is on. Metrics: "loss",
      each term's value by name, "<term>/<metric>", "grad_norm", "update_norm" (of the change of the
      stored parameters), the `counts`, "stop" (the maximum over the batch, if it has the leaf),
      "finite" (bool) and "gradient_finite" (bool per trainable leaf, in sorted order of paths). An
      "outputs" term's metrics are sums, divided by its denominator like its total; a "params"
      term's metrics are reported unchanged. If the loss or a gradient is not finite, the state is
      returned unchanged and "finite" is False.

    Raises:
      ValueError: see `check_terms`; when traced: a weight that `hyper` does not have, or a batch
        whose leading axis is not A.
    """
    check_terms(terms, trainable)
    terms = tuple(terms)
    check_number("accumulation", accumulation, "[1, inf)")
    static = (forward_fn, terms, dropout, refresh)

    def train_step(state: TrainState, batch: dict, hyper: dict):
        _check_batch(batch, accumulation)
        key = jax.random.fold_in(
            jax.random.wrap_key_data(state.key, impl="threefry2x32"), state.step
        )
        train, frozen = split_params(state.params, trainable)
        loss = _StepLoss(*static, frozen, state.step, key, hyper)
        grads, metrics = loss.grad_and_metrics(train, batch, accumulation)
        new, opt_state, changed = update_leaves(
            optimizer,
            trainable,
            train,
            state.opt_state,
            grads,
            loss=metrics["loss"],
            learning_rate=hyper["learning_rate"],
        )
        metrics |= counts(batch) | changed
        if "stop" in batch:  # added by the loop
            metrics["stop"] = jnp.max(batch["stop"])
        finite = metrics["finite"]
        new_state = TrainState(
            step=jnp.where(finite, state.step + 1, state.step),
            params=merge_params(new, frozen),
            opt_state=opt_state,
            key=state.key,
        )
        return new_state, metrics

    placed = {}
    if shardings is not None:
        state_s, batch_s, repl_s = shardings
        placed = {"in_shardings": (state_s, batch_s, repl_s), "out_shardings": (state_s, repl_s)}
    return jax.jit(train_step, donate_argnums=(0,) if donate else (), **placed)


def update_leaves(
    optimizer: optax.GradientTransformationExtraArgs,
    trainable: Mapping[str, bool],
    train: dict[str, jax.Array],
    opt_state: Any,
    grads: dict[str, jax.Array],
    *,
    loss: jax.Array,
    learning_rate: jax.Array,
) -> tuple[dict, Any, dict]:
    """Return (new leaves, new optimizer state, metrics "grad_norm" ... "gradient_finite").

    If the loss or a gradient is not finite, both are unchanged, and "update_norm" is NaN.
    """
    split: dict[str, Any] = {p: mask for p, mask in trainable.items() if isinstance(mask, tuple)}
    grads = grads | {
        path: jnp.where(by_layer(mask, grads[path]), grads[path], 0) for path, mask in split.items()
    }
    gradient_finite = jnp.stack([jnp.isfinite(jnp.sum(grads[p] ** 2)) for p in sorted(grads)])
    finite, norm = jnp.isfinite(loss) & jnp.all(gradient_finite), optax.global_norm(grads)

    def updated(train: dict, opt_state: Any):
        known = {"learning_rate": learning_rate, "grad_norm": norm}
        moves: Any
        moves, opt_state = optimizer.update(grads, opt_state, train, **known)
        new = {path: leaf + moves[path] for path, leaf in train.items()}
        new |= {
            path: jnp.where(by_layer(mask, train[path]), new[path], train[path])
            for path, mask in split.items()
        }
        # The norm of the parameters' change: that of the updates would need them in memory.
        moved = {path: leaf - train[path] for path, leaf in new.items()}
        return new, opt_state, optax.global_norm(moved)

    def kept(train, opt_state):
        return train, opt_state, jnp.full_like(norm, jnp.nan)

    # A branch, because selecting leaf by leaf would read the whole state again.
    new, opt_state, moved = jax.lax.cond(finite, updated, kept, train, opt_state)
    metrics = {"grad_norm": norm, "update_norm": moved, "finite": finite}
    return new, opt_state, metrics | {"gradient_finite": gradient_finite}


@dataclasses.dataclass
class _StepLoss:
    """The loss of one step as functions of the trainable leaves; lives while the step is traced."""

    forward_fn: ForwardFn
    terms: tuple[LossTerm, ...]
    dropout: bool | str
    refresh: Callable[..., Any] | None
    frozen: dict
    step: jax.Array
    key: jax.Array
    hyper: dict

    def __post_init__(self):
        self.weights = {term.name: _weight(term, self.hyper) for term in self.terms}
        self.on_outputs = [term for term in self.terms if term.on == "outputs"]
        self.on_params = [term for term in self.terms if term.on == "params"]
        self.dropout_key, self.refresh_key = jax.random.split(self.key)

    def grad_and_metrics(self, train: dict, batch: dict, accumulation: int) -> tuple[dict, dict]:
        """The gradient of the whole loss, "loss", and every term's value and metrics."""
        grads, summed, plain = jax.tree.map(jnp.zeros_like, train), {}, {}
        if self.on_outputs and accumulation == 1:
            grads, summed = self._micro_grad(train, jax.tree.map(lambda x: x[0], batch), 0, None)
        elif self.on_outputs:
            grads, summed = self._scan(train, batch, accumulation)
        if self.on_params:
            more, plain = jax.grad(self._params_loss, has_aux=True)(train)
            grads = jax.tree.map(jnp.add, grads, more)
        metrics = averaged_metrics(self.on_outputs, summed) | plain_metrics(plain)
        metrics["loss"] = sum(self.weights[term.name] * metrics[term.name] for term in self.terms)
        return grads, metrics

    def _params(self, train: dict) -> Any:
        params = merge_params(train, self.frozen)
        if self.refresh is None:
            return params
        return self.refresh(params, self.step, self.refresh_key, self.hyper, True)

    def _values(self, train: dict, micro: dict, index) -> dict[str, TermValue]:
        dropout = None
        if self.dropout:
            rate = None if self.dropout == "adapters" else self.hyper["dropout"]
            dropout = (jax.random.fold_in(self.dropout_key, index), rate)
        params = self._params(train)
        return values_of(self.forward_fn, self.terms, params, micro, dropout=dropout)[0]

    def _micro_grad(self, train: dict, micro: dict, index, denominators: dict | None):
        """Gradient of a micro-batch's part of the loss; `denominators` None: the whole batch."""

        def loss(train):
            values, total = self._values(train, micro, index), 0.0
            for name, value in values.items():
                denominator = value.denominator if denominators is None else denominators[name]
                share = value.total * jax.lax.stop_gradient(_reciprocal(denominator))
                total = total + self.weights[name] * share
            return total, values

        return jax.grad(loss, has_aux=True)(train)

    def _scan(self, train: dict, batch: dict, accumulation: int):
        xs = (batch, jnp.arange(accumulation))

        def count(sums, x):
            values = self._values(train, *x)
            return {n: sums[n] + _float32(v.denominator) for n, v in values.items()}, None

        zeros = {term.name: jnp.zeros((), jnp.float32) for term in self.on_outputs}
        denominators, _ = jax.lax.scan(count, zeros, xs)

        def add(sums, x):
            micro, index = x
            new = self._micro_grad(train, micro, index, denominators)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new), None

        micro, index = jax.tree.map(lambda x: x[0], xs)
        shapes = jax.eval_shape(self._micro_grad, train, micro, index, denominators)
        start = jax.tree.map(
            lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes
        )
        return jax.lax.scan(add, start, xs)[0]

    def _params_loss(self, train: dict):
        params = self._params(train)
        values = {term.name: term(params) for term in self.on_params}
        total = sum(
            self.weights[name] * value.total * jax.lax.stop_gradient(_reciprocal(value.denominator))
            for name, value in values.items()
        )
        return total, values


def make_eval_step(
    forward_fn: ForwardFn,
    terms: Sequence[LossTerm],
    replicated: Any | None = None,
    predictions: Callable[..., dict] | None = None,
):
    """Make the jitted `(params, batch) -> ({term: TermValue}, rows)` of the "outputs" terms.

    Batch leaves are [B, ...]; rows are `predictions(params, outputs, batch)` of each example, or
    {}. `replicated` is the sharding of the results on a mesh, so that every process can read them.
    To be token-exact, sum the values of several batches with `jax.tree.map`, then use
    `averaged_metrics`. Raises ValueError for duplicate names of terms.
    """
    check_names(terms)

    def eval_step(params, batch):
        values, outputs = values_of(forward_fn, terms, params, batch, dropout=None)
        rows = {} if predictions is None else predictions(params, outputs, batch)
        return values, rows

    return jax.jit(eval_step, out_shardings=replicated)


def values_of(
    forward_fn: ForwardFn, terms: Sequence[LossTerm], params: Any, batch: Mapping, **given: Any
) -> tuple[dict[str, TermValue], dict]:
    """(the values of the "outputs" terms on a batch, the outputs that they read)."""
    on_outputs = [term for term in terms if term.on == "outputs"]
    trees = [term.per_layer(params, batch, forward_fn) for term in on_outputs if term.per_layer]
    if trees:
        given["per_layer"] = {name: tree for one in trees for name, tree in one.items()}
    outputs = forward_fn(params, batch, probes=union_of_probes(on_outputs), **given)
    return {term.name: term(params, outputs, batch) for term in on_outputs}, outputs


def make_params_metrics(terms: Sequence[LossTerm], replicated: Any | None = None):
    """Make the jitted `params -> metrics` of the "params" terms."""
    on_params = [term for term in terms if term.on == "params"]

    def params_metrics(params):
        return plain_metrics({t.name: t(params) for t in on_params})

    return jax.jit(params_metrics, out_shardings=replicated)


def averaged_metrics(terms: Sequence[LossTerm], sums: Mapping[str, TermValue]) -> dict[str, Any]:
    """`{term: total / denominator, "term/metric": metric / denominator}` and derived metrics."""
    metrics = {}
    for term in terms:
        total, denominator, extra = sums[term.name]
        scale = _reciprocal(denominator)
        metrics[term.name] = total * scale
        averages = {key: value * scale for key, value in extra.items()}
        if term.derived is not None:
            averages = term.derived(averages)
        metrics |= {f"{term.name}/{key}": value for key, value in averages.items()}
    return metrics


def plain_metrics(values: Mapping[str, TermValue]) -> dict[str, Any]:
    """`{term: total / denominator, "term/metric": metric}` of the "params" terms."""
    metrics = {}
    for name, (total, denominator, extra) in values.items():
        metrics[name] = total * _reciprocal(denominator)
        metrics |= {f"{name}/{key}": value for key, value in extra.items()}
    return metrics


def union_of_probes(terms: Sequence[LossTerm]) -> tuple:
    """All probes that the terms need, in order of first use; unlike ones have unlike names."""
    probes = tuple(dict.fromkeys(probe for term in terms for probe in term.probes))
    names = [probe.name for probe in probes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two unlike probes are named {twice[0]!r}: give each its own name")
    return probes


def _reciprocal(denominator) -> jax.Array:
    """1 / denominator, and 0 for 0."""
    denominator = _float32(denominator)
    return jnp.where(denominator == 0, 0.0, 1.0 / jnp.where(denominator == 0, 1.0, denominator))


def _float32(x) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _weight(term: LossTerm, hyper: Mapping[str, Any]):
    if not isinstance(term.weight, str):
        return term.weight
    if term.weight not in hyper:
        raise ValueError(
            f"loss term {term.name!r} takes its weight from hyper[{term.weight!r}], which is not "
            f"given; hyper has {sorted(hyper)}"
        )
    return hyper[term.weight]


def _check_batch(batch: Mapping[str, Any], accumulation: int) -> None:
    for name, leaf in batch.items():
        if leaf.ndim < 2 or leaf.shape[0] != accumulation:
            raise ValueError(
                f"batch[{name!r}] has shape {leaf.shape}; expected [accumulation={accumulation}, "
                "examples, ...]"
            )
