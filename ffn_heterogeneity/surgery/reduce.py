"""The surgery of one layer, which the model in memory and the checkpoint on disk share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import count_parameters
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery.compensation import outgoing_of_survivors
from ffn_heterogeneity.surgery.plan import Cut, Plan
from ffn_heterogeneity.surgery.removal import take_neurons


def reduce_layer(
    ffn: dict, plan: Plan, *, layer: int, cut: Cut
) -> tuple[dict, np.ndarray, dict | None]:
    """Chooses, compensates, removes.

    Without compensation masks and `neuron_scale` stay leaves of their own; with it they are folded
    into the survivors' outgoing weights, which are new ones.

    Args:
      ffn: the layer's FFN leaves; untouched.
      cut: from `plan.cuts`.

    Returns:
      (its new leaves, the removed neurons ascending, the report of the compensation or None).

    Raises:
      ValueError: weights that cannot be read, kept or written; the message names the layer.
    """
    gone, merges = plan.choose(ffn, layer, cut)
    if not gone.size:
        return ffn, gone, None
    kept = np.setdiff1d(np.arange(ffn["down"]["kernel"].shape[0]), gone)
    if plan.compensation == "none":
        return take_neurons(ffn, kept), gone, None
    try:
        kernel, report = outgoing_of_survivors(plan.compensation, ffn, gone, merges)
    except ValueError as error:
        raise ValueError(f"layer {layer}: {error}") from None
    smaller = take_neurons(ffn, kept)
    smaller.pop("neuron_scale", None)
    bias = {name: leaf for name, leaf in ffn["down"].items() if name == "bias"}
    return smaller | {"down": {"kernel": kernel} | bias}, gone, {"layer": layer} | report


def reduce_model(
    config: ModelConfig, params: dict, plan: Plan
) -> tuple[ModelConfig, dict, dict[int, np.ndarray], list[dict]]:
    """The smaller model; the tree that comes in is untouched.

    Args:
      params: unstacked (or stacked: it is unstacked first).

    Returns:
      (config with the new widths, unstacked params, {layer: removed neurons}, the reports of the
      compensation).

    Raises:
      ValueError: an argument is out of its range, or a layer cannot be reduced.
    """
    params = unstack(params)
    layers, widths = list(params["layers"]), list(config.ffn_widths)
    removed, reports = {}, []
    for layer, cut in plan.cuts(widths, lambda i: layers[i]["ffn"]).items():
        ffn, removed[layer], report = reduce_layer(layers[layer]["ffn"], plan, layer=layer, cut=cut)
        layers[layer] = {**layers[layer], "ffn": ffn}
        widths[layer] -= len(removed[layer])
        reports += [report] if report else []
    return config.with_widths(widths), {**params, "layers": layers}, removed, reports


def results_of(
    plan: Plan,
    configs: tuple[ModelConfig, ModelConfig],
    removed: Mapping[int, np.ndarray],
    reports: list[dict],
) -> dict:
    """What `results.json` holds.

    Args:
      configs: before and after.
      removed, reports: as from `reduce_model`.
    """
    before, after = configs
    total, left = (count_parameters(config)["total"] for config in configs)
    return dataclasses.asdict(plan) | {
        "removed": [removed.get(i, np.zeros(0, int)).tolist() for i in range(before.n_layers)],
        "compensated": reports,
        "ffn_widths_before": list(before.ffn_widths),
        "ffn_widths_after": list(after.ffn_widths),
        "parameters_before": total,
        "parameters_after": left,
        "parameters_removed_percent": 100.0 * (total - left) / total,
    }
