"""`scripts/train.py`: a config in, a trained model and its numbers out."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from ffn_heterogeneity.adapters import parameters_in
from ffn_heterogeneity.data.corpus.shards import check_vocabulary
from ffn_heterogeneity.data.pipeline import Pipeline, make_pipeline
from ffn_heterogeneity.io.card import compared, public_text, write_card
from ffn_heterogeneity.io.checkpoints import Checkpoints
from ffn_heterogeneity.io.export import loads_in, save_pretrained
from ffn_heterogeneity.io.files import read_json, write_json
from ffn_heterogeneity.io.fingerprint import of_model
from ffn_heterogeneity.io.load import Model, load_model, load_tokenizer
from ffn_heterogeneity.io.metrics import missing_steps, read_metrics
from ffn_heterogeneity.io.workdir import working_in
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import local_rows, to_host
from ffn_heterogeneity.parallel.processes import on_main, say
from ffn_heterogeneity.paths import flatten
from ffn_heterogeneity.train.build import Built, build, check_config, hyper_function, loop_config
from ffn_heterogeneity.train.evaluation import make_evaluator
from ffn_heterogeneity.train.fit import check_state, compile_checked
from ffn_heterogeneity.train.hooks import Hook
from ffn_heterogeneity.train.loop import LoopResult, TrainLoop
from ffn_heterogeneity.train.plan import dry_run
from ffn_heterogeneity.train.shared import Shared
from ffn_heterogeneity.train.source import is_fresh, model_shape, starting_model
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.wording import spans


def run(config: ConfigDict, workdir: str | os.PathLike, shared: Shared | None = None) -> dict:
    """Trains as `config` says (`configs/parts/train.py`); returns what `results.json` holds.

    A directory that holds this run already is continued; a finished one is only read. With
    `config.dry_run` the run is planned and not made.

    Args:
      shared: what this run has in common with others of this process, if there are any.

    Raises:
      ValueError (WorkdirError, DataError, CheckpointError, RuleError, TrainingDiverged are some):
        what is wrong, in one line.
      SystemExit: a signal stopped it, after the state was saved (128 + its number).
    """
    start, workdir = time.time(), epath.Path(workdir)
    logging.set_verbosity(logging.WARNING)  # orbax tells twenty lines a save
    if config.dry_run:
        return dry_run(config, workdir)
    # Alone or not is whoever launches it to say.
    with working_in(workdir, config.to_dict(), alone=False):
        if (workdir / "results.json").exists():
            print(f"this run is complete: {workdir}/results.json", file=sys.stderr)
        else:
            _train(config, workdir, shared, start)
        return read_json(workdir / "results.json")


def _train(config: ConfigDict, workdir: epath.Path, shared: Shared | None, start: float) -> None:
    """The run; `start` is when it began."""
    check_config(config)
    mesh = partition.make_mesh(**config.mesh)
    say(check_state(config, mesh))
    say(f"loading {config.model} ..." if config.model else "making a new model ...")
    model = starting_model(config, shared.load if shared else load_model)
    say(model.source)
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer, so no text can be read: add its files")
    pipeline = open_data(config, model.tokenizer, model.config.vocab_size, mesh)
    with contextlib.closing(pipeline.train_iterator()) as batches:
        make = shared.build if shared else build
        built = make(config, model.config, model.params, mesh)
        loop, facts = make_loop(config, workdir, built, model, pipeline, batches, make)
        hyper = loop.hyper
        # The device holds the weights now; the host's copy is not needed any more.
        model = Model(model.config, {}, model.tokenizer, model.source)
        result = loop.run()
    if result.stopped:
        raise SystemExit(128 + signal.Signals[result.stopped])
    params, step = final_params(config, workdir, result)
    params = to_host(built.settled(params, step, hyper(result.step)))

    def finish() -> None:
        save_pretrained(
            model.config, params, workdir / "model", tokenizer=model.tokenizer,
            export=config.export.form, dtype=config.export.dtype, overwrite=True,
            structure="fold" if config.export.form == "padded" else "keep",
        )  # fmt: skip
        results = facts | summary(workdir, result)
        results |= measured(config, built, pipeline, results["history"], step)
        if hasattr(batches, "shares"):
            results["shares"] = batches.shares
            say(", ".join(f"{share:.1%} of rows from {k}" for k, share in batches.shares.items()))
        losses, results["seconds"] = ", ".join(facts["losses"]), time.time() - start
        write_card(workdir / "model", config.model or "", f"trained with {losses}", results)
        write_json(workdir / "results.json", results | of_model(workdir / "model"))
        print(f"model: {workdir}/model, numbers: {workdir}/results.json", file=sys.stderr)
        print(loads_in(workdir / "model"), file=sys.stderr)

    on_main(finish)


def examine(config: ConfigDict) -> None:
    """Refuses what `run` would before it compiles, without reading any weights; errors as there."""
    check_config(config)
    mesh = partition.make_mesh(**config.mesh)
    fresh = is_fresh(config)
    name, revision = (config.tokenizer, None) if fresh else (config.model, config.revision)
    tokenizer, vocabulary = load_tokenizer(name, revision=revision), model_shape(config).vocab_size
    check_vocabulary(tokenizer, vocabulary, config.model or "the new model")
    open_data(config, tokenizer, vocabulary, mesh)
    check_state(config, mesh)


def open_data(config: ConfigDict, tokenizer: Any, vocab_size: int, mesh: Mesh) -> Pipeline:
    """The run's data, of which this process reads the rows that its devices are given."""
    rows = local_rows(partition.batch_sharding(mesh), config.batch_size, config.accumulation)
    return make_pipeline(
        config.data.to_dict(), tokenizer, config.batch_size, config.seq_len, config.seed,
        accumulation=config.accumulation, rows=rows, vocab_size=vocab_size,
    )  # fmt: skip


