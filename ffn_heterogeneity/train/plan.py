"""Plan of a run: the parts of its step, from its config and its files' headers.

A plan contains shapes and functions, but no weights. The dry run prints it, also for devices that
are not available; a run adds weights; runs with equal static settings share its programs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ffn_heterogeneity.heads import ROOT
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.terms import LossTerm
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.stack import layer_names, slots
from ffn_heterogeneity.models.unused import refuse_unused, unused_leaves
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import local_rows
from ffn_heterogeneity.train.build import (
    auto_remat,
    made_whole,
    make_refresh,
    make_terms,
    objective_of,
    run_options,
    what_trains,
)
from ffn_heterogeneity.train.objectives import Data, Objective, make_forward
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.settings import TrainConfig
from ffn_heterogeneity.train.source import found_shapes, headed, prepared
from ffn_heterogeneity.train.state import TrainState, abstract_state, state_shardings
from ffn_heterogeneity.train.step import (
    check_terms,
    make_eval_step,
    make_params_metrics,
    make_train_step,
    values_of,
)
from ffn_heterogeneity.tree import Leaf, flatten, is_auxiliary, unflatten
from ffn_heterogeneity.wording import some


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A plan for evaluation.

    Attributes:
      model, params: the trained model: its config, and shapes and dtypes of its leaves.
      mesh: an `AbstractMesh` if nothing is compiled.
      objective: the task.
      batch_size, accumulation: rows per step, and number of micro-batches.
      terms, evaluated_terms: the loss; and the loss with monitors, for validation.
      options: run options of the forward pass.
      refresh: from `make_refresh`.
      forward: from `make_forward`.
      eval_step, params_metrics: jitted, see `train/step.py`; `params_metrics` is for the terms and
        the monitors.
      settled: (params, step, hyper) -> params for evaluation and export (`REFRESHES`).
    """

    model: ModelConfig
    params: Any
    mesh: Mesh | AbstractMesh
    objective: Objective
    batch_size: int
    accumulation: int
    terms: tuple[LossTerm, ...]
    evaluated_terms: tuple[LossTerm, ...]
    options: causal_lm.RunOptions
    refresh: Callable[..., Any] | None
    forward: Callable[..., dict]
    eval_step: Any
    params_metrics: Any
    settled: Callable[..., Any]

    @property
    def tokens(self) -> int:
        """Positions of a step, including padding."""
        return self.batch_size * self.objective.positions

    @functools.cached_property
    def rows(self) -> NamedSharding:
        """The sharding of a step's batches [A, B / A, ...]."""
        return partition.batch_sharding(self.mesh)

    @functools.cached_property
    def examples(self) -> NamedSharding:
        """The sharding of evaluation batches [B, ...]."""
        return partition.batch_sharding(self.mesh, accumulated=False)

    @functools.cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Every leaf's declaration, by its path."""
        return declared(self.model, self.params)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """{path: number of parameters} of the model's leaves: 0 for data, 2 per byte of NF4."""
        return {
            path: self.leaves[path].holds * math.prod(leaf.shape)
            for path, leaf in flatten(self.params).items()
            if not is_auxiliary(path)
        }

    def open_data(self, tokenizer: Any) -> Data:
        """Open the run's data; this process reads the rows of its devices."""
        rows = local_rows(self.rows, self.batch_size, self.accumulation)
        return self.objective.data(tokenizer, rows)


