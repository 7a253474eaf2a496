"""The loop: resuming to the same bits, signals, divergence, kept checkpoints, one compilation."""

import contextlib
import dataclasses
import functools
import os
import signal

import jax
import numpy as np
import pytest
from tiny_models import no_file_beyond
from tiny_runs import metrics, refused
from train_toy import HYPER, L1, NLL, NORM, TOY, ToyBatches, toy_batch, toy_forward, toy_params

from ffn_heterogeneity.io.checkpoints import Checkpoints
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.metrics import MetricsWriter
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.losses.terms import LossTerm, TermValue
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.train.evaluation import make_evaluator
from ffn_heterogeneity.train.hooks import Hook
from ffn_heterogeneity.train.language import counts
from ffn_heterogeneity.train.loop import LoopConfig, Program, TrainingDiverged, TrainLoop
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer, make_schedule
from ffn_heterogeneity.train.state import create_state, state_shardings
from ffn_heterogeneity.train.step import make_eval_step, make_params_metrics, make_train_step

# Nothing here is large.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

TERMS = (NLL, NORM, L1)
SCHEDULE = make_schedule("cosine", 0.05, warmup_steps=3, total_steps=20)


def placed_on(mesh, state):
    """Shardings of the state, a batch and scalars."""
    placed = state_shardings(mesh, state, declared(TOY, state.params))
    return placed, partition.batch_sharding(mesh), partition.replicated(mesh)


@functools.cache
def compiled(terms, accumulation):
    """The compiled functions of a run, shared because compilation takes most of a test's time."""
    mesh, params = partition.make_mesh(), toy_params()
    leaves = declared(TOY, params)
    mask = partition.trainable_mask(leaves, freeze=("^embed/",))
    optimizer = make_optimizer(OptimizerConfig("adamw", weight_decay=0.1), params, mask, leaves)
    state = create_state(params, optimizer, mask)
    placed = placed_on(mesh, state)
    given = {"dropout": True, "counts": counts, "shardings": placed, "accumulation": accumulation}
    step = make_train_step(toy_forward, terms, optimizer, mask, **given)
    evaluate = make_eval_step(toy_forward, terms), make_params_metrics(terms)
    return mask, optimizer, placed, step, evaluate


def make_loop(workdir, *, terms=TERMS, hook=None, hyper=None, evaluate=True, **options):
    options = {"steps": 12, "eval_every": 4, "accumulation": 2} | options
    every = options.pop("eval_every")
    mask, optimizer, placed, step, evaluators = compiled(terms, options["accumulation"])
    validation = [toy_batch(3, seed=900 + i) for i in range(2)]
    evaluator = make_evaluator(*evaluators, lambda: iter(validation))
    state = create_state(toy_params(), optimizer, mask, seed=5)
    hyper = hyper or (lambda s: HYPER | {"learning_rate": SCHEDULE(s), "dropout": 0.2})
    paths = tuple(sorted(path for path, trains in mask.items() if trains))
    program = Program(step, hyper, shardings=placed, gradient_paths=paths)
    hooks = (Hook(lambda state, check: evaluator(state.params, check), every),) * evaluate
    config = LoopConfig(**options, tensorboard=False)
    state = jax.device_put(state, placed[0])
    return TrainLoop(config, program, state, ToyBatches(4, hook), workdir, hooks)


def replace_hook(loop, function) -> None:
    """Makes the loop call `function(its hook's function, state, check_stop)` instead."""
    (hook,) = loop.hooks
    inner = functools.partial(function, hook.function)
    loop.hooks = (Hook(inner, hook.every),)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, make_loop(workdir, checkpoint_every=5).run()


def test_a_whole_run(whole, capsys):
    workdir, result = whole
    assert result.step == 12 and result.stopped is None and int(result.state.step) == 12
    rows = metrics(workdir)
    train = [row["step"] for row in rows if "train/loss" in row]
    evaluated = [row["step"] for row in rows if "validation/nll" in row]
    assert train == list(range(1, 13)) and evaluated == [0, 4, 8, 12]
    first = next(row for row in rows if row["step"] == 1)
    assert first["train/learning_rate"] == SCHEDULE(0) and first["train/alpha"] == HYPER["alpha"]
    assert rows[-1]["validation/nll"] < rows[0]["validation/nll"]
    assert len(rows[0]["validation/l1/per_layer"]) == 2
    assert result.tokens_per_second > 0 and result.compile_seconds > 0


