"""Neuron removal in one layer, shared by models in memory and checkpoints on disk."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.adapters import FFN_LEAVES
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import count_parameters
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.models.walk import ffn_blocks, write
from ffn_heterogeneity.surgery import states
from ffn_heterogeneity.surgery.blockwise import check_fits, compensated
from ffn_heterogeneity.surgery.calibration import (
    calibration_rows,
    check_calibration,
    expected_tokens,
    written,
)
from ffn_heterogeneity.surgery.compensation import OF_WEIGHTS, outgoing_of_survivors
from ffn_heterogeneity.surgery.criteria import ON_TEXT, PUBLISHED
from ffn_heterogeneity.surgery.published import published_cuts
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.surgery.removal_plan import Cut, RemovalPlan
from ffn_heterogeneity.surgery.seen import of_place, seen_states
from ffn_heterogeneity.surgery.selection import layer_subset
from ffn_heterogeneity.wording import naming, settings_of


@dataclasses.dataclass(frozen=True)
class Removal(RemovalPlan):
    """Settings of `prune`, checked as far as that is possible without a model.

    Attributes:
      count: takes priority over the ratio.
      calibration, calibration_tokens: for criteria and compensations that use text, as in
        `calibration.calibration_rows`; self-generated text uses the seed.
      sequential: for compensations that use states, as in `blockwise.compensated`.
    """

    criterion: str = "entropy"
    ratio: float | None = 0.25
    calibration: str = ""
    calibration_tokens: int | None = None
    sequential: bool = False

    def __post_init__(self):
        if self.count is not None:
            object.__setattr__(self, "ratio", None)
        super().__post_init__()
        reads = self.criterion in (*ON_TEXT, *PUBLISHED)
        who = f"criterion {self.criterion!r}" if reads else ""
        check_calibration(self, who)


def prune(model: Model, settings: Mapping[str, Any], data=None, key=None) -> tuple[Model, dict]:
    """Return a copy of the model without the neurons that `settings` (configs/prune.py) remove.

    Args:
      settings: those of `Removal`.

    Returns:
      (the smaller model, the contents of `results.json`); self-generated text under "own_rows",
      which `calibration.write_rows` can save.

    Raises:
      ValueError: an argument is out of its range, or a layer cannot be reduced.
    """
    plan, seen, rows = settings_of(Removal, settings), None, None
    if plan.compensation in states.METHODS:
        chosen = layer_subset(plan.layers, model.config.n_layers, model.config.groups)
        widths = {i: model.config.ffn_widths[i] for i in chosen}
        if plan.budget == "layer":
            kept = {i: width - plan.count_of(width) for i, width in widths.items()}
        else:
            kept = dict.fromkeys(widths, 0)  # the scores say it
        tokens = expected_tokens(plan.calibration, plan.calibration_tokens)
        check_fits(model.config, plan.compensation, kept, tokens)
    if plan.looks == "text":
        asked = (plan.calibration, plan.calibration_tokens, plan.seed)
        rows = calibration_rows(model, *asked)
    if plan.chooses_by:
        shown = rows if plan.chooses_by == "text" else None
        seen = seen_states(model.config, model.params, shown)
    cuts = published_cuts(model, plan, rows) if rows and plan.criterion in PUBLISHED else None
    config, tree, removed, reports = reduce_model(model.config, model.params, plan, seen, cuts)
    smaller = dataclasses.replace(model, config=config, params=restack(config, tree))
    if plan.compensation in states.METHODS:
        given = (plan.compensation, rows, plan.sequential)
        smaller, reports = compensated(model, smaller, *given)
    results = results_of(plan, (model.config, smaller.config), removed, reports)
    return smaller, results | written(plan.calibration, rows)


def reduce_layer(
    config: ModelConfig,
    place: Place,
    ffn: dict,
    plan: RemovalPlan,
    *,
    cut: Cut,
    seen: dict | None = None,
) -> tuple[dict, np.ndarray, dict | None]:
    """Choose the neurons of one block, compensate for them and remove them.

    Without compensation, masks and neuron factors stay separate leaves. A compensation by weights
    folds them into the survivors' new outgoing weights. A compensation by states is not done here
    (`blockwise.compensated`).

    Args:
      config: the dense model's.
      place: which block.
      ffn: its leaves; unchanged.
      cut: from `plan.cuts`.
      seen: from `seen_states`, if `plan.looks`.

    Returns:
      (the new leaves, the removed neurons in ascending order, the compensation's report or None).

    Raises:
      ValueError: weights that cannot be read, kept or written; the message names the layer.
    """
    gone, merges = plan.choose(ffn, place, cut, seen)
    if not gone.size:
        return ffn, gone, None
    survivors = np.setdiff1d(np.arange(ffn["down"]["kernel"].shape[0]), gone)
    smaller = take_neurons(config, place, ffn, survivors)
    if plan.compensation not in OF_WEIGHTS:
        return smaller, gone, None
    with naming(f"layer {place.layer}"):
        kernel, report = outgoing_of_survivors(plan.compensation, ffn, gone, merges)
    smaller = {name: leaf for name, leaf in smaller.items() if name not in FFN_LEAVES}
    bias = {name: leaf for name, leaf in ffn["down"].items() if name == "bias"}
    return smaller | {"down": {"kernel": kernel} | bias}, gone, {"layer": place.layer} | report


def reduce_blocks(
    config: ModelConfig,
    blocks: Mapping[Place, dict],
    plan: RemovalPlan,
    *,
    cut: Cut,
    seen: dict | None = None,
) -> tuple[dict[Place, dict], np.ndarray, list[dict]]:
    """Reduce all blocks of one layer; arguments and errors as `reduce_layer`.

    Returns:
      ({place: new leaves}, the removed neurons (with experts one row per expert), the reports).
    """
    made = {
        place: reduce_layer(config, place, block, plan, cut=cut, seen=of_place(seen, place))
        for place, block in blocks.items()
    }
    removed = [gone for _, gone, _ in made.values()]
    sparse = any(place.expert is not None for place in blocks)
    return (
        {place: leaves for place, (leaves, _, _) in made.items()},
        np.stack(removed) if sparse else removed[0],
        [report for _, _, report in made.values() if report],
    )


def only_block(blocks: Mapping[Place, dict], layer: int) -> dict:
    """Return the leaves of a layer's only block, for a budget over all layers.

    Raises:
      ValueError: the layer has experts.
    """
    if (place := Place(layer, None, "ffn")) not in blocks:
        raise ValueError(
            f"budget='global': layer {layer} has experts, which must stay equally wide; use "
            "budget='layer'"
        )
    return blocks[place]


def reduce_model(
    config: ModelConfig,
    params: dict,
    plan: RemovalPlan,
    seen: Sequence[Any] | None = None,
    cuts: Mapping[int, Cut] | None = None,
) -> tuple[ModelConfig, dict, dict[int, np.ndarray], list[dict]]:
    """Remove the neurons that `plan` chooses from all layers; `params` are unchanged.

    Args:
      params: unstacked (or stacked: they are unstacked first).
      seen: from `seen_states`, if `plan.looks`.
      cuts: instead of `plan.cuts`.

    Returns:
      (config with the new widths, unstacked params, {layer: removed neurons}, the compensation's
      reports).

    Raises:
      ValueError: an argument is out of its range, or a layer cannot be reduced.
    """
    blocks, widths = dict(ffn_blocks(config, params)), list(config.ffn_widths)
    states: Sequence[Any] = [None] * config.n_layers if seen is None else seen
    new, removed, reports = {}, {}, []

    if cuts is None:
        cuts = plan.cuts(config, lambda i: only_block(blocks, i), states)
    massive = [spec for spec in (plan.protect, plan.lose) if spec.startswith("massive:")]
    if massive and not any(np.any((states[layer] or {})["massive"]) for layer in cuts):
        raise ValueError(
            f"layers={plan.layers!r} leaves out the massive layer, whose neurons {massive[0]!r} "
            "names"
        )
    for layer, cut in cuts.items():
        own = {place: block for place, block in blocks.items() if place.layer == layer}
        made, removed[layer], more = reduce_blocks(config, own, plan, cut=cut, seen=states[layer])
        new |= made
        reports += more
        widths[layer] -= removed[layer].shape[-1]
    return config.with_widths(widths), write(config, params, new), removed, reports


def results_of(
    plan: RemovalPlan,
    configs: tuple[ModelConfig, ModelConfig],
    removed: Mapping[int, np.ndarray],
    reports: list[dict],
) -> dict:
    """Return the contents of `results.json`.

    Args:
      configs: before and after the removal.
      removed, reports: from `reduce_model`.
    """
    before, after = configs
    return (
        dataclasses.asdict(plan)
        | {
            "removed": [removed.get(i, np.zeros(0, int)).tolist() for i in range(before.n_layers)],
            "compensated": reports,
            "ffn_widths_before": list(before.ffn_widths),
            "ffn_widths_after": list(after.ffn_widths),
        }
        | sizes_of(before, after)
    )


def sizes_of(before: ModelConfig, after: ModelConfig) -> dict[str, float]:
    """Numbers of parameters before and after a surgery, and the share that is gone, in percent."""
    total, left = (count_parameters(config)["total"] for config in (before, after))
    return {
        "parameters_before": total,
        "parameters_after": left,
        "parameters_removed_percent": 100.0 * (total - left) / total,
    }