@dataclasses.dataclass(frozen=True)
class Plan(Evaluation):
    """A plan of a training run.

    Attributes:
      hyper: step (0-based) -> values that change between steps (`TrainConfig.hyper`).
      trainable: `{path: trains}`, or one bool per layer, see `partition.trainable_mask`.
      unread: leaves that stay unchanged because the objective does not read them.
      whole: from `made_whole`.
      dropout: as in `make_train_step`.
      train_step: jitted, see `train/step.py`.
      state: shapes and dtypes of the training state.
      shardings: shardings of (the state, accumulated batches, replicated values).
      remats: rematerialization policies that `compile_plan` may try; the first is in `options`.
      assumed: notes on assumptions about remote files or weights.
      key: plans with the same key share their programs (`Shared`).
    """

    hyper: Callable[[int], dict[str, float]]
    trainable: dict[str, Any]
    unread: tuple[str, ...]
    whole: list[str]
    dropout: bool | str
    optimizer: optax.GradientTransformationExtraArgs
    train_step: Any
    state: TrainState
    shardings: tuple[Any, Any, Any]
    remats: tuple[str, ...]
    assumed: tuple[str, ...] = ()
    key: Hashable = None

    @functools.cached_property
    def trained(self) -> int:
        """Number of trainable parameters."""
        # Of a stacked leaf there may be one bool per layer.
        return round(sum(n * np.mean(self.trainable[path]) for path, n in self.sizes.items()))

    def changed(self, remat: str, accumulation: int) -> Plan:
        """The plan of the same run with other programs; itself if nothing changes."""
        if (remat, accumulation) == (self.options.remat, self.accumulation):
            return self
        options = dataclasses.replace(self.options, remat=remat)
        forward, replicated = make_forward(self.objective, self.model, options), self.shardings[2]
        predictions = self.objective.predictions
        evaluated = make_eval_step(forward, self.evaluated_terms, replicated, predictions)
        made = dataclasses.replace(
            self,
            options=options,
            accumulation=accumulation,
            forward=forward,
            eval_step=evaluated,
        )
        return dataclasses.replace(made, train_step=made._step())

    def _step(self) -> Any:
        return make_train_step(
            self.forward,
            self.terms,
            self.optimizer,
            self.trainable,
            accumulation=self.accumulation,
            refresh=self.refresh,
            dropout=self.dropout,
            counts=self.objective.counts,
            shardings=self.shardings,
        )

    def differs(self, model: Model) -> str:
        """Name the leaf or config that differs in a loaded model; "" if none does."""
        if model.config != self.model:
            return "the model's config"
        planned, loaded = (
            {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(params).items()}
            for params in (self.params, model.params)
        )
        unlike = (path for path in {*planned, *loaded} if planned.get(path) != loaded.get(path))
        return min(unlike, default="")


def plan(
    config: TrainConfig,
    mesh: Mesh | AbstractMesh | None = None,
    model: Model | None = None,
    cache: dict[Hashable, Plan] | None = None,
) -> Plan:
    """Plan a run's step from `config` without reading weights.

    Args:
      mesh: None: over this machine's devices.
      model: the model to train (`source.starting_model`), if it has been loaded: its leaves may be
        arrays or `ShapeDtypeStruct`s. None: from its files' headers.
      cache: earlier plans, by their keys: programs of equal static settings are reused.

    Raises:
      ValueError (e.g. RuleError, CheckpointError): a rule, term or sharding that does not fit the
        tree or the mesh.
    """
    mesh, assumed = mesh or partition.make_mesh(**config.mesh), ()
    if model is None:
        start = config.source
        abstract_model, assumed = found_shapes(start)
        abstract_model = dataclasses.replace(abstract_model, tokenizer=None)
        abstract_model = jax.eval_shape(functools.partial(prepared, start), abstract_model)
        head = objective_of(config.task, abstract_model.config).head
        model = jax.eval_shape(functools.partial(headed, start, head), abstract_model)
    objective = objective_of(config.task, model.config)
    optimizer, hyper = config.optimizer_with(objective.rates), config.hyper(objective.terms)
    key = static_key(config.static, optimizer, model, mesh)
    if cache is not None and key in cache:
        # The cached programs with this run's data: seeds and schedules are not part of the key.
        return dataclasses.replace(cache[key], objective=objective, hyper=hyper, assumed=assumed)
    seen = plan_evaluation(config, objective, model, mesh)
    made = _build(config, seen, optimizer, hyper)
    made = dataclasses.replace(made, assumed=assumed, key=key)
    if cache is not None:
        cache[key] = made
    return made


def static_key(
    static: Hashable, optimizer: OptimizerConfig, model: Model, mesh: Mesh | AbstractMesh
) -> Hashable:
    """Cache key: every setting that changes the compiled program.

    It has all static settings of the config (`TrainConfig.static`), the optimizer with the leaves'
    learning rates, the model's config, the names, shapes and dtypes of its leaves, and the mesh.
    """
    leaves = ((path, x.shape, str(x.dtype)) for path, x in flatten(model.params).items())
    return static, optimizer, model.config, tuple(leaves), mesh


