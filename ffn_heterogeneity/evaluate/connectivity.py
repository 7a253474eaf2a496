"""Entropy, gini and mstd of a model's outgoing weights, layer by layer."""

from __future__ import annotations

import math
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.losses.nucl import layer_statistics
from ffn_heterogeneity.report.figures import curves_figure


def connectivity(config: ConfigDict, workdir: epath.Path) -> dict[str, Any]:
    """The analysis "connectivity": the layers' sums and `<workdir>/connectivity.png`."""
    model = load_model(config.model, revision=config.revision)
    return {"layers": layer_sums(model, workdir), "d_model": model.config.d_model}


def layer_sums(model: Model, folder: epath.Path) -> list[dict[str, Any]]:
    """Each layer's sums over its neurons, and how many it has; draws `connectivity.png`."""
    sums = layer_statistics(model.params)
    widths = model.config.ffn_widths
    layers = [{**row, "neurons": width} for row, width in zip(sums, widths, strict=True)]
    d = model.config.d_model
    uniform = {"entropy": math.log(d), "gini": 1 - 1 / d, "mstd": 0.0}
    panels = {
        f"{name}, mean over neurons (dashed: uniform)": {
            "": {i: layer[name] / layer["neurons"] for i, layer in enumerate(layers)}
        }
        for name in uniform
    }
    path, bounds = folder / "connectivity.png", tuple(uniform.values())
    curves_figure(panels, path, xlabel="layer", bounds=bounds)
    return layers
