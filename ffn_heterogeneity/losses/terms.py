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

    Sum and denominator stay apart so that accumulation, packing and data parallelism are exact:
    both are summed over micro-batches and devices before they are divided.

    Attributes:
      total: scalar float32.
      denominator: scalar float32; must not depend on the parameters.
      metrics: name -> array, what comes free with the computation (never differentiated).
    """

    total: jax.Array
    denominator: jax.Array
    metrics: dict[str, jax.Array] = {}


@dataclasses.dataclass(frozen=True)
class TermContext:
    """The facts of a run that every term may use, in addition to its own settings.

    Attributes:
      name: of this instance; prefix of its metrics. Two instances of one term have two names.
      weight: a key of `hyper` (so that a sweep never recompiles), or a constant.
      model: the model's config.
      mesh: of the devices that the parameters and batches are cut over; None: one device.
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
      targets: regular expressions of the parameter paths a "params" term acts on; one that matches
        no trainable leaf is an error when the train step is built.
      derived: for `on="outputs"`: from its own metrics, averaged over all tokens of the step or of
        the validation data, to those that are reported (jump rates are no averages themselves).
      per_layer: (params, batch, forward) -> {name of one of its probes: tree of [L, ...] leaves},
        which the probe is handed layer by layer (a teacher's states, learnt weights of layers).
        `forward(params, batch, probes=)` is the run's (`train.objectives.Forward`),
        `forward.of(config)` that of a model of other widths, and
        `forward.nudged(params, batch, nudges)` has nudges added to the outputs of the FFNs.
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
        """What `function` returns.

        Raises:
          ValueError: that is no `TermValue`, or it reads what is not there.
        """
        try:
            value = self.function(*seen)
        except KeyError as error:
            raise ValueError(
                f"loss term {self.name!r} reads {error}, which is not there: what it reads of "
                "outputs['probes'] must be among its LossTerm(probes=...), losses/terms.py"
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
    """The key of `hyper`, and of the config, that holds a loss's weight."""
    return f"losses.{name}.weight"


def weights_of(losses: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """`{"losses.<name>.weight": weight}` of the groups of losses that are built.

    Raises:
      ValueError: a group has no weight, or one that is negative or not finite.
    """
    weights = {}
    for name, group in losses.items():
        key = key_of_weight(name)
        if "weight" not in group:
            raise ValueError(f"{key} is not given: a loss needs one (None: it is left out)")
        if group["weight"] is not None:
            check_number(key, group["weight"], "[0, inf)")
            weights[key] = float(group["weight"])
    return weights


def strict(term: Callable[..., LossTerm]) -> Callable[..., LossTerm]:
    """The term, which rejects a setting that its signature lacks and names the nearest."""
    names = [*inspect.signature(term).parameters][1:]

    @functools.wraps(term)
    def made(context: TermContext, **settings: Any) -> LossTerm:
        check_known(settings, names)
        return term(context, **settings)

    return made


def probe_term(context: TermContext, probe: Probe) -> LossTerm:
    """A monitor of what a probe sees, and no loss (its total is 0).

    Metrics: every "sum" among the probe's results, divided by the "count" next to it, over all
    tokens, [L]: "mean", or "<group>/mean" where the results are grouped.

    Raises:
      ValueError: a probe of kind "example", whose rows are no sums.
    """
    if probe.kind != "sum":
        raise ValueError(f"probe {probe.name!r} gives a row an example: it has no average")

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
