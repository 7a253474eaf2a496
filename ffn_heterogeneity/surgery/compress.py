"""`scripts/compress.py`: a model in, a smaller model and the list of what went out."""

from __future__ import annotations

import sys

import jax
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.io.export import EXPORTS, save_pretrained
from ffn_heterogeneity.io.files import remove_leftovers, write_json
from ffn_heterogeneity.io.load import Model, load_model, model_directory
from ffn_heterogeneity.models.causal_lm import check_leaves
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.surgery.plan import Plan
from ffn_heterogeneity.surgery.reduce import reduce_model, results_of
from ffn_heterogeneity.surgery.streaming import compress_directory
from ffn_heterogeneity.wording import check_choice

DTYPES = ("as_read", "float32", "bfloat16", "float16")


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """Loads, chooses, removes, writes; returns what `results.json` holds.

    Raises:
      ValueError, CheckpointError: a config value or a file is wrong; the message names it.
    """
    check_config(config)
    target, dtype = workdir / "model", None if config.dtype == "as_read" else config.dtype
    if config.streaming:
        source = model_directory(config.model, revision=config.revision)
        results = compress_directory(
            source, target, plan_of(config), export=config.export, dtype=dtype
        )
    else:
        model = load_model(config.model, revision=config.revision)
        smaller_config, smaller, results = prune(config, model)
        remove_leftovers(target)
        save_pretrained(
            smaller_config, smaller, target,
            tokenizer=model.tokenizer, export=config.export, dtype=dtype, overwrite=True,
        )  # fmt: skip
        write_json(target / "removed_neurons.json", results)
    write_json(workdir / "results.json", results)
    print(
        f"removed {sum(map(len, results['removed'])):,} neurons by {config.criterion}: "
        f"{results['parameters_before']:,} -> {results['parameters_after']:,} parameters "
        f"({results['parameters_removed_percent']:.1f}% gone); {target}",
        file=sys.stderr,
    )
    return results


def prune(config: ConfigDict, model: Model) -> tuple[ModelConfig, dict, dict]:
    """What `config` removes from `model`, in memory; the model itself is untouched.

    Returns:
      (config of the smaller model, its unstacked tree, the results that `run` writes).

    Raises:
      ValueError: as `run`.
    """
    plan = plan_of(config)
    smaller_config, smaller, removed, reports = reduce_model(model.config, model.params, plan)
    check_leaves(smaller_config, restack_shapes(smaller_config, smaller))
    results = results_of(plan, (model.config, smaller_config), removed, reports)
    return smaller_config, smaller, results


def plan_of(config: ConfigDict) -> Plan:
    """What the config says is to be removed; a count goes before the ratio."""
    return Plan(
        criterion=config.criterion,
        ratio=None if config.count is not None else config.ratio,
        count=config.count,
        layers=config.layers,
        budget=config.budget,
        reverse=config.reverse,
        seed=config.seed,
        compensation=config.compensation,
    )


def check_config(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded or trained; errors as `run`."""
    if not config.model:
        raise ValueError("--config.model is empty: give a directory, a .gguf file or a hub id")
    check_choice("dtype", config.dtype, DTYPES)
    check_choice("export", config.export, EXPORTS)
    plan_of(config).check()
    if config.streaming and str(config.model).endswith(".gguf"):
        model_directory(config.model)  # says what to do


def restack_shapes(config, params) -> dict:
    """The stacked tree's shapes, without stacking the arrays."""
    return jax.eval_shape(lambda tree: restack(config, tree), params)
