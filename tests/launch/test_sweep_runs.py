"""Sweeps of training runs: tiny models that share one program, stopped and continued."""

import json
import logging
import re
import shlex
import subprocess
import sys

import jax
import pytest
from tiny_models import REPOSITORY, run_script
from tiny_runs import metrics, stop_at_batch

from ffn_heterogeneity.io.workdir import WorkdirError
from ffn_heterogeneity.launch import experiment, sweep_run
from ffn_heterogeneity.launch.commands import COMMANDS, Command
from ffn_heterogeneity.train import shared

pytestmark = pytest.mark.usefixtures("compiled_quickly")
ALPHAS = (0.0, 1.0, 10.0, 100.0, 1000.0)


TIMES = ("seconds", "tokens_per_second", "compile_seconds")


@pytest.fixture(scope="module")
def spec(files, tmp_path_factory):
    """A config file of small runs that defines sweeps."""
    path = tmp_path_factory.mktemp("configs") / "small.py"
    path.write_text(f"""
import runpy
from ffn_heterogeneity.launch.sweep import chain, point, product
KIND = "train"
def get_config():
    file = runpy.run_path({str(REPOSITORY / "configs/nucl_finetune.py")!r})
    config = file["get_config"]({f"{files[0]},text"!r})
    config.data.path = {str(files[1])!r}
    config.steps, config.batch_size, config.seq_len, config.dropout = 3, 2, 16, 0.1
    config.data.validation_fraction, config.data.passage_chars = 0.2, 100
    config.eval.max_batches, config.tensorboard = 1, False
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1e-2, 0
    return config
SWEEPS = {{
    "alpha": product({{"losses.nucl.weight": {ALPHAS}}}),
    "two": product({{"losses.nucl.weight": (0.0, 1.0)}}),
    "broken": chain(
        point("bad", {{"data.path": "nowhere.txt"}}), point("good"),
        point("worse", {{"data.path": "nowhere.txt"}}),
    ),
    "wrong": chain(
        point("good"), point("rule", {{"freeze": ("ffn/dwn",)}}),
        point("rate", {{"optimizer.learning_rate": -1.0}}),
        point("rate2", {{"optimizer.learning_rate": -1.0, "seed": 1}}),
    ),
    "mixed": chain(
        point("loss", {{"losses.nucl.variant": "sum"}}), point("good"),
        point("text", {{"data.path": "nowhere.txt"}}),
    ),
}}
""")
    return str(path)


def small(spec, **changes):
    from ffn_heterogeneity.launch.cli import load_config

    config = load_config(spec)
    for key, value in changes.items():
        config.update_from_flattened_dict({key.replace("__", "."): value})
    config.lock()
    return config


