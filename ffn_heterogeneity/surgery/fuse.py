"""Compression of feed-forward blocks to fewer neurons (MLP Fusion, arXiv 2307.08941).

A method of `METHODS` replaces m neurons by c; those of `entries.ENTRIES` remove weights and
keep all neurons. A neuron is a row (`neurons.rows_of`):

  fusion   k-means; the centroids, and P = the clusters' sizes as a factor after the activation that
           never trains (section IV-B, equation 9): act(x W1~ + b1~) P W2~ + b2.
  merged   P multiplied into W2~: the same outputs and gradients of W1 and b1; W2's differ by P.
  sqrt     sqrt(P) on both sides of the activation, the form of the SGD kernel (equation 15), exact
           for ReLU; in gated blocks only on up and down, exact for every activation [ours].
  sketch   S = N(0, 1) / sqrt(c) [m, c]: W1 S, S^T b1, S^T W2 (gated: one S for all [ours]).
  hybrid_sketch   the third of c with the largest |W1_i| |W2_i| kept, the others sketched to the
           rest of c (the authors' code: 256 of 768).
  structured   the c neurons of largest L1 norm, whole (the authors' code drops rows of W1 and
           columns of W2 apart, which leaves halves of neurons).
  mmd      c support points that minimize the MMD to the m neurons (`mmd.support_points`), and m / c
           as a factor after the activation (equation 14).
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import count_parameters
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.models.walk import ffn_blocks, write
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.surgery import neurons, states
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.blockwise import check_fits, compensated
from ffn_heterogeneity.surgery.calibration import (
    calibration_rows,
    check_calibration,
    expected_tokens,
    written,
)
from ffn_heterogeneity.surgery.entries import ENTRIES, MASKS, masked_out, weights
from ffn_heterogeneity.surgery.kmeans import cluster
from ffn_heterogeneity.surgery.mmd import support_points
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.surgery.selection import highest, layer_subset, removal_count
from ffn_heterogeneity.tree import is_abstract
from ffn_heterogeneity.wording import check_choice, check_numbers, naming, settings_of


class Made(NamedTuple):
    """c neurons made from m: their rows, a factor after the activation [c] or None, a report."""

    rows: dict
    factor: np.ndarray | None = None
    facts: Mapping[str, float] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Settings of `fuse`.

    Attributes:
      method: a name of `METHODS` or `entries.ENTRIES`.
      ratio: the share of every layer's neurons (or weights) that is removed.
      layers: as `selection.layer_subset` reads it.
      n_init: number of k-means starts, of which the best is used; the paper's tables use 30.
      canonical: gated neurons are scaled before they are clustered (`neurons.canonical`) [ours].
      steps: AdamW steps, for method "mmd".
      spare: number of massive neurons of the massive layer that stay unchanged [ours].
      skip: "massive": the whole massive layer stays unchanged [ours].
      seed: seed of the k-means starts and of the sketches.
      rewind: a model of the same shape whose weights are restored under the masks (LTH: the weights
        from before the training that the masks are computed from); "": keep this model's weights.
      compensation: "none", or a name of `states.METHODS`: refit the outgoing weights on calibration
        text [ours for clusters]; calibration, calibration_tokens and sequential are as in
        `reduce.Removal`.
    """

    method: str = "fusion"
    ratio: float = 0.25
    layers: str = "all"
    n_init: int = 1
    canonical: bool = False
    steps: int = 100
    spare: int = 0
    skip: str = ""
    seed: int = 0
    rewind: str = ""
    compensation: str = "none"
    calibration: str = ""
    calibration_tokens: int | None = None
    sequential: bool = False

    def __post_init__(self):
        check_choice("method", self.method, (*METHODS, *ENTRIES))
        check_choice("skip", self.skip, ("", "massive"))
        if self.rewind and self.method not in MASKS:
            raise ValueError(f"rewind={self.rewind!r} works only with method={' or '.join(MASKS)}")
        for name in ("spare", "canonical"):
            if getattr(self, name) and self.method in ENTRIES:
                raise ValueError(f"{name}={getattr(self, name)}: {self.method} keeps every neuron")
        check_choice("compensation", self.compensation, ("none", *states.METHODS))
        if self.compensation != "none" and self.method in ENTRIES:
            raise ValueError(
                f"compensation={self.compensation!r}: {self.method} keeps every neuron: use "
                "another method"
            )
        check_calibration(self)
        removal_count(1, ratio=self.ratio)
        check_numbers(self, n_init="[1, 10000]", steps="[0, 1e9]", spare="[0, 1e9]")


