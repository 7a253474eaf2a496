"""Layer-wise distillation of a compressed model (MLP Fusion, equation 10).

    mean over layers, tokens and the hidden dimension of (h_l - h'_l)^2

h_l is the residual stream after block l, h'_l that of the teacher: the same model with the
uncompressed blocks, under the root `teacher/` (`surgery.teacher`), without dropout and without a
gradient. The paper sums over layers; padding does not count (it does in the authors' code).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.losses.classification import classification_term, regression_term
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.stack import slots
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.displacement import counted_tokens
from ffn_heterogeneity.tree import TEACHER, replaced, subtree
from ffn_heterogeneity.wording import check_choice

# The residual stream after the block (layer-wise tuning), or the FFN's output ("maintain output",
# Table XIV).
STATES: dict[str, Callable[[Any], jax.Array]] = {
    "block": lambda seen: seen.block_output,
    "ffn": lambda seen: seen.ffn_output,
}
# "Maintain NTK gradient" of that table, whose formula is not printed: the gradients of the task's
# loss with respect to each FFN's output, in units of the teacher's root mean square [ours]. A step
# computes second derivatives.
GRADIENT = "gradient"


def layerwise_term(
    context: TermContext, states: str = "block", sum_hidden: bool = False
) -> LossTerm:
    """Mean over layers and tokens of the squared differences from the teacher's states.

    Metrics: "layers" [L], the value of each layer.

    Args:
      states: a name of `STATES`, or `GRADIENT`, which needs labels.
      sum_hidden: sum over the hidden dimension instead of the mean (the authors' code).

    Raises:
      ValueError: no such states; when traced: no teacher.
    """
    check_choice("states", states, (*STATES, GRADIENT))
    name = f"layerwise/{context.name}"  # two of them may run side by side
    probe = Probe(name, functools.partial(_apart, states, sum_hidden))
    look = STATES.get(states, STATES["ffn"])
    shown = Probe("taught", functools.partial(_shown, look), kind="example")

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        seen = outputs["probes"][name]
        # The mean over layers of their means: two stacks have different numbers of tokens.
        # Micro-batches count by the mean of both [ours].
        count = jnp.mean(seen["count"])
        sums = seen["sum"] * (count / jnp.maximum(seen["count"], 1))
        return TermValue(jnp.mean(sums), count, {"layers": jax.lax.stop_gradient(sums)})

    def per_layer(params: dict, batch: dict, forward: Any) -> dict:
        config, teacher = teacher_of(context.model, params)
        teaching = forward.of(config)

        def gradients(params: dict, forward: Any) -> jax.Array:
            def loss(nudges: jax.Array) -> jax.Array:
                return _loss_of_rows(forward.nudged(params, batch, nudges), batch)

            return jax.grad(loss)(jnp.zeros(taught.shape, taught.dtype))

        seen = teaching(teacher, batch, probes=(shown,))["probes"]["taught"]
        if config.kind == "encoder_decoder":  # the stacks' rows differ
            if states == GRADIENT:
                raise ValueError(f"states={GRADIENT!r} supports no {config.family}: use block")
            taught = {stack: states_lbtd for stack, (states_lbtd, _) in seen.items()}
            return {name: jax.lax.stop_gradient(taught)}
        taught, real = seen
        if states == GRADIENT:
            wanted = jax.lax.stop_gradient(gradients(teacher, teaching))
            squares = jnp.where(real[..., None], wanted, 0) ** 2 / wanted.shape[3]
            squares = jnp.sum(squares, (1, 2, 3), keepdims=True)
            scale = jnp.sqrt(squares / jnp.maximum(jnp.sum(real[0]), 1))
            apart = gradients(params, forward) - wanted
            return {name: apart / jnp.where(scale > 0, scale, 1)}
        return {name: jax.lax.stop_gradient(taught)}

    return LossTerm(context.name, function, context.weight, probes=(probe,), per_layer=per_layer)


def _shown(look: Callable[[Any], jax.Array], seen: Any, batch: dict, _: Any) -> tuple:
    """(states, mask of real tokens) of a layer's rows, which an objective may have packed."""
    states_btd = look(seen)
    return states_btd, counted_tokens(batch, states_btd.shape[:2])["all"]


def _loss_of_rows(outputs: dict, batch: dict) -> jax.Array:
    """Sum over rows: cross-entropy of their labels, or squared error of their numbers."""
    several = outputs["predictions"].shape[1] > 1
    term = (classification_term if several else regression_term)(TermContext("labels"))
    return term.function({}, outputs, batch).total


def _apart(states: str, sum_hidden: bool, seen: Any, batch: dict, taught_btd: jax.Array) -> dict:
    """Sums and counts of a layer; for gradients, `taught_btd` are the differences."""
    wide = jnp.promote_types(taught_btd.dtype, jnp.float32)
    apart_btd = taught_btd.astype(wide)
    if states != GRADIENT:
        apart_btd = STATES[states](seen).astype(wide) - apart_btd
    squares_btd, reduce = apart_btd**2, jnp.sum if sum_hidden else jnp.mean
    counted_bt = counted_tokens(batch, apart_btd.shape[:2])["all"]
    return {
        "sum": jnp.sum(jnp.where(counted_bt, reduce(squares_btd, axis=-1), 0.0)),
        "count": jnp.sum(counted_bt, dtype=wide),
    }


def teacher_of(config: ModelConfig | None, params: dict) -> tuple[ModelConfig, dict]:
    """Return the teacher's (config, tree): the student's with the blocks under `teacher/`.

    So it is the uncompressed model only while nothing else changes: adapters and MacDrop outside
    the fused blocks act in it, too, as they are at that step [ours].

    Raises:
      ValueError: no such blocks.
    """
    if config is None or TEACHER not in params:
        raise ValueError("loss 'layerwise' needs a teacher: config.prepare=(.., 'teacher')")
    teacher_params, layers = params, list(config.layers)
    for slot in slots(params):
        taught = subtree(params[TEACHER], f"{slot.path}/ffn")
        if taught is not None:
            teacher_params = replaced(teacher_params, f"{slot.path}/ffn", taught)
            changes: dict[str, Any] = {"ffn_width": taught["down"]["kernel"].shape[-2]}
            sparse = "router" in taught
            changes |= {"experts": taught["down"]["kernel"].shape[-3] if sparse else None}
            constants = taught["constant"].shape[-2] if "constant" in taught else 0
            changes |= {"routes": None, "constants": constants}
            for i in slot.layers:
                layers[i] = dataclasses.replace(layers[i], **changes)
    return dataclasses.replace(config, layers=tuple(layers)), teacher_params
