"""MacDrop: dropout on massive weights while adapters train (massive weights, section 3).

Columns `macdrop_rows` (the paper's rows of W_up and W_gate) of a frozen kernel are multiplied by
`macdrop_keep`, which is stored as ones. Each training step draws it again, elementwise
Bernoulli(1 - p_t), with one draw for gate and up as in Algorithm 1; kept values are not rescaled.
DoRA's norm is that of the masked kernel, as if the weights themselves were masked (Algorithm 1), so
it restores the norms of masked columns: MacDrop has less effect there (docs/reproduce.md). It has
no effect in evaluation and export. In a layer with experts the leaves have a leading axis of
experts, and only the massive expert's rows are columns (`tree.no_indices`).

The paper masks frozen weights. Where kernels train (`five.py` without lora and dora), a dropped
weight has no gradient in that step [ours].
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.tree import nodes, replaced
from ffn_heterogeneity.wording import check_choice, check_numbers, settings_of

CURRICULA = ("step", "epoch_before", "epoch_after", "exp", "constant")
STEPS = 579  # of the paper's runs, to which its decay rates of "exp" refer
ROWS, KEEP = "macdrop_rows", "macdrop_keep"
SCOPES = ("massive", "layer", "others")


@dataclasses.dataclass(frozen=True)
class Macdrop:
    """MacDrop's settings.

    Attributes:
      k, scope, layer, token: see `surgery.adapt.insert_macdrop`.
      p0, curriculum, a, epochs: see `rate`.
    """

    k: int = 5
    p0: float = 0.8
    curriculum: str = "step"
    a: float = 0.01
    epochs: int = 3
    scope: str = "massive"
    layer: int | None = None
    token: int | None = None

    def __post_init__(self):
        check_choice("scope", self.scope, SCOPES)
        check_choice("curriculum", self.curriculum, CURRICULA)
        check_numbers(self, k="[1, inf)", p0="[0, 1]", epochs="[1, inf)", a="[0, inf]")


def drop(kernel: jax.Array, leaves: dict[str, jax.Array]) -> jax.Array:
    """kernel [..., in, out], its columns `macdrop_rows` [..., k] times the mask [..., in, k].

    Rows from `out` upward have no effect.
    """

    def one(kernel, rows, keep):
        keep = keep.astype(kernel.dtype)
        return kernel.at[:, rows].multiply(keep, unique_indices=True, mode="drop")

    for _ in range(kernel.ndim - 2):
        one = jax.vmap(one)
    return one(jnp.asarray(kernel), jnp.asarray(leaves[ROWS]), jnp.asarray(leaves[KEEP]))


def rate(settings: Mapping[str, Any] | Macdrop, steps: int) -> Callable[[int], float]:
    """p of the step after s finished ones, t = s + 1 of T = `steps` optimizer steps.

    step: p0 (1 - t / T); epoch_before: p0 (1 - (e - 1) / E); epoch_after: p0 (1 - e / E), e from 1
    the epoch of E = `settings.epochs` that t is in; exp: p0 exp(-a t 579 / T) [ours: the paper's
    a are for its 579 steps]; constant: p0.

    Raises:
      ValueError: no such curriculum, or a number out of its range.
    """
    settings = settings_of(Macdrop, settings)
    p0, kind, epochs = settings.p0, settings.curriculum, settings.epochs

    def p(done: int) -> float:
        t = min(done + 1, steps)
        epoch = math.ceil(t * epochs / steps)
        return (
            p0
            * {
                "step": 1 - t / steps,
                "epoch_before": 1 - (epoch - 1) / epochs,
                "epoch_after": 1 - epoch / epochs,
                "exp": math.exp(-settings.a * t * STEPS / steps),
                "constant": 1.0,
            }[kind]
        )

    return p


def refresh(settings: Mapping[str, Any]) -> Callable[..., dict]:
    """(params, step, key, hyper, train) -> params with this step's masks, none in evaluation.

    `hyper["macdrop"]` is p.
    """

    settings_of(Macdrop, settings)

    def function(params: dict, step, key, hyper, train: bool) -> dict:
        for path, leaves in nodes(params, lambda node: KEEP in node):
            if train:
                # gate and up of a block share their mask: the key is the block's.
                block = f"/{path.rpartition('/')[0]}"
                subkey = jax.random.fold_in(key, zlib.crc32(block.encode()))
                keep = jax.random.bernoulli(subkey, 1 - hyper["macdrop"], leaves[KEEP].shape)
                leaves = {**leaves, KEEP: keep.astype(leaves[KEEP].dtype)}
            else:
                leaves = {name: leaf for name, leaf in leaves.items() if name not in (ROWS, KEEP)}
            params = replaced(params, path, leaves)
        return params

    return function


def init(fan_in: int, rows) -> dict[str, jax.Array]:
    """The two leaves for a kernel with `fan_in` inputs."""
    rows = jnp.asarray(rows, jnp.int32)
    return {ROWS: rows, KEEP: jnp.ones((fan_in, len(rows)), jnp.float32)}
