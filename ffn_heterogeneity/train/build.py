"""The parts of a run, built before anything is computed: what is predicted, lost, moved and where.

The same for arrays and for shapes alone, so that a dry run plans the very step that a run takes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from ffn_heterogeneity.adapters import REFRESHES, adapter_leaves, is_linear, kernel_readers
from ffn_heterogeneity.heads import ROOT
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, probe_term, strict
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.options import choose_dtype
from ffn_heterogeneity.models.stack import layer_names, slots
from ffn_heterogeneity.models.unused import refuse_unused, unused_leaves
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.paths import TEACHER, flatten, nodes, subtree, unflatten
from ffn_heterogeneity.probes import PROBES
from ffn_heterogeneity.train.labels import labels
from ffn_heterogeneity.train.language import language
from ffn_heterogeneity.train.loop import Program
from ffn_heterogeneity.train.objectives import Objective, make_forward
from ffn_heterogeneity.train.optimizers import make_optimizer
from ffn_heterogeneity.train.settings import (
    LANGUAGE,
    TrainConfig,
    hyper_function,
    key_of_weight,
    loss_weights,
)
from ffn_heterogeneity.train.state import TrainState, abstract_state, state_shardings
from ffn_heterogeneity.train.step import (
    check_names,
    check_terms,
    make_eval_step,
    make_params_metrics,
    make_train_step,
    values_of,
)
from ffn_heterogeneity.wording import check_choice, check_known, naming, some, unknown

# remat="auto" is the first of these that fits (train/fit.py). With the products' outputs kept 3% of
# the operations are done again; to keep everything takes three times the memory for those.
AUTO_REMAT = ("dots", "attention_output", "full")
# Among `train_only`: the blocks that have a teacher.
TAUGHT = "@taught"
# name in configs -> (config, the model's config) -> objective
OBJECTIVES: dict[str, Callable[[TrainConfig, ModelConfig], Objective]] = {
    LANGUAGE: language,
    "labels": labels,
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The programs of a batch that is not trained on.

    Attributes:
      model, mesh: an `AbstractMesh` where nothing is to be compiled.
      objective: the task.
      terms, evaluated_terms: the loss, and what validation computes: the loss and its monitors.
      forward: of `make_forward`.
      eval_step, params_metrics: jitted, see `train/step.py`; `params_metrics` of the terms and the
        monitors.
      settled: (params, step, hyper) -> params as evaluation and export see them (`REFRESHES`).
    """

    model: ModelConfig
    mesh: Mesh | AbstractMesh
    objective: Objective
    terms: tuple[LossTerm, ...]
    evaluated_terms: tuple[LossTerm, ...]
    options: causal_lm.RunOptions
    forward: Callable[..., dict]
    eval_step: Any
    params_metrics: Any
    settled: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Built(Evaluation):
    """The parts of a run that trains.

    Attributes:
      trainable: `{path: trains}`, or one bool a layer, see `partition.trainable_mask`.
      unread: leaves that stay as they are because the objective does not read them.
      whole: of `made_whole`.
      train_step: jitted, see `train/step.py`.
      state: shapes and dtypes of the training state.
      shardings: of (the state, accumulated batches, what every device holds whole).
    """

    trainable: dict[str, Any]
    unread: tuple[str, ...]
    whole: list[str]
    optimizer: optax.GradientTransformationExtraArgs
    train_step: Any
    state: TrainState
    shardings: tuple[Any, Any, Any]

    def program(self, config: TrainConfig) -> Program:
        """The program that the loop of a run with `config` calls step by step."""
        trained = sorted(path for path, trains in self.trainable.items() if trains)
        return Program(
            self.train_step,
            hyper_function(config, self.objective.terms),
            shardings=self.shardings,
            gradient_paths=tuple(trained),
            lengths=len(self.objective.lengths),
            terms=tuple(term.name for term in self.terms),
        )


def objective_of(config: TrainConfig, model: ModelConfig) -> Objective:
    """The objective that `config` names, on a model.

    Raises:
      ValueError: there is none of that name, or what it is given does not fit.
    """
    check_choice("objective", config.objective, tuple(OBJECTIVES))
    return OBJECTIVES[config.objective](config, model)


