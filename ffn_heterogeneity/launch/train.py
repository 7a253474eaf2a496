"""`scripts/train.py`: train a model from a config, and write it with its numbers.

config -> objective, model, prepared tree -> built step -> loop -> results and export
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.corpus.shards import check_vocabulary
from ffn_heterogeneity.heads import ROOT
from ffn_heterogeneity.io.checkpoints import Checkpoints
from ffn_heterogeneity.io.files import plain
from ffn_heterogeneity.io.fingerprint import of_model
from ffn_heterogeneity.io.hf.card import write_card
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import Model, load_tokenizer
from ffn_heterogeneity.io.metrics import missing_steps, read_metrics
from ffn_heterogeneity.io.read import read_json
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.io.runs import SEEDS_APART
from ffn_heterogeneity.io.workdir import UNSTARTED, finished, paths_in_stages, working_in
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import to_host
from ffn_heterogeneity.parallel.processes import answer, gathered, on_main, say
from ffn_heterogeneity.train.build import objective_of
from ffn_heterogeneity.train.dry_run import dry_run
from ffn_heterogeneity.train.early import check_early
from ffn_heterogeneity.train.evaluation import PREFIX, validation
from ffn_heterogeneity.train.fit import compile_checked, described
from ffn_heterogeneity.train.hooks import Hook
from ffn_heterogeneity.train.loop import LoopResult, Program, TrainingDiverged, TrainLoop
from ffn_heterogeneity.train.objectives import Data
from ffn_heterogeneity.train.plan import Plan, plan, plan_evaluation
from ffn_heterogeneity.train.settings import TrainConfig, read
from ffn_heterogeneity.train.shared import Shared
from ffn_heterogeneity.train.source import found_model, starting_model
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.tree import flatten
from ffn_heterogeneity.wording import some, spans

MOVING = "failed_attempt"  # folder in `set_aside`


def run(config: ConfigDict, workdir: str | os.PathLike, shared: Shared | None = None) -> dict:
    """Train as `config` describes (`configs/parts/train.py`); return the content of `results.json`.

    If the directory already holds this run, it is resumed, or only read if finished. With
    `config.dry_run` the run is only planned.

    Args:
      shared: state shared with other runs of this process, if there are any.

    Raises:
      ValueError (e.g. WorkdirError, DataError, CheckpointError, RuleError, TrainingDiverged): the
        message is one line.
      SystemExit: a signal stopped it, after the state was saved (128 + its number).
    """
    start, workdir, settings = time.time(), epath.Path(workdir), read(config)
    logging.set_verbosity(logging.WARNING)  # orbax logs twenty lines per save
    logging.get_absl_logger().addFilter(_no_traceback)
    if settings.dry_run:
        return dry_run(settings, workdir)
    if not finished(workdir):
        check_early(settings)
    # The launcher decides whether other processes may use the directory.
    with working_in(workdir, config.to_dict(), alone=False):
        if finished(workdir):
            print(f"this run is complete: {workdir}/results.json", file=sys.stderr)
        else:
            try_seeds(settings, workdir, shared or Shared(keep_model=False), start)
        results = read_json(workdir / "results.json")
        _answer(results)
        return results


def _no_traceback(record: Any) -> bool:
    """Log filter: drop tracebacks of orbax's threads, because the run's last line has the error."""
    return not (record.exc_info and "orbax" in record.pathname)


def try_seeds(config: TrainConfig, workdir: epath.Path, shared: Shared, start: float) -> None:
    """Call `train`; if the loss is not finite, retry up to `config.retries` times with other seeds.

    The files of a failed attempt are moved to <workdir>/diverged_<n>, so that a resumed run knows
    its attempt.
    """
    on_main(lambda: (workdir / MOVING).exists() and set_aside(workdir))
    for attempt in itertools.count(len(diverged(workdir))):
        seeded = dataclasses.replace(config, seed=config.seed + attempt * SEEDS_APART)
        try:
            return train(seeded, workdir, shared, start)
        except TrainingDiverged as error:
            if attempt >= config.retries:
                raise
            say(f"{error}; starting again with seed {seeded.seed + SEEDS_APART}")
            on_main(functools.partial(set_aside, workdir))


def diverged(workdir: epath.Path) -> list[epath.Path]:
    """Folders of attempts whose loss was not finite."""
    return [*workdir.glob("diverged_*")]


def set_aside(workdir: epath.Path) -> None:
    """Move the outputs of a failed attempt to diverged_<n>; if interrupted, the next start ends it.

    The folder gets this name last, because its existence begins the next attempt.
    """
    folder = workdir / MOVING
    folder.mkdir(parents=True, exist_ok=True)
    for name in UNSTARTED:
        if (workdir / name).exists():
            (workdir / name).rename(folder / name)
    folder.rename(workdir / f"diverged_{len(diverged(workdir))}")


def train(config: TrainConfig, workdir: epath.Path, shared: Shared, start: float) -> None:
    """Run one attempt; `start` is the time at which the run began."""
    built = plan(config, cache=shared.plans)
    say(described(built, config.loop.steps))
    say(f"loading {config.model} ..." if config.model else "making a new model ...")
    head = built.objective.head
    model = starting_model(config.source, head, shared.load)
    say(model.source)
    if other := built.differs(model):
        # Some surgeries depend on the weights, and remote files had no headers to plan with.
        if not built.assumed:
            say(f"planned again: {other} differs from its header")
        built = plan(config, built.mesh, model, shared.plans)
    if built.unread:
        say(f"{built.objective.name} does not read {some(built.unread)}: they stay unchanged")
    for kernels in built.whole:
        say(f"a step makes the kernels of {kernels}")
    if config.dropout:
        say(f"dropout={config.dropout:g}: losses in training are higher than in validation for it")
    data = built.open_data(model.tokenizer)
    with contextlib.closing(data.batches):
        loop, built, seconds = make_loop(config, built, model, data, workdir, shared)
        # The weights are on the device now; the host's copy is no longer needed.
        model = dataclasses.replace(model, params={})
        result = loop.run()
    if result.stopped:
        raise SystemExit(128 + signal.Signals[result.stopped])
    again = functools.partial(starting_model, config.source, head, shared.load)
    params, step = final_params(config, again, workdir, result)
    hyper = built.hyper(result.step)
    params = built.settled(params, step, hyper)
    tested = validation(built, data.at_end, at_end=True)(params) if data.at_end else {}
    params = to_host(params)
    facts = facts_of(built, model.source, hyper)
    facts |= {"exported_step": step, "compile_seconds": seconds or result.compile_seconds}
    facts |= tested

    def finish() -> None:
        export(config.export, model, params, workdir / "model")
        results = facts | summary(workdir, result)
        results |= data.says(results)
        if head := built.forward.head:
            results |= plain(head.says(params[ROOT]))
        if config.retries:
            results |= {"seed": config.seed, "retries": len(diverged(workdir))}
        results["seconds"] = time.time() - start
        method = f"trained with {', '.join(facts['losses'])}"
        loads = write_card(workdir / "model", config.model, method, results, model.config)
        write_results(workdir, results | of_model(workdir / "model"))
        if "constant_loss" in results and (said := unlearnt(workdir, results["constant_loss"])):
            print(said, file=sys.stderr)
        print(f"model: {workdir}/model, numbers: {workdir}/results.json", file=sys.stderr)
        print(loads, file=sys.stderr)

    on_main(finish)


def examine(config: ConfigDict) -> None:
    """Check everything that `run` checks before compiling, without reading weights."""
    settings = read(config)
    built, source = plan(settings), settings.source
    revision = None if source.is_fresh else source.revision
    tokenizer = load_tokenizer(source.model or source.tokenizer, revision=revision)
    check_vocabulary(tokenizer, built.model.vocab_size, source.model or "the new model")
    if not paths_in_stages(config.to_dict()):  # written before this stage begins
        built.open_data(tokenizer)
    described(built, settings.loop.steps)


def facts_of(built: Plan, source: str, weights: Mapping[str, float]) -> dict[str, Any]:
    """Facts of the run for `results.json`."""
    return {
        "model": source,
        "parameters": sum(built.sizes.values()),
        "trainable_parameters": built.trained,
        "device": jax.devices()[0].device_kind,
        "compute_dtype": str(built.options.compute_dtype),
        "mesh": dict(built.mesh.shape),
        "processes": jax.process_count(),
        "losses": {term.name: weights[str(term.weight)] for term in built.terms},
        "remat": built.options.remat,
    }


def make_loop(
    config: TrainConfig, built: Plan, model: Model, data: Data, workdir: epath.Path, shared: Shared
) -> tuple[TrainLoop, Plan, float | None]:
    """Return (the loop, ready to run, the step that fits in memory, the seconds to compile it)."""
    options = {"seed": config.seed, "shardings": built.shardings[0]}
    check_same(model.params)
    state = create_state(model.params, built.optimizer, built.trainable, **options)
    seconds = None
    if not (workdir / "checkpoints" / str(config.loop.steps)).exists():
        built, seconds = compile_checked(built, state)
        shared.plans[built.key] = built  # the next run starts with the step that fits
    mode, _, metric = (config.best_metric or built.objective.best).rpartition(":")
    loop = dataclasses.replace(config.loop, best_metric=metric, best_mode=mode or "min")
    program = Program(
        built.train_step,
        built.hyper,
        shardings=built.shardings,
        gradient_paths=tuple(sorted(path for path, trains in built.trainable.items() if trains)),
        lengths=len(built.objective.lengths),
        terms=tuple(term.name for term in built.terms),
    )
    hooks = validation_hooks(built, data, config.eval_every)
    return TrainLoop(loop, program, state, data.batches, workdir, hooks), built, seconds


def check_same(params: dict) -> None:
    """Check that all processes computed the same weights; each places its own part of them.

    Raises:
      ValueError: they did not.
    """
    if jax.process_count() == 1:
        return
    crc = 0
    for leaf in flatten(params).values():
        crc = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8), crc)
    if len({*gathered(np.uint32(crc)).tolist()}) > 1:
        raise ValueError(
            "the processes computed different weights before training (prepare=...): make the "
            "model in a run of one process first, and train that"
        )


def validation_hooks(built: Plan, data: Data, every: int) -> tuple[Hook, ...]:
    """Measurements between steps: on every held-out set, with the weights as exported."""
    if not data.held_out:
        monitors = [term.name for term in built.evaluated_terms if term not in built.terms]
        more = f"; not measured: {', '.join(monitors)}" if monitors else ""
        say(f"no validation data: no evaluation, and no best checkpoint{more}")
        return ()
    evaluate = validation(built, data.held_out)

    def measure(state, check_stop):
        params = built.settled(state.params, state.step, built.hyper(int(state.step)))
        return evaluate(params, check_stop)

    return (Hook(measure, every),)


def final_params(
    config: TrainConfig, start: Callable[[], Model], workdir: epath.Path, result: LoopResult
) -> tuple[dict, int]:
    """Return (parameters, their step) of the last or the best step.

    The best are those of a checkpoint, or those of `start()` if no evaluation was better; then the
    last state is deleted.
    """
    best = result.best
    if config.export["weights"] != "best" or not best or best["step"] == result.step:
        return result.state.params, result.step
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), result.state
    )
    for leaf in jax.tree.leaves(result.state):  # a device may not have room for both
        leaf.delete()
    if best["step"] == 0:
        say("no evaluation was better than the original model: exporting the original model")
        return start().params, 0
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.loop.keep)
    state, _ = checkpoints.restore(wanted, best["step"])
    checkpoints.close()
    return state.params, best["step"]


def export(settings: Mapping[str, str], model: Model, params: dict, directory: epath.Path) -> None:
    """Write the trained model, with its structure if the form supports it."""
    options = {"export": settings["form"], "dtype": settings["dtype"], "overwrite": True}
    options["structure"] = "fold" if settings["form"] == "padded" else "keep"
    options["tokenizer"] = model.tokenizer
    save_pretrained(model.config, params, directory, **options)


def _answer(results: Mapping[str, Any]) -> None:
    """Print the results of the last validation and of the tests."""
    for name, value in {**results, **(results["final"] or {})}.items():
        if name.startswith((PREFIX, "test/")) and np.ndim(value) == 0:
            answer(f"{name}: {float(value):.5f}")  # of a file: "nan"


def summary(workdir: epath.Path, result: LoopResult) -> dict:
    """First, best and final validation metrics, their history, and the speed."""
    rows = read_metrics(workdir / "metrics.jsonl")
    lost = spans(missing_steps(rows, range(1, result.step + 1)))
    history = [
        {key: value for key, value in row.items() if not isinstance(value, list)}
        for row in rows
        if any(key.startswith(PREFIX) for key in row)
    ]
    return {
        "steps": result.step,
        "first": history[0] if history else None,
        "final": history[-1] if history else None,
        "best": result.best,
        "history": history,
        "tokens_per_second": result.tokens_per_second,
        **({"steps_without_metrics": lost} if lost else {}),
    }


def unlearnt(workdir: epath.Path, constant: float) -> str:
    """Return a warning if a classifier learned nothing, else "".

    That is: its mean loss over the last 10% of the steps is within 2% of the loss of a constant
    prediction.
    """
    rows, names = read_metrics(workdir / "metrics.jsonl"), ("classification", "regression")
    values = [row.get(f"train/{name}") for row in rows for name in names]
    losses = [loss for loss in values if isinstance(loss, float)]
    last = losses[-max(1, len(losses) // 10) :]
    if not last or (mean := float(np.mean(last))) < 0.98 * constant:
        return ""
    said = f"nothing was learned: final loss {mean:.3f}; a constant prediction has {constant:.3f}"
    return f"{said}: raise --config.optimizer.learning_rate or --config.epochs"


def validate(config: ConfigDict, workdir: epath.Path) -> dict:
    """Run the validation of a training config on the unchanged `config.model`.

    Called by `scripts/evaluate.py`; returns the content of `results.json`.

    Raises:
      ValueError: as `run`; the model lacks the objective's head; there is no held-out data.
    """
    settings = read(config)
    mesh, model = partition.make_mesh(**settings.mesh), found_model(settings.source)
    objective = objective_of(settings.task, model.config)
    built = plan_evaluation(settings, objective, model, mesh)
    data = built.open_data(model.tokenizer)
    with contextlib.closing(data.batches):
        if not data.held_out:
            raise ValueError("no validation data: nothing to evaluate")
        where = partition.shardings(mesh, model.params, built.leaves)
        metrics = validation(built, data.held_out)(jax.device_put(model.params, where))
    results = {"model": model.source, "objective": built.objective.name, **metrics}
    on_main(lambda: write_results(workdir, plain(results)))
    for name, value in metrics.items():
        if np.ndim(value) == 0:
            answer(f"{name}: {float(value):.5f}")  # of a file: "nan"
    return plain(results)
