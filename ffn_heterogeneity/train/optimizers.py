"""Optimizers over a flat `{path: leaf}` dict, with the learning rate as a run-time argument.

`optimizer.update(grads, state, params, learning_rate=lr)` returns the step to ADD to the
parameters. The learning rate is an array, so schedules and sweeps never recompile.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ffn_heterogeneity.models.stack import layer_names
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.tree import Leaf, flatten
from ffn_heterogeneity.wording import check_choice, check_number

OPTIMIZERS = ("adamw", "adafactor", "sgd")
SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of an optimizer; options of other optimizers are ignored.

    Attributes:
      name: "adamw", "adafactor" or "sgd".
      b1, b2, eps: AdamW's decays of the two moments, and the constant added to the root.
      weight_decay: decoupled, multiplied by the learning rate (as in torch.optim.AdamW); applies
        to leaves that are declared to decay, in all three optimizers.
      rates: (regex, factor) pairs: factors of the learning rate (and so of the decay) of leaves, or
        layers of them; the first match decides.
      clip_norm: gradients are scaled down to this global norm; None: no clipping.
      momentum, nesterov: SGD's.
      multiply_by_parameter_scale: multiply Adafactor's update by max(rms of the leaf, 1e-3). The
        default is False: with True, a learning rate of 1e-6 moves weights by about 5e-8 per step,
        so nothing is learned. The paper does not state which it used.
      clipping_threshold: Adafactor's clip of the update's rms, per layer and leaf; None: none.
      decay_rate: Adafactor's second moment decays with 1 - t ** -decay_rate.
      min_dim_size_to_factor: Adafactor factors kernels whose two largest axes have at least this
        size.
      adafactor_eps: added to squared gradients.
    """

    name: str = "adamw"
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    rates: tuple = ()
    clip_norm: float | None = None
    momentum: float = 0.0
    nesterov: bool = False
    multiply_by_parameter_scale: bool = False
    clipping_threshold: float | None = 1.0
    decay_rate: float = 0.8
    min_dim_size_to_factor: int = 128
    adafactor_eps: float = 1e-30

    def __post_init__(self):
        check_choice("optimizer", self.name, OPTIMIZERS)
        allowed = dict.fromkeys(("b1", "b2", "momentum"), "[0, 1)")
        allowed |= dict.fromkeys(("eps", "weight_decay"), "[0, inf)")
        for name, interval in allowed.items():
            check_number(f"optimizer.{name}", getattr(self, name), interval)
        for pattern, factor in self.rates:
            check_number(f"optimizer.rates: {pattern}", factor, "[0, inf)")
        if self.clip_norm is not None:
            check_number("optimizer.clip_norm", self.clip_norm, "(0, inf], or None")


def make_optimizer(
    config: OptimizerConfig,
    params: Any,
    trainable_mask: Mapping[str, bool],
    leaves: Mapping[str, Leaf] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Make the optimizer of the trainable leaves of `params`.

    Args:
      config: the optimizer's settings.
      params: the whole parameter tree (or its ShapeDtypeStructs); only paths and shapes are read.
      trainable_mask: `{path: trains}` over every leaf; frozen leaves get no state.
      leaves: `models.leaves.declared` of the tree, which declares the leaves that decay; needed if
        `weight_decay` is not 0.

    Returns:
      A transformation on the flat dict `{path: leaf}` of the trainable leaves. Its `update` needs
      the keyword `learning_rate` (a scalar, may be traced) and returns the step to add; it accepts
      `grad_norm`, the gradients' global norm, if known.

    Raises:
      ValueError: decay without declarations.
    """
    paths = [path for path in flatten(params) if trainable_mask[path]]
    parts = []
    if config.clip_norm is not None:
        parts.append(_clip(config.clip_norm))
    if config.name == "adamw":
        parts.append(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
    elif config.name == "adafactor":
        parts.append(per_layer(_adafactor(config)))
    elif config.momentum:
        parts.append(optax.trace(decay=config.momentum, nesterov=config.nesterov))
    if config.weight_decay:
        if leaves is None:
            raise ValueError(
                f"weight_decay={config.weight_decay} needs leaves=declared(config, params), which "
                "declares the leaves that decay (models/leaves.py)"
            )
        decays = {path: leaves[path].decays for path in paths}
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decays))
    factors = dict.fromkeys(paths, 1.0)
    if config.rates:
        names = {
            path: leaf_names
            for path, leaf_names in layer_names(params).items()
            if trainable_mask[path]
        }
        factors = partition.match_rules(config.rates, names, 1.0)
    parts.append(_scale_by_rate(factors))
    return optax.with_extra_args_support(optax.chain(*parts))


def _clip(largest: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm`, bit for bit, without recomputing a known norm."""

    def update(grads, state, params=None, *, grad_norm=None, **_):
        norm = optax.global_norm(grads) if grad_norm is None else grad_norm

        def clipped(g: jax.Array) -> jax.Array:
            return jnp.where(norm < largest, g, g / norm.astype(g.dtype) * largest)

        return jax.tree.map(clipped, grads), state

    return optax.GradientTransformationExtraArgs(optax.clip_by_global_norm(largest).init, update)


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=config.decay_rate,
            min_dim_size_to_factor=config.min_dim_size_to_factor,
            epsilon=config.adafactor_eps,
        )
    ]
    if config.clipping_threshold is not None:
        parts.append(optax.clip_by_block_rms(config.clipping_threshold))
    if config.multiply_by_parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    return optax.chain(*parts)