def build(config: TrainConfig, model: Model, mesh: Mesh | AbstractMesh) -> Built:
    """Everything that `config` says about the step.

    Args:
      model: with arrays, or `ShapeDtypeStruct`s: only shapes and dtypes are read.

    Raises:
      ValueError (RuleError is one): a rule, term or sharding that does not fit the tree or mesh.
    """
    params, seen = model.params, build_evaluation(config, model.config, model.params, mesh)
    _check_quantised(params, config.train_only)
    only = [_taught(params) if pattern == TAUGHT else pattern for pattern in config.train_only]
    leaves = declared(model.config, params)
    mask = partition.trainable_mask(leaves, config.freeze, only, layer_names(params))
    check_terms(seen.terms, mask)
    mask, unread = _frozen_where_unread(config, seen, params, mask)
    settings = config.optimizer_with(seen.objective.rates)
    optimizer = make_optimizer(settings, params, mask, leaves)
    state = abstract_state(params, optimizer, mask)
    placed = (
        state_shardings(mesh, state, leaves),
        partition.batch_sharding(mesh),
        partition.replicated(mesh),
    )
    train_step = make_train_step(
        seen.forward,
        seen.terms,
        optimizer,
        mask,
        accumulation=config.accumulation,
        refresh=make_refresh(config.refresh),
        dropout=config.dropout > 0 or (config.adapter_dropout > 0 and "adapters"),
        counts=seen.objective.counts,
        shardings=placed,
    )
    if config.refresh:
        where = flatten(placed[0].params)
        settled = jax.eval_shape(seen.settled, params, 0, hyper_shapes(config, seen))
        where = unflatten({path: where[path] for path in flatten(settled)})
        seen = dataclasses.replace(seen, settled=jax.jit(seen.settled, out_shardings=where))
    return Built(
        **vars(seen),
        trainable=mask,
        unread=unread,
        whole=made_whole(params, seen.terms),
        optimizer=optimizer,
        train_step=train_step,
        state=state,
        shardings=placed,
    )


def build_evaluation(
    config: TrainConfig, model: ModelConfig, params: Any, mesh: Mesh | AbstractMesh
) -> Evaluation:
    """Builds what `config` says about a batch that is not trained on; errors as `build`."""
    objective = objective_of(config, model)
    terms = make_terms(config.losses_with(objective.terms), model, mesh)
    evaluated = (*terms, *make_terms(config.monitors, model, mesh, trained=False))
    check_names(evaluated)
    options, refresh = run_options(config, mesh), make_refresh(config.refresh)
    forward, whole = make_forward(objective, model, options), partition.replicated(mesh)

    def settled(params, step, hyper):
        return params if refresh is None else refresh(params, step, None, hyper, False)

    return Evaluation(
        model=model,
        mesh=mesh,
        objective=objective,
        terms=terms,
        evaluated_terms=evaluated,
        options=options,
        forward=forward,
        eval_step=make_eval_step(forward, evaluated, whole, objective.predictions),
        params_metrics=make_params_metrics(evaluated, whole),
        settled=settled,
    )


def hyper_shapes(config: TrainConfig, seen: Evaluation) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of what changes from step to step."""
    return jax.eval_shape(lambda: hyper_function(config, seen.objective.terms)(0))


def _frozen_where_unread(
    config: TrainConfig, seen: Evaluation, params: Any, mask: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the mask, in which leaves that the objective does not read stay as they are; those that
    would have trained): a language model's untied head under a classifier, say.

    Raises:
      ValueError: a leaf that the model does not read either. (Flax is silent about those.)
    """
    settled = jax.eval_shape(seen.settled, params, 0, hyper_shapes(config, seen))
    rows = config.batch_size // config.accumulation
    batch = seen.objective.shapes(rows, seen.objective.longest)

    def computed(params: Any, batch: Any) -> Any:
        values, outputs = values_of(seen.forward, seen.terms, params, batch)
        on_params = [term(params) for term in seen.terms if term.on == "params"]
        return values, outputs.get("predictions"), on_params

    unread = unused_leaves(seen.model, settled, computed, batch)
    own = set(unread) and set(unused_leaves(seen.model, settled))
    kept = f"{ROOT}/"  # of another task
    refuse_unused(
        seen.model, [path for path in unread if path in own and not path.startswith(kept)]
    )
    return mask | dict.fromkeys(unread, False), tuple(path for path in unread if mask[path])


def made_whole(params: Any, terms: Sequence[LossTerm]) -> list[str]:
    """The kernels made whole in the step though their factors have a product of their own,
    and what reads them."""
    readers: dict[tuple[str, ...], list[str]] = {}
    for slot in slots(params):
        for name, leaves in nodes(slot.tree, is_linear):
            beside = kernel_readers(leaves)
            if beside is None:
                continue
            paths = [f"{slot.path}/{name}/{leaf}" for leaf in leaves if leaf != "bias"]
            for term in terms:
                # A kernel's readers name all of its leaves; others read some leaf as it is.
                if any(all(re.search(own, path) for path in paths) for own in term.targets):
                    beside.append(term.name)
            readers.setdefault(tuple(beside), []).append(f"{slot.path}/{name}")
    return [f"{some(paths)} whole for {', '.join(why)}" for why, paths in readers.items() if why]


