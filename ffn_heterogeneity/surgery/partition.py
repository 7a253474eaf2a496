"""Experts from a dense model: `partition` of the neurons, and `upcycle`, which copies the block.

`partition`: the m neurons of a layer become E experts of m / E. A neuron is a column of gate (plain
FFN: of up), scaled to norm 1 as in Moefication (arXiv 2110.01786). Balanced k-means alternates
between the optimal assignment of neurons to centroids with m / E places each, and means. Routers:

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

`upcycle` (arXiv 2212.05055): each expert is a copy of the block, so that gates of sum 1 give the
dense model for any router and any top_k.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import ConfigError, LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import config_from_hf, config_to_hf, count_parameters
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.models.walk import ffn_blocks, write
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.surgery import moefication, neurons
from ffn_heterogeneity.surgery.calibration import OWN, calibration_rows, check_text
from ffn_heterogeneity.surgery.kmeans import cluster
from ffn_heterogeneity.surgery.seen import activation_rates
from ffn_heterogeneity.surgery.selection import highest, layer_subset
from ffn_heterogeneity.tree import is_abstract
from ffn_heterogeneity.wording import check_choice, check_numbers, settings_of

ROUTERS = ("zeros", "means", "trained")
MAX_STEPS = 50  # of balanced k-means
# Families of experts in transformers, by the dense family with the same attention and norms.
FAMILIES_OF_EXPERTS = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}


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
        _check_top_k(self.chosen, self.experts - self.shared)
        who = f"shared={self.shared}" if self.shared else ""
        who = "router 'trained'" if self.router == "trained" else who
        check_text(who, self.calibration, self.calibration_tokens)

    @property
    def chosen(self) -> int:
        """Number of routed experts per token."""
        return self.experts - self.shared if self.top_k is None else self.top_k


@dataclasses.dataclass(frozen=True)
class Upcycling:
    """Settings of `upcycle`.

    Attributes:
      experts: E, the number of copies.
      top_k: number of experts per token.
      layers: as `selection.layer_subset` reads it.
      noise: standard deviation of the router's values; 0: zeros.
      seed: seed of that noise.
    """

    experts: int = 8
    top_k: int = 2
    layers: str = "all"
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self):
        check_numbers(self, experts="[1, 4096]", noise="[0, inf)")
        _check_top_k(self.top_k, self.experts)


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
    blocks = _dense_blocks(model, asked.layers, asked.experts)
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
    trained, routed = asked.router == "trained", asked.experts - asked.shared
    factor = np.ones(asked.experts)  # of down's kernel
    factor[asked.shared :] = 1 if trained else asked.chosen
    bias = np.full(asked.experts, 1 / asked.chosen if trained else 1.0)
    if asked.shared:
        bias = np.arange(asked.experts) == 0
    fields: dict[str, Any] = {"experts": asked.experts, "top_k": asked.chosen}
    fields |= {"shared": asked.shared, "router": "mlp" if trained else "linear"}
    fields |= {"gates": "none" if trained else "renormalized"}
    new = {}
    for layer, ffn in blocks.items():
        new[layer] = _experts_of(ffn, groups[layer], factor, bias)
        zeros = _zero_router(ffn, routed, fields["router"])
        new[layer]["router"] = routers.get(layer, zeros)
    report |= {"own_rows": rows} if asked.calibration == OWN and rows is not None else {}
    return _with_experts(model, new, fields, dataclasses.asdict(asked), report)


def upcycle(model: Model, settings: Mapping[str, Any] | Upcycling, data=None, key=None) -> tuple:
    """Replace the block of the layers that `settings` name by E copies; same outputs.

    Also runs on shapes alone.

    Returns:
      (the model, a report as `partition`'s, with "noise").

    Raises:
      ValueError: settings out of range, a layer with experts or adapters, or non-finite weights.
    """
    asked = settings_of(Upcycling, settings)
    new = {}
    for layer, ffn in _dense_blocks(model, asked.layers).items():
        router = _zero_router(ffn, asked.experts, "linear")
        if asked.noise:
            drawn = np.random.default_rng([asked.seed, layer]).normal(size=router["kernel"].shape)
            router = {"kernel": (asked.noise * drawn).astype(router["kernel"].dtype)}
        copies = jax.tree.map(lambda leaf: leaf[None].repeat(asked.experts, axis=0), ffn)
        new[layer] = {**copies, "router": router}
    fields: dict[str, Any] = {"experts": asked.experts, "top_k": asked.top_k}
    fields |= {"gates": "renormalized", "shared": 0, "router": "linear"}
    return _with_experts(model, new, fields, dataclasses.asdict(asked), {})


def assumed(settings: Mapping[str, Any]) -> str:
    """Note on what `partition` assumes without weights."""
    return "no weights are read: each expert is taken to have consecutive neurons"


# ---- the dense model's side


def _check_top_k(top_k: int, routed: int) -> None:
    if not 1 <= top_k <= routed:
        raise ValueError(f"top_k={top_k}: expected 1 to {routed}, the number of routed experts")


def _width(ffn: dict) -> int:
    return ffn["down"]["kernel"].shape[0]


def _columns(ffn: dict) -> np.ndarray:
    """gate's columns, or up's in a plain block, as rows [m, d], float64 or float32."""
    kernel = ffn["gate" if "gate" in ffn else "up"]["kernel"]
    return kernel.T.astype(np.result_type(kernel.dtype, np.float32))


def _dense_blocks(model: Model, layers: str, experts: int = 1) -> dict[int, dict]:
    """{layer: its block}, numpy unless abstract, of plain dense layers that `experts` divides."""
    config, params = model.config, model.params
    chosen = layer_subset(layers, config.n_layers)
    for layer in chosen:
        if (count := config.layers[layer].experts) is not None:
            raise ValueError(f"layer {layer} already has {count} experts: choose dense layers")
        width = config.layers[layer].ffn_width
        if width % experts:
            raise ValueError(
                f"layer {layer}: experts={experts} does not divide the {width} neurons; choose a "
                f"divisor, such as {' or '.join(map(str, _near_divisors(width, experts)))}"
            )
    params = params if is_abstract(params) else jax.tree.map(np.asarray, params)
    blocks = {place.layer: ffn for place, ffn in ffn_blocks(config, params) if place.layer in chosen}
    return {layer: neurons.plain(ffn, layer) for layer, ffn in blocks.items()}


def _near_divisors(width: int, experts: int) -> list[int]:
    """The next lower and higher divisors of the width."""
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    lower, higher = [n for n in divisors if n < experts], [n for n in divisors if n > experts]
    return [*lower[-1:], *higher[:1]]


# ---- groups of neurons


def balanced(points: np.ndarray, c: int, seed: int = 0) -> tuple[np.ndarray, float]:
    """Balanced k-means: c clusters of exactly m / c points, from the centroids of plain k-means.

    Each step assigns the points so that the sum of the squared distances is least (scipy's
    `linear_sum_assignment` on every centroid repeated m / c times), and then computes the means. It
    ends when no point moves, or after 50 steps.

    Args:
      points: [m, p]; c divides m.

    Returns:
      (the cluster of each point, int [m]; the sum of the squared distances to the centroids over
      the sum of the points' squares).
    """
    from scipy.optimize import linear_sum_assignment

    points = points.astype(np.float64)
    size, labels = len(points) // c, np.full(len(points), -1)
    centroids = cluster(points, c, seed=seed).centroids
    for _ in range(MAX_STEPS):
        costs = np.sum(centroids**2, axis=1) - 2 * points @ centroids.T
        before, labels = labels, linear_sum_assignment(np.repeat(costs, size, axis=1))[1] // size
        centroids = np.stack([points[labels == one].mean(0) for one in range(c)])
        if np.array_equal(labels, before):
            break
    total = np.sum(points**2)
    return labels, float(np.sum((points - centroids[labels]) ** 2) / total) if total else 0.0


def normalized(rows: np.ndarray) -> np.ndarray:
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
    groups, shares = {}, [None] * model.config.n_layers
    for layer in bar("partition", blocks, unit="layer"):
        points = normalized(_columns(blocks[layer]))
        width = len(points) // asked.experts
        first = np.zeros(0, int)
        if rates is not None:
            first = highest(rates[layer], asked.shared * width)
        others = np.setdiff1d(np.arange(len(points)), first)
        seed = int(np.random.default_rng([asked.seed, layer]).integers(1 << 31))
        labels, shares[layer] = balanced(points[others], asked.experts - asked.shared, seed)
        order = np.concatenate([first, others[np.argsort(labels, kind="stable")]])
        groups[layer] = order.reshape(asked.experts, width)
    return groups, {"inertia_shares": shares}


# ---- experts and routers


def _experts_of(ffn: dict, groups: np.ndarray, factor: np.ndarray, bias: np.ndarray) -> dict:
    """Leaves of the experts [E, ...]; down's kernel times `factor`, its bias times `bias` [E]."""

    def scaled(leaf: Any, by: np.ndarray) -> Any:
        by = by.reshape(-1, *(1,) * (leaf.ndim - 1))
        return (leaf * by.astype(np.result_type(leaf.dtype, np.float32))).astype(leaf.dtype)

    block = {}
    for name, leaves in ffn.items():
        kernel, given = leaves["kernel"], leaves.get("bias")
        if name == "down":
            block[name] = {"kernel": scaled(kernel[groups], factor)}
            given = given if given is None else given[None].repeat(len(groups), axis=0)
            bias_leaf = given if given is None else scaled(given, bias)
        else:
            block[name] = {"kernel": kernel.T[groups].swapaxes(1, 2)}
            bias_leaf = given if given is None else given[groups]
        block[name] |= {} if bias_leaf is None else {"bias": bias_leaf}
    return block


def _zero_router(ffn: dict, columns: int, kind: str) -> dict:
    kernel = ffn["up"]["kernel"]
    if kind == "linear":
        return {"kernel": np.zeros((kernel.shape[0], columns), kernel.dtype)}
    hidden = {"kernel": np.zeros((kernel.shape[0], columns), kernel.dtype)}
    return {"hidden": hidden, "kernel": np.zeros((columns, columns), kernel.dtype)}


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
        new = {Place(layer, None, "ffn"): _ordered(blocks[layer], groups[layer]) for layer in blocks}
        ordered = restack(model.config, write(model.config, model.params, new))
        inputs, sums = moefication.routed_sums(model.config, ordered, rows, asked.experts)
        for layer in bar("routers", blocks, unit="layer"):
            points = normalized(_columns(blocks[layer]))
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
    ordered = {name: {leaf: x[..., order] for leaf, x in ffn[name].items()} for name in ffn}
    return ordered | {"down": ffn["down"] | {"kernel": ffn["down"]["kernel"][order]}}


# ---- the new model


def _with_experts(
    model: Model, new: Mapping[int, dict], fields: dict, asked: dict, report: dict
) -> tuple[Model, dict]:
    """The model with those FFNs [E, ...] and fields of `LayerConfig`, and the full report."""
    config = model.config

    def changed(i: int, layer: LayerConfig) -> LayerConfig:
        if i not in new:
            return layer
        return dataclasses.replace(layer, ffn_width=new[i]["down"]["kernel"].shape[1], **fields)

    layers = tuple(changed(i, layer) for i, layer in enumerate(config.layers))
    after = family_of_experts(dataclasses.replace(config, layers=layers))
    places = {Place(layer, None, "ffn"): leaves for layer, leaves in new.items()}
    params = restack(after, write(config, model.params, places))
    counts = count_parameters(after)
    report = {name: asked[name] for name in ("router", "layers", "noise") if name in asked} | {
        "experts": fields["experts"],
        "top_k": fields["top_k"],
        "shared": fields["shared"],
        "family": after.family,
        "ffn_widths_before": list(config.ffn_widths),
        "ffn_widths_after": list(after.ffn_widths),
        "parameters_before": count_parameters(config)["total"],
        "parameters_after": counts["total"],
        "active_parameters": counts["active"],
        **report,
    }
    return dataclasses.replace(model, config=after, params=params), report


def family_of_experts(config: ModelConfig) -> ModelConfig:
    """The config in a family of transformers that has its experts, if there is one.

    Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE. Other models keep their family, and
    are written in the native form (io/hf/export.py).
    """
    family = FAMILIES_OF_EXPERTS.get(config.family)
    biases = config.ffn_bias or config.attention_bias or config.attention_out_bias
    if family is None or family == "mixtral" and biases:
        return config
    other = dataclasses.replace(config, family=family)
    stated = dataclasses.replace(other, generation="", head=None)
    try:
        return other if config_from_hf(config_to_hf(stated)) == stated else config
    except ConfigError:
        return config