class PerLayerState(NamedTuple):
    """`{path: state of that leaf}`; states of stacked leaves carry the leading layer axis."""

    leaves: dict[str, Any]


def per_layer(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply `transform` to every leaf separately, and to every layer of a leaf under "stack/".

    On a stacked [L, in, out] leaf, optax's Adafactor would factor over, and take the rms of, all
    layers together (updates between 0.57 and 5.7 times the per-layer ones). `jax.vmap` of the
    transform over the layer axis is exactly the per-layer optimizer.
    """

    def init(params):
        def one(path, leaf):
            return jax.vmap(transform.init)(leaf) if _stacked(path) else transform.init(leaf)

        return PerLayerState({path: one(path, leaf) for path, leaf in params.items()})

    def update(grads, state, params=None):
        updates, states = {}, {}
        params = params or {}
        for path, grad in grads.items():
            function = jax.vmap(transform.update) if _stacked(path) else transform.update
            updates[path], states[path] = function(grad, state.leaves[path], params[path])
        return updates, PerLayerState(states)

    return optax.GradientTransformation(init, update)


def _stacked(path: str) -> bool:
    return path.startswith("stack/")


def _scale_by_rate(factors: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    def scaled(update, factor, learning_rate):
        # weak typing would let a float64 rate promote float32 updates: cast to each leaf's dtype.
        rate = jnp.asarray(learning_rate, update.dtype)
        return -rate * (update if factor == 1 else partition.by_layer(factor, update) * update)

    def update(updates, state, params=None, *, learning_rate, **_):
        del params
        return {k: scaled(u, factors[k], learning_rate) for k, u in updates.items()}, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def make_schedule(
    name: str,
    learning_rate: float,
    *,
    warmup_steps: float = 0,
    total_steps: int | None = None,
    final_fraction: float = 0.0,
) -> Callable[[int], float]:
    """Make the learning-rate schedule: optimizer step (0-based) -> rate, in float64 on the host.

    Warm-up: rate * (step + 1) / warmup_steps for step < warmup_steps, so that the first step is
    not lost and step `warmup_steps - 1` has the full rate; a value below 1 is a fraction of all
    steps. Then, with t = (step - warmup_steps) / (total_steps - warmup_steps) clipped to [0, 1]:
    "constant" rate; "linear" rate * (1 - (1 - final_fraction) t);
    "cosine" rate * (final_fraction + (1 - final_fraction) (1 + cos(pi t)) / 2).

    Raises:
      ValueError: unknown name, a negative or non-finite rate, a decay without a length.
    """
    check_choice("schedule", name, SCHEDULES)
    check_number("learning_rate", learning_rate, "[0, inf)")
    check_number("warmup_steps", warmup_steps, "[0, inf)")
    if 0 < warmup_steps < 1:
        warmup_steps = round(warmup_steps * (total_steps or 0))
    if name != "constant" and (total_steps is None or total_steps <= warmup_steps):
        raise ValueError(
            f"schedule {name!r} needs total_steps > warmup_steps, got {total_steps} and "
            f"{warmup_steps}: train longer or warm up less"
        )

    def rate(step: int) -> float:
        if step < warmup_steps:
            return learning_rate * (step + 1) / warmup_steps
        if name == "constant":
            return learning_rate
        t = min(1.0, (step - warmup_steps) / ((total_steps or 0) - warmup_steps))
        shape = 1.0 - t if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * t))
        return learning_rate * (final_fraction + (1.0 - final_fraction) * shape)

    return rate