def interrupt_at(position):
    def hook(now):
        if now == position:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


@pytest.mark.parametrize("at", [0, 3, 7])
def test_sigterm_saves_and_the_resumed_run_has_the_same_bits(whole, tmp_path, at, capsys):
    result = make_loop(tmp_path, hook=interrupt_at(at)).run()
    assert result.stopped == "SIGTERM" and result.step == at + 1
    assert "to resume: " in capsys.readouterr().err
    assert Checkpoints(tmp_path / "checkpoints").latest_step() == at + 1
    again = make_loop(tmp_path).run()
    assert f"resumed from {tmp_path / 'checkpoints' / str(at + 1)}" in capsys.readouterr().err
    assert bits(again.state) == bits(whole[1].state)
    assert metrics(tmp_path) == metrics(whole[0])
    assert again.best == whole[1].best


def test_a_crash_resumes_from_the_last_checkpoint(whole, tmp_path, capsys):
    def crash(position):
        if position == 9:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        make_loop(tmp_path, hook=crash, checkpoint_every=5, keep_best=False).run()
    out = capsys.readouterr().err
    assert "stopped at step 9" in out and "to resume: " in out
    assert [row["step"] for row in metrics(tmp_path)][-1] > 5
    again = make_loop(tmp_path, checkpoint_every=5, keep_best=False).run()
    assert "checkpoints/5" in capsys.readouterr().err
    assert bits(again.state) == bits(whole[1].state)
    assert metrics(tmp_path) == metrics(whole[0])


def test_rows_that_a_crash_took_are_said_once_and_stay_known(tmp_path, capsys):
    assert make_loop(tmp_path, hook=interrupt_at(8)).run().step == 9
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:8])[:-5])
    assert make_loop(tmp_path, hook=interrupt_at(10)).run().step == 11
    line = f"{log}: 5 of 12 rows are lost, of steps: 6 to 9\n"
    assert capsys.readouterr().err.count(line) == 1
    result = make_loop(tmp_path).run()
    assert "lost" not in capsys.readouterr().err
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4, 4, 5, 10, 11, 12, 12]
    assert training.summary(tmp_path, result)["steps_without_metrics"] == "6 to 9"


def test_a_finished_run_is_not_trained_again(whole, tmp_path):
    first = make_loop(tmp_path).run()
    before = metrics(tmp_path)

    def never(position):
        raise AssertionError("a batch was read")

    again = make_loop(tmp_path, hook=never).run()
    assert bits(again.state) == bits(first.state) and metrics(tmp_path) == before
    assert again.step == 12 and again.stopped is None


@pytest.mark.parametrize("step", [8, 12])
def test_a_signal_during_evaluation_is_made_up_for(whole, tmp_path, step):
    loop = make_loop(tmp_path)

    def evaluate(inner, state, check_stop):
        if loop.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(state, check_stop)

    replace_hook(loop, evaluate)
    result = loop.run()
    assert (result.step, result.stopped) == (step, "SIGTERM")  # not done, even at the last step
    assert not any("validation/nll" in row for row in metrics(tmp_path) if row["step"] == step)
    again = make_loop(tmp_path).run()
    assert metrics(tmp_path) == metrics(whole[0]) and again.best == whole[1].best
    assert again.stopped is None