def fuse(model: Model, settings: Mapping[str, Any] | Fusion, data=None, key=None) -> tuple:
    """Compress the FFNs of the layers that `settings` name; the model stays trainable.

    The methods of `METHODS` also run on shapes alone (a dry run, which assumes that the massive
    layer is the first); the report then has only the widths.

    Returns:
      (the model, {"method", "ratio", "layers", widths and parameters before and after, "kept_share"
      of the compressed blocks' weights and biases, without P; the massive layer's "layer_index"
      (from 0) if it is skipped; and, depending on the method, "inertia_share" (over the sum of
      squares) or "mmd2" and "mmd2_start": means over layers; with an s appended, per layer}).

    Raises:
      ValueError: settings out of range, adapters in a block, non-finite weights, or `canonical` on
        a plain block; the message names the layer.
    """
    asked, config = settings_of(Fusion, settings), model.config
    massive, spared = _massive(model, asked)
    chosen = _chosen(config, asked, massive.layer)
    if is_abstract(model.params):
        return _of_shapes(model, asked, chosen)
    widths, new, facts = list(config.ffn_widths), {}, {}
    every = ffn_blocks(config, jax.tree.map(np.asarray, model.params))
    blocks = {place: ffn for place, ffn in every if place.layer in chosen}
    if asked.method in ENTRIES:
        allowed = ("mask",) if asked.method == "unstructured" else ()
        blocks = {place: neurons.plain(ffn, place.layer, allowed) for place, ffn in blocks.items()}
        new = ENTRIES[asked.method](blocks, 1 - asked.ratio, model, asked.seed)
    else:
        for place in bar(asked.method, blocks, unit="block"):
            spared_here = spared if place == massive else spared[:0]
            new[place], block_facts = fuse_block(blocks[place], place, asked, spared_here)
            widths[place.layer] = new[place]["down"]["kernel"].shape[0]
            for name, value in block_facts.items():
                facts.setdefault(name, {}).setdefault(place.layer, []).append(value)
    before, remaining = (sum(map(weights, some.values())) for some in (blocks, new))
    if asked.rewind:
        model, new = _rewound(model, new, asked.rewind)
    after = model.config.with_widths(widths)
    params = restack(after, write(model.config, model.params, new))
    smaller = dataclasses.replace(model, config=after, params=params)
    compensation: dict[str, Any] = {}
    if asked.compensation != "none":
        given = (asked.calibration, asked.calibration_tokens, asked.seed)
        rows = calibration_rows(model, *given)
        smaller, reports = compensated(model, smaller, asked.compensation, rows, asked.sequential)
        compensation = {"compensation": asked.compensation, "compensated": reports}
        compensation |= written(asked.calibration, rows)
    # Weights that were masked before are not counted.
    total = count_parameters(config)["total"] - sum(map(masked_out, blocks.values()))
    biases = count_parameters(smaller.config)["total"] - count_parameters(after)["total"]
    left = total - before + remaining + biases
    report = {
        "method": asked.method,
        "ratio": asked.ratio,
        "layers": asked.layers,
        "ffn_widths_before": list(config.ffn_widths),
        "ffn_widths_after": widths,
        "parameters_before": total,
        "parameters_after": left,
        "parameters_removed_percent": 100.0 * (total - left) / total,
        "kept_share": remaining / before,
    }
    if asked.skip:
        report["layer_index"] = massive.layer
    report |= compensation
    for name, layers in facts.items():
        means = {layer: float(np.mean(each)) for layer, each in layers.items()}
        report[name] = float(np.mean(list(means.values())))
        report[f"{name}s"] = [means.get(layer) for layer in range(config.n_layers)]
    return smaller, report


