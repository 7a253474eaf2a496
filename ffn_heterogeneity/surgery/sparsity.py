"""Learned sparsity: weight scores and their masks (GEM-MINER), and gates on ranks (FLOP).

The config argument of a training run names them and the losses that they need:

    <model>,<task>,scores,score_norm    scores train, weights are frozen
    <its model>,<task>,score_mask       the remaining weights train under a fixed mask
    <model>,<task>,gates,size           gated factors train towards a size

Iterative pruning alternates the surgery `score_mask` (at rising ratios, with `keep_scores`) and
training of the leaves "/score$".
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.adapters import gates
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.walk import linears, write
from ffn_heterogeneity.surgery.adapt import MLPS, Quantised, inserted
from ffn_heterogeneity.surgery.selection import highest_share
from ffn_heterogeneity.tree import is_abstract
from ffn_heterogeneity.wording import check_numbers, settings_of


@dataclasses.dataclass(frozen=True)
class Scores(Quantised):
    """Settings of `insert_scores`; `targets` defaults to feed-forward blocks, without routers."""

    targets: str = MLPS


@dataclasses.dataclass(frozen=True)
class ScoreMask:
    """Settings of `fix_masks`.

    Attributes:
      ratio: the share of the scored weights that the masks remove, including earlier masks.
      keep_scores: keep the scores under the masks, for another round of training.
    """

    ratio: float = 0.25
    keep_scores: bool = False

    def __post_init__(self):
        check_numbers(self, ratio="[0, 1)")


@dataclasses.dataclass(frozen=True)
class Gates(Scores):
    """Settings of `insert_gates`.

    Attributes:
      rank: rank of the factors; 0: in out / (in + out), which keeps the number of parameters.
      start: initial mean of log_alpha. The authors' 0, for training from scratch, halves every
        kernel's output; 5 hardly changes it.
    """

    rank: int = 0
    start: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_numbers(self, rank="[0, inf)", start="(-inf, inf)")


def insert_scores(model: Model, settings: Mapping[str, Any] | Scores, data=None, key=None) -> tuple:
    """Add a score ~ U(0, 1) to every weight of the kernels whose path matches `targets`.

    Returns:
      (the model, {"adapted": paths}).

    Raises:
      ValueError: no matching kernel, or one that already has scores.
    """
    asked = settings_of(Scores, settings)

    def put(path: str, leaves: dict, kernel_key: jax.Array) -> dict:
        shape = jax.eval_shape(effective_kernel, leaves).shape
        return leaves | {"score": jax.random.uniform(kernel_key, shape)}

    return inserted(model, asked.targets, put, key, "score")


def fix_masks(model: Model, settings: Mapping[str, Any] | ScoreMask, data=None, key=None) -> tuple:
    """Replace scores by fixed masks that remove the weights of lowest score over all kernels.

    Weights that an earlier mask removed count first and stay removed, so rounds at rising ratios
    remove the lowest of the active scores.

    Returns:
      (the model, {"kept_share" of the scored weights}).

    Raises:
      ValueError: no kernel has scores.
    """
    asked, tree = settings_of(ScoreMask, settings), unstack(model.params)
    every = linears(model.config, tree)
    scored = {place: leaves for place, leaves in every if "score" in leaves}
    if not scored:
        raise ValueError("no kernel has scores: put them in and train them (surgery scores)")
    masks, new = _masks(list(scored.values()), 1 - asked.ratio), {}
    gone = () if asked.keep_scores else ("score",)
    for (place, leaves), mask in zip(scored.items(), masks, strict=True):
        new[place] = {name: leaf for name, leaf in leaves.items() if name not in gone}
        new[place]["mask"] = mask
    params = restack(model.config, write(model.config, tree, new))
    share = sum(mask.sum() for mask in masks) / sum(mask.size for mask in masks)
    return dataclasses.replace(model, params=params), {"kept_share": float(share)}


def _masks(scored: list[dict], share: float) -> list[np.ndarray]:
    """One mask for each kernel; all ones on shapes alone."""
    if is_abstract(scored):
        return [np.ones(leaves["score"].shape, np.float32) for leaves in scored]
    values = []
    for leaves in scored:
        active = np.asarray(leaves.get("mask", 1)) != 0
        values.append(np.where(active, np.asarray(leaves["score"]), -np.inf))
    stays = zip(values, highest_share(values, share), strict=True)
    return [(stay & (value > -np.inf)).astype(np.float32) for value, stay in stays]


def insert_gates(model: Model, settings: Mapping[str, Any] | Gates, data=None, key=None) -> tuple:
    """Replace the kernels whose path matches `targets` by gated factors.

    The factors are U S and V^T of the singular value decomposition of the effective kernel: a mask,
    LoRA or `low_rank`'s factors (whose rank is kept) are folded in first.

    Returns:
      (the model, {"adapted": paths}).

    Raises:
      ValueError: no matching kernel, one that has gates, or a rank above the kernel's dimensions.
    """
    asked = settings_of(Gates, settings)

    def put(path: str, leaves: dict, kernel_key: jax.Array) -> dict:
        if "hidden" in leaves:
            raise ValueError(f"{path} is a router of two layers: leave it out of targets")
        kernel = effective_kernel(leaves).astype(np.float32)
        n, k = kernel.shape
        rank = asked.rank or max(1, n * k // (n + k))
        if not asked.rank and "low_rank_a" in leaves:
            rank = leaves["low_rank_a"].shape[1]
        if rank > min(n, k):
            raise ValueError(f"{path}: rank={rank} of a kernel {n} x {k}")
        u, s, v = jnp.linalg.svd(kernel, full_matrices=False)
        bias = {name: leaf for name, leaf in leaves.items() if name == "bias"}
        return bias | gates.init(kernel_key, u[:, :rank] * s[:rank], v[:rank], asked.start)

    return inserted(model, asked.targets, put, key, gates.A)
