"""`scripts/analyze.py`."""

from __future__ import annotations

import sys

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate.displacement import displacement
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.losses.nucl import layer_statistics
from ffn_heterogeneity.report.figures import connectivity_figure


def connectivity(config: ConfigDict, workdir: epath.Path) -> dict:
    """Entropy, gini and mstd of the outgoing weights, summed over each layer's neurons."""
    model = load_model(config.model, revision=config.revision)
    widths = model.config.ffn_widths
    layers = [
        {**sums, "neurons": width}
        for sums, width in zip(layer_statistics(model.params), widths, strict=True)
    ]
    connectivity_figure(layers, model.config.d_model, workdir / "connectivity.png")
    return {"layers": layers, "d_model": model.config.d_model}


ANALYSES = {"connectivity": connectivity, "displacement": displacement}


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """Runs the analysis the config names; returns what `results.json` holds.

    Raises:
      ValueError: no such analysis, or no model given.
    """
    if config.analysis not in ANALYSES:
        raise ValueError(f"analysis {config.analysis!r}: choose one of {sorted(ANALYSES)}")
    if not config.model:
        raise ValueError("--config.model is empty: give a directory, a .gguf file or a hub id")
    results = {"model": config.model, "analysis": config.analysis}
    results |= ANALYSES[config.analysis](config, workdir)
    write_json(workdir / "results.json", results)
    print(f"{workdir}/results.json", file=sys.stderr)
    return results