@pytest.fixture(scope="module")
def alphas(spec, tmp_path_factory):
    """The finished sweep: its result, its output, and JAX's log of compilations."""
    workdir, messages = tmp_path_factory.mktemp("sweep") / "run", []

    class Listen(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Listen()
    logging.getLogger("jax").addHandler(handler)
    with jax.log_compiles():
        results = sweep_run.run(small(spec), workdir, spec=spec, sweep="alpha")
    logging.getLogger("jax").removeHandler(handler)
    return workdir, results, messages


def test_five_alphas_are_one_compilation(alphas):
    workdir, results, messages = alphas
    counts = {"points": 5, "finished": 5, "ran": 5}
    assert results == counts | {"programs": 1, "compilations": 1}
    for name in ("train_step", "eval_step", "params_metrics"):
        compiled = [line for line in messages if re.search(rf"Compiling .*\b{name}\b", line)]
        assert len(compiled) == 1, (name, messages)
    names = [f"weight={alpha:g}" for alpha in ALPHAS]
    listed = json.loads((workdir / "sweep.json").read_text())
    assert [one["name"] for one in listed["points"]] == names
    assert [one["settings"] for one in listed["points"]] == [
        {"losses.nucl.weight": a} for a in ALPHAS
    ]
    results = [json.loads((workdir / name / "results.json").read_text()) for name in names]
    entropies = [r["final"]["validation/entropy/ent/ffn_out/mean"] for r in results]
    assert entropies[-1] < entropies[0] and len(set(entropies)) == 5


def test_a_point_is_the_run_alone_and_seeds_share_too(spec, alphas, tmp_path):
    """A point equals the single run bit for bit: sharing a program and a model changes nothing."""
    together = shared.Shared(keep_model=False)
    experiment.run(small(spec, losses__nucl__weight=1000.0, seeds=(0, 1)), tmp_path, together)
    assert (together.programs, together.compilations) == (1, 1)
    rows = [metrics(tmp_path / name) for name in ("seed_0", "seed_1")]
    assert rows[0] == metrics(alphas[0] / "weight=1000") != rows[1]


def test_finished_points_are_skipped(spec, alphas, monkeypatch, capsys):
    def never(*_):
        raise AssertionError("a finished point was run again")

    monkeypatch.setitem(COMMANDS, "train", Command(lambda config: None, never))
    again = sweep_run.run(small(spec), alphas[0], spec=spec, sweep="alpha")
    assert (again["ran"], again["finished"]) == (0, 5)
    assert "0 runs to do, 5 finished before" in capsys.readouterr().err
    # Another process of the same sweep finished them after this one began.
    one = sweep_run.points_of(spec, "alpha", small(spec))[1][0]
    task = sweep_run.PointRun(one, sweep_run.apply(small(spec), one), alphas[0] / one.name)
    sweep_run.run_one("train", task, shared.Shared())


def test_another_sweep_or_another_setting_is_refused(spec, alphas):
    def refused(message, sweep="alpha", **changes):
        before = sorted(alphas[0].rglob("*"))
        with pytest.raises(WorkdirError, match=message):
            sweep_run.run(small(spec, **changes), alphas[0], spec=spec, sweep=sweep)
        assert sorted(alphas[0].rglob("*")) == before

    refused("steps: 3 there, 4 here", steps=4)
    refused("holds another sweep .sweep: 'alpha' there, 'two' here", sweep="two")
    listing = alphas[0] / "sweep.json"
    text = listing.read_text()
    listing.write_text(text.replace("weight=10", "weight=11", 1))
    refused("lists 'weight=11', which is no point now")
    listing.write_text(text)


def test_an_interrupted_sweep_goes_on(spec, alphas, tmp_path, monkeypatch):
    """SIGTERM in the second run; the same command ends with the same bits."""
    stop_at_batch(monkeypatch, 5)
    with pytest.raises(SystemExit) as stop:
        sweep_run.run(small(spec), tmp_path / "run", spec=spec, sweep="two")
    assert stop.value.code == 143
    assert not (tmp_path / "run" / "weight=1" / "results.json").exists()
    results = sweep_run.run(small(spec), tmp_path / "run", spec=spec, sweep="two")
    assert (results["ran"], results["finished"]) == (1, 2)
    for name in ("weight=0", "weight=1"):
        assert metrics(tmp_path / "run" / name) == metrics(alphas[0] / name)


def test_what_a_point_lacks_is_said_before_the_first_runs(spec, tmp_path):
    """Errors of all points are reported at once; the corrected sweep can use the directory."""
    flags = [f"--config={spec}", f"--workdir={tmp_path / 'run'}"]
    for sweep, message in (
        ("broken", "error: point 'bad', 'worse': nowhere.txt: no such file"),
        ("wrong", "error: point 'rule': .*'ffn/dwn'.*; point 'rate', 'rate2': .*learning_rate=-1"),
        ("mixed", "error: point 'loss': losses.nucl: .*; point 'text': .*nowhere.txt"),
    ):
        done = run_script("sweep", *flags, f"--sweep={sweep}")
        assert re.search(message, done.error) and not (tmp_path / "run").exists()
        assert "runs to do" not in done.err


def test_one_failing_point_does_not_lose_the_others(spec, files, tmp_path, monkeypatch):
    # The file is deleted after the sweep checked it.
    monkeypatch.setattr(experiment, "examine", lambda *_: None)
    flags = [f"--config={spec}", "--sweep=broken", f"--workdir={tmp_path / 'run'}"]
    done = run_script("sweep", *flags)
    assert re.search(r"2 of 3 points failed: bad worse: .*nowhere\.txt", done.error)
    assert "3 runs to do" in done.err and "1 of 3 points finished" in done.err
    here = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert here == ["good"], "those that failed leave nothing behind"
    assert run_script("sweep", *flags, "--only=good").code == 0
    assert "unknown point 'god'" in run_script("sweep", *flags, "--only=god").error


def test_bugs_are_shown_once_and_the_others_run(spec, tmp_path, monkeypatch, capsys):
    def run(config, directory, shared):
        if config.losses.nucl.weight != 10:
            raise ZeroDivisionError("a bug")
        (directory / "results.json").write_text("{}")

    monkeypatch.setitem(COMMANDS, "train", Command(lambda config: None, run))
    with pytest.raises(sweep_run.SweepFailed, match=r"^4 of 5 .*: ZeroDivisionError: a bug$"):
        sweep_run.run(small(spec), tmp_path, spec=spec, sweep="alpha")
    assert capsys.readouterr().err.count("Traceback") == 1


def test_printed_commands_are_the_points(spec, tmp_path):
    flags = [f"--config={spec}", "--sweep=two", f"--workdir={tmp_path / 'run'}"]
    tuples = "--config.losses.nucl.targets=('ffn_out', 'attention_out')"
    for line in run_script("sweep", *flags, tuples, "--print").out.splitlines():
        assert tuples in shlex.split(line)
    flags = [flag.replace("/run", "/other") for flag in flags] + ["--config.steps=2"]
    printed = run_script("sweep", *flags, "--print")
    assert printed.code == 0, printed.err
    lines = printed.out.splitlines()
    assert len(lines) == 2 and not list((tmp_path / "other").glob("weight*"))
    python, script, *arguments = shlex.split(lines[1])
    assert python == sys.executable and script == str(REPOSITORY / "scripts/train.py")
    assert run_script("train", *arguments).code == 0
    again = run_script("sweep", *flags, "--print")
    assert again.code == 0 and again.out.splitlines() == lines[:1]
    flags[2:3] = [f"--workdir={tmp_path / 'broken'}", "--config.data.path=a\n[b]"]
    broken = run_script("sweep", *flags, "--print").out.splitlines()
    said = [["bash", "-c", f"printf %s, {line}"] for line in broken]
    texts = [subprocess.run(one, capture_output=True, text=True).stdout for one in said]
    assert len(texts) == 2 and all("--config.data.path=a\n[b]," in text for text in texts)
