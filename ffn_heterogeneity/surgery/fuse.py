"""Compression of feed-forward blocks to fewer neurons (MLP Fusion, arXiv 2307.08941).

A method makes of m neurons c; a neuron is a row (`neurons.rows_of`):

  fusion   k-means; the centroids, and P = the clusters' sizes as a factor after the activation that
           never trains (section IV-B, equation 9): act(x W1~ + b1~) P W2~ + b2.
  merged   P multiplied into W2~: the same outputs and gradients of W1 and b1; W2's differ by P.
  sqrt     sqrt(P) on both sides of the activation, the form of the SGD kernel (equation 15), exact
           for ReLU; of gated blocks on up and down alone, exact for all [ours].
  sketch   S = N(0, 1) / sqrt(c) [m, c]: W1 S, S^T b1, S^T W2 (gated: one S for all [ours]).
  hybrid_sketch   the third of c with the largest |W1_i| |W2_i| kept, the others sketched to the
           rest of c (the authors' code: 256 of 768).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.families import count_parameters
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.models.walk import Place, ffn_blocks, write
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.kmeans import cluster
from ffn_heterogeneity.surgery.neurons import block_of, canonical, joined, rows_of, split, times
from ffn_heterogeneity.surgery.selection import layer_subset, removal_count
from ffn_heterogeneity.wording import check_choice, settings_of


class Made(NamedTuple):
    """c neurons of m: their rows, P [c] or None, and inertia over the sum of squares or None."""

    rows: dict
    factor: np.ndarray | None = None
    share: float | None = None


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The settings of a compression of neurons.

    Attributes:
      method: of `METHODS`.
      ratio: the share of every layer's neurons that goes.
      layers: as `selection.layer_subset` reads it.
      n_init: starts of k-means, the best of which is taken; the paper's tables: 30.
      canonical: gated neurons are scaled before they are clustered (`neurons.canonical`) [ours].
      spare: so many massive neurons of the massive layer stay as they are [ours].
      seed: of k-means' starts and of sketches.
    """

    method: str = "fusion"
    ratio: float = 0.25
    layers: str = "all"
    n_init: int = 1
    canonical: bool = False
    spare: int = 0
    seed: int = 0

    def __post_init__(self):
        check_choice("method", self.method, tuple(METHODS))
        removal_count(1, ratio=self.ratio)
        if self.n_init < 1 or self.spare < 0:
            raise ValueError(f"n_init={self.n_init} must be at least 1, spare={self.spare} 0")


def fuse(model: Model, settings: Mapping[str, Any] | Fusion, data=None, key=None) -> tuple:
    """A model with fewer neurons in the layers that `settings` name; it stays trainable.

    Returns:
      (the model, {"method", "ratio", "layers", widths and parameters before and after,
      "inertia_share": inertia over the sum of squares, the mean over layers, and of each layer}).

    Raises:
      ValueError: settings out of range, adapters in a block, weights that are not finite, or
        `canonical` of a plain block; names the layer.
    """
    from tqdm import tqdm

    asked, config = settings_of(Fusion, settings), model.config
    chosen = layer_subset(asked.layers, config.n_layers)
    massive, spared = _massive(model, asked.spare)
    widths, new, shares = list(config.ffn_widths), {}, {}
    blocks = dict(ffn_blocks(jax.tree.map(np.asarray, model.params)))
    places = [place for place in blocks if place.layer in chosen]
    for place in tqdm(places, desc=asked.method, unit="block", file=sys.stderr):
        own = spared if place.layer == massive else spared[:0]
        new[place], share = fuse_block(blocks[place], place, asked, own)
        widths[place.layer] = new[place]["down"]["kernel"].shape[0]
        if share is not None:
            shares.setdefault(place.layer, []).append(share)
    after = config.with_widths(widths)
    params = restack(after, write(model.params, new))
    total, left = (count_parameters(one)["total"] for one in (config, after))
    found = {layer: float(np.mean(each)) for layer, each in shares.items()}
    report = dataclasses.asdict(asked) | {
        "ffn_widths_before": list(config.ffn_widths),
        "ffn_widths_after": widths,
        "parameters_before": total,
        "parameters_after": left,
        "parameters_removed_percent": 100.0 * (total - left) / total,
    }
    if found:
        report["inertia_share"] = float(np.mean(list(found.values())))
        report["inertia_shares"] = [found.get(layer, 0.0) for layer in range(config.n_layers)]
    return dataclasses.replace(model, config=after, params=params), report


