"""The part of a training step after its gradients, beside the optimiser's update alone."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from ffn_heterogeneity.bench.timing import Interval, Questions, compare, paired_interval, stepping
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.families import preset
from ffn_heterogeneity.paths import flatten
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.step import update_leaves

QUESTIONS: Questions = {
    "What does a step's tail cost beside optax?": (
        "Times after the gradients",
        r"(.* / .*)",
        r"^\w+",
    )
}


def benchmark_tail(config: ConfigDict) -> dict:
    """Times AdamW with clipping on `config.model`'s leaves: the step's tail (finite check, norms, a
    state that stays where something is not finite) in turn with optax alone.

    Raises:
      ValueError: an unknown model.
    """
    shapes = flatten(causal_lm.abstract_params(preset(config.model)[0]))
    rng, trainable = np.random.default_rng(0), dict.fromkeys(shapes, True)
    grads, train = (
        {path: jnp.asarray(rng.standard_normal(x.shape, np.float32)) for path, x in shapes.items()}
        for _ in range(2)
    )
    clipped = OptimizerConfig(name="adamw", weight_decay=0.1, clip_norm=1.0)
    optimizer = make_optimizer(clipped, shapes, trainable)
    rate = jnp.float32(1e-4)

    def tail(state, grads):
        params, opt_state = state
        new, opt_state, metrics = update_leaves(
            optimizer, trainable, params, opt_state, grads, loss=jnp.zeros(()), learning_rate=rate
        )
        return (new, opt_state), metrics

    def alone(state, grads):
        updates, opt_state = optimizer.update(grads, state[1], state[0], learning_rate=rate)
        return (optax.apply_updates(state[0], updates), opt_state), {}

    programs, calls = {}, {}
    for name, function in (("step's tail", tail), ("optax alone", alone)):
        state = jax.tree.map(jnp.copy, train)
        state = state, optimizer.init(state)
        programs[name] = jax.jit(function, donate_argnums=0).lower(state, grads).compile()
        calls[name] = stepping(programs[name], state, grads)
    title = f"{config.model} after its gradients, AdamW with clipping"
    return compare(title, programs, calls, config.repetitions, _ratio)


def _ratio(seconds: Mapping[str, np.ndarray]) -> dict[str, Interval]:
    ratio = paired_interval(seconds["step's tail"], seconds["optax alone"])
    return {"step's tail / optax alone": ratio}
