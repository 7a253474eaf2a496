"""Sweeps of removals: many points on one loaded model, or as jobs."""

import dataclasses
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_models import LLAMA, REPOSITORY, config_of, our_logits, random_params, run_script
from tiny_runs import flags_of, refused, run_program

import ffn_heterogeneity as fh
from ffn_heterogeneity.evaluate import run as evaluation
from ffn_heterogeneity.evaluate.perplexity import window_nll
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import compress, in_memory, slurm
from ffn_heterogeneity.launch.compress import REMOVED
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.train import shared

pytestmark = pytest.mark.usefixtures("compiled_quickly")


READ = {"window": 32, "max_windows": 3}


def table_flags(files, sweep, workdir):
    settings = {"model": files[0], "text": files[1], "batch_size": 3, **READ}
    return [
        *flags_of(f"{REPOSITORY}/configs/prune_table.py", workdir, **settings),
        f"--sweep={sweep}",
    ]


def results_in(root):
    paths = sorted(Path(root).glob("*/results.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


@pytest.fixture(scope="module")
def pairs(files, tmp_path_factory):
    """(directory, loads, compilations) of Figure 4 on the tiny model."""
    workdir, loads = tmp_path_factory.mktemp("pairs") / "run", []

    def load(*arguments, **options):
        loads.append(arguments)
        return load_model(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "load_model", load)
        before = window_nll._cache_size()
        done = run_script("sweep", *table_flags(files, "pairs", workdir))
    assert done.code == 0, done.err
    return workdir, len(loads), window_nll._cache_size() - before


def test_every_pair_is_one_load_and_one_program(pairs):
    workdir, loads, compilations = pairs
    assert (loads, compilations) == (1, 1)
    results = results_in(workdir)
    assert list(results) == ["layers_0_1", "layers_1_2", "layers_2_3", "unpruned"]
    widths = {name: one["ffn_widths_after"] for name, one in results.items()}
    assert widths["layers_1_2"] == [24, 18, 18, 24] and widths["unpruned"] == [24] * 4
    assert not list(workdir.rglob("*.safetensors")) and "removed" not in results["unpruned"]
    lists = {path.parent.name: json.loads(path.read_text()) for path in workdir.rglob(REMOVED)}
    assert [len(neurons) for neurons in lists["layers_1_2"]] == [0, 6, 6, 0]
    assert set(lists) == set(results) - {"unpruned"}


def test_blocks_are_skipped_and_left_early(files, tmp_path):
    workdir = tmp_path / "blocks"
    done = run_script("sweep", *table_flags(files, "blocks", workdir))
    assert done.code == 0, done.err
    results = results_in(workdir)
    assert set(results) == {"unpruned", *(f"skip_{i}" for i in range(4)), "exit_1", "exit_2"}
    model = load_model(str(files[0]))
    text = evaluation.check_config(
        config_of("perplexity", model=str(files[0]), text=str(files[1]), batch_size=3, **READ)
    )
    for name, blocks in (("exit_1", 1), ("exit_2", 2), ("skip_3", 3)):
        short, _ = SURGERIES["truncate"](model, {"blocks": blocks})
        nll = evaluation.score(text, short)["nll"]
        assert results[name]["nll"] == pytest.approx(nll, rel=1e-6), name
    assert len({one["nll"] for one in results.values()}) == len(results)


def test_a_point_at_which_another_process_works_is_left_to_it(files, tmp_path):
    """With two sweeps in one directory, the other points run, and this one is named."""
    point = tmp_path / "layers_0_1"
    point.mkdir()
    handle = os.open(point, os.O_RDONLY)
    only = ("--only=layers_0_1", "--only=unpruned")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        done = run_script("sweep", *table_flags(files, "pairs", tmp_path), *only)
    finally:
        os.close(handle)
    assert done.code == 2
    assert f"layers_0_1: another process is at work in {point}" in done.err
    assert list(results_in(tmp_path)) == ["unpruned"] and not list(point.iterdir())
    done = run_script("sweep", *table_flags(files, "pairs", tmp_path), *only)
    assert done.code == 0 and list(results_in(tmp_path)) == ["layers_0_1", "unpruned"]


def test_every_row_of_table_4_on_a_tiny_model(files, tmp_path):
    before = window_nll._cache_size()
    done = run_script("sweep", *table_flags(files, "criteria", tmp_path))
    assert done.code == 0, done.err
    assert window_nll._cache_size() - before <= 2, "one program for each of two model shapes"
    results = results_in(tmp_path)
    rows = {row: one["perplexity"] for row, one in results.items()}
    assert len(rows) == 12 and all(np.isfinite(list(rows.values())))
    assert len(set(rows.values())) >= 9, rows  # gini and mstd may well choose alike
    for row, one in results.items():
        assert one["ffn_widths_after"] == [24 if row == "unpruned" else 18] * 4
    assert results["stahlberg_byrne"]["largest_condition"] >= 1
    assert "largest_condition" not in results["srinivas_babu"]


def test_in_memory_is_what_the_scripts_do(files, pairs, tmp_path):
    """compress and evaluate give the same perplexity; a report knows which run wrote the model it
    read, even after a move."""
    flags = [f"--config.model={files[0]}", "--config.layers=pair:1"]
    assert run_script("compress", *flags, f"--workdir={tmp_path / 'c'}").code == 0
    for name, model in (("layers_1_2", tmp_path / "c" / "model"), ("unpruned", files[0])):
        settings = {"model": model, "text": files[1], "workdir": tmp_path / name}
        done = run_script("evaluate", **settings, **READ)
        assert done.code == 0, done.err
        apart = json.loads((tmp_path / name / "results.json").read_text())
        together = results_in(pairs[0])[name]
        assert together["nll"] == pytest.approx(apart["nll"], rel=1e-6)
        assert (together["tokens"], together["windows"]) == (apart["tokens"], apart["windows"])
    (tmp_path / "c").rename(tmp_path / "moved")
    frame = fh.results(*(tmp_path / name for name in ("moved", "layers_1_2", "unpruned")))
    origins = frame.drop_duplicates("run").set_index("run").origin
    assert origins[f"{tmp_path}/layers_1_2"] == f"{tmp_path}/moved"
    assert origins.notna().sum() == 1


def test_attacks_in_memory_are_those_of_the_script(files, tmp_path):
    """A point of the sweep over k equals compress and evaluate; a k that is too large fails."""
    settings = {"model": files[0], "text": files[1], **READ}
    only = [f"--only={name}" for name in ("none", "attack=zero,k=3", "attack=retain,k=30")]
    table = {
        "config": "configs/attack_table.py",
        "prompts": ("ab",),
        "max_new_tokens": 4,
        **settings,
    }
    done = run_script("sweep", "--sweep=k", *only, workdir=tmp_path / "sweep", **table)
    assert done.code == 2 and "k=30: layer 1 (from 0) has 24 neurons" in done.err
    results = results_in(tmp_path / "sweep")
    settings |= {"k": 3, "attack": "zero", "compute_dtype": "float32", "workdir": tmp_path / "one"}
    assert run_script("compress", config="configs/attack.py", **settings).code == 0
    one = json.loads((tmp_path / "one" / "results.json").read_text())
    assert set(results) == {"none", "attack=zero,k=3"}
    for name, path in (("none", files[0]), ("attack=zero,k=3", tmp_path / "one" / "model")):
        answer = fh.generate(fh.load_model(str(path)), "ab", 4)
        assert results[name]["answers"] == {"ab": answer}
    assert results["none"]["perplexity"] == pytest.approx(one["perplexity_before"], rel=1e-6)
    zeroed = results["attack=zero,k=3"]
    assert zeroed["perplexity"] == pytest.approx(one["perplexity_after"], rel=1e-6)
    assert zeroed["indices"] == one["indices"] and len(zeroed["nll_windows"]) == 3
    assert np.mean(zeroed["nll_windows"]) == pytest.approx(zeroed["nll"], rel=1e-6)


def test_trained_models_are_attacked_with_their_adapters_folded_in(files, tmp_path):
    """A sweep removes from the folded model; a surgery outside of a sweep rejects adapters."""
    base = load_model(str(files[0]))
    model, _ = SURGERIES["dora"](base, {"rank": 2, "alpha": 4.0, "targets": "ffn/"})
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 0.3 if path[-1].key == "lora_b" else leaf, model.params
    )
    model = dataclasses.replace(model, params=params)
    places = [tmp_path / "lora" / name / "model" for name in ("seed=0", "seed=1")]
    for place in places:
        save_pretrained(model.config, params, place, tokenizer=model.tokenizer, structure="keep")
    options = {"text": files[1], "window": 16, "max_windows": 2, "workdir": tmp_path / "sweep"}
    options |= {"config": "configs/attack_table.py"}
    for pattern in ("*1", "*"):  # with more models the same sweep continues
        options["models"] = (f"{tmp_path}/lora/{pattern}/model",)
        done = run_script("sweep", "--sweep=trained", **options)
        assert done.code == 0, done.err
    assert "[2/2] lora-seed=0" in done.err and "4 of 4 points finished" in done.err
    done = run_script("sweep", "--sweep=trained", **options | {"models": ("none/*/model",)})
    assert done.code == 2 and "none/*/model' matches nothing" in done.err
    results = results_in(tmp_path / "sweep")
    assert set(results) == {f"lora-seed={i},attack=zero,k={k}" for i in (0, 1) for k in (0, 3)}
    folded, _ = SURGERIES["fold"](model)
    options = {"window": 16, "max_windows": 2, "text": str(files[1]), "model": str(places[0])}
    config = config_of("attack_table", attack="zero", k=3, **options)
    surgery, settings, text, _ = in_memory.check_config(config)
    attacked, _ = in_memory.operate(surgery, settings, folded)
    for k, one in ((0, folded), (3, attacked)):
        nll = evaluation.score(text, one)["nll"]
        assert results[f"lora-seed=1,attack=zero,k={k}"]["nll"] == pytest.approx(nll, rel=1e-6)
    plain = evaluation.score(text, base)["nll"]
    assert abs(results["lora-seed=0,attack=zero,k=0"]["nll"] - plain) > 1e-3


def test_the_neurons_attacked_are_those_before_training(files, tmp_path):
    """Here training makes other neurons massive; `anew` attacks those."""
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf[..., ::-1] if path[-2].key in ("gate", "up") else leaf,
        load_model(str(files[0])).params,
    )
    run = tmp_path / "run"
    trained = dataclasses.replace(load_model(str(files[0])), params=params)
    save_pretrained(trained.config, params, run / "model", tokenizer=trained.tokenizer)
    (run / "config.json").write_text(json.dumps({"model": str(files[0])}))
    options = {"text": files[1], "window": 16, "max_windows": 2}
    options |= {"config": "configs/attack_table.py", "models": (str(run / "model"),)}
    before, now = (
        massive_weights(one.config, one.params) for one in (load_model(str(files[0])), trained)
    )
    assert before.indices[:3].tolist() != now.indices[:3].tolist()
    for name, anew, massive in (("before", False, before), ("now", True, now)):
        done = run_script("sweep", "--sweep=trained", **options, anew=anew, workdir=tmp_path / name)
        assert done.code == 0, done.err
        results = results_in(tmp_path / name)
        [attacked] = [one for point, one in results.items() if point.endswith("k=3")]
        where = attacked["layer_index"], attacked["indices"]
        assert where == (massive.layer, massive.indices[:3].tolist())