def plan_evaluation(
    config: TrainConfig, objective: Objective, model: Model, mesh: Mesh | AbstractMesh
) -> Evaluation:
    """Plan a run that only evaluates; errors as `plan`."""
    terms = make_terms(config.losses_with(objective.terms), model.config, mesh)
    evaluated = (*terms, *make_terms(config.monitors, model.config, mesh, trained=False))
    parts = mesh.shape["data"] * mesh.shape["fsdp"] * config.accumulation
    if objective.together > 1 and config.batch_size % (parts * objective.together):
        raise ValueError(
            f"together={objective.together} with batch_size={config.batch_size}: their rows cannot "
            f"be cut over {parts} devices (or micro-batches): make batch_size a multiple of "
            f"{parts * objective.together}, or set together=1"
        )
    packed = config.data.get("packing", True)
    options = run_options(
        config.compute_dtype, config.remat, config.unroll, mesh, packed, config.adapter_dropout
    )
    refresh = make_refresh(config.refresh)
    forward, replicated = make_forward(objective, model.config, options), partition.replicated(mesh)

    def settled(params, step, hyper):
        return params if refresh is None else refresh(params, step, None, hyper, False)

    return Evaluation(
        model=model.config,
        params=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params),
        mesh=mesh,
        objective=objective,
        batch_size=config.batch_size,
        accumulation=config.accumulation,
        terms=terms,
        evaluated_terms=evaluated,
        options=options,
        refresh=refresh,
        forward=forward,
        eval_step=make_eval_step(forward, evaluated, replicated, objective.predictions),
        params_metrics=make_params_metrics(evaluated, replicated),
        settled=settled,
    )


def _build(
    config: TrainConfig,
    seen: Evaluation,
    optimizer_config: OptimizerConfig,
    hyper: Callable[[int], dict[str, float]],
) -> Plan:
    params, mesh = seen.params, seen.mesh
    materialized = made_whole(slots(params), seen.terms)
    mask = what_trains(params, seen.leaves, config.freeze, config.train_only, config.prepare)
    settled = jax.eval_shape(seen.settled, params, 0, hyper(0))
    mask, unread = _frozen_where_unread(seen, settled, mask)
    if not any(map(np.any, mask.values())):
        raise partition.RuleError(f"no leaf is left to train: nothing reads {some(unread)}")
    names = layer_names(params)
    training = [name for path, one in mask.items() if np.any(one) for name in names[path]]
    optimizer_config = _used_rates(optimizer_config, len(seen.objective.rates), training)
    # A term of some layers of a stacked leaf needs one of these to train.
    each: dict[str, bool] = {}
    for path, trains in mask.items():
        per_layer = np.broadcast_to(trains, len(names[path])).tolist()
        each |= zip(names[path], per_layer, strict=True)
    check_terms(seen.terms, each)
    optimizer = make_optimizer(optimizer_config, params, mask, seen.leaves)
    state = abstract_state(params, optimizer, mask)
    placed = (
        state_shardings(mesh, state, seen.leaves),
        seen.rows,
        partition.replicated(mesh),
    )
    if seen.refresh is not None:
        where = flatten(placed[0].params)
        where = unflatten({path: where[path] for path in flatten(settled)})
        seen = dataclasses.replace(seen, settled=jax.jit(seen.settled, out_shardings=where))
    inside = config.adapter_dropout > 0 or any(layer.jitter for layer in seen.model.layers)
    remats = auto_remat(seen.options.platform) if config.remat == "auto" else (config.remat,)
    made = Plan(
        **{field.name: getattr(seen, field.name) for field in dataclasses.fields(Evaluation)},
        hyper=hyper,
        trainable=mask,
        unread=unread,
        whole=materialized,
        dropout=config.dropout > 0 or (inside and "adapters"),
        optimizer=optimizer,
        train_step=None,
        state=state,
        shardings=placed,
        remats=remats,
    )
    return dataclasses.replace(made, train_step=made._step())


def _used_rates(optimizer: OptimizerConfig, own: int, training: list[str]) -> OptimizerConfig:
    """The optimizer without those of the objective's `own` rates (the first) that nothing uses."""
    rates = list(enumerate(optimizer.rates))
    rates = [x for i, x in rates if i >= own or any(re.search(x[0], name) for name in training)]
    return dataclasses.replace(optimizer, rates=tuple(rates))


def _frozen_where_unread(
    seen: Evaluation, settled: Any, mask: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Freeze leaves that the objective does not read, e.g. an untied head under a classifier.

    Returns:
      (the mask, the leaves that would otherwise train).

    Raises:
      ValueError: a leaf that the model does not read either. (Flax does not report those.)
    """
    rows = seen.batch_size // seen.accumulation
    batch = seen.objective.shapes(rows, seen.objective.longest)

    def computed(params: Any, batch: Any) -> Any:
        values, outputs = values_of(seen.forward, seen.terms, params, batch)
        on_params = [term(params) for term in seen.terms if term.on == "params"]
        return values, outputs.get("predictions"), on_params

    unread = unused_leaves(seen.model, settled, computed, batch)
    unused = set(unread) and set(unused_leaves(seen.model, settled))
    prefix = f"{ROOT}/"  # another task's head
    refuse_unused(
        seen.model, [path for path in unread if path in unused and not path.startswith(prefix)]
    )
    return mask | dict.fromkeys(unread, False), tuple(path for path in unread if mask[path])
