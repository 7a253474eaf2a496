"""Runs of stages and of seeds: real training, surgery and evaluation of a tiny model."""

import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from scipy import stats
from tiny_models import REPOSITORY, config_of
from tiny_runs import flags_of, refused, small_run

from ffn_heterogeneity.data.tasks import tasks
from ffn_heterogeneity.evaluate import run as evaluation
from ffn_heterogeneity.io.files import plain
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.workdir import WorkdirError, working_in
from ffn_heterogeneity.launch import evaluate, experiment, stages
from ffn_heterogeneity.launch.commands import COMMANDS
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
TIMES = ("seconds", "tokens_per_second", "compile_seconds", "model", "device")


def staged(files, **changes):
    settings = {"steps": 4, "optimizer__warmup_steps": 1, "eval__every": 2}
    small = small_run(files[1], "recover__", **settings)
    small |= {"score__text": str(files[1]), "score__window": 16, "score__max_windows": 3}
    return config_of("prune_recover", f"{files[0]},text", **(small | changes))


def test_a_stages_memory_is_its_own():
    stages._peak_memory()
    held = np.ones(200_000_000 // 8)
    large = stages._peak_memory()
    del held
    stages._peak_memory()
    assert large - stages._peak_memory() > 190_000_000


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    return workdir, experiment.run(staged(files), workdir)


def test_prune_recover_score(files, finished):
    workdir, results = finished
    stages = results["stages"]
    assert list(stages) == ["prune", "recover", "score"]
    assert json.loads((workdir / "results.json").read_text()) == results
    pruned, recovered = (load_model(workdir / x / "model") for x in ("00_prune", "01_recover"))
    assert pruned.config == recovered.config
    assert pruned.config.ffn_widths == tuple(stages["prune"]["ffn_widths_after"])
    assert max(pruned.config.ffn_widths) < max(load_model(str(files[0])).config.ffn_widths)
    before, after = flatten(pruned.params), flatten(recovered.params)
    assert any(not np.array_equal(before[path], after[path]) for path in before)
    first, last = (stages["recover"][name]["validation/nll"] for name in ("first", "final"))
    assert last < first
    score = config_of("perplexity", model=str(workdir / "01_recover" / "model"))
    score.text, score.window, score.max_windows = str(files[1]), 16, 3
    again = evaluation.run(score, workdir.parent / "score")
    assert again["perplexity"] == stages["score"]["perplexity"]


def test_completed_stages_are_only_read(files, finished, monkeypatch):
    def never(*_):
        raise AssertionError("a completed stage was run again")

    for kind, command in COMMANDS.items():
        monkeypatch.setitem(COMMANDS, kind, dataclasses.replace(command, run=never))
    pushed, config = [], staged(files)
    monkeypatch.setattr(stages, "push_directory", lambda *given: pushed.append(given))
    assert experiment.run(config, finished[0]) == finished[1] and not pushed
    with config.unlocked():
        config.prune.push = "me/tiny"
    assert experiment.run(config, finished[0]) == finished[1]
    assert pushed == [(finished[0] / "00_prune" / "model", "me/tiny")]


@pytest.mark.parametrize("after", ["prune", "recover", "score"])
def test_a_run_that_died_between_stages_ends_with_the_same_numbers(
    files, finished, tmp_path, monkeypatch, after
):
    """The run dies when a stage has written everything except its mark."""
    real, workdir = stages.write_json, tmp_path / "run"

    def dies(path, value):
        if value.get("name") == after:
            raise KeyboardInterrupt
        real(path, value)

    monkeypatch.setattr(stages, "write_json", dies)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(staged(files), workdir)
    monkeypatch.setattr(stages, "write_json", real)
    again = experiment.run(staged(files), workdir)
    assert without_times(again) == without_times(finished[1])
    one, other = (load_model(str(d / "01_recover" / "model")) for d in (workdir, finished[0]))
    for path, leaf in flatten(one.params).items():
        np.testing.assert_array_equal(leaf, flatten(other.params)[path], err_msg=path)


def test_sigterm_in_a_stage_and_the_printed_command_goes_on(files, finished, tmp_path):
    settings = small_run(files[1], "recover__", steps=100_000, eval__every=0)
    config = f"{REPOSITORY}/configs/prune_recover.py:{files[0]},text"
    flags = flags_of(config, score__text=files[1], **settings)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    pipes["env"] = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONUNBUFFERED": "1"}
    script = REPOSITORY / "scripts" / "train.py"
    process = subprocess.Popen([sys.executable, script, *flags], **pipes)
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        written = list(tmp_path.glob("runs/*/01_recover/metrics.jsonl"))
        if written and written[0].read_text().count("\n") > 5:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    [workdir] = (tmp_path / "runs").iterdir()
    [resume] = [line for line in output.splitlines() if "to resume: " in line]
    assert resume.endswith(f"--workdir=runs/{workdir.name}")
    assert (workdir / "00_prune" / "done.json").exists()
    assert not (workdir / "01_recover" / "done.json").exists()
    assert list((workdir / "01_recover" / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prune__ratio": 0.5}, "00_prune was completed with another config"),
        ({"recover__steps": 5}, "01_recover was completed with another config"),
        ({"score__window": 8}, "02_score was completed with another config"),
        ({"stages": ("recover", "prune", "score")}, "'00_prune', which is not one of"),
        ({"stages": ("prune",)}, "'01_recover', which is not one of"),
    ],
)
def test_stages_of_another_run_are_refused(files, finished, changes, message):
    refused(message, experiment.run, staged(files, **changes), finished[0], error=WorkdirError)


def test_another_mesh_or_a_profile_is_the_same_run(files, finished):
    changed = staged(files, recover__mesh={"data": 1, "fsdp": 1, "tensor": 1})
    assert experiment.run(changed, finished[0]) == finished[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score__text": ""}, "stage 'score': give exactly one of --config.text"),
        ({"score__text": "nowhere.txt"}, "stage 'score': nowhere.txt"),
        ({"prune__ratio": 1.5}, "stage 'prune': ratio=1.5 must be a number in"),
        ({"prune__criterion": "size"}, "stage 'prune': unknown criterion 'size'"),
        ({"prune__kind": "cut"}, "stage 'prune': kind='cut': choose one of"),
        ({"recover__steps": "many"}, "stage 'recover', key 'steps'"),
        ({"recover__dropout": 1.0}, "stage 'recover': dropout=1.0 must be a number in"),
        ({"recover__base": "configs/nothing.py"}, "'configs/nothing.py' does not exist"),
        ({"stages": ("prune", "mend")}, "stage 'mend': the config needs a group 'mend'"),
        ({"stages": ()}, "stages is empty"),
        ({"stages": ("prune", "prune")}, "two stages are named 'prune'"),
        ({"seeds": (0, 0)}, r"seeds=\(0, 0\): expected different integers"),
        ({"seeds": (0.5, 1)}, "different integers"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(files, tmp_path, changes, message):
    refused(message, experiment.run, staged(files, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("group", "key", "message"),
    [
        ("prune", "ration", "stage 'prune', prune: unknown key 'ration', did you mean 'ratio'"),
        ("recover.optimizer", "lerning_rate", "did you mean 'optimizer.learning_rate'"),
    ],
)
def test_a_setting_that_the_base_has_not(files, tmp_path, group, key, message):
    config = staged(files)
    with config.unlocked():
        functools.reduce(lambda node, name: node[name], group.split("."), config)[key] = 0.5
    refused(message, experiment.run, config, tmp_path / "run")


def test_partial_results_of_other_settings_are_not_continued(files, tmp_path, monkeypatch):
    """A killed stage's folder is free for other settings only if nothing in it is resumed."""
    run, one = tmp_path / "run", {"stages": ("score",)}
    for output in ("tokens.txt", "tasks/piqa.json"):

        def killed(config, folder, output=output):
            (folder / output).parent.mkdir(exist_ok=True)
            (folder / output).write_text("{}")
            raise KeyboardInterrupt

        with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
            stopped.setattr(evaluate, "run", killed)
            experiment.run(staged(files, **one), run)
        other = staged(files, score__window=8, **one)
        if "/" in output:
            refused("00_score holds another run .window", experiment.run, other, run)
            assert experiment.run(staged(files, **one), run)
            continue
        with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
            stopped.setattr(evaluate, "run", killed)
            experiment.run(other, run)
        assert json.loads((run / "00_score/config.json").read_text())["window"] == 8
        shutil.rmtree(run)


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("prune", {"prune__criterion": "mean_state", "prune__calibration": "{}"}),
        ("recover", {"recover__data__path": "{}"}),
    ],
)
def test_a_failed_stage_leaves_its_folder_to_the_mended_command(files, tmp_path, stage, changes):
    """The script claims the folder, whose config is then the corrected one."""
    (tmp_path / "empty.txt").touch()

    def claimed(**changes):
        config = staged(files, **changes)
        with working_in(tmp_path / "run", config.to_dict()):
            return experiment.run(config, tmp_path / "run"), plain(config.to_dict())

    broken = {key: value.format(tmp_path / "empty.txt") for key, value in changes.items()}
    refused("empty", claimed, **broken)
    done = [path.parent.name for path in (tmp_path / "run").glob("*/done.json")]
    assert done == ["00_prune"] * (stage == "recover")
    results, config = claimed()
    assert results["stages"]["score"]["perplexity"] > 1
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == config
    refused("holds another run .score.window", claimed, score__window=8, error=WorkdirError)


def test_seeds_give_a_mean_and_an_interval(files, tmp_path, capsys):
    config = staged(files, seeds=(3, 5, 8), prune__criterion="random", stages=("prune", "score"))
    results = experiment.run(config, tmp_path / "run")
    values = [run["stages"]["score"]["perplexity"] for run in results["runs"]]
    assert results["seeds"] == [3, 5, 8] and len({*values}) == 3
    removed = [run["stages"]["prune"]["seed"] for run in results["runs"]]
    assert removed == [3, 5, 8]
    row = results["summary"]["score/perplexity"]
    ends = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    interval = [row["mean"], row["low"], row["high"]]
    np.testing.assert_allclose(interval, [np.mean(values), *ends], 1e-12)
    assert row["n"] == 3 and "score/perplexity: " in capsys.readouterr().out
    assert experiment.run(config, tmp_path / "run") == results


def test_a_seed_reaches_stages_that_do_not_name_it(files):
    """Also those whose group leaves the seed to the config that it starts from."""
    config = staged(files, seeds=(3,), stages=("prune", "score"))
    with config.prune.unlocked():
        del config.prune.seed
    (stage, _) = experiment.make_stages(experiment._with_seed(config, 3))
    assert stage.config.seed == 3


def test_one_seed_says_nothing_of_the_others():
    one = experiment.summarise([{"x": 1.0}])["x"]
    assert one["mean"] == 1 and one["high"] == math.inf


def test_seeds_of_a_plain_run(files, tmp_path):
    settings = small_run(files[1], seeds=(0, 1), dropout=0.1)
    config = config_of("nucl_finetune", f"{files[0]},text", **settings)
    results = experiment.run(config, tmp_path / "run")
    finals = [run["final"]["validation/nll"] for run in results["runs"]]
    assert finals[0] != finals[1]
    assert results["summary"]["validation/nll"]["mean"] == np.mean(finals)
    assert (tmp_path / "run" / "seed_1" / "model" / "config.json").exists()


def test_dry_runs_of_stages_plan_those_that_train(files, tmp_path, capsys):
    plans = experiment.run(staged(files, dry_run="h100:2"), tmp_path / "run")
    assert "as it is before prune" in capsys.readouterr().err
    assert list(plans) == ["recover"] and plans["recover"]["device_count"] == 2
    assert not (tmp_path / "run" / "00_prune").exists()


@pytest.mark.parametrize("name", ["prune_recover", "fuse_recover"])
def test_a_recovery_may_be_on_any_data(name):
    """Some keys are only for running text."""
    for data in tasks():
        stages = experiment.make_stages(config_of(name, f"llama2_7b,{data}", score__text=__file__))
        assert {stage.name for stage in stages} >= {"recover", "score"}


@pytest.mark.parametrize(
    ("name", "method", "rate", "clip", "eps"),
    [
        ("mlp_fusion", "fusion,tuned", 2e-5, 1.0, 1e-6),
        ("switch", "fusion,tuned", 3e-4, None, 1e-8),
        ("switch", "lora", 3e-4, None, 1e-8),
    ],
)
def test_methods_of_one_table_train_with_the_same_optimizer(
    name, method, rate, clip, eps, tmp_path
):
    """The settings are those of MLP Fusion's code, and the tuning's PyTorch's, at the same rate."""
    (tmp_path / "rows.jsonl").write_text('{"sentence": "a b", "label": 1}\n' * 640)
    config = config_of(name, f"m,sst2,{method}", data__path=str(tmp_path / "rows.jsonl"))
    found = {
        stage.name: [
            stage.config.optimizer[key] for key in ("learning_rate", "clip_norm", "eps", "b2")
        ]
        for stage in experiment.make_stages(config)
        if "optimizer" in stage.config
    }
    assert found.pop("finetune") == [rate, clip, eps, 0.98]
    assert set(map(tuple, found.values())) <= {(rate, None, 1e-8, 0.999)}