def test_an_evaluation_made_up_for_is_not_written_twice(whole, tmp_path):
    """Stopped in the evaluation of step 8, killed right after repeating it, resumed again."""

    def interrupted(loop, then):
        def evaluate(inner, state, check_stop):
            measured = inner(state, check_stop) if loop.step != 8 or then else None
            if loop.step == 8 and not then:
                os.kill(os.getpid(), signal.SIGTERM)
                check_stop()
            return measured

        replace_hook(loop, evaluate)
        return loop

    assert interrupted(make_loop(tmp_path), then=False).run().step == 8

    def crash(position):
        raise OSError("killed")

    refused("killed", interrupted(make_loop(tmp_path, hook=crash), then=True).run, error=OSError)
    assert metrics(tmp_path)[-1]["step"] == 8 and "validation/nll" in metrics(tmp_path)[-1]
    again = make_loop(tmp_path).run()
    assert metrics(tmp_path) == metrics(whole[0]) and again.best == whole[1].best
    assert bits(again.state) == bits(whole[1].state)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("full", ["checkpoint", "metrics"])
def test_a_full_disk_stops_with_the_way_out_and_resumes(whole, tmp_path, capsys, full):
    loop = make_loop(tmp_path, checkpoint_every=5, keep=2)
    inner, log = (loop._save, loop._report), tmp_path / "metrics.jsonl"

    def save():
        with no_file_beyond(60) if loop.step == 8 else contextlib.nullcontext():
            inner[0]()

    def report(pending):
        with no_file_beyond(log.stat().st_size + 9) if loop.step == 8 else contextlib.nullcontext():
            inner[1](pending)

    if full == "checkpoint":
        loop._save, error = save, f"{tmp_path}/checkpoints/8 could not be .*: File too.*points/5"
    else:
        loop._report, error = report, f"File too large; fix the cause.*{log}"
    refused(error, loop.run, error=(CheckpointError, OSError))
    assert "to resume: " in capsys.readouterr().err
    again = make_loop(tmp_path, checkpoint_every=5).run()
    assert "checkpoints/5" in capsys.readouterr().err
    assert bits(again.state) == bits(whole[1].state)
    assert metrics(tmp_path) == metrics(whole[0])


def test_the_way_out_is_told_before_the_checkpoints_are_closed(tmp_path, capsys):
    loop = make_loop(tmp_path, hook=interrupt_at(1), evaluate=False)
    said = []

    def close():
        said.append(capsys.readouterr().err)
        raise OSError("the disk does not answer")

    loop.checkpoints.close = close
    refused("does not answer", loop.run, error=OSError)
    assert "stopped at step 2; to resume: " in said[0]


def test_only_the_first_process_writes_and_speaks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda *_: 1)
    result = make_loop(tmp_path, steps=3, save_at_end=False, keep_best=False).run()
    assert result.step == 3 and result.best["step"] == 3
    assert capsys.readouterr() == ("", "")
    with MetricsWriter(tmp_path / "writer") as writer:
        writer.write(1, {"loss": 1.0})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_old_signal_handlers_come_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    make_loop(tmp_path, steps=1, evaluate=False).run()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_divergence_names_step_term_and_checkpoint(tmp_path, capsys):
    def hyper(step):
        broken = float("inf") if step == 6 else 0.01
        return HYPER | {"dropout": 0.0, "learning_rate": 0.01, "gamma": broken}

    fragile = LossTerm("fragile", _over, "gamma", on="params")
    with pytest.raises(TrainingDiverged) as error:
        make_loop(tmp_path, terms=(NLL, fragile), hyper=hyper, checkpoint_every=4).run()
    message = str(error.value)
    assert "step 7:" in message and str(tmp_path / "checkpoints" / "4") in message
    assert "stopped at step" in capsys.readouterr().err
    assert max(row["step"] for row in metrics(tmp_path)) == 6
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]


def _over(params):
    return TermValue(params["final_norm"]["scale"].sum(), np.float32(1))


def test_divergence_names_the_term(tmp_path):
    def bad(params, outputs, batch):
        return TermValue(np.float32(np.nan) * outputs["hidden"].sum(), np.float32(1))

    with pytest.raises(TrainingDiverged, match="step 1: not finite: bad=nan; there is no check"):
        make_loop(tmp_path, terms=(NLL, LossTerm("bad", bad, 1.0)), evaluate=False).run()


def test_divergence_names_weights_that_are_not_finite(tmp_path):
    loop = make_loop(tmp_path, evaluate=False)
    scale = loop.state.params["final_norm"]["scale"]
    params = {**loop.state.params, "final_norm": {"scale": scale.at[1].set(np.nan)}}
    loop.state = dataclasses.replace(loop.state, params=params)
    refused("weights that are not finite: 'final_norm/scale'", loop.run, error=TrainingDiverged)


