"""A task from outside the package: trained, stopped, planned, evaluated, pruned, attacked."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import outside_task
import pytest
from tiny_models import LLAMA, REPOSITORY, config_of, free_address, random_params, save_tiny

from ffn_heterogeneity.evaluate.answer_metrics import cb
from ffn_heterogeneity.heads import HEADS
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.launch import compress, evaluate
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import layer_leaves, restack, unstack
from ffn_heterogeneity.train.objectives import make_forward
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.tree import flatten

PROGRAM = Path(outside_task.__file__)
PLACES = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"
UNTIED = dataclasses.replace(LLAMA, tied=False)
WORDS = ("entailment", "contradiction", "neutral")
pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for registry, name, piece in outside_task.ADDED:
        monkeypatch.setitem(registry, name, piece)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("objective")
    save_tiny(root / "model", UNTIED)
    return root


def run(files, workdir, ways=("alone",), stop=0):
    given = {"env": os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": PLACES}, "text": True}
    given |= {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, PROGRAM, files, workdir]
    running = [subprocess.Popen([*command, way, str(stop)], **given) for way in ways]
    ended = [process.communicate(timeout=240) for process in running]
    return [process.returncode for process in running], ended


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    workdir, said = tmp_path_factory.mktemp("alone") / "run", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        for registry, name, piece in outside_task.ADDED:
            patch.setitem(registry, name, piece)
        training.run(outside_task.config_for(files / "model"), workdir)
    (workdir / "said.txt").write_text(said.getvalue())
    return workdir


def test_both_sets_are_validated_and_the_best_is_kept(files, alone):
    results = json.loads((alone / "results.json").read_text())
    first, last = results["first"], results["final"]
    for row in (first, last):
        assert (row["validation/near/rows"], row["validation/far/rows"]) == (18, 10)
    assert last["validation/near/squares"] < first["validation/near/squares"]
    best = max(row["validation/near/spearman"] for row in results["history"])
    assert results["best"]["metric"] == "validation/near/spearman"
    assert results["best"]["value"] == best and results["rows"] == 64
    assert results["losses"] == {"squares": 1.0, "kinds": 0.1}
    # Of 18 rows, which no batch of four contains.
    right = 18 * last["validation/near/accuracy"]
    assert right == pytest.approx(round(right), abs=1e-9)


def test_the_head_is_kept_the_refresh_never_stored_and_what_is_not_read_stays(files, alone):
    before, after = load_model(files / "model"), load_model(alone / "model")
    assert after.config.head == HeadConfig.of("pooled", {"outputs": 4})
    assert dataclasses.replace(after.config, head=None) == before.config
    # Adam changes a weight by at most the rate per step; the noise, 10%, is proportional.
    table = before.params["embed"]["embedding"]
    moved = after.params["embed"]["embedding"] - table
    assert 0 < np.abs(moved).max() <= 6 * 3e-3 * 1.05
    assert abs(np.sum(moved * table)) < 0.02 * np.sum(table**2)
    added = set(flatten(after.params)) - set(flatten(before.params))
    assert added == {"task_head/pooler/kernel", "task_head/out/kernel"}
    assert (after.params["head"]["kernel"] == before.params["head"]["kernel"]).all()
    said = (alone / "said.txt").read_text()
    assert "scores does not read 'head/kernel': they stay unchanged" in said
    results = json.loads((alone / "results.json").read_text())
    assert results["parameters"] - results["trainable_parameters"] == 16 * 258


def test_two_lengths_are_two_programs_compiled_before_the_first_step(files, tmp_path, monkeypatch):
    loops, compiled = [], []
    loop, compile_step = training.TrainLoop, training.compile_checked.__globals__["compile_step"]

    def noted(*given):
        loops.append(loop(*given))
        assert len(compiled) == 2, "before the loop is made"
        return loops[0]

    monkeypatch.setattr(training, "TrainLoop", noted)

    def counted(*given, **named):
        compiled.append(1)
        return compile_step(*given, **named)

    monkeypatch.setitem(training.compile_checked.__globals__, "compile_step", counted)
    training.run(outside_task.config_for(files / "model"), tmp_path / "run")
    lengths = {shapes[0][1] for shapes in loops[0]._shapes}
    assert lengths == {16, 32} and loops[0].program.train_step._cache_size() == 2


def same(one, other, bound):
    one, other = (read_metrics(x / "metrics.jsonl") for x in (one, other))
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a, b in zip(one, other, strict=True):
        # The tokens of a step identify its length.
        for key in {k for k in a if k.startswith(("validation/", "train/loss", "train/tokens"))}:
            assert abs(a[key] - b[key]) <= bound * abs(a[key]), (key, a["step"])


@pytest.mark.slow
def test_two_processes_are_one(files, alone, tmp_path):
    address = free_address()
    codes, said = run(files, tmp_path / "two", [f"{address},2,{i}" for i in range(2)])
    assert codes == [0, 0], said
    same(alone, tmp_path / "two", 1e-5)


def test_killed_and_resumed(files, alone, tmp_path):
    assert run(files, tmp_path / "run", stop=3)[0] == [-9]
    training.run(outside_task.config_for(files / "model"), tmp_path / "run")
    same(alone, tmp_path / "run", 0)
    one, other = (flatten(load_model(x / "model").params) for x in (alone, tmp_path / "run"))
    for path, leaf in one.items():
        assert leaf.tobytes() == other[path].tobytes(), path


def test_the_dry_run_plans_the_longest(files, tmp_path):
    plan = training.run(outside_task.config_for(files / "model", dry_run="here"), tmp_path)
    assert plan["tokens_per_step"] == 4 * 32 and plan["compiled"]["bytes_per_device"]
    head = 16 * 16 + 16 * 4
    assert plan["parameters"] == head + sum(x.size for x in flatten(random_params(UNTIED)).values())
    assert plan["trainable_parameters"] == plan["parameters"] - 16 * 258


def test_evaluate_prints_the_trainings_own_numbers(files, alone, tmp_path, monkeypatch, capsys):
    config = outside_task.config_for(alone / "model")
    results = evaluate.run(config, _made(tmp_path / "e"))
    last = json.loads((alone / "results.json").read_text())["final"]
    assert last.pop("step") == 6
    for name, value in last.items():
        assert results[name] == pytest.approx(value, rel=1e-6), name
    rank = last["validation/near/spearman"]
    assert f"validation/near/spearman: {rank:.5f}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="needs a model with the head 'pooled'.* has none"):
        evaluate.run(outside_task.config_for(files / "model"), _made(tmp_path / "f"))
    monkeypatch.delitem(HEADS, "pooled")
    with pytest.raises(ValueError, match="unknown head 'pooled'.*import the module that adds it"):
        evaluate.run(config, _made(tmp_path / "g"))


def _made(path):
    path.mkdir()
    return path


def predicted(model, rows):
    """[rows, outputs] of the saved head."""
    objective = outside_task.scores(read(outside_task.config_for("x")), model.config)
    forward = make_forward(objective, model.config, RunOptions())
    return np.asarray(forward(model.params, outside_task.batch_of(rows, 32, 8))["predictions"])


def test_pruned_with_its_head_equals_masked(alone, tmp_path, monkeypatch):
    monkeypatch.delitem(HEADS, "pooled")  # surgeries need no support for it
    config = config_of("prune", model=str(alone / "model"), ratio=0.25)
    results = compress.run(config, _made(tmp_path / "p"))
    monkeypatch.setitem(HEADS, "pooled", outside_task.pooled)
    dense, pruned = load_model(alone / "model"), load_model(tmp_path / "p/model")
    assert pruned.config.ffn_widths == (18,) * 4 and pruned.config.head == dense.config.head
    tree = unstack(jax.tree.map(np.copy, dense.params))
    for (_, down), gone in zip(layer_leaves(tree, "ffn/down"), results["removed"], strict=True):
        down["kernel"][gone] = 0
    masked = dataclasses.replace(dense, params=restack(dense.config, tree))
    rows = outside_task.rows_of(8, 3)
    expected, actual = predicted(masked, rows), predicted(pruned, rows)
    np.testing.assert_allclose(actual, expected, atol=5e-6 * np.abs(expected).max())
    assert np.abs(actual - predicted(dense, rows)).max() > 1e-4


def test_attacked_and_folded_with_its_head(alone, tmp_path):
    intact, rows = load_model(alone / "model"), outside_task.rows_of(8, 3)
    config = config_of("attack", model=str(alone / "model"), export="padded")
    compress.run(config, _made(tmp_path / "a"))
    attacked = load_model(tmp_path / "a/model")
    heads = (model.params["task_head"]["out"]["kernel"] for model in (attacked, intact))
    assert np.array_equal(*heads)
    assert np.abs(predicted(attacked, rows) - predicted(intact, rows)).max() > 1e-4
    # LoRA and the head trained, then folded: the plain weights, and the head with them.
    config = outside_task.config_for(alone / "model", steps=1, export__form="padded")
    with config.unlocked():
        config.prepare, config.lora, config.train_only = ("lora",), {"rank": 2}, ("lora_", "head/")
    training.run(config, tmp_path / "l")
    folded = load_model(tmp_path / "l/model")
    names = {path.split("/")[-1] for path in flatten(folded.params)}
    assert not names & {"lora_a", "lora_b"} and folded.config.head == intact.config.head
    last = json.loads((tmp_path / "l/results.json").read_text())["final"]
    again = evaluate.run(outside_task.config_for(tmp_path / "l/model"), _made(tmp_path / "e"))
    assert again["validation/far/squares"] == pytest.approx(last["validation/far/squares"], 1e-5)


def test_another_head_is_refused(alone, tmp_path, monkeypatch):
    objective = outside_task.scores(read(outside_task.config_for("x")), UNTIED)
    other = dataclasses.replace(objective, head=HeadConfig.of("pooled", {"outputs": 9}))
    monkeypatch.setitem(outside_task.build.OBJECTIVES, "scores", lambda config, model: other)
    with pytest.raises(ValueError, match="has a head 'pooled' with .*4.*needs 'pooled' with .*9"):
        training.run(outside_task.config_for(alone / "model"), tmp_path / "run")


def test_without_losses_it_is_evaluated_and_not_trained(alone, tmp_path, monkeypatch):
    """The objective's `evaluate` gets parameters and batches, and decodes here."""
    objective = outside_task.scores(read(outside_task.config_for("x")), UNTIED)

    def decoded(params, batches):
        return {"seen": float(sum((batch["kind"] >= 0).sum() for batch in batches))}

    silent = dataclasses.replace(objective, terms={}, evaluate=decoded)
    monkeypatch.setitem(outside_task.build.OBJECTIVES, "scores", lambda config, model: silent)
    results = evaluate.run(outside_task.config_for(alone / "model"), _made(tmp_path / "e"))
    assert results["validation/near/seen"] == 18 and results["validation/far/seen"] == 10
    with pytest.raises(ValueError, match="at least one loss term"):
        training.run(outside_task.config_for(alone / "model"), tmp_path / "run")


def test_f1_does_not_add_up():
    """The mean of the batches' F1 would be another number."""
    said, meant = list("ecneceec"), list("ecnnceen")
    words = {"e": WORDS[0], "c": WORDS[1], "n": WORDS[2]}
    said, meant = ([words[x] for x in one] for one in (said, meant))
    parts = [cb(said[i : i + 4], meant[i : i + 4])["macro_f1"] for i in (0, 4)]
    assert abs(np.mean(parts) - cb(said, meant)["macro_f1"]) > 0.05
