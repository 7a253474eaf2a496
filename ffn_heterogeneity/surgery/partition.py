"""Experts from a dense model: the neurons of each block, divided into equal groups.

The m neurons of a layer become E experts of m / E, by balanced k-means (`kmeans.balanced`). A
neuron's point is its column of gate (plain FFN: of up), scaled to norm 1 as in Moefication (arXiv
2110.01786). Routers:

  zeros    R = 0. All gates are equal; with top_k = E the model is the dense model.
  means    the column of an expert is the mean of its neurons' columns of gate, not scaled [ours].
  trained  Moefication's two-layer router, trained on calibration text (`moefication`).

`zeros` and `means` renormalize the gates: with sum 1, top_k experts are averaged, and the kernel of
their down is multiplied by top_k. `trained` adds the chosen experts ungated. The output bias is
added once: it is in all experts with gates of sum 1, divided by top_k without gates, and in the
first shared expert if there is one.

`shared=n` (CMoE, arXiv 2502.04416): the n m / E neurons with the highest activation rate form n
experts that see every token. The rate is the share of calibration tokens on which a neuron is among
the 10 with the largest |h|. (CMoE's h is that of normalized inputs and kernels.)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.models.walk import write
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.surgery import moefication
from ffn_heterogeneity.surgery.calibration import calibration_rows, check_text, written
from ffn_heterogeneity.surgery.kmeans import balanced
from ffn_heterogeneity.surgery.seen import activation_rates
from ffn_heterogeneity.surgery.selection import highest
from ffn_heterogeneity.surgery.sparse_layers import (
    check_top_k,
    dense_blocks,
    with_experts,
    zero_router,
)
from ffn_heterogeneity.tree import is_abstract
from ffn_heterogeneity.wording import check_choice, check_numbers, settings_of

ROUTERS = ("zeros", "means", "trained")


@dataclasses.dataclass(frozen=True)
class Partition:
    """Settings of `partition`.

    Attributes:
      experts: E, the number of experts of each layer, shared ones included.
      top_k: number of routed experts per token; None: all.
      router: a name of `ROUTERS`.
      shared: number of experts that see every token.
      layers: as `selection.layer_subset` reads it.
      seed: seed of k-means, of the trained router, and of self-generated text.
      calibration, calibration_tokens: text for `shared` and for router "trained", as in
        `reduce.Removal`.
    """

    experts: int = 8
    top_k: int | None = None
    router: str = "zeros"
    shared: int = 0
    layers: str = "all"
    seed: int = 0
    calibration: str = ""
    calibration_tokens: int | None = None

    def __post_init__(self):
        check_choice("router", self.router, ROUTERS)
        check_numbers(self, experts="[1, 4096]", shared=f"[0, {self.experts})")
        check_top_k(self.chosen, self.experts - self.shared)
        who = f"shared={self.shared}" if self.shared else ""
        who = "router 'trained'" if self.router == "trained" else who
        check_text(who, self.calibration, self.calibration_tokens)

    @property
    def chosen(self) -> int:
        """Number of routed experts per token."""
        return self.experts - self.shared if self.top_k is None else self.top_k


def partition(model: Model, settings: Mapping[str, Any] | Partition, data=None, key=None) -> tuple:
    """Divide the neurons of the layers that `settings` name into experts.

    Also runs on shapes alone, with consecutive neurons in each expert and routers of zeros.

    Returns:
      (the model, {"experts", "top_k", "shared", "router", "layers", widths and parameters before
      and after, "active_parameters" of a token, "inertia_shares" of the clusters per layer (over
      the sum of squares), and of trained routers "captured" ... per layer, see
      `moefication.train_router`}).

    Raises:
      ValueError: settings out of range, a width that E does not divide, a layer with experts or
        adapters, non-finite weights, or as `calibration_rows`; the message names the layer.
    """
    asked = settings_of(Partition, settings)
    blocks = dense_blocks(model, asked.layers, asked.experts)
    if is_abstract(model.params):
        groups = {layer: np.arange(_width(ffn)) for layer, ffn in blocks.items()}
        groups = {layer: order.reshape(asked.experts, -1) for layer, order in groups.items()}
        routers, report, rows = {}, {}, None
    else:
        wants_rows = asked.shared or asked.router == "trained"
        given = (asked.calibration, asked.calibration_tokens, asked.seed)
        rows = calibration_rows(model, *given) if wants_rows else None
        groups, report = _clustered(model, asked, blocks, rows)
        routers, more = _routers(model, asked, blocks, groups, rows)
        report |= more
    fields = _fields(asked)
    factor, bias = _factors(asked)
    new = {}
    for layer, ffn in blocks.items():
        new[layer] = _experts_of(ffn, groups[layer], factor, bias)
        zeros = zero_router(ffn, asked.experts - asked.shared, fields["router"])
        new[layer]["router"] = routers.get(layer, zeros)
    report |= written(asked.calibration, rows)
    return with_experts(model, new, fields, dataclasses.asdict(asked), report)


def assumed(settings: Mapping[str, Any]) -> str:
    """Note on what `partition` assumes without weights."""
    return "no weights are read: each expert is taken to have consecutive neurons"


# ---- the dense model's side


def _width(ffn: dict) -> int:
    return ffn["down"]["kernel"].shape[0]


def _columns(ffn: dict) -> np.ndarray:
    """gate's columns, or up's in a plain block, as rows [m, d], float64 or float32."""
    kernel = ffn["gate" if "gate" in ffn else "up"]["kernel"]
    return kernel.T.astype(np.result_type(kernel.dtype, np.float32))


# ---- groups of neurons


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Return rows of norm 1; zero rows stay zero."""
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)


