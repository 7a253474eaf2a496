"""What a config builds before anything is loaded: loss, optimiser, shardings, the compiled step.

The same for arrays and for shapes alone, so that a dry run plans the very step that a run takes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from ffn_heterogeneity.adapters import ADAPTERS, RATES, REFRESHES
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, probe_term, strict
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.options import COMPUTE_DTYPES, choose_dtype
from ffn_heterogeneity.models.stack import layer_names
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.paths import flatten, flatten_config, unflatten
from ffn_heterogeneity.probes import PROBES
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.loop import LoopConfig
from ffn_heterogeneity.train.objectives import LANGUAGE, OBJECTIVES, Objective
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer, make_schedule
from ffn_heterogeneity.train.profiler import parse_window
from ffn_heterogeneity.train.state import TrainState, abstract_state, state_shardings
from ffn_heterogeneity.train.step import (
    check_names,
    make_eval_step,
    make_params_metrics,
    make_train_step,
)
from ffn_heterogeneity.wording import check_choice, check_known, unknown

# What remat="auto" means: the first that fits (train/fit.py). With the products' outputs kept 3% of
# the operations are done again; to keep everything takes three times the memory for those.
AUTO_REMAT = ("dots", "attention_output", "full")
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
# Keys, or groups of keys, that no compiled program depends on: they go through `hyper`, or are the
# host's business. Any other key is taken to be part of the program.
FREE_KEYS = (
    "model", "revision", "tokenizer", "seed", "seeds", "steps", "mesh", "dropout",
    "optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_steps",
    "optimizer.final_fraction", "eval", "checkpoint", "export", "tensorboard", "wandb", "profile",
    "dry_run",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Built:
    """The parts of a run.

    Attributes:
      mesh: of devices, or an `AbstractMesh` where nothing is to be compiled.
      trainable: `{path: trains}`, or one bool a layer, see `partition.trainable_mask`.
      forward: (params, batch, *, probes, dropout, per_layer) -> outputs.
      terms, evaluated_terms: the loss, and what validation computes: the loss and its monitors.
      train_step, eval_step, params_metrics: jitted, see `train/step.py`; `params_metrics` of the
        terms and the monitors.
      objective: what is predicted and scored beside the loss.
      settled: (params, step, hyper) -> params as evaluation and export see them (`REFRESHES`).
      state: shapes and dtypes of the training state.
      shardings: of (the state, accumulated batches, what every device holds whole).
    """

    model: ModelConfig
    mesh: Mesh | AbstractMesh
    trainable: dict[str, bool]
    optimizer: optax.GradientTransformationExtraArgs
    terms: tuple[LossTerm, ...]
    evaluated_terms: tuple[LossTerm, ...]
    options: causal_lm.RunOptions
    forward: Callable[..., dict]
    train_step: Any
    eval_step: Any
    params_metrics: Any
    objective: Objective
    settled: Callable[..., Any]
    state: TrainState
    shardings: tuple[Any, Any, Any]


def build(config: ConfigDict, model: ModelConfig, params: Any, mesh: Mesh | AbstractMesh) -> Built:
    """Everything that `config` says about the step.

    Args:
      params: the tree, or its `ShapeDtypeStruct`s: only shapes and dtypes are read.

    Raises:
      ValueError (RuleError is one): a rule, term or sharding that does not fit the tree or mesh.
    """
    patterns = tuple(config.freeze), tuple(config.train_only)
    _check_quantised(params, config.train_only)
    mask = partition.trainable_mask(flatten(params), *patterns, layer_names(params))
    optimizer = make_optimizer(optimizer_config(config), params, mask)
    state = abstract_state(params, optimizer, mask)
    placed = (
        state_shardings(mesh, state),
        partition.batch_sharding(mesh),
        partition.replicated(mesh),
    )
    (terms, monitors), options = make_terms(config, model, mesh), run_options(config, mesh)
    objective, refresh = (
        OBJECTIVES[config.get("objective", LANGUAGE)](config, model),
        make_refresh(config),
    )

    def forward(params, batch, *, probes=(), dropout=None, per_layer=None):
        outputs = causal_lm.forward(
            model, params, batch, options=options, probes=probes, dropout=dropout,
            per_layer=per_layer,
        )  # fmt: skip
        if objective.head is not None:
            outputs["predictions"] = objective.head(params["task_head"], outputs, batch)
        return outputs

    def settled(params, step, hyper):
        return params if refresh is None else refresh(params, step, None, hyper, False)

    train_step = make_train_step(
        forward, terms, optimizer, mask,
        accumulation=config.accumulation, refresh=refresh,
        dropout=config.dropout > 0 or (options.adapter_dropout > 0 and "adapters"),
        shardings=placed,
    )  # fmt: skip
    hyper = jax.eval_shape(lambda: hyper_function(config)(0))
    causal_lm.check_leaves(model, jax.eval_shape(settled, params, 0, hyper), forward)
    evaluated = (*terms, *monitors)
    check_names(evaluated)
    return Built(
        model=model, mesh=mesh, trainable=mask, optimizer=optimizer, terms=terms,
        evaluated_terms=evaluated, options=options,
        forward=forward, train_step=train_step, state=state, shardings=placed,
        eval_step=make_eval_step(forward, evaluated, placed[2], objective),
        params_metrics=make_params_metrics(evaluated, placed[2]), objective=objective,
        settled=settled if refresh is None else jax.jit(
            settled, out_shardings=_of(jax.eval_shape(settled, params, 0, hyper), placed[0].params)
        ),
    )  # fmt: skip


def _check_quantised(params: Any, train_only: Sequence[str]) -> None:
    """Refuses to train what is left of a quantised model without adapters, unless that is said."""
    names = {path.rpartition("/")[2]: path for path in flatten(params)}
    learned = {leaf for adapter in ADAPTERS for leaf in adapter.trained}
    if "nf4_codes" in names and not train_only and not learned & set(names):
        raise partition.RuleError(
            f"{names['nf4_codes']}: the base is quantised, its kernels cannot train: add lora or "
            "dora to the config's argument, name what trains (train_only), or fold it "
            "(configs/adapt.py:fold)"
        )


def _of(tree: Any, shardings: Any) -> Any:
    """The shardings of the leaves that a tree still has."""
    flat = flatten(shardings)
    return unflatten({path: flat[path] for path in flatten(tree)})


def make_refresh(config: ConfigDict) -> Callable[..., Any] | None:
    """`config.refresh`'s functions (`adapters.REFRESHES`), one after the other; None without any.

    Raises:
      ValueError: an unknown name.
    """
    names = config.get("refresh", ())
    for name in names:
        check_choice("refresh", name, tuple(REFRESHES))
    functions = [REFRESHES[name](config[name]) for name in names]

    def refresh(params, step, key, hyper, train):
        for i, function in enumerate(functions):
            own = None if key is None else jax.random.fold_in(key, i)
            params = function(params, step, own, hyper, train)
        return params

    return refresh if functions else None


def static_key(config: ConfigDict, model: ModelConfig, params: Any, mesh: Mesh) -> Hashable:
    """What `build` makes programs of: runs with equal keys can use the same ones.

    Everything in the config but `FREE_KEYS` and the weights of losses (a dropout rate counts as on
    or off, a loss as built or not), the model's config, the names, shapes and dtypes of its leaves,
    the mesh.
    """
    flat, weights = flatten_config(config.to_dict()), loss_weights(config)
    kept = {
        key: value
        for key, value in flat.items()
        if key not in (*FREE_KEYS, *weights) and key.split(".")[0] not in FREE_KEYS
    }
    kept["dropout is on"] = config.dropout > 0
    leaves = tuple((path, x.shape, str(x.dtype)) for path, x in flatten(params).items())
    return json.dumps(kept, sort_keys=True), model, leaves, mesh


def check_config(config: ConfigDict) -> None:
    """Refuses what would only be noticed after hours.

    Raises:
      ValueError: names the key, its value and what it may be.
    """
    for key, value, choices in (
        ("compute_dtype", config.compute_dtype, COMPUTE_DTYPES),
        ("export.dtype", config.export.dtype, EXPORT_DTYPES),
        ("export.form", config.export.form, ("auto", "padded", "native")),
        ("export.weights", config.export.weights, ("last", "best")),
    ):
        check_choice(key, value, choices)
    check_choice("objective", config.get("objective", LANGUAGE), tuple(OBJECTIVES))
    for name in config.get("prepare", ()):
        check_choice("prepare", name, tuple(n for n, one in SURGERIES.items() if one.abstract))
        SURGERIES[name].check(config[name])
    if not config.model and "shape" not in config:
        raise ValueError("model is empty: give a directory, a .gguf file, a hub id or a preset")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout={config.dropout} is outside [0, 1)")
    hyper_function(config), optimizer_config(config), loop_config(config)
    adapter_dropout(config)
    if config.accumulation < 1 or config.batch_size % config.accumulation:
        raise ValueError(
            f"batch_size={config.batch_size} must be a multiple of "
            f"accumulation={config.accumulation}"
        )
    window = parse_window(config.profile)
    if window and window[1] > config.steps + 1:
        raise ValueError(f"profile={config.profile!r}: the run has steps 1 to {config.steps}")
    if config.export.weights == "best" and not config.checkpoint.keep_best:
        raise ValueError("export.weights='best' needs checkpoint.keep_best=True")


def make_terms(
    config: ConfigDict, model: ModelConfig, mesh: Mesh | AbstractMesh
) -> tuple[tuple[LossTerm, ...], tuple[LossTerm, ...]]:
    """(the loss, what validation computes beside it and nobody trains on).

    A group of `config.losses` is one term: `term` (default: the group's name) is its name in
    `losses.TERMS`, `weight` its factor (None: it is not built; 0 is built, so that a sweep over the
    weight is one program), the rest are the term's settings. `config.monitors` has the same form
    without weights, or names a probe (of `probes.PROBES`) whose averages are wanted. Terms are
    summed in the order of `TERMS`, then of their names: a config's own order is lost when it is
    iterated.

    Raises:
      ValueError: an unknown term or setting, or a weight that is none.
    """
    return _terms(config, "losses", model, mesh), _terms(config, "monitors", model, mesh)


def _terms(config: ConfigDict, kind: str, model: ModelConfig, mesh: Any) -> tuple[LossTerm, ...]:
    weights, made = loss_weights(config), {}
    for name, group in config.get(kind, {}).items():
        term, where = group.get("term", name), f"{kind}.{name}"
        if kind == "monitors" and "probe" in group:
            if group.probe not in PROBES:
                new = "a new one needs a line in PROBES (probes/__init__.py)"
                raise ValueError(f"{where}: {unknown('probe', group.probe, tuple(PROBES))}; {new}")
            check_known(group, ("probe",), f"setting of {where}")
            made[len(TERMS), name] = probe_term(TermContext(name, 0.0), PROBES[group.probe])
            continue
        if term not in TERMS:
            new = "a new one needs a line in TERMS (losses/__init__.py), a probe probe=<its name>"
            raise ValueError(f"{where}: {unknown('term', term, tuple(TERMS))}; {new}")
        weight = key_of_weight(name) if kind == "losses" else 0.0
        if weight and weight not in weights:
            continue
        settings = {k: value for k, value in group.items() if k not in ("term", "weight")}
        try:
            one = strict(TERMS[term])(TermContext(name, weight, model, mesh), **settings)
            if not isinstance(one, LossTerm):
                raise ValueError(f"term {term!r} returned {one!r:.60}: it must return a LossTerm")
            made[list(TERMS).index(term), name] = one
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return tuple(made[key] for key in sorted(made))


def key_of_weight(name: str) -> str:
    """The key of `hyper`, and of the config, that holds a loss's weight."""
    return f"losses.{name}.weight"


def loss_weights(config: ConfigDict) -> dict[str, float]:
    """`{"losses.<name>.weight": weight}` of the losses that are built.

    Raises:
      ValueError: a weight that is negative or not finite, a group without one.
    """
    weights = {}
    for name, group in config.losses.items():
        key = key_of_weight(name)
        if "weight" not in group:
            raise ValueError(f"{key} is not given: a loss needs one (None: it is left out)")
        if group.weight is None:
            continue
        if not np.isfinite(group.weight) or group.weight < 0:
            raise ValueError(f"{key}={group.weight} must be finite and >= 0")
        weights[key] = float(group.weight)
    return weights


def optimizer_config(config: ConfigDict) -> OptimizerConfig:
    """The keys of `config.optimizer` that are not the schedule's."""
    values = config.optimizer.to_dict()
    for key in ("learning_rate", "schedule", "warmup_steps", "final_fraction"):
        del values[key]
    return OptimizerConfig(**values)


def hyper_function(config: ConfigDict):
    """step (0-based) -> {"learning_rate", "dropout", the losses' weights, refreshes' rates}."""
    schedule = make_schedule(
        config.optimizer.schedule,
        config.optimizer.learning_rate,
        warmup_steps=config.optimizer.warmup_steps,
        total_steps=config.steps,
        final_fraction=config.optimizer.final_fraction,
    )
    constant = {"dropout": config.dropout} | loss_weights(config)
    names = [name for name in config.get("refresh", ()) if name in RATES]
    rates = {name: RATES[name](config[name], config.steps) for name in names}

    def hyper(step):
        changing = {name: rate(step) for name, rate in rates.items()}
        return {"learning_rate": schedule(step), **constant, **changing}

    return hyper


def run_options(config: ConfigDict, mesh: Mesh | AbstractMesh) -> causal_lm.RunOptions:
    """What "auto" means on the mesh's platform; shardings on several devices."""
    platform = causal_lm.platform_of(mesh)
    held = partition.run_shardings(mesh) if mesh.size > 1 else {}
    alone = platform == "gpu" and mesh.size == 1
    return causal_lm.RunOptions(
        compute_dtype=choose_dtype(config.compute_dtype, platform),
        remat=AUTO_REMAT[0] if config.remat == "auto" else config.remat,
        unroll=(alone or 1) if config.unroll < 0 else config.unroll or True,
        packed=config.data.get("packing", True),
        adapter_dropout=adapter_dropout(config),
        platform=platform,
        **held,
    )


def adapter_dropout(config: ConfigDict) -> float:
    """Of the prepared adapters' groups, the one that has it.

    Raises:
      ValueError: it is outside [0, 1).
    """
    rates = [config[name].get("dropout", 0.0) for name in config.get("prepare", ())]
    if bad := [rate for rate in rates if not 0 <= rate < 1]:
        raise ValueError(f"an adapter's dropout={bad[0]} is outside [0, 1)")
    return max(rates, default=0.0)


def loop_config(config: ConfigDict) -> LoopConfig:
    mode, _, metric = config.eval.best_metric.rpartition(":")
    return LoopConfig(
        steps=config.steps,
        checkpoint_every=config.checkpoint.every,
        accumulation=config.accumulation,
        best_metric=metric,
        best_mode=mode or "min",
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        save_at_end=config.checkpoint.at_end,
        profile=parse_window(config.profile),
    )
