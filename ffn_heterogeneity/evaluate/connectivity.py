"""Entropy, Gini index and mstd of a model's outgoing weights, by layer."""

import math
from typing import Any

from etils import epath

from ffn_heterogeneity.evaluate.inputs import ModelSettings
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.nucl import layer_statistics
from ffn_heterogeneity.report.figures import curves_figure
from ffn_heterogeneity.wording import markdown_table

STATISTICS = ("entropy", "gini", "mstd")


def connectivity(settings: ModelSettings, model: Model, workdir: epath.Path) -> dict[str, Any]:
    """The analysis "connectivity": sums per layer, a table, and `<workdir>/connectivity.png`."""
    layers = layer_sums(model, workdir)
    cells = [
        (i, layer["neurons"], *(f"{layer[name] / layer['neurons']:.5g}" for name in STATISTICS))
        for i, layer in enumerate(layers)
    ]
    cells.append(("uniform", "-", *(f"{value:.5g}" for value in _uniform(model.config.d_model))))
    table = markdown_table(("layer", "neurons", *STATISTICS), cells)
    print(f"{model.source}, mean over each layer's neurons:\n{table}")
    return {"layers": layers, "d_model": model.config.d_model}


def _uniform(d: int) -> tuple[float, float, float]:
    """Statistics of a neuron whose outgoing weights are all equal."""
    return math.log(d), 1 - 1 / d, 0.0


def layer_sums(model: Model, folder: epath.Path) -> list[dict[str, Any]]:
    """Return each layer's sums over its neurons, and their number; draw `connectivity.png`."""
    sums = layer_statistics(model.params)
    widths = [layer.ffn_width * (layer.experts or 1) for layer in model.config.layers]
    layers = [{**row, "neurons": width} for row, width in zip(sums, widths, strict=True)]
    panels = {
        f"{name}, mean over neurons (dashed: uniform)": {
            "": {i: layer[name] / layer["neurons"] for i, layer in enumerate(layers)}
        }
        for name in STATISTICS
    }
    bounds = _uniform(model.config.d_model)
    curves_figure(panels, folder / "connectivity.png", xlabel="layer", bounds=bounds)
    return layers