def _clustered(
    model: Model, asked: Partition, blocks: Mapping[int, dict], rows: Sequence[np.ndarray] | None
) -> tuple[dict[int, np.ndarray], dict]:
    """({layer: neurons of each expert, int [E, m / E], shared experts first}, report)."""
    rates = None
    if asked.shared:
        assert rows is not None
        rates = activation_rates(model.config, model.params, rows)
    groups, shares = {}, dict.fromkeys(range(model.config.n_layers))
    for layer in bar("partition", blocks, unit="layer"):
        points = unit_rows(_columns(blocks[layer]))
        width = len(points) // asked.experts
        first = np.zeros(0, int)
        if rates is not None:
            first = highest(rates[layer], asked.shared * width)
        others = np.setdiff1d(np.arange(len(points)), first)
        seed = int(np.random.default_rng([asked.seed, layer]).integers(1 << 31))
        labels, shares[layer] = balanced(points[others], asked.experts - asked.shared, seed)
        order = np.concatenate([first, others[np.argsort(labels, kind="stable")]])
        groups[layer] = order.reshape(asked.experts, width)
    return groups, {"inertia_shares": list(shares.values())}


# ---- experts and routers


def _fields(asked: Partition) -> dict[str, Any]:
    """Fields of a layer's `LayerConfig`."""
    trained = asked.router == "trained"
    kinds = {"router": "mlp", "gates": "none"} if trained else {"gates": "renormalized"}
    fields = {"experts": asked.experts, "top_k": asked.chosen, "shared": asked.shared}
    return {**fields, "router": "linear", **kinds}


def _factors(asked: Partition) -> tuple[np.ndarray, np.ndarray]:
    """(factors of the kernels of down [E], of its bias [E]), by which the sums are right."""
    averaged = asked.router != "trained"  # gates of sum 1
    is_shared = np.arange(asked.experts) < asked.shared
    factor = np.where(averaged & ~is_shared, asked.chosen, 1)
    if asked.shared:
        return factor, np.arange(asked.experts) == 0
    return factor, np.full(asked.experts, 1.0 if averaged else 1 / asked.chosen)


def _experts_of(ffn: dict, groups: np.ndarray, factor: np.ndarray, bias: np.ndarray) -> dict:
    """Leaves of the experts [E, ...]; down's kernel times `factor`, its bias times `bias` [E]."""

    def scaled(leaf: Any, by: np.ndarray) -> Any:
        by = by.reshape(-1, *(1,) * (leaf.ndim - 1))
        return (leaf * by.astype(np.result_type(leaf.dtype, np.float32))).astype(leaf.dtype)

    block = {}
    for name, leaves in ffn.items():
        if name == "down":
            each = {"kernel": lambda kernel: scaled(kernel[groups], factor)}
            each["bias"] = lambda given: scaled(given[None].repeat(len(groups), axis=0), bias)
        else:
            each = {"kernel": lambda kernel: kernel.T[groups].swapaxes(1, 2)}
            each["bias"] = lambda given: given[groups]
        block[name] = {leaf: each[leaf](value) for leaf, value in leaves.items()}
    return block


def _routers(
    model: Model,
    asked: Partition,
    blocks: Mapping[int, dict],
    groups: Mapping[int, np.ndarray],
    rows: Sequence[np.ndarray] | None,
) -> tuple[dict[int, dict], dict]:
    """({layer: leaves of its router; {} for zeros}, report)."""
    routers, report = {}, {}
    if asked.router == "means":
        for layer, ffn in blocks.items():
            means = _columns(ffn)[groups[layer][asked.shared :]].mean(1)
            routers[layer] = {"kernel": means.T.astype(ffn["up"]["kernel"].dtype)}
    if asked.router == "trained":
        assert rows is not None
        new = {
            Place(layer, None, "ffn"): _ordered(blocks[layer], groups[layer]) for layer in blocks
        }
        ordered = restack(model.config, write(model.config, model.params, new))
        inputs, sums = moefication.routed_sums(model.config, ordered, rows, asked.experts)
        for layer in bar("routers", blocks, unit="layer"):
            points = unit_rows(_columns(blocks[layer]))
            centroids = points[groups[layer][asked.shared :]].mean(1)
            router, facts = moefication.train_router(
                inputs[layer], sums[layer][:, asked.shared :], centroids, asked.chosen, asked.seed
            )
            dtype = blocks[layer]["up"]["kernel"].dtype
            routers[layer] = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), router)
            for name, value in facts.items():
                report.setdefault(name, [None] * model.config.n_layers)[layer] = value
    return routers, report


def _ordered(ffn: dict, groups: np.ndarray) -> dict:
    """The dense block with the neurons of each expert next to each other; the same function."""
    order = groups.reshape(-1)
    block = {"down": ffn["down"] | {"kernel": ffn["down"]["kernel"][order]}}
    for name in ffn.keys() - block.keys():
        block[name] = {leaf: x[..., order] for leaf, x in ffn[name].items()}
    return block