def test_filled_up_is_the_same_function(files):
    config = config_of("prune_table", model=str(files[0]), layers="odd", ratio=0.5)
    model = load_model(str(files[0]))
    smaller, results = in_memory.operate(*compress.check_config(config), model)
    assert smaller.config.ffn_widths == (24, 12, 24, 12)
    filled = in_memory.filled_up(smaller)
    assert filled.config == model.config
    assert in_memory.filled_up(model) is model
    tokens = np.random.default_rng(0).integers(2, 258, (2, 9))
    one, other = (our_logits(m.config, m.params, tokens) for m in (smaller, filled))
    assert np.abs(one - other).max() <= 5e-6 * np.abs(one).max()
    assert [len(gone) for gone in results["removed"]] == [0, 12, 0, 12]


def test_the_smaller_model_is_written_where_it_is_asked_for(files, tmp_path):
    config = config_of("prune_table", model=str(files[0]), text=str(files[1]), save_model=True)
    config.window, config.max_windows = 16, 2
    results = in_memory.run(config, tmp_path)
    assert load_model(str(tmp_path / "model")).config.ffn_widths == (18,) * 4
    assert json.loads((tmp_path / "results.json").read_text()) == results


def test_tasks_are_scored_on_the_smaller_model(files, tmp_path, monkeypatch):
    seen = []

    def evaluate_tasks(settings, model, workdir):
        seen.append((settings.tasks, model.config.ffn_widths, settings.save_samples))
        tokens = np.arange(2, 9)[None]
        first = float(our_logits(model.config, model.params, tokens)[0, 0, 0])
        return {"tasks": {"piqa": {"first": first}}}

    monkeypatch.setattr(in_memory, "evaluate_tasks", evaluate_tasks)
    config = config_of("prune_table", model=str(files[0]), text=str(files[1]), tasks=("piqa",))
    config.window, config.max_windows, config.layers = 16, 2, "odd"
    results = in_memory.run(config, tmp_path)
    assert seen == [(("piqa",), (24,) * 4, True)], "filled up, so that one program is enough"
    tree = unstack(random_params(LLAMA))
    _, removal = in_memory.operate(*compress.check_config(config), load_model(str(files[0])))
    for layer, gone in zip(tree["layers"], removal["removed"], strict=True):
        layer["ffn"]["down"]["kernel"][gone] = 0
    exact = our_logits(LLAMA, restack(LLAMA, tree), np.arange(2, 9)[None])[0, 0, 0]
    assert results["tasks"]["piqa"]["first"] == pytest.approx(float(exact), rel=1e-5)
    config.limit = -1
    refused("limit=-1", in_memory.check_config, config)
    config.limit, config.data_root = 0, "nowhere"
    refused("nowhere: no such directory", in_memory.check_config, config)
    config.tasks = ()
    in_memory.check_config(config)  # without tasks their keys have no effect