def _rewound(model: Model, new: Mapping[Place, dict], name: str) -> tuple[Model, dict]:
    """(the model at `name`, its blocks under the masks of the new ones)."""
    before = load_model(name)
    if before.config.layers != model.config.layers or before.config.d_model != model.config.d_model:
        raise ValueError(f"rewind={name} is a model of another shape")
    old, masked = dict(ffn_blocks(before.config, before.params)), {}
    for place, ffn in new.items():
        masked[place] = {
            linear: old[place][linear] | {"mask": leaves["mask"]} for linear, leaves in ffn.items()
        }
    return before, masked


def _massive(model: Model, asked: Fusion) -> tuple[Place, np.ndarray]:
    """(the massive block, or layer -1 if no setting needs it; its neurons that stay unchanged)."""
    none = np.zeros(0, int)
    if not (asked.spare or asked.skip) or is_abstract(model.params):
        return Place(0 if asked.skip else -1, None, "ffn"), none
    with naming(f"skip={asked.skip!r}, spare={asked.spare} (the massive layer)"):
        massive = massive_weights(model.config, model.params, None, None)
    place = Place(massive.layer, massive.expert, "ffn")
    return place, np.asarray(massive.indices[: asked.spare])


def _chosen(config: ModelConfig, asked: Fusion, massive: int) -> set[int]:
    """The layers that change.

    Raises:
      ValueError: there is none, or their compensation will fail.
    """
    chosen = set(layer_subset(asked.layers, config.n_layers, config.groups))
    if asked.skip and not chosen - {massive}:
        way = f"skip={asked.skip!r} leaves it out"
        raise ValueError(f"layers={asked.layers!r} names the massive layer alone, and {way}")
    chosen -= {massive} if asked.skip else set()
    if asked.compensation != "none":
        widths = {i: config.ffn_widths[i] for i in chosen}
        kept = {i: m - removal_count(m, ratio=asked.ratio) for i, m in widths.items()}
        tokens = expected_tokens(asked.calibration, asked.calibration_tokens)
        check_fits(config, asked.compensation, kept, tokens)
    return chosen


def assumed_layer(settings: Mapping[str, Any]) -> str:
    """Note on the layer that `fuse` assumes to be massive without weights."""
    if not settings_of(Fusion, settings).skip:
        return ""
    return "no weights are read: the massive layer, which is not fused, is taken to be the first"


def _of_shapes(model: Model, asked: Fusion, chosen: set[int]) -> tuple[Model, dict]:
    """Placeholder selection for dry runs: the first c neurons."""
    if asked.method in ENTRIES:
        raise ValueError(
            f"fuse.method={asked.method!r} needs a separate stage (configs/mlp_fusion.py): before "
            f"training use {', '.join(METHODS)}"
        )
    widths, new = list(model.config.ffn_widths), {}
    for place, ffn in ffn_blocks(model.config, model.params):
        if place.layer not in chosen:
            continue
        m = ffn["down"]["kernel"].shape[0]
        c = widths[place.layer] = m - removal_count(m, ratio=asked.ratio)
        new[place] = take_neurons(model.config, place, ffn, np.arange(c))
        if asked.method in WITH_FACTOR:
            new[place]["neuron_scale"] = jnp.ones(c, np.float32)
    after = model.config.with_widths(widths)
    params = restack(after, write(model.config, model.params, new))
    report = {"ffn_widths_before": list(model.config.ffn_widths), "ffn_widths_after": widths}
    return dataclasses.replace(model, config=after, params=params), report


