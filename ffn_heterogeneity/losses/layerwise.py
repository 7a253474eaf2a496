"""States of a compressed model drawn to the whole one's, layer by layer (MLP Fusion, equation 10).

    mean over layers, tokens and the hidden dimension of (h_l - h'_l)^2

h_l is the residual stream after block l, h'_l the teacher's: the same model with the blocks that it
had before they were compressed, under the root `teacher/` (`surgery.teacher`), without dropout and
without a gradient. The paper sums over layers; padding counts nowhere (it does in the authors'
code).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.stack import slots
from ffn_heterogeneity.paths import TEACHER, replaced, subtree
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.displacement import counted_tokens
from ffn_heterogeneity.wording import check_choice

# The residual stream after the block (layer-wise tuning), or what the FFN returns ("maintain
# output", Table XIV).
STATES: dict[str, Callable[[Any], jax.Array]] = {
    "block": lambda seen: seen.block_output,
    "ffn": lambda seen: seen.ffn_output,
}


def layerwise_term(
    context: TermContext, states: str = "block", sum_hidden: bool = False
) -> LossTerm:
    """The mean over layers and tokens of the squared differences to the teacher's states.

    Metrics: "layers" [L], of each layer by itself.

    Args:
      states: of `STATES`.
      sum_hidden: the sum over the hidden dimension in the place of its mean (the authors' code).

    Raises:
      ValueError: no such states; when traced: there is no teacher.
    """
    check_choice("states", states, STATES)
    own = Probe("layerwise", functools.partial(_apart, states, sum_hidden))
    shown = Probe("taught", lambda seen, batch, _: STATES[states](seen), kind="example")

    def function(params: dict, outputs: dict, batch: dict) -> TermValue:
        seen = outputs["probes"]["layerwise"]
        layers = len(seen["sum"])
        return TermValue(
            jnp.sum(seen["sum"]),
            jnp.sum(seen["count"]),
            {"layers": layers * jax.lax.stop_gradient(seen["sum"])},
        )

    def per_layer(params: dict, batch: dict, forward: Callable[..., dict]) -> dict:
        config, teacher = teacher_of(context.model, params)
        taught = forward(teacher, batch, probes=(shown,), config=config)["probes"]["taught"]
        return {"layerwise": jax.lax.stop_gradient(taught)}

    return LossTerm(context.name, function, context.weight, probes=(own,), per_layer=per_layer)


def _apart(states: str, sum_hidden: bool, seen: Any, batch: dict, taught_btd: jax.Array) -> dict:
    state_btd = STATES[states](seen)
    wide = jnp.promote_types(state_btd.dtype, jnp.float32)
    squares_btd = (state_btd.astype(wide) - taught_btd.astype(wide)) ** 2
    reduce = jnp.sum if sum_hidden else jnp.mean
    counted_bt = counted_tokens(batch, state_btd.shape[:2])["all"]
    return {
        "sum": jnp.sum(jnp.where(counted_bt, reduce(squares_btd, axis=-1), 0.0)),
        "count": jnp.sum(counted_bt, dtype=wide),
    }


def teacher_of(config: ModelConfig | None, params: dict) -> tuple[ModelConfig, dict]:
    """(its config, its tree): the student's, but for the blocks under `teacher/`.

    Raises:
      ValueError: there are none.
    """
    if config is None or TEACHER not in params:
        raise ValueError("loss 'layerwise' needs a teacher: config.prepare=(.., 'teacher')")
    whole, widths = params, list(config.ffn_widths)
    for slot in slots(params):
        taught = subtree(params[TEACHER], f"{slot.path}/ffn")
        if taught is not None:
            whole = replaced(whole, f"{slot.path}/ffn", taught)
            for layer in slot.layers:
                widths[layer] = taught["down"]["kernel"].shape[-2]
    return config.with_widths(widths), whole
