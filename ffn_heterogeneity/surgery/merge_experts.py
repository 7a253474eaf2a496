"""Merging of experts: M-SMoE, REAM and ResMoE.

m_smoe (MC-SMoE's authors' code; MLP Fusion's baseline): the most used experts are dominant; every
other joins the dominant one with the most similar router logits, (cos + 1) / 2 over the text; a
group becomes the mean of its experts, weighted by usage, after their neurons are aligned to those
of the dominant one by the inner products of incoming columns and outgoing rows. Every layer loses
the same share [ours: the code has one threshold for all layers, and aligns to expert 0].

ream (2604.04356, as public implementations have it; the paper was not read): centroids are the
experts of highest REAP score, the mean of gate x |output| over their tokens. From the highest down,
each takes its `group` most similar experts that are still free; most take none. Similarity is the
mean of two cosines over the text: of the gate-weighted outputs, and of the router's logits. Members
are aligned to the centroid by the distances of normalized weights plus those of normalized states.
Each layer is observed on the model whose earlier layers are merged. The sources are silent or
differ on the outputs' cosine, here of vectors of all tokens and dimensions, with every expert
applied to every token and the softmax probability as its gate [ours]; the weights of the mean, here
usage, or with weighting="score" the REAP score (public code) [ours]; and the router's columns, here
all kept, or with columns="dominant" the centroids' alone (public code) [ours].

In both, the router is unchanged and the leaf `expert_of` maps its columns to merged experts, so
top_k may exceed their number. Usage is the number of tokens sent to an expert, padding excluded; an
expert that is never used has weight 0. Shared experts are left alone.

resmoe (2503.06881; code iDEA-iSAIL-Lab-UIUC/ResMoE), without data: a barycenter of the layer's
experts (`alignment.barycenter`), and per expert its residual to it, as one matrix [m, p] of all the
neurons' rows, of which a share is stored: "pruned", the entries of largest magnitude, or "svd", two
factors of rank floor(share m p / (m + p)) [ours: the code's scripts prune, and its trials of SVD
factor each kernel]. NO expert is removed, and the new model is as large as the old one: this
library has no leaf for a barycenter, so the kernels hold barycenter + stored residual. The report
has the size of the stored form. Output biases stay exact.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.leaves import Place, count_parameters
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.walk import blocks_of, joined
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.surgery import alignment
from ffn_heterogeneity.surgery.calibration import calibration_rows, check_text, written
from ffn_heterogeneity.surgery.expert_groups import m_smoe_groups, ream_groups
from ffn_heterogeneity.surgery.expert_text import ExpertText, Seen, routers_on
from ffn_heterogeneity.surgery.own_text import OWN
from ffn_heterogeneity.surgery.selection import highest_share, layer_subset, removal_count
from ffn_heterogeneity.tree import flatten
from ffn_heterogeneity.wording import check_choice, check_number, settings_of

RATIO = 0.5


@dataclasses.dataclass(frozen=True)
class Merging:
    """Settings of `merge_experts`.

    Attributes:
      method: "m_smoe", "ream" or "resmoe".
      ratio: share of every layer's experts that is removed (shared ones are not counted).
      layers: as `selection.layer_subset` reads it.
      columns: the router's columns, "all", or "dominant": those of the dominant experts, so that
        the model has a usual form, and tokens of the others go to these.
      group: C of ream, the largest number of experts that join a centroid.
      weighting: the weights of ream's mean, "usage" or "score".
      residual: resmoe's compression of the residuals, "pruned" or "svd".
      share: of resmoe, the share of the residuals' parameters that is stored; 1 is exact for
        "pruned", and 2 for "svd" (two factors of full rank have up to twice the parameters).
      calibration: as in `calibration.calibration_rows`.
      calibration_tokens: number of tokens; None: as `calibration_rows`.
      seed: of self-generated text.
    """

    method: str = "m_smoe"
    ratio: float = RATIO
    layers: str = "all"
    columns: str = "all"
    group: int = 16
    weighting: str = "usage"
    residual: str = "pruned"
    share: float = 0.25
    calibration: str = OWN
    calibration_tokens: int | None = None
    seed: int = 0

    def __post_init__(self):
        check_choice("method", self.method, ("m_smoe", "ream", "resmoe"))
        check_choice("columns", self.columns, ("all", "dominant"))
        check_choice("weighting", self.weighting, ("usage", "score"))
        check_choice("residual", self.residual, ("pruned", "svd"))
        check_number("group", self.group, "[1, 1e9]")
        check_number("share", self.share, "[0, 1]" if self.residual == "pruned" else "[0, 2]")
        removal_count(1, ratio=self.ratio)
        if self.weighting == "score" and self.method != "ream":
            raise ValueError(f"weighting='score' works only with method='ream', not {self.method}")
        of = {"columns": self.method != "resmoe", "group": self.method == "ream"}
        of |= dict.fromkeys(("share", "residual"), self.method == "resmoe")
        for name, used in of.items():
            if not used and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect on {self.method}")
        if self.method != "resmoe":
            check_text(f"method {self.method!r}", self.calibration, self.calibration_tokens)
        elif self.ratio != RATIO:
            raise ValueError(
                f"ratio={self.ratio}: resmoe removes no expert: set share, the part of the "
                "residuals that is stored"
            )


def merge_experts(model: Model, settings: Mapping[str, Any] | Merging, data=None, key=None):
    """Merge the experts of the layers that `settings` name; see this module.

    Returns:
      (the new model, {"method", "ratio" (of resmoe "residual", "share"), "layers", "experts_before"
      and "experts_after" per layer (0: dense), parameters before and after, "merged": a dict per
      layer: "layer", its feed-forward parameters before and after, and of m_smoe and ream "groups"
      (experts by number, the dominant one first), "usage" and "scores" per router column, and
      "similarity", the mean of members to their dominant expert (None: no group has two); of resmoe
      "stored_parameters" (without the positions of pruned residuals) and "error", |change| relative
      to the norm of the experts}; the sum of stored parameters is in "stored_parameters", too, and
      self-generated text in "own_rows").

    Raises:
      ValueError: dense layers, or layers that are merged already, or have constants; a block with
        adapters or neuron factors; too little text; the message names the layer.
    """
    asked, config = settings_of(Merging, settings), model.config
    chosen = layer_subset(asked.layers, config.n_layers, config.groups)
    tree = unstack(jax.tree.map(np.asarray, model.params))
    _check_layers(config, tree["layers"], chosen, asked)
    configs, reports, report = list(config.layers), [], {}
    layers = list(tree["layers"])
    if asked.method == "resmoe":
        for i in bar("resmoe", chosen, unit="layer"):
            ffn, facts = _resmoe(config, i, layers[i]["ffn"], asked)
            layers[i] = {**layers[i], "ffn": ffn}
            reports.append(facts)
        report["stored_parameters"] = sum(facts["stored_parameters"] for facts in reports)
    else:
        rows = calibration_rows(model, asked.calibration, asked.calibration_tokens, asked.seed)
        report |= written(asked.calibration, rows)
        ream = asked.method == "ream"
        text = ExpertText(model, rows, size=1) if ream else None
        routers = {} if ream else routers_on(model, rows)
        for i in bar(asked.method, range(max(chosen) + 1), unit="layer"):
            old = layers[i]
            if i in chosen:
                seen = text.seen(i, old) if text else routers[i]
                configs[i], ffn, facts = _merged(config, i, old["ffn"], seen, asked)
                layers[i] = {**old, "ffn": ffn}
                reports.append(facts)
            if text:  # the next layers see the merged one
                text.move(configs[i], layers[i])
    after = dataclasses.replace(config, layers=tuple(configs))
    smaller = dataclasses.replace(
        model, config=after, params=restack(after, {**tree, "layers": layers})
    )
    totals = [count_parameters(one)["total"] for one in (config, after)]
    named = ("residual", "share") if asked.method == "resmoe" else ("ratio",)
    return smaller, {
        "method": asked.method,
        **{name: getattr(asked, name) for name in named},
        "layers": asked.layers,
        "experts_before": [layer.experts or 0 for layer in config.layers],
        "experts_after": [layer.experts or 0 for layer in configs],
        "parameters_before": totals[0],
        "parameters_after": totals[1],
        "parameters_removed_percent": 100.0 * (totals[0] - totals[1]) / totals[0],
        "merged": reports,
        **report,
    }


def _check_layers(config: ModelConfig, layers: Sequence, chosen: Sequence, asked: Merging) -> None:
    """Check what needs no text."""
    if dense := [i for i in chosen if config.layers[i].experts is None]:
        raise ValueError(
            f"layers={asked.layers!r}: layers {', '.join(map(str, dense))} have no experts: name "
            "layers with experts"
        )
    for i in chosen if asked.method != "resmoe" else ():
        layer = config.layers[i]
        if layer.routes is not None or "expert_of" in layers[i]["ffn"]:
            raise ValueError(f"layer {i} has merged experts already: start from the model before")
        if layer.constants:
            raise ValueError(f"layer {i} has {layer.constants} constants in place of experts")
        if asked.columns == "dominant" and set(layers[i]["ffn"]["router"]) - {"kernel"}:
            raise ValueError(f"layer {i}: its router has adapters: fold them first")
        left = layer.columns - removal_count(layer.columns, ratio=asked.ratio)
        if asked.columns == "dominant" and layer.router != "linear":
            raise ValueError(f"layer {i}: columns='dominant' needs a linear router")
        if asked.columns == "dominant" and left < layer.top_k:
            raise ValueError(
                f"layer {i}: {left} of {layer.columns} columns remain, and a token is sent to "
                f"top_k={layer.top_k}: lower ratio, or use columns='all'"
            )
        if asked.method == "ream" and layer.columns - left > asked.group * left:
            raise ValueError(
                f"layer {i}: {left} centroids take at most {asked.group} experts each, and "
                f"{layer.columns - left} have to join: raise group"
            )


# ---- groups


def _merged(
    config: ModelConfig, i: int, ffn: dict, seen: Seen, asked: Merging
) -> tuple[LayerConfig, dict, dict]:
    """(the layer's config, its feed-forward leaves, its report) after merging."""
    layer, shared = config.layers[i], config.layers[i].shared
    removed = removal_count(layer.columns, ratio=asked.ratio)
    left = layer.columns - removed
    ream = asked.method == "ream"
    groups = ream_groups(seen, left, asked.group) if ream else m_smoe_groups(seen, left)
    for first, *_ in groups.columns:
        if not seen.usage[first]:
            raise ValueError(
                f"layer {i}: expert {shared + first} remains, and none of the {seen.tokens:,} "
                f"tokens of the text is sent to it ({int(np.sum(seen.usage > 0))} of "
                f"{layer.columns} experts are used): give more calibration_tokens, or raise ratio"
            )
    blocks = [block for _, block in blocks_of(config, i, ffn)]
    weights = seen.scores if asked.weighting == "score" else seen.usage
    new = blocks[:shared]
    for group in groups.columns:
        members = [blocks[shared + column] for column in group]
        states = [seen.states[column] for column in group] if seen.states is not None else None
        orders = _orders([alignment.points_of(block, i) for block in members], states)
        new.append(alignment.weighted_mean(members, weights[group], orders, i))
    after, more = dataclasses.replace(layer, experts=len(new)), {}
    if asked.columns == "dominant":
        kept = [group[0] for group in groups.columns]
        kernel = ffn["router"]["kernel"][:, kept]
        more["router"] = {**ffn["router"], "kernel": kernel}
    elif removed:
        after = dataclasses.replace(after, routes=layer.columns)
        more["expert_of"] = np.zeros(layer.columns, np.int32)
        for number, group in enumerate(groups.columns):
            more["expert_of"][group] = shared + number
    leaves = _joined(config, i, after, ffn, new) | more
    pairs = [groups.similarity[group[0], one] for group in groups.columns for one in group[1:]]
    return (
        after,
        leaves,
        {
            "layer": i,
            "parameters_before": _size(ffn),
            "parameters_after": _size(leaves),
            "groups": [[shared + column for column in group] for group in groups.columns],
            "usage": [int(one) for one in seen.usage],
            "scores": [float(one) for one in seen.scores],
            "similarity": float(np.mean(pairs)) if pairs else None,
        },
    )


def _orders(points: Sequence[np.ndarray], states: Sequence[np.ndarray] | None) -> list[np.ndarray]:
    """Orders of the experts' neurons that align them to the first, by weights and any states."""
    first, *others = points
    orders = [np.arange(len(first))]
    if states is None:
        return orders + [alignment.matched(first, other) for other in others]
    for other, state in zip(others, states[1:], strict=True):
        orders.append(alignment.matched_by((first, other), (states[0].T, state.T)))
    return orders


def _joined(config: ModelConfig, i: int, layer: LayerConfig, ffn: dict, blocks: Sequence) -> dict:
    """The layer's feed-forward leaves with these experts."""
    configs = (*config.layers[:i], layer, *config.layers[i + 1 :])
    place, after = Place(i, None, "ffn"), dataclasses.replace(config, layers=configs)
    return joined(after, place, ffn, {place._replace(expert=e): b for e, b in enumerate(blocks)})


def _size(ffn: dict) -> int:
    return sum(leaf.size for path, leaf in flatten(ffn).items() if path != "expert_of")


# ---- residuals


def _resmoe(config: ModelConfig, i: int, ffn: dict, asked: Merging) -> tuple[dict, dict]:
    """(the layer's feed-forward leaves, its report), barycenter and compressed residuals."""
    layer, shared = config.layers[i], config.layers[i].shared
    blocks = [block for _, block in blocks_of(config, i, ffn)]
    experts = np.stack([alignment.points_of(block, i) for block in blocks[shared:]])
    center, aligned = alignment.barycenter(experts)
    made, stored = zip(*(compressed(one - center, asked) for one in aligned), strict=True)
    new = [
        alignment.block_from(center + residual, block, i)
        for residual, block in zip(made, blocks[shared:], strict=True)
    ]
    leaves = _joined(config, i, layer, ffn, [*blocks[:shared], *new])
    return leaves, {
        "layer": i,
        "parameters_before": _size(ffn),
        "parameters_after": _size(leaves),
        "stored_parameters": _size(ffn) - experts.size + center.size + sum(stored),
        "error": float(np.linalg.norm(center + made - aligned) / np.linalg.norm(experts)),
    }


def compressed(residual: np.ndarray, asked: Merging) -> tuple[np.ndarray, int]:
    """Return (the compressed residual [m, p], the number of parameters that it is stored in)."""
    if asked.residual == "pruned":
        (stays,) = highest_share([np.abs(residual)], asked.share) if asked.share else (False,)
        return np.where(stays, residual, 0), int(np.count_nonzero(stays & (residual != 0)))
    m, p = residual.shape
    rank = min(m, p, math.floor(asked.share * m * p / (m + p) + 1e-9))
    left, values, right = np.linalg.svd(residual, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank], rank * (m + p)