ALL = "'unpruned', 'all', 'top', 'bottom', 'even' and 1 more"
PRUNED = "'all', 'top', 'bottom', 'even', 'odd'"


def test_bad_points_stop_the_sweep_before_it_begins(files, tmp_path):
    flags = table_flags(files, "halves", tmp_path / "run")
    for flag, message in (
        ("--config.text=", f"error: point {ALL}: give exactly one of --config.text"),
        ("--config.criterion=size", f"point {PRUNED}: unknown criterion 'size'"),
        ("--config.criterion=mean_state", f"point {PRUNED}: criterion 'mean_state' needs calib"),
        ("--config.ratio=2.0", f"point {PRUNED}: ratio=2.0 must be a number in"),
        ("--config.streaming=True", f"point {ALL}: streaming=True is for"),
        ("--config.model=runs/nowhere/model", f"point {ALL}: model 'runs/nowhere/model' is not a"),
    ):
        assert message in run_script("sweep", *flags, flag).error
        assert not (tmp_path / "run").exists()


def test_options_of_jobs():
    parsed = slurm.parse_options("timeout_min=60,slurm_partition=gpu")
    assert parsed == {"timeout_min": 60, "slurm_partition": "gpu"}
    typed = "mem_gb=1.5,slurm_use_srun=False,stderr_to_stdout=true,name=1a"
    values = {"mem_gb": 1.5, "slurm_use_srun": False, "stderr_to_stdout": True, "name": "1a"}
    assert slurm.parse_options(typed) == values
    assert slurm.parse_options("") == {}
    theirs = {"slurm_setup": ["module load cuda"], "slurm_srun_args": ["--cpu-bind=none"]}
    theirs |= {"slurm_account": "00123", "slurm_nodes": 0}
    texts = (
        f"{key}={value[0] if isinstance(value, list) else value}" for key, value in theirs.items()
    )
    assert slurm.parse_options(",".join(texts)) == theirs
    refused("is a table", slurm.parse_options, "slurm_additional_parameters=account=x")
    for text in ("timeout", "=3"):
        refused("write key=value", slurm.parse_options, text)


