"""Removal of whole experts, with their columns of the router."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.context import with_both_sides
from ffn_heterogeneity.models.families import count_parameters
from ffn_heterogeneity.models.leaves import Place, declared_at
from ffn_heterogeneity.models.stack import layer_leaves, restack, unstack
from ffn_heterogeneity.models.walk import blocks_of
from ffn_heterogeneity.probes.experts import expert_probe
from ffn_heterogeneity.probes.observe import observe, token_batches
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.calibration import calibration_rows, check_text, written
from ffn_heterogeneity.surgery.expert_scores import ON_TEXT, RULES, bos_experts, expert_scores
from ffn_heterogeneity.surgery.seen import BATCH, unvisited
from ffn_heterogeneity.surgery.selection import layer_subset, removal_count
from ffn_heterogeneity.tree import LeafError, flatten, unflatten
from ffn_heterogeneity.wording import check_choice, check_number, settings_of


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
      calibration, calibration_tokens: as in `calibration.calibration_rows`; self-generated
        text uses the seed.
    """

    rule: str = "aimer"
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
        if self.top_k is not None:
            check_number("top_k", self.top_k, "[1, inf)")
        if self.count is not None:
            object.__setattr__(self, "ratio", None)
        else:
            removal_count(1, ratio=self.ratio)
        who = f"rule {self.rule!r}" if self.rule in ON_TEXT else "constant=True"
        check_text(who if self.needs_text else "", self.calibration, self.calibration_tokens)

    @property
    def needs_text(self) -> bool:
        """True if the experts are observed on text."""
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
      of a rule on text, the numbers of experts and parameters before and after}); self-generated
      text under "own_rows".

    Raises:
      ValueError: no experts, fewer router columns than top_k, more experts without tokens than are
        removed, nothing massive to protect, or as `calibration_rows` and `expert_scores`.
    """
    asked, config = settings_of(ExpertRemoval, settings), model.config
    rows = None
    if asked.needs_text:
        ExpertCut(asked, config)  # its errors before a text is read or generated
        rows = calibration_rows(model, asked.calibration, asked.calibration_tokens, asked.seed)
    sums = expert_sums(config, model.params, rows) if rows is not None else {}
    change, tree = ExpertCut(asked, config, sums), unstack(model.params)
    if asked.protect:
        change.protect(massive_weights(config, model.params).states)
    new = list(tree["layers"])
    for i, ffn in layer_leaves(model.params, "ffn"):
        if i in change.changed:
            new[i] = {**new[i], "ffn": change.apply(i, ffn)}
    params = restack(change.config, {**tree, "layers": new})
    report = change.results()
    report |= written(asked.calibration, rows)
    return dataclasses.replace(model, config=change.config, params=params), report


class ExpertCut:
    """A removal of experts, layer by layer.

    Attributes:
      changed: the layers that lose experts.
      layers: settings of all layers afterwards.
    """

    def __init__(self, asked: ExpertRemoval, config: ModelConfig, sums: Mapping[int, Any] = {}):
        """Check the settings against a model; errors as `remove_experts`.

        Args:
          sums: from `expert_sums`, if the settings need text.
        """
        self.asked, self.before, self.sums = asked, config, sums
        self.layers, self.spared = list(config.layers), {}
        sparse = [i for i, layer in enumerate(config.layers) if layer.experts is not None]
        self.changed = [
            i for i in layer_subset(asked.layers, config.n_layers, config.groups) if i in sparse
        ]
        if not self.changed:
            raise ValueError(f"layers={asked.layers!r}: none of them has experts, {sparse} have")
        self.ranking: dict[int, np.ndarray] = {}
        self.removed: dict[int, np.ndarray] = {}
        for i in self.changed:
            layer, count = self.layers[i], self._count(i)
            fields: dict[str, Any] = {"experts": (layer.experts or 0) - count}
            if asked.top_k is not None:
                fields["top_k"] = asked.top_k
            if asked.constant:
                fields["constants"] = layer.constants + count
            self.layers[i] = dataclasses.replace(layer, **fields)
            self._check(i, count)

    @property
    def config(self) -> ModelConfig:
        """The model's config afterwards."""
        return dataclasses.replace(self.before, layers=tuple(self.layers))

    def protect(self, states: Sequence[np.ndarray]) -> None:
        """Let the experts with a massive weight go last.

        Args:
          states: `Massive.states`.

        Raises:
          ValueError: there is none in the layers.
        """
        self.spared = bos_experts(states)
        if not set(self.spared) & set(self.changed):
            others = {i: one.tolist() for i, one in self.spared.items()}
            raise ValueError(
                f"protect='massive': no expert of the layers {self.changed} has a massive weight "
                f"on bos; experts of other layers that have one: {others}"
            )

    def apply(self, i: int, ffn: dict) -> dict:
        """The leaves of layer i's FFN without the experts that go; ties: the lower index goes."""
        experts = [block for _, block in blocks_of(self.before, i, ffn)]
        scores = expert_scores(self.asked.rule, i, experts, self.sums.get(i), self.asked.seed)
        scores[self.spared.get(i, [])] = -np.inf
        order = np.argsort(-scores, kind="stable")
        order = order[order >= self.before.layers[i].shared]
        self.ranking[i], gone = order, np.sort(order[: self._count(i)])
        if lost := sorted({*gone.tolist()} & {*self.spared.get(i, ())}):
            raise ValueError(
                f"layer {i}: {len(gone)} experts are to go, and expert {lost[0]} is one of "
                f"{len(self.spared[i])} that protect='massive' keeps: remove fewer"
            )
        self.removed[i], means = gone, None
        if self.asked.constant:
            total = self.sums[i]
            means = total["outputs"] / np.maximum(total["tokens"], 1)[:, None]
        self.layers[i], leaves = without_experts(self.before, i, ffn, gone, means)
        self.layers[i] = dataclasses.replace(
            self.layers[i], top_k=self.asked.top_k or self.before.layers[i].top_k
        )
        self._check(i, 0)
        return leaves

    def results(self) -> dict:
        """The contents of `results.json`."""
        removed = [self.removed.get(i, np.zeros(0, int)) for i in range(self.before.n_layers)]
        before, after = (count_parameters(config) for config in (self.before, self.config))
        left = 100.0 * (before["total"] - after["total"]) / before["total"]
        report = dataclasses.asdict(self.asked) | {
            "removed_experts": [gone.tolist() for gone in removed],
            "ranking": [
                {"layer": i, "experts": order[::-1].tolist()} for i, order in self.ranking.items()
            ],
            "experts_before": [layer.experts for layer in self.before.layers],
            "experts_after": [layer.experts for layer in self.layers],
            "parameters_before": before["total"],
            "parameters_after": after["total"],
            "parameters_removed_percent": left,
            "active_before": before["active"],
            "active_after": after["active"],
        }
        if self.sums:
            report["tokens"] = [self.sums[i]["tokens"].astype(int).tolist() for i in self.ranking]
        return report

    def _count(self, i: int) -> int:
        """The number of experts that layer i loses."""
        layer, asked = self.before.layers[i], self.asked
        of = (layer.experts or 0) - layer.shared
        return removal_count(of, ratio=asked.ratio, count=asked.count)

    def _check(self, i: int, count: int) -> None:
        layer = self.layers[i]
        if layer.top_k > layer.columns:
            raise ValueError(
                f"layer {i}: {layer.columns} router columns are left, and top_k={layer.top_k}: "
                f"remove fewer, or set top_k={layer.columns} or less"
            )
        if count and self.asked.rule in ON_TEXT and i in self.sums:
            tokens = self.sums[i]["tokens"]
            if (tokens[layer.shared :] == 0).sum() > count:
                raise ValueError(
                    f"layer {i}: {unvisited(tokens)}, and {count} are to be removed: more "
                    "calibration text is needed"
                )


def expert_sums(
    config: ModelConfig, params: dict, rows: Sequence[np.ndarray]
) -> dict[int, dict[str, np.ndarray]]:
    """{layer with experts: sums of `expert_probe` over rows of token ids, [E, ...], float64}.

    Both stacks of an encoder-decoder read the rows.
    """
    width, experts = max(config.ffn_widths), max(layer.experts or 0 for layer in config.layers)
    probe = expert_probe(experts, width)
    batches = token_batches(rows, BATCH)
    if config.kind == "encoder_decoder":
        batches = (with_both_sides(config, batch) for batch in batches)
    seen, sums = observe(config, params, batches, probe)[probe.name], {}
    for i, layer in enumerate(config.layers):
        if layer.experts is not None:
            sums[i] = {name: total[i][: layer.experts] for name, total in seen.items()}
            for name in ("sum", "size", "square"):
                sums[i][name] = sums[i][name][:, : layer.ffn_width]
    return sums


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
        if leaf.depends_on("route"):
            raise LeafError(
                f"layer {i}: {path} depends on all columns of the router: fold it first"
            )
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