def make_loop(
    config: ConfigDict,
    workdir: epath.Path,
    built: Built,
    model: Model,
    pipeline: Pipeline,
    batches: Any,
    make: Callable[..., Built] = build,
) -> tuple[TrainLoop, dict]:
    """Everything but the running; and the facts of the run that `results.json` names."""
    state = create_state(
        model.params, built.optimizer, built.trainable,
        seed=config.seed, shardings=built.shardings[0],
    )  # fmt: skip
    done = (workdir / "checkpoints" / str(config.steps)).exists()
    seconds = None
    if not done:
        built, seconds = compile_checked(config, built, state, len(pipeline.rows), make)
    loop = TrainLoop(
        loop_config(config),
        train_step=built.train_step,
        state=state,
        batches=batches,
        hyper=hyper_function(config),
        workdir=workdir,
        hooks=_hooks(config, built, pipeline, hyper_function(config)),
        shardings=built.shardings,
        gradient_paths=tuple(sorted(path for path, trains in built.trainable.items() if trains)),
        tensorboard=config.tensorboard,
        wandb=config.wandb,
        compile_seconds=seconds,
    )
    sizes = {path: parameters_in(path, leaf) for path, leaf in flatten(model.params).items()}
    facts = {
        "model": model.source,
        "parameters": sum(sizes.values()),
        "trainable_parameters": sum(
            int(size * np.mean(built.trainable[path])) for path, size in sizes.items()
        ),
        "device": jax.devices()[0].device_kind,
        "compute_dtype": str(built.options.compute_dtype),
        "remat": built.options.remat,
        "mesh": dict(built.mesh.shape),
        "processes": jax.process_count(),
        "losses": {term.name: config.losses[term.name].weight for term in built.terms},
    }
    return loop, facts


def _hooks(
    config: ConfigDict, built: Built, pipeline: Pipeline, hyper: Callable[[int], dict]
) -> tuple[Hook, ...]:
    if pipeline.held_out is None:
        say("no validation data: nothing is evaluated and no checkpoint is the best")
        return ()

    def batches() -> Iterator[dict[str, np.ndarray]]:
        """Held-out batches cut into micro-batches: evaluation needs no more memory than training.

        Rows of padding alone are kept: every piece has the same shape, so one compilation.
        """
        for batch in pipeline.validation_iterator(config.eval.max_batches or None):
            for part in range(config.accumulation):
                rows = len(pipeline.rows) // config.accumulation
                yield {k: v[part * rows : (part + 1) * rows] for k, v in batch.items()}

    evaluate = make_evaluator(
        built.eval_step,
        built.params_metrics,
        batches,
        terms=built.evaluated_terms,
        sharding=partition.batch_sharding(built.mesh, accumulated=False),
        objective=built.objective,
    )

    def measure(state, check_stop):
        params = built.settled(state.params, state.step, hyper(int(state.step)))
        return evaluate(params, check_stop)

    return (Hook(measure, config.eval.every),)


def final_params(config: ConfigDict, workdir: epath.Path, result: LoopResult) -> tuple[dict, int]:
    """(parameters, their step): the last; or the best, which are a checkpoint's, or the input's if
    nothing beat it."""
    if config.export.weights != "best" or not result.best or result.best["step"] == result.step:
        return result.state.params, result.step
    if result.best["step"] == 0:
        say("no evaluation was better than the model as it was loaded: that one is exported")
        return starting_model(config).params, 0
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep)
    state, _ = checkpoints.restore(result.state, result.best["step"])
    checkpoints.close()
    return state.params, result.best["step"]


def summary(workdir: epath.Path, result: LoopResult) -> dict:
    """First, best and final validation metrics, their history, and the speed."""
    rows = read_metrics(workdir / "metrics.jsonl")
    lost = spans(missing_steps(rows, range(1, result.step + 1)))
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
        **({"steps_without_metrics": lost} if lost else {}),
    }


def measured(
    config: ConfigDict, built: Built, pipeline: Pipeline, history: list[dict], step: int
) -> dict:
    """Perplexity of the held-out rows before the first step and at the exported one; {}: unknown.

    The rows are counted over all processes' batches, which this one reads again.
    """
    nll = {row["step"]: row["validation/nll"] for row in history if "validation/nll" in row}
    if not {0, step} <= nll.keys():
        return {}
    whole = copy.copy(pipeline)
    whole.rows = np.arange(pipeline.batch_size)
    batches = whole.validation_iterator(config.eval.max_batches or None)
    counts = [(mask.any(1).sum(), mask.sum()) for mask in (b["loss_mask"] for b in batches)]
    windows, tokens = np.sum(counts, axis=0).tolist()
    data = config.data
    text = data.get("validation_path") or f"held-out part of {public_text(data.path or data.task)}"
    return compared(
        *(float(np.exp(nll[at])) for at in (0, step)), text=text, window=config.seq_len,
        windows=windows, tokens=tokens, dtype=str(built.options.compute_dtype),
    )  # fmt: skip