def test_jobs_without_submitit(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ImportError, match=r"pip install 'ffn-heterogeneity\[slurm\]'"):
        slurm.run_jobs(dict.get, {}, tmp_path)


def test_jobs_of_the_local_executor(tmp_path):
    """Jobs with `dict.get`: None is success, a text is the error; a job that dies is named."""
    jobs = {"good": ({}, "a"), "bad": ({"a": "the disk is full"}, "a"), "dead": (1, "a")}
    options = "cluster=local,parallel=3"
    failed = slurm.run_jobs(dict.get, jobs, tmp_path / "jobs", options)
    assert failed.pop("bad") == "the disk is full"
    assert re.fullmatch(r"the job ended without a result, see .*_log\.err", failed.pop("dead"))
    assert not failed
    with pytest.raises(ValueError, match="--submitit='cluster=local,tiem=3'"):
        slurm.run_jobs(dict.get, jobs, tmp_path / "jobs", "cluster=local,tiem=3")
    with pytest.raises(ValueError, match="parallel='many'"):
        slurm.run_jobs(dict.get, jobs, tmp_path / "jobs", "cluster=local,parallel=many")


def test_jobs_that_still_run_are_waited_for(tmp_path):
    """The launcher is killed; started again, it submits nothing twice."""
    script = f"echo ran >> {tmp_path}/log; while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"
    jobs = {"one": (["sh", "-c", script],)}
    program = (
        "import subprocess, sys; from ffn_heterogeneity.launch.slurm import run_jobs; "
        f"run_jobs(subprocess.check_call, {jobs!r}, {str(tmp_path / 'jobs')!r}, 'cluster=local')"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as launcher:
        while not (tmp_path / "log").exists():
            assert launcher.poll() is None, "it failed"
            time.sleep(0.05)
        launcher.kill()
    threading.Timer(1.0, (tmp_path / "go").touch).start()
    arguments = (subprocess.check_call, jobs, tmp_path / "jobs", "cluster=local")
    assert not slurm.run_jobs(*arguments) and (tmp_path / "go").exists()
    assert (tmp_path / "log").read_text() == "ran\n"
    assert not slurm.run_jobs(*arguments), "and after it ended, again"
    assert (tmp_path / "log").read_text() == "ran\nran\n"


@pytest.mark.parametrize("note", ['{"cluster": "local", "id": "../x"}', '{"cluster": [], "id": 3}'])
def test_a_job_file_that_names_no_job_is_not_waited_for(tmp_path, capsys, note):
    (tmp_path / "one.job.json").write_text(note)
    assert slurm._running(tmp_path, "one") is None
    assert "one.job.json names no job" in capsys.readouterr().err
    (tmp_path / "one.job.json").write_text("[" * 100_000)
    refused("one.job.json: not JSON", slurm._running, tmp_path, "one")


@pytest.mark.slow
def test_a_sweep_as_local_jobs_is_the_same_sweep(files, pairs, tmp_path):
    flags = table_flags(files, "pairs", tmp_path / "run")
    jobs = ["--launcher=submitit", "--submitit=cluster=local,parallel=2"]
    quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as `compiled_quickly` here
    done = run_program(sys.executable, "scripts/sweep.py", *flags, *jobs, **quickly)
    assert done.code == 0, done.err
    one, other = results_in(pairs[0]), results_in(tmp_path / "run")
    assert list(one) == list(other)
    for name, result in one.items():
        assert result | {"seconds": 0} == other[name] | {"seconds": 0}
    assert run_script("sweep", *flags).code == 0, "and it is finished"
