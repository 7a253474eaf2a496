"""`scripts/train.py`: a config in, a trained model and its numbers out."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.pipeline import Pipeline, make_pipeline
from ffn_heterogeneity.io.checkpoints import Checkpoints
from ffn_heterogeneity.io.export import save_pretrained
from ffn_heterogeneity.io.files import read_json, write_json
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import layer_statistics, nucl_term
from ffn_heterogeneity.losses.terms import LossTerm
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.paths import flatten
from ffn_heterogeneity.report.writer import read_metrics
from ffn_heterogeneity.train import partition
from ffn_heterogeneity.train.evaluation import make_evaluator
from ffn_heterogeneity.train.loop import LoopConfig, LoopResult, TrainLoop
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer, make_schedule
from ffn_heterogeneity.train.state import create_state, state_shardings
from ffn_heterogeneity.train.step import make_eval_step, make_params_metrics, make_train_step
from ffn_heterogeneity.train.workdir import prepare_workdir

COMPUTE_DTYPES = ("auto", "float32", "bfloat16")
EXPORT_DTYPES = ("float32", "bfloat16", "float16")


def run(config: ConfigDict, workdir: str | os.PathLike) -> dict:
    """Trains as `configs/nucl_finetune.py` describes; returns what `results.json` holds.

    A directory that holds this run already is continued; a finished one is only read.

    Raises:
      ValueError (WorkdirError, DataError, CheckpointError, RuleError, TrainingDiverged are some):
        what is wrong, in one line.
      SystemExit: a signal stopped it, after the state was saved (143: SIGTERM, 130: SIGINT).
    """
    start, workdir = time.time(), epath.Path(workdir)
    logging.set_verbosity(logging.WARNING)  # orbax tells twenty lines a save
    prepare_workdir(workdir, config.to_dict())
    if (workdir / "results.json").exists():
        print(f"this run is complete: {workdir}/results.json", file=sys.stderr)
        return read_json(workdir / "results.json")
    check_config(config)
    print(f"loading {config.model} ...", flush=True)
    model = load_model(config.model, revision=config.revision)
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer, so no text can be read: add its files")
    causal_lm.check_leaves(model.config, model.params)
    before = statistics(model.config, model.params)
    pipeline = make_pipeline(
        config.data.to_dict(), model.tokenizer, config.batch_size, config.seq_len, config.seed
    )
    with contextlib.closing(pipeline.train_iterator()) as batches:
        loop, facts = make_loop(config, workdir, model, pipeline, batches)
        # The device holds the weights now; the host's copy is not needed any more.
        model = Model(model.config, {}, model.tokenizer, model.source)
        result = loop.run()
    if result.stopped:
        raise SystemExit(130 if result.stopped == "SIGINT" else 143)
    params = final_params(config, workdir, result)
    save_pretrained(
        model.config, params, workdir / "model", tokenizer=model.tokenizer,
        export=config.export.form, dtype=config.export.dtype, overwrite=True,
    )  # fmt: skip
    after = statistics(model.config, params)
    results = facts | {"before": before, "after": after} | summary(workdir, result)
    results["seconds"] = time.time() - start
    write_json(workdir / "results.json", results)
    print(f"model: {workdir}/model, numbers: {workdir}/results.json", file=sys.stderr)
    return results


def check_config(config: ConfigDict) -> None:
    """Refuses what would only be noticed after hours.

    Raises:
      ValueError: names the key, its value and what it may be.
    """
    for key, value, choices in (
        ("compute_dtype", config.compute_dtype, COMPUTE_DTYPES),
        ("export.dtype", config.export.dtype, EXPORT_DTYPES),
        ("export.form", config.export.form, ("auto", "padded", "native")),
        ("export.weights", config.export.weights, ("last", "best")),
    ):
        if value not in choices:
            raise ValueError(f"{key}={value!r}: choose one of {choices}")
    if not config.model:
        raise ValueError("model is empty: give a directory, a .gguf file, a hub id or a preset")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout={config.dropout} is outside [0, 1)")
    if not np.isfinite(config.nucl.alpha) or config.nucl.alpha < 0:
        raise ValueError(f"nucl.alpha={config.nucl.alpha} must be finite and >= 0")
    if config.accumulation < 1 or config.batch_size % config.accumulation:
        raise ValueError(
            f"batch_size={config.batch_size} must be a multiple of "
            f"accumulation={config.accumulation}"
        )
    if config.export.weights == "best" and not config.checkpoint.keep_best:
        raise ValueError("export.weights='best' needs checkpoint.keep_best=True")


def make_terms(config: ConfigDict, model: ModelConfig) -> tuple[LossTerm, ...]:
    """NLL, and NUCL unless its variant is "none"."""
    terms = [nll_term(model, config.nll_reduction)]
    if config.nucl.variant != "none":
        nucl = config.nucl
        terms.append(nucl_term(nucl.variant, tuple(nucl.targets), nucl.axis, weight="alpha"))
    return tuple(terms)


def entropy_monitor(config: ConfigDict) -> LossTerm:
    """The entropy of the targeted connections, evaluated beside any variant and never trained on.

    Its mean per neuron is what the paper's Figures 2 and 3 plot: "validation/entropy/ent/...".
    """
    return nucl_term("ent", tuple(config.nucl.targets), config.nucl.axis, name="entropy")


def make_loop(
    config: ConfigDict, workdir: epath.Path, model: Model, pipeline: Pipeline, batches: Any
) -> tuple[TrainLoop, dict]:
    """Everything but the running; and the facts of the run that `results.json` names."""
    mask = partition.trainable_mask(
        flatten(model.params), tuple(config.freeze), tuple(config.train_only)
    )
    optimizer = make_optimizer(optimizer_config(config), model.params, mask)
    state = create_state(model.params, optimizer, mask, seed=config.seed)
    mesh = partition.make_mesh()
    placed = (
        state_shardings(mesh, state),
        partition.batch_sharding(mesh),
        partition.replicated(mesh),
    )
    terms, options = make_terms(config, model.config), run_options(config)

    def forward(params, batch, *, probes, dropout):
        return causal_lm.forward(
            model_config, params, batch, options=options, probes=probes, dropout=dropout
        )

    model_config = model.config
    train_step = make_train_step(
        forward, terms, optimizer, mask,
        accumulation=config.accumulation, dropout=config.dropout > 0, shardings=placed,
    )  # fmt: skip
    loop = TrainLoop(
        loop_config(config),
        train_step=train_step,
        state=jax.device_put(state, placed[0]),
        batches=batches,
        hyper=hyper_function(config),
        workdir=workdir,
        evaluate=_evaluator(config, forward, terms, pipeline, mesh),
        shardings=placed,
        gradient_paths=tuple(sorted(path for path, trains in mask.items() if trains)),
        tensorboard=config.tensorboard,
    )
    sizes = {path: int(np.size(leaf)) for path, leaf in flatten(model.params).items()}
    facts = {
        "model": model.source,
        "parameters": sum(sizes.values()),
        "trainable_parameters": sum(size for path, size in sizes.items() if mask[path]),
        "device": jax.devices()[0].device_kind,
        "alpha": config.nucl.alpha,
        "variant": config.nucl.variant,
    }
    return loop, facts


def _evaluator(config, forward, terms, pipeline, mesh):
    if pipeline.held_out is None:
        print("no validation data: nothing is evaluated and no checkpoint is the best", flush=True)
        return None

    def batches() -> Iterator[dict[str, np.ndarray]]:
        """Held-out batches cut into micro-batches: evaluation needs no more memory than training.

        Rows of padding alone are kept: every piece has the same shape, so one compilation.
        """
        for batch in pipeline.validation_iterator(config.eval.max_batches or None):
            for part in range(config.accumulation):
                rows = config.batch_size // config.accumulation
                yield {k: v[part * rows : (part + 1) * rows] for k, v in batch.items()}

    return make_evaluator(
        make_eval_step(forward, terms),
        make_params_metrics((*terms, entropy_monitor(config))),
        batches,
        sharding=partition.batch_sharding(mesh, accumulated=False),
    )


def optimizer_config(config: ConfigDict) -> OptimizerConfig:
    """The keys of `config.optimizer` that are not the schedule's."""
    values = config.optimizer.to_dict()
    for key in ("learning_rate", "schedule", "warmup_steps", "final_fraction"):
        del values[key]
    return OptimizerConfig(**values)