def _massive(model: Model, spare: int) -> tuple[int | None, np.ndarray]:
    if not spare:
        return None, np.zeros(0, int)
    found = massive_weights(model.config, model.params, None, None)
    return found.layer, np.asarray(found.indices[:spare])


def fuse_block(
    ffn: dict, place: Place, asked: Fusion, spared: np.ndarray
) -> tuple[dict, float | None]:
    """(the block of fewer neurons, those spared first; inertia over the sum of squares or None)."""
    rows = rows_of(ffn, place.layer)
    try:
        rows = canonical(rows) if asked.canonical else rows
    except ValueError as error:
        raise ValueError(f"layer {place.layer}: {error}") from None
    m = len(joined(rows))
    c = m - removal_count(m, ratio=asked.ratio) - len(spared)
    if c < 1:
        raise ValueError(f"layer {place.layer}: of {m} neurons {len(spared)} are spared, none left")
    others = np.setdiff1d(np.arange(m), spared)
    own = [{part: row[which] for part, row in rows.items()} for which in (spared, others)]
    draw = np.random.default_rng([asked.seed, place.layer, place.expert or 0])
    seed = int(draw.integers(1 << 31))
    made = METHODS[asked.method](own[1], c, asked, seed)
    both = {part: np.concatenate([own[0][part], row]) for part, row in made.rows.items()}
    block = block_of(both, ffn)
    if made.factor is not None:
        factor = np.concatenate([np.ones(len(spared)), made.factor])
        block["neuron_scale"] = factor.astype(np.float32)
    return block, made.share


# ---- methods: (rows, c, settings, seed) -> Made


def _clustered(rows: dict, c: int, asked: Fusion, seed: int) -> tuple[dict, np.ndarray, float]:
    """(centroids, cluster sizes, inertia over the sum of squares), on all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("neurons",)) if jax.device_count() > 1 else None
    found = cluster(joined(rows), c, starts=asked.n_init, seed=seed, mesh=mesh, label="k-means")
    return split(found.centroids, rows), found.sizes, found.share


def fusion(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """Centroids, and the sizes of their clusters apart."""
    return Made(*_clustered(rows, c, asked, seed))


def merged(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """Fusion, the sizes multiplied into down."""
    centroids, sizes, share = _clustered(rows, c, asked, seed)
    return Made(times(centroids, ("down",), sizes), None, share)


def sqrt(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """Fusion, the roots of the sizes multiplied into both sides: up and down."""
    centroids, sizes, share = _clustered(rows, c, asked, seed)
    return Made(times(centroids, ("up", "down"), np.sqrt(sizes)), None, share)


def sketch(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """c random mixtures of the neurons."""
    points = joined(rows)
    mix = np.random.default_rng(seed).normal(size=(c, len(points))) / np.sqrt(c)
    return Made(split(mix @ points, rows))


def hybrid_sketch(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """The neurons with the largest product of norms, and mixtures of the others."""
    kept = round(c / 3)
    down = np.linalg.norm(rows["down", "kernel"], axis=1)
    kernels = [row for (name, leaf), row in rows.items() if leaf == "kernel" and name != "down"]
    order = np.argsort(-down * np.linalg.norm(np.concatenate(kernels, 1), axis=1), kind="stable")
    first, rest = np.sort(order[:kept]), np.sort(order[kept:])
    mixed = sketch({part: row[rest] for part, row in rows.items()}, c - kept, asked, seed).rows
    return Made({part: np.concatenate([row[first], mixed[part]]) for part, row in rows.items()})


METHODS: dict[str, Callable[[dict, int, Fusion, int], Made]] = {
    "fusion": fusion,
    "merged": merged,
    "sqrt": sqrt,
    "sketch": sketch,
    "hybrid_sketch": hybrid_sketch,
}