def _taught(params: dict) -> str:
    """The pattern of `TAUGHT`."""
    taught = [slot for slot in slots(params) if subtree(params.get(TEACHER, {}), slot.path)]
    if not taught:
        raise ValueError(f"train_only={TAUGHT!r}: no block has a teacher (config.prepare)")
    layers = "|".join(str(layer) for slot in taught for layer in slot.layers)
    return rf"^layers/({layers})/ffn/(gate|up|down)/"


def _check_quantised(params: Any, train_only: Sequence[str]) -> None:
    """Refuses to train what is left of a quantised model without adapters, unless that is said."""
    names = {path.rpartition("/")[2]: path for path in flatten(params)}
    learned = {name for name, leaf in adapter_leaves().items() if leaf.trains}
    if "nf4_codes" in names and not train_only and not learned & set(names):
        raise partition.RuleError(
            f"{names['nf4_codes']}: the base is quantised, its kernels cannot train: add lora or "
            "dora to the config's argument, name what trains (train_only), or fold it "
            "(configs/adapt.py:fold)"
        )


def make_refresh(groups: Mapping[str, Mapping[str, Any]]) -> Callable[..., Any] | None:
    """Functions of `adapters.REFRESHES`, one after the other; None without any.

    Args:
      groups: name -> settings.

    Raises:
      ValueError: an unknown name.
    """
    for name in groups:
        check_choice("refresh", name, tuple(REFRESHES))
    functions = [REFRESHES[name](settings) for name, settings in groups.items()]

    def refresh(params, step, key, hyper, train):
        for i, function in enumerate(functions):
            own = None if key is None else jax.random.fold_in(key, i)
            params = function(params, step, own, hyper, train)
        return params

    return refresh if functions else None


def static_key(config: TrainConfig, model: Model, mesh: Mesh) -> Hashable:
    """The parts that `build` makes programs of: runs with equal keys can use the same ones.

    Everything in the config that is not free, leaves' own rates beside the run's, the model's
    config, the names, shapes and dtypes of its leaves, the mesh.
    """
    leaves = ((path, x.shape, str(x.dtype)) for path, x in flatten(model.params).items())
    optimizer = config.optimizer_with(objective_of(config, model.config).rates)
    return config.static, optimizer, model.config, tuple(leaves), mesh


def make_terms(
    groups: Mapping[str, Mapping[str, Any]],
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    trained: bool = True,
) -> tuple[LossTerm, ...]:
    """The loss; or, not `trained`, monitors, which validation computes beside it.

    A group is one term: `term` (default: the group's name) is its name in `losses.TERMS`, `weight`
    its factor (None: it is not built; 0 is built, so that a sweep over the weight is one program),
    the rest are the term's settings. Monitors have the same form without weights, or name a probe
    (of `probes.PROBES`) whose averages are wanted. Terms are summed in the order of `TERMS`, then
    of their names: a config's own order is lost when it is iterated.

    Raises:
      ValueError: an unknown term or setting, or a weight that is none.
    """
    built = loss_weights(groups) if trained else {}
    kind, made = "losses" if trained else "monitors", {}
    for name, group in groups.items():
        weight = key_of_weight(name) if trained else 0.0
        if trained and weight not in built:
            continue
        with naming(f"{kind}.{name}"):
            place, term = _term(TermContext(name, weight, model, mesh), group, not trained)
        made[place, name] = term
    return tuple(made[key] for key in sorted(made))


def _term(context: TermContext, group: Mapping[str, Any], monitor: bool) -> tuple[int, LossTerm]:
    """(its place in the sum, the term of one group)."""
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


def run_options(config: TrainConfig, mesh: Mesh | AbstractMesh) -> causal_lm.RunOptions:
    """A run's options: "auto" resolved on the mesh's platform; shardings on several devices."""
    platform = causal_lm.platform_of(mesh)
    on_mesh = partition.run_shardings(mesh) if mesh.size > 1 else {}
    unroll: int | bool = config.unroll or True
    if config.unroll < 0:
        unroll = True if platform == "gpu" and mesh.size == 1 else 1
    return causal_lm.RunOptions(
        compute_dtype=choose_dtype(config.compute_dtype, platform),
        remat=AUTO_REMAT[0] if config.remat == "auto" else config.remat,
        unroll=unroll,
        packed=config.data.get("packing", True),
        adapter_dropout=config.adapter_dropout,
        platform=platform,
        **on_mesh,
    )
