"""Leaves that a model's outputs do not depend on."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.adapters import ADAPTERS
from ffn_heterogeneity.models.causal_lm import forward, logits
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.tree import flatten


def unused_leaves(
    config: ModelConfig,
    params: dict,
    run: Callable[[dict, Any], Any] | None = None,
    batch: Any = None,
) -> tuple[str, ...]:
    """Paths of leaves that no output depends on (0.02 s; sees through scan and remat).

    Args:
      run: (params, batch) -> a tree of all outputs that count; None: the model's logits (an
        encoder's outputs).
      batch: shapes for `run`.
    """
    from jax.interpreters import partial_eval

    def own(params: dict, batch: Any) -> Any:
        outputs = forward(config, params, batch)
        return logits(config, params, outputs["hidden"]) if config.lm_head else outputs

    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    row = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    batch = {"tokens": row, "encoder_tokens": row} if batch is None else batch
    jaxpr = jax.make_jaxpr(run or own)(abstract, batch).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    paths = flatten(abstract)
    return tuple(path for path, is_used in zip(paths, used, strict=False) if not is_used)


def check_leaves(config: ModelConfig, params: dict, exempt: str = "") -> None:
    """Check that all leaves of a tree are used (Flax does not report unused ones).

    Args:
      exempt: a root that other code reads ("task_head").

    Raises:
      ValueError: unused leaves; the message names them.
    """
    unused = [path for path in unused_leaves(config, params) if path.split("/")[0] != exempt]
    others = {name for adapter in ADAPTERS.values() for name in adapter.for_losses}
    refuse_unused(config, [path for path in unused if path.split("/")[-1] not in others])


def refuse_unused(config: ModelConfig, unused: Sequence[str]) -> None:
    """Raise ValueError with the names of unused leaves, if there are any."""
    if unused:
        more = " ..." if len(unused) > 8 else ""
        raise ValueError(
            f"{len(unused)} leaves are never used by the {config.family} model: "
            f"{', '.join(unused[:8])}{more}"
        )