def fuse_block(
    ffn: dict, place: Place, asked: Fusion, spared: np.ndarray
) -> tuple[dict, Mapping[str, float]]:
    """(the compressed block with the spared neurons first, the method's report)."""
    rows = neurons.rows_of(ffn, place.layer)
    with naming(f"layer {place.layer}"):
        rows = neurons.canonical(rows) if asked.canonical else rows
    m = len(rows["down", "kernel"])
    c = m - removal_count(m, ratio=asked.ratio) - len(spared)
    if c < 1:
        raise ValueError(
            f"layer {place.layer}: of {m} neurons {len(spared)} are spared, and none is left to "
            "fuse: lower spare or ratio"
        )
    others = np.setdiff1d(np.arange(m), spared)
    groups = [{path: row[which] for path, row in rows.items()} for which in (spared, others)]
    draw = np.random.default_rng([asked.seed, place.layer, place.expert or 0])
    seed = int(draw.integers(1 << 31))
    made = METHODS[asked.method](groups[1], c, asked, seed)
    both = {path: np.concatenate([groups[0][path], row]) for path, row in made.rows.items()}
    block = neurons.block_of(both, ffn)
    if made.factor is not None:
        factor = np.concatenate([np.ones(len(spared)), made.factor])
        block["neuron_scale"] = factor.astype(np.float32)
    return block, made.facts


# ---- methods: (rows, c, settings, seed) -> Made


def _clustered(rows: dict, c: int, asked: Fusion, seed: int) -> tuple[dict, np.ndarray, dict]:
    """(centroids, cluster sizes, report), computed on all devices of this process."""
    here = jax.local_devices()
    axis = {"axis_names": ("columns",), "axis_types": (jax.sharding.AxisType.Auto,)}
    mesh = jax.make_mesh((len(here),), **axis, devices=here)
    groups = cluster(
        neurons.joined(rows), c, starts=asked.n_init, seed=seed, mesh=mesh, label="k-means"
    )
    return neurons.split(groups.centroids, rows), groups.sizes, {"inertia_share": groups.share}


def fusion(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """Centroids, with their clusters' sizes as a factor after the activation."""
    return Made(*_clustered(rows, c, asked, seed))


def merged(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """Fusion with the cluster sizes multiplied into down."""
    centroids, sizes, facts = _clustered(rows, c, asked, seed)
    return Made(neurons.times(centroids, ("down",), sizes), None, facts)


def sqrt(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """Fusion with the square roots of the cluster sizes multiplied into both up and down."""
    centroids, sizes, facts = _clustered(rows, c, asked, seed)
    return Made(neurons.times(centroids, ("up", "down"), np.sqrt(sizes)), None, facts)


def sketch(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """c random mixtures of the neurons."""
    points = neurons.joined(rows)
    mix = np.random.default_rng(seed).normal(size=(c, len(points))) / np.sqrt(c)
    return Made(neurons.split(mix @ points, rows))


def hybrid_sketch(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """The neurons with the largest product of norms, and mixtures of the others."""
    count = round(c / 3)
    down = np.linalg.norm(rows["down", "kernel"], axis=1)
    kernels = [row for (name, leaf), row in rows.items() if leaf == "kernel" and name != "down"]
    first = highest(down * np.linalg.norm(np.concatenate(kernels, 1), axis=1), count)
    rest = np.setdiff1d(np.arange(len(down)), first)
    mixed = sketch({path: row[rest] for path, row in rows.items()}, c - count, asked, seed).rows
    return Made({path: np.concatenate([row[first], mixed[path]]) for path, row in rows.items()})


def structured(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """The neurons whose incoming and outgoing weights have the largest L1 norm."""
    survivors = highest(np.abs(neurons.joined(rows)).sum(1), c)
    return Made({path: row[survivors] for path, row in rows.items()})


def mmd(rows: dict, c: int, asked: Fusion, seed: int) -> Made:
    """Support points, with the number of neurons that each represents as a factor."""
    points = neurons.joined(rows)
    support, first, last = support_points(points, c, steps=asked.steps, seed=seed)
    factor = np.full(c, len(points) / c)
    return Made(neurons.split(support, rows), factor, {"mmd2_start": first, "mmd2": last})


METHODS: dict[str, Callable[[dict, int, Fusion, int], Made]] = {
    "fusion": fusion,
    "merged": merged,
    "sqrt": sqrt,
    "sketch": sketch,
    "hybrid_sketch": hybrid_sketch,
    "structured": structured,
    "mmd": mmd,
}
WITH_FACTOR = ("fusion", "mmd")  # methods that add a factor after the activation