def test_a_validation_metric_that_is_not_finite_stops(tmp_path):
    loop = make_loop(tmp_path, checkpoint_every=3)

    def evaluate(inner, state, check_stop):
        measured = inner(state, check_stop)
        return measured | ({"validation/nll": float("nan")} if loop.step == 4 else {})

    replace_hook(loop, evaluate)
    refused("step 4: validation/nll=nan; .*checkpoints/3", loop.run, error=TrainingDiverged)


def test_a_second_compilation_is_an_error(tmp_path):
    compiled.cache_clear()
    loop = make_loop(tmp_path, evaluate=False)
    compiled.cache_clear()  # the other tests' step must have been compiled for one shape
    batches = iter([toy_batch(4, seed=1), toy_batch(4, length=9, seed=2), toy_batch(4)])
    methods = {"__next__": lambda s: next(batches), "get_state": lambda s: {}}
    loop.batches = type("Changing", (), methods)()
    refused("compiled 2 times by step 2", loop.run, error=RuntimeError)


def test_data_that_ends_early_is_an_error_and_saved(tmp_path):
    def hook(position):
        if position == 3:
            raise StopIteration

    refused("ended after 3 of 12 steps", make_loop(tmp_path, hook=hook).run)
    assert Checkpoints(tmp_path / "checkpoints").latest_step() == 3


def test_the_best_checkpoint_is_kept(tmp_path):
    """The learning rate makes the loss rise after step 4: that step and the last are kept."""

    def hyper(step):
        rate = 0.05 if step < 4 else -0.05
        return HYPER | {"learning_rate": rate, "dropout": 0.0}

    result = make_loop(tmp_path, hyper=hyper, eval_every=2).run()
    assert result.best["step"] == 4 and result.best["metric"] == "validation/nll"
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == [4, 12] and checkpoints.best_step == 4
    by_step = {r["step"]: r["validation/nll"] for r in metrics(tmp_path) if "validation/nll" in r}
    assert result.best["value"] == min(by_step.values()) == by_step[4]


def test_the_largest_may_be_the_best(tmp_path):
    result = make_loop(tmp_path, best_metric="validation/norm", best_mode="max").run()
    values = {r["step"]: r["validation/norm"] for r in metrics(tmp_path) if "validation/norm" in r}
    assert result.best["value"] == max(values.values()) == values[result.best["step"]]
    assert len(set(values.values())) > 1
    refused("best_mode='most': choose one of", make_loop, tmp_path / "other", best_mode="most")


def test_hooks_have_their_own_steps(tmp_path):
    loop = make_loop(tmp_path, eval_every=4)
    loop.hooks += (Hook(lambda state, check: {"length": float(state.step)}, 3),)
    loop.run()
    names = ("validation/nll", "length")
    rows = {key: [r["step"] for r in metrics(tmp_path) if key in r] for key in names}
    assert rows == {"validation/nll": [0, 4, 8, 12], "length": [0, 3, 6, 9, 12]}


def test_a_wrong_best_metric_lists_the_right_ones(tmp_path):
    with pytest.raises(ValueError, match="'validation/nlll' is not among .*'validation/nll'"):
        make_loop(tmp_path, best_metric="validation/nlll").run()


def test_another_models_checkpoint_is_refused(tmp_path):
    make_loop(tmp_path, steps=2, evaluate=False).run()
    loop = make_loop(tmp_path, steps=2, evaluate=False)
    loop.state.params["final_norm"]["scale"] = jax.numpy.zeros(7)
    refused(r"leaf 'params.final_norm.scale'.*\[6\].*\[7\]", loop.run, error=CheckpointError)


def test_bad_settings_are_named(tmp_path):
    refused("steps=0", LoopConfig, steps=0)
    with pytest.raises(ValueError, match="4 rows, which accumulation=3 does not divide"):
        make_loop(tmp_path, accumulation=3, evaluate=False).run()
