"""A loss is a weighted sum of named terms; each term is a pure function."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.tree import flatten
from ffn_heterogeneity.wording import check_choice, check_known, check_number


class TermValue(NamedTuple):
    """The value of a term: `total / denominator`.

    Total and denominator are separate so that accumulation, packing and data parallelism are exact:
    both are summed over micro-batches and devices before the division.

    Attributes:
      total: scalar float32.
      denominator: scalar float32; must not depend on the parameters.
      metrics: name -> array, values available without extra cost (never differentiated).
    """

    total: jax.Array
    denominator: jax.Array
    metrics: dict[str, jax.Array] = {}


@dataclasses.dataclass(frozen=True)
class TermContext:
    """Facts of a run that every term may use, in addition to its settings.

    Attributes:
      name: name of this instance and prefix of its metrics. Two instances of a term have two names.
      weight: a key of `hyper` (so that a sweep never recompiles), or a constant.
      model: the model's config.
      mesh: mesh over which parameters and batches are sharded; None: one device.
    """

    name: str
    weight: str | float = 1.0
    model: ModelConfig | None = None
    mesh: Mesh | AbstractMesh | None = None


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """One named, weighted term of the loss.

    Attributes:
      name: prefix of its metrics.
      function: for `on="outputs"`: (params, outputs, batch) -> TermValue; for `on="params"`:
        (params) -> TermValue.
      weight: a key of `hyper` (so that a sweep never recompiles), or a constant.
      on: "outputs" terms see every micro-batch; "params" terms are added once per optimiser step.
      probes: the probes whose results it reads from `outputs["probes"]`.
      targets: regular expressions of the parameter paths of a "params" term; one that matches no
        trainable leaf is an error when the train step is built.
      derived: for `on="outputs"`: maps its metrics, averaged over all tokens of the step or of the
        validation data, to further reported metrics (jump rates are not averages).
      per_layer: (params, batch, forward) -> {name of one of its probes: tree of [L, ...] leaves, or
        one by stack}, which the probe gets layer by layer (a teacher's states, learned weights of
        layers).
        `forward(params, batch, probes=)` is the run's (`train.objectives.Forward`),
        `forward.of(config)` that of a model of other widths, and
        `forward.nudged(params, batch, nudges)` adds nudges to the outputs of the FFNs.
    """

    name: str
    function: Callable[..., TermValue]
    weight: str | float
    on: str = "outputs"
    probes: tuple[Any, ...] = ()
    targets: tuple[str, ...] = ()
    derived: Callable[[dict], dict] | None = None
    per_layer: Callable[[Any, dict, Callable[..., dict]], dict] | None = None

    def __post_init__(self):
        check_choice(f"term {self.name!r}: on", self.on, ("outputs", "params"))
        if not all(isinstance(probe, Probe) for probe in self.probes):
            raise ValueError(f"term {self.name!r}: probes={self.probes!r} must be of type Probe")

    def __call__(self, *seen: Any) -> TermValue:
        """Call `function`.

        Raises:
          ValueError: it does not return a `TermValue`, or reads a missing entry.
        """
        try:
            value = self.function(*seen)
        except KeyError as error:
            raise ValueError(
                f"loss term {self.name!r} reads {error}, which does not exist: all that it reads "
                "of outputs['probes'] must be in its LossTerm(probes=...), losses/terms.py"
            ) from error
        two = value[:2] if isinstance(value, TermValue) else ()
        if [*map(np.shape, two)] != [(), ()] or not isinstance(value.metrics, dict):
            raise ValueError(
                f"loss term {self.name!r} returned the shapes {jax.tree.map(np.shape, value)}: it "
                "must return TermValue(total, denominator, metrics), two scalars and a dict "
                "(losses/terms.py)"
            )
        return value


def key_of_weight(name: str) -> str:
    """Key of `hyper` and of the config for a loss's weight."""
    return f"losses.{name}.weight"


def weights_of(losses: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """`{"losses.<name>.weight": weight}` of the groups of losses that are built.

    Raises:
      ValueError: a group without a weight, or with a negative or non-finite one.
    """
    weights = {}
    for name, group in losses.items():
        key = key_of_weight(name)
        if "weight" not in group:
            raise ValueError(f"{key} is missing: a loss needs a weight (None disables the loss)")
        if group["weight"] is not None:
            check_number(key, group["weight"], "[0, inf)")
            weights[key] = float(group["weight"])
    return weights


def strict(term: Callable[..., LossTerm]) -> Callable[..., LossTerm]:
    """Wrap a term so that it rejects unknown settings and names the nearest known one."""
    names = [*inspect.signature(term).parameters][1:]

    @functools.wraps(term)
    def made(context: TermContext, **settings: Any) -> LossTerm:
        check_known(settings, names)
        return term(context, **settings)

    return made


def probe_term(context: TermContext, probe: Probe) -> LossTerm:
    """A monitor that reports a probe, not a loss (its total is 0).

    Metrics: every "sum" among the probe's results, divided by the "count" next to it, over all
    tokens, [L]: "mean", or "<group>/mean" if the results are grouped.

    Raises:
      ValueError: a probe of kind "example", whose rows are not sums.
    """
    if probe.kind != "sum":
        raise ValueError(f"probe {probe.name!r} returns one row per example: it has no average")

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        seen = flatten(outputs["probes"][probe.name])
        return TermValue(jnp.zeros(()), jnp.ones(()), jax.lax.stop_gradient(seen))

    def derived(metrics: dict) -> dict:
        groups = [path.removesuffix("sum") for path in metrics if path.endswith("sum")]
        return {
            f"{group}mean": metrics[f"{group}sum"] / jnp.maximum(metrics[f"{group}count"], 1e-30)
            for group in groups
        }

    return LossTerm(context.name, function, context.weight, probes=(probe,), derived=derived)