def hyper_function(config: ConfigDict):
    """step (0-based) -> {"learning_rate", "alpha", "dropout"}."""
    schedule = make_schedule(
        config.optimizer.schedule,
        config.optimizer.learning_rate,
        warmup_steps=config.optimizer.warmup_steps,
        total_steps=config.steps,
        final_fraction=config.optimizer.final_fraction,
    )
    constant = {"alpha": config.nucl.alpha, "dropout": config.dropout}
    return lambda step: {"learning_rate": schedule(step), **constant}


def run_options(config: ConfigDict) -> causal_lm.RunOptions:
    """What "auto" means on this platform."""
    on_cpu = jax.default_backend() == "cpu"
    dtype, remat = config.compute_dtype, config.remat
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    if remat == "auto":
        remat = "dots" if on_cpu else "full"
    return causal_lm.RunOptions(
        compute_dtype=jax.numpy.dtype(dtype), remat=remat, unroll=config.unroll or True
    )


def loop_config(config: ConfigDict) -> LoopConfig:
    return LoopConfig(
        steps=config.steps,
        eval_every=config.eval.every,
        checkpoint_every=config.checkpoint.every,
        accumulation=config.accumulation,
        best_metric=config.eval.best_metric,
        keep=config.checkpoint.keep,
        keep_best=config.checkpoint.keep_best,
        save_at_end=config.checkpoint.at_end,
    )


def final_params(config: ConfigDict, workdir: epath.Path, result: LoopResult) -> dict:
    """The last parameters, or the best checkpoint's (the input's where nothing was better)."""
    if config.export.weights == "best" and result.best and result.best["step"] != result.step:
        checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
        step = checkpoints.best_step
        if step is None:
            raise ValueError(
                "export.weights='best', but no evaluation was better than the model as it was "
                "loaded: there is nothing to export. Lower the learning rate, or export 'last'"
            )
        state, _ = checkpoints.restore(result.state, step)
        checkpoints.close()
        return state.params
    return result.state.params


def statistics(config: ModelConfig, params: dict) -> list[dict]:
    """Per layer: sums over neurons of entropy, gini, mstd; their means; the number of neurons."""
    layers = []
    for sums, width in zip(layer_statistics(params), config.ffn_widths, strict=True):
        means = {f"{name}_mean": value / width for name, value in sums.items()}
        layers.append({**sums, **means, "neurons": width})
    return layers


def summary(workdir: epath.Path, result: LoopResult) -> dict:
    """First, best and final validation metrics, their history, and the speed."""
    rows = read_metrics(workdir / "metrics.jsonl")
    history = [
        {key: value for key, value in row.items() if not isinstance(value, list)}
        for row in rows
        if any(key.startswith("validation/") for key in row)
    ]
    return {
        "steps": result.step,
        "first": history[0] if history else None,
        "final": history[-1] if history else None,
        "best": result.best,
        "history": history,
        "tokens_per_second": result.tokens_per_second,
        "compile_seconds": result.compile_seconds,
    }
