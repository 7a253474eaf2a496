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
from jax.sharding import Mesh
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
from ffn_heterogeneity.train.distributed import on_main, say
from ffn_heterogeneity.train.evaluation import make_evaluator
from ffn_heterogeneity.train.loop import LoopConfig, LoopResult, TrainLoop
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer, make_schedule
from ffn_heterogeneity.train.placement import local_rows, to_host
from ffn_heterogeneity.train.state import abstract_state, create_state, state_shardings
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
    on_main(lambda: prepare_workdir(workdir, config.to_dict()))
    if (workdir / "results.json").exists():
        print(f"this run is complete: {workdir}/results.json", file=sys.stderr)
        return read_json(workdir / "results.json")
    check_config(config)
    mesh = partition.make_mesh(**config.mesh)
    rows = local_rows(partition.batch_sharding(mesh), config.batch_size, config.accumulation)
    say(f"loading {config.model} ...")
    model = load_model(config.model, revision=config.revision)
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer, so no text can be read: add its files")
    causal_lm.check_leaves(model.config, model.params)
    before = statistics(model.config, model.params)
    pipeline = make_pipeline(
        config.data.to_dict(), model.tokenizer, config.batch_size, config.seq_len, config.seed,
        accumulation=config.accumulation, rows=rows,
    )  # fmt: skip
    with contextlib.closing(pipeline.train_iterator()) as batches:
        loop, facts = make_loop(config, workdir, mesh, model, pipeline, batches)
        # The device holds the weights now; the host's copy is not needed any more.
        model = Model(model.config, {}, model.tokenizer, model.source)
        result = loop.run()
    if result.stopped:
        raise SystemExit(130 if result.stopped == "SIGINT" else 143)
    params = to_host(final_params(config, workdir, result))

    def finish() -> None:
        save_pretrained(
            model.config, params, workdir / "model", tokenizer=model.tokenizer,
            export=config.export.form, dtype=config.export.dtype, overwrite=True,
        )  # fmt: skip
        after = statistics(model.config, params)
        results = facts | {"before": before, "after": after} | summary(workdir, result)
        write_json(workdir / "results.json", results | {"seconds": time.time() - start})
        print(f"model: {workdir}/model, numbers: {workdir}/results.json", file=sys.stderr)

    on_main(finish)
    return read_json(workdir / "results.json")


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


def make_terms(config: ConfigDict, model: ModelConfig, devices: int = 1) -> tuple[LossTerm, ...]:
    """NLL, and NUCL unless its variant is "none"."""
    terms = [nll_term(model, config.nll_reduction, devices=devices)]
    if config.nucl.variant != "none":
        nucl = config.nucl
        terms.append(
            nucl_term(
                nucl.variant, tuple(nucl.targets), nucl.axis, weight="alpha", sharded=devices > 1
            )
        )
    return tuple(terms)


def entropy_monitor(config: ConfigDict, devices: int = 1) -> LossTerm:
    """The entropy of the targeted connections, evaluated beside any variant and never trained on.

    Its mean per neuron is what the paper's Figures 2 and 3 plot: "validation/entropy/ent/...".
    """
    nucl = config.nucl
    return nucl_term("ent", tuple(nucl.targets), nucl.axis, name="entropy", sharded=devices > 1)


def make_loop(
    config: ConfigDict,
    workdir: epath.Path,
    mesh: Mesh,
    model: Model,
    pipeline: Pipeline,
    batches: Any,
) -> tuple[TrainLoop, dict]:
    """Everything but the running; and the facts of the run that `results.json` names."""
    mask = partition.trainable_mask(
        flatten(model.params), tuple(config.freeze), tuple(config.train_only)
    )
    optimizer = make_optimizer(optimizer_config(config), model.params, mask)
    placed = (
        state_shardings(mesh, abstract_state(model.params, optimizer, mask)),
        partition.batch_sharding(mesh),
        partition.replicated(mesh),
    )
    state = create_state(model.params, optimizer, mask, seed=config.seed, shardings=placed[0])
    terms, options = make_terms(config, model.config, mesh.size), run_options(config, mesh)

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
        state=state,
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
        "mesh": dict(mesh.shape),
        "processes": jax.process_count(),
        "alpha": config.nucl.alpha,
        "variant": config.nucl.variant,
    }
    return loop, facts


def _evaluator(config, forward, terms, pipeline, mesh):
    if pipeline.held_out is None:
        say("no validation data: nothing is evaluated and no checkpoint is the best")
        return None

    def batches() -> Iterator[dict[str, np.ndarray]]:
        """Held-out batches cut into micro-batches: evaluation needs no more memory than training.

        Rows of padding alone are kept: every piece has the same shape, so one compilation.
        """
        for batch in pipeline.validation_iterator(config.eval.max_batches or None):
            for part in range(config.accumulation):
                rows = len(pipeline.rows) // config.accumulation
                yield {k: v[part * rows : (part + 1) * rows] for k, v in batch.items()}

    return make_evaluator(
        make_eval_step(forward, terms, partition.replicated(mesh)),
        make_params_metrics(
            (*terms, entropy_monitor(config, mesh.size)), partition.replicated(mesh)
        ),
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


def run_options(config: ConfigDict, mesh: Mesh) -> causal_lm.RunOptions:
    """What "auto" means on this platform; shardings on a mesh."""
    on_cpu = jax.default_backend() == "cpu"
    dtype, remat = config.compute_dtype, config.remat
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    if remat == "auto":
        remat = "dots" if on_cpu else "full"
    held = partition.run_shardings(mesh) if mesh.size > 1 else {}
    return causal_lm.RunOptions(
        compute_dtype=jax.numpy.dtype(dtype), remat=remat, unroll=config.unroll or True, **held
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
    """The last parameters, or the best ones: a checkpoint's, or the input's if nothing beat it."""
    if config.export.weights != "best" or not result.best or result.best["step"] == result.step:
        return result.state.params
    if result.best["step"] == 0:
        say("no evaluation was better than the model as it was loaded: that one is exported")
        return load_model(config.model, revision=config.revision).params
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
    state, _ = checkpoints.restore(result.state, result.best["step"])
    checkpoints.close()
    return state.params


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
