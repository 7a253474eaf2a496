"""`scripts/compress.py`: a model in, a smaller model and the list of what went out."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.io.export import EXPORTS, save_pretrained
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.causal_lm import check_leaves
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery.criteria import check_criterion
from ffn_heterogeneity.surgery.removal import choose_neurons, remove_neurons
from ffn_heterogeneity.surgery.selection import removal_count

DTYPES = ("as_read", "float32", "bfloat16", "float16")


def parameter_count(params: Any) -> int:
    """Number of scalars in a tree."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params))


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """Loads, chooses, removes, writes; returns what `results.json` holds.

    Raises:
      ValueError, CheckpointError: a config value or a file is wrong; the message names it.
    """
    check_config(config)
    model = load_model(config.model, revision=config.revision)
    ratio = None if config.count is not None else config.ratio
    before = parameter_count(model.params)
    params = unstack(model.params)
    removed = choose_neurons(
        model.config, params,
        criterion=config.criterion, ratio=ratio, count=config.count, layers=config.layers,
        budget=config.budget, reverse=config.reverse, seed=config.seed,
    )  # fmt: skip
    smaller_config, smaller = remove_neurons(model.config, params, removed)
    check_leaves(smaller_config, restack_shapes(smaller_config, smaller))
    after = parameter_count(smaller)
    results = {
        "criterion": config.criterion,
        "reverse": config.reverse,
        "ratio": ratio,
        "count": config.count,
        "layers": config.layers,
        "budget": config.budget,
        "seed": config.seed,
        "removed": [
            removed.get(i, np.zeros(0, int)).tolist() for i in range(model.config.n_layers)
        ],
        "ffn_widths_before": list(model.config.ffn_widths),
        "ffn_widths_after": list(smaller_config.ffn_widths),
        "parameters_before": before,
        "parameters_after": after,
        "parameters_removed_percent": 100.0 * (before - after) / before,
    }
    dtype = None if config.dtype == "as_read" else config.dtype
    save_pretrained(
        smaller_config, smaller, workdir / "model",
        tokenizer=model.tokenizer, export=config.export, dtype=dtype, overwrite=True,
    )  # fmt: skip
    write_json(workdir / "model" / "removed_neurons.json", results)
    write_json(workdir / "results.json", results)
    print(
        f"removed {sum(map(len, results['removed'])):,} neurons by {config.criterion}: "
        f"{before:,} -> {after:,} parameters ({results['parameters_removed_percent']:.1f}% gone); "
        f"{workdir / 'model'}",
        file=sys.stderr,
    )
    return results


def check_config(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded or trained; errors as `run`."""
    if not config.model:
        raise ValueError("--config.model is empty: give a directory, a .gguf file or a hub id")
    for key, choices in (("dtype", DTYPES), ("export", EXPORTS)):
        if config[key] not in choices:
            raise ValueError(f"{key}={config[key]!r}: choose one of {choices}")
    check_criterion(config.criterion)
    if config.count is None:
        removal_count(1, ratio=config.ratio)


def restack_shapes(config, params) -> dict:
    """The stacked tree's shapes, without stacking the arrays."""
    return jax.eval_shape(lambda tree: restack(config, tree), params)
