"""Removal of whole experts, with their columns of the router."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import count_parameters
from ffn_heterogeneity.models.leaves import Place, declared_at
from ffn_heterogeneity.models.stack import layer_leaves, restack, unstack
from ffn_heterogeneity.models.walk import blocks_of
from ffn_heterogeneity.probes.experts import expert_probe
from ffn_heterogeneity.probes.observe import observe, token_batches
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.calibration import OWN, calibration_rows
from ffn_heterogeneity.surgery.expert_scores import ON_TEXT, RULES, bos_experts, expert_scores
from ffn_heterogeneity.surgery.seen import BATCH, unvisited
from ffn_heterogeneity.surgery.selection import layer_subset, removal_count
from ffn_heterogeneity.tree import flatten, unflatten
from ffn_heterogeneity.wording import check_choice, settings_of


@dataclasses.dataclass(frozen=True)
class ExpertRemoval:
    """Settings of `remove_experts`, checked as far as that is possible without a model.

    Attributes:
      rule: one of `expert_scores.RULES`.
      ratio, count: how many of a layer's experts go, of those with router columns; as in
        `selection.removal_count`. `count` takes priority.
      top_k: number of router columns per token afterwards; None: as before.
      layers: as in `selection.layer_subset`; of them, those with experts.
      protect: "massive": experts with a massive weight stay (`expert_scores.bos_experts`).
      constant: a removed expert leaves its mean output on the text, with its column (MoNE).
      calibration, calibration_tokens: as in `calibration.calibration_rows`; "own" uses the seed.
    """

    rule: str = "reap"
    ratio: float | None = 0.5
    count: int | None = None
    top_k: int | None = None
    layers: str | Sequence[int] = "all"
    protect: str = ""
    constant: bool = False
    calibration: str = ""
    calibration_tokens: int | None = None
    seed: int = 0

    def __post_init__(self):
        check_choice("rule", self.rule, RULES)
        check_choice("protect", self.protect, ("", "massive"))
        if self.count is not None:
            object.__setattr__(self, "ratio", None)
        else:
            removal_count(1, ratio=self.ratio)
        if self.needs_text and not self.calibration:
            who = f"rule {self.rule!r}" if self.rule in ON_TEXT else "constant=True"
            raise ValueError(
                f"{who} needs calibration text: give --config.calibration=<text file>, or own for "
                "self-generated text"
            )

    @property
    def needs_text(self) -> bool:
        """Whether the experts are observed on text."""
        return self.rule in ON_TEXT or self.constant


def remove_experts(
    model: Model, settings: Mapping[str, Any] | ExpertRemoval, data=None, key=None
) -> tuple[Model, dict]:
    """Return a copy of the model without the experts that `settings` (configs/experts.py) remove.

    Shared experts, which have no router column, always stay. With `gates` "renormalized" the gates
    of a token's remaining experts sum to 1 as before.

    Args:
      settings: those of `ExpertRemoval`.

    Returns:
      (the smaller model, {"removed_experts": one list per layer, "ranking": [{"layer",
      "experts"}], the experts of each layer from the last to go to the first, "tokens" per expert
      of a rule on text, the numbers of experts and parameters before and after}); with calibration
      "own" also the generated text under "own_rows".

    Raises:
      ValueError: no experts, fewer router columns than top_k, more experts without tokens than are
        removed, nothing massive to protect, or as `calibration_rows` and `expert_scores`.
    """
    asked, config = settings_of(ExpertRemoval, settings), model.config
    sparse = [i for i, layer in enumerate(config.layers) if layer.experts is not None]
    chosen = [i for i in layer_subset(asked.layers, config.n_layers) if i in sparse]
    if not chosen:
        raise ValueError(f"layers={asked.layers!r}: none of them has experts, {sparse} have")
    rows = None
    if asked.needs_text:
        rows = calibration_rows(model, asked.calibration, asked.calibration_tokens, asked.seed)
    sums = expert_sums(config, model.params, rows) if rows is not None else {}
    spared = _spared(model, asked, chosen)
    tree, layers, removed, ranking = unstack(model.params), list(config.layers), {}, []
    new = list(tree["layers"])
    for i in chosen:
        ffn = dict(layer_leaves(model.params, "ffn"))[i]
        order = ranked(config, i, ffn, asked, sums.get(i), spared.get(i, ()))
        removed[i] = _first(order, layers[i], asked, i, sums.get(i))
        means = None
        if asked.constant:
            total = sums[i]
            means = total["outputs"] / np.maximum(total["tokens"], 1)[:, None]
        layers[i], leaves = without_experts(config, i, ffn, removed[i], means)
        if asked.top_k is not None:
            layers[i] = dataclasses.replace(layers[i], top_k=asked.top_k)
        new[i] = {**new[i], "ffn": leaves}
        ranking.append({"layer": i, "experts": order[::-1].tolist()})
    _check_columns(layers, chosen)
    after = dataclasses.replace(config, layers=tuple(layers))
    params = restack(after, {**tree, "layers": new})
    report = _report(asked, (config, after), removed, ranking, sums)
    report |= {"own_rows": rows} if asked.calibration == OWN and rows is not None else {}
    return dataclasses.replace(model, config=after, params=params), report


def expert_sums(
    config: ModelConfig, params: dict, rows: Sequence[np.ndarray]
) -> dict[int, dict[str, np.ndarray]]:
    """{layer with experts: sums of `expert_probe` over rows of token ids, [E, ...], float64}."""
    width, experts = max(config.ffn_widths), max(layer.experts or 0 for layer in config.layers)
    probe = expert_probe(experts, width)
    seen, sums = observe(config, params, token_batches(rows, BATCH), probe)[probe.name], {}
    for i, layer in enumerate(config.layers):
        if layer.experts is not None:
            sums[i] = {name: total[i][: layer.experts] for name, total in seen.items()}
            for name in ("sum", "size", "square"):
                sums[i][name] = sums[i][name][:, : layer.ffn_width]
    return sums


def ranked(
    config: ModelConfig, i: int, ffn: dict, asked: ExpertRemoval, sums: Any, spared: Sequence[int]
) -> np.ndarray:
    """Experts of layer i with router columns, the first to go first; ties: the lower index first.

    Args:
      ffn: leaves of the layer's FFN.
      spared: experts that go last.
    """
    experts = [block for _, block in blocks_of(config, i, ffn)]
    scores = expert_scores(asked.rule, i, experts, sums, asked.seed)
    scores[list(spared)] = -np.inf
    order = np.argsort(-scores, kind="stable")
    return order[order >= config.layers[i].shared]


def without_experts(
    config: ModelConfig, i: int, ffn: dict, gone: np.ndarray, means: np.ndarray | None = None
) -> tuple[LayerConfig, dict]:
    """Return (the layer's settings, the leaves of its FFN) without the experts `gone`.

    Args:
      means: [E, D]; the removed experts' columns stay, with these vectors as outputs.

    Raises:
      ValueError: a router with a hidden layer, or constants of merged experts.
    """
    layer, place = config.layers[i], Place(i, None, "ffn")
    if layer.router != "linear":
        raise ValueError(f"layer {i}: router={layer.router!r} has a hidden layer as wide as itself")
    if means is not None and layer.routes is not None:
        raise ValueError(f"layer {i}: constant=True, but its experts are merged")
    stay = np.setdiff1d(np.arange(layer.experts or 0), gone)
    own = layer.columns - layer.constants  # columns with an expert
    expert_of = np.asarray(ffn.get("expert_of", layer.shared + np.arange(own)))
    lost = np.isin(expert_of, gone)
    columns = [np.flatnonzero(~lost), np.arange(own, layer.columns)]
    columns += [np.flatnonzero(lost)] if means is not None else []
    every = np.concatenate(columns)
    leaves = {}
    for path, leaf in declared_at(config, place, ffn).items():
        value = np.asarray(flatten(ffn)[path])
        for axis, kept in (("expert", stay), ("route", every)):
            if (at := leaf.axis(axis)) is not None:
                value = np.take(value, kept, axis=at)
        leaves[path] = value
    if "expert_of" in leaves:
        leaves["expert_of"] = np.searchsorted(stay, leaves["expert_of"]).astype(np.int32)
    constants = layer.constants
    if means is not None and gone.size:
        added = means[expert_of[lost]].astype(np.asarray(ffn["down"]["kernel"]).dtype)
        before = [leaves["constant"]] if constants else []
        leaves["constant"] = np.concatenate([*before, added])
        constants += len(added)
    routes = None if layer.routes is None else len(every)
    fields = {"experts": len(stay), "routes": routes, "constants": constants}
    return dataclasses.replace(layer, **fields), unflatten(leaves)


def _spared(model: Model, asked: ExpertRemoval, chosen: Sequence[int]) -> dict[int, np.ndarray]:
    if not asked.protect:
        return {}
    found = bos_experts(massive_weights(model.config, model.params).states)
    if not set(found) & set(chosen):
        raise ValueError(
            f"protect='massive': no expert of the layers {list(chosen)} has a massive weight on "
            f"bos; experts that have one: { {i: one.tolist() for i, one in found.items()} }"
        )
    return found


def _first(
    order: np.ndarray, layer: LayerConfig, asked: ExpertRemoval, i: int, sums: Any
) -> np.ndarray:
    """The experts that go, ascending.

    Raises:
      ValueError: a choice among experts without tokens.
    """
    count = removal_count(len(order), ratio=asked.ratio, count=asked.count)
    if asked.rule in ON_TEXT:
        empty = int((sums["tokens"][layer.shared :] == 0).sum())
        if empty > count:
            raise ValueError(
                f"layer {i}: {unvisited(sums['tokens'])}, and {count} are to be removed: more "
                "calibration text is needed"
            )
    return np.sort(order[:count])


def _check_columns(layers: Sequence[LayerConfig], chosen: Sequence[int]) -> None:
    for i in chosen:
        layer = layers[i]
        if layer.top_k > layer.columns:
            raise ValueError(
                f"layer {i}: {layer.columns} router columns are left, and top_k={layer.top_k}: "
                f"remove fewer, or set top_k={layer.columns} or less"
            )


def _report(
    asked: ExpertRemoval, configs: tuple, removed: Mapping, ranking: list, sums: Mapping
) -> dict:
    before, after = configs
    counts = [count_parameters(config) for config in configs]
    report = dataclasses.asdict(asked) | {
        "removed_experts": [
            removed.get(i, np.zeros(0, int)).tolist() for i in range(before.n_layers)
        ],
        "ranking": ranking,
        "experts_before": [layer.experts for layer in before.layers],
        "experts_after": [layer.experts for layer in after.layers],
        "parameters_before": counts[0]["total"],
        "parameters_after": counts[1]["total"],
        "active_before": counts[0]["active"],
        "active_after": counts[1]["active"],
    }
    left = report["parameters_before"] - report["parameters_after"]
    report["parameters_removed_percent"] = 100.0 * left / report["parameters_before"]
    if sums:
        report["tokens"] = [[int(x) for x in sums[row["layer"]]["tokens"]] for row in ranking]
    return report
