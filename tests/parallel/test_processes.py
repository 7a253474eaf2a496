"""Real processes, joined by jax.distributed on this machine, compared with one process."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import process_program
import pytest
from tiny_models import LLAMA, REPOSITORY, TEXT, byte_tokenizer, free_address, random_params
from tiny_runs import flags_of, refused

from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.io.read import read_json
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel import processes as distributed
from ffn_heterogeneity.parallel.placement import local_rows

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def start(*arguments, log: Path, environment: dict = ENVIRONMENT) -> subprocess.Popen:
    pipes = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, cwd=REPOSITORY, **pipes)


def end(processes: list[subprocess.Popen], logs: list[Path]) -> list[int]:
    try:
        return [process.wait(timeout=240) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError([log.read_text()[-1500:] for log in logs]) from None
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("compiled_quickly")
def test_processes_train_as_one(tmp_path, capsys, count):
    """Losses 1e-6, gradients 1e-5 of each leaf's norm, parameters after three steps 1e-6."""
    address, logs = free_address(), [tmp_path / f"{i}.log" for i in range(count)]
    running = [
        start(process_program.__file__, address, count, i, tmp_path / f"{count}.npz", log=log)
        for i, log in enumerate(logs)
    ]
    process_program.main("", 1, 0, tmp_path / "1.npz")
    codes = end(running, logs)
    assert codes == [0] * count, [log.read_text()[-1500:] for log in logs]
    for i, log in enumerate(logs):
        assert f"process {i} of {count}: 1 of {count} cpu devices\n" in log.read_text()
    assert "process 0 of 1: 1 of 1 cpu devices\n" in capsys.readouterr().out
    one, several = (dict(np.load(tmp_path / f"{name}.npz")) for name in (1, count))
    assert one.keys() == several.keys() and len(one) > 20
    np.testing.assert_allclose(several.pop("losses"), one.pop("losses"), rtol=1e-6)
    for name, leaf in one.items():
        bound = 1e-5 if name.startswith("gradient") else 1e-6
        assert np.linalg.norm(several[name] - leaf) <= bound * np.linalg.norm(leaf), name


@pytest.mark.slow
@pytest.mark.parametrize("data", ["text", "mixture"])
def test_sigterm_to_one_of_two_processes_then_one_goes_on(tmp_path, data):
    """Both stop at the same step and save within 10 s; one process finishes the run equally."""
    params = jax.tree.map(np.asarray, random_params(LLAMA))
    save_pretrained(LLAMA, params, tmp_path / "model", tokenizer=byte_tokenizer())
    parts = []
    texts = {"text": TEXT, "second": TEXT.upper(), "third": TEXT.swapcase()}
    for (name, text), weight in zip(texts.items(), (0.5, 0.3, 0.2), strict=True):
        (tmp_path / f"{name}.txt").write_text(text * 4)
        parts.append(("text", str(tmp_path / f"{name}.txt"), weight))
    source = {
        "text": {"data.path": tmp_path / "text.txt"},
        "mixture": {"data.mixture": tuple(parts)},
    }

    def arguments(name: str) -> list:
        settings = {"data.validation_fraction": 0.2, "data.passage_chars": 400, "steps": 12}
        settings |= {"seq_len": 64, "batch_size": 8, "accumulation": 2, "eval.every": 4}
        settings |= {
            "checkpoint.every": 4,
            "optimizer.learning_rate": 1e-3,
            "optimizer.warmup_steps": 0,
        }
        config = f"configs/nucl_finetune.py:{tmp_path}/model,{data}"
        return ["scripts/train.py", *flags_of(config, tmp_path / name, **source[data], **settings)]

    alone = tmp_path / "alone.log"
    assert end([start(*arguments("alone"), log=alone)], [alone]) == [0], alone.read_text()[-1500:]
    address, logs = free_address(), [tmp_path / f"two_{i}.log" for i in range(2)]
    two = [
        start(*arguments("two"), f"--distributed={address},2,{i}", log=log)
        for i, log in enumerate(logs)
    ]
    until = time.time() + 200
    while "step 1/12" not in logs[0].read_text() and time.time() < until:
        time.sleep(0.05)
    two[1].send_signal(signal.SIGTERM)
    sent = time.time()
    assert end(two, logs) == [143, 143], [log.read_text()[-1500:] for log in logs]
    assert time.time() - sent < 10
    stopped = [row["step"] for row in read_metrics(tmp_path / "two" / "metrics.jsonl")][-1]
    assert 0 < stopped < 12
    rest = tmp_path / "rest.log"
    assert end([start(*arguments("two"), log=rest)], [rest]) == [0], rest.read_text()[-1500:]
    first, second = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "two"))
    assert [row["step"] for row in first] == [row["step"] for row in second]
    for one, other in zip(first, second, strict=True):
        for key in {"train/loss", "validation/nll", "train/target_tokens"} & one.keys():
            assert abs(one[key] - other[key]) <= 1e-5 * abs(one[key]), (key, one["step"])
    if data == "mixture":
        shares = [
            read_json(tmp_path / name / "results.json")["shares"] for name in ("alone", "two")
        ]
        assert shares[0] == shares[1] and len(shares[0]) == 3


@pytest.mark.slow
def test_a_work_directory_that_one_process_does_not_see(tmp_path):
    """Else its checkpoints would lack that process's parts."""
    save_pretrained(LLAMA, random_params(LLAMA), tmp_path / "model", tokenizer=byte_tokenizer())
    (tmp_path / "text.txt").write_text(TEXT)
    settings = {"data.path": tmp_path / "text.txt", "steps": 2, "seq_len": 32, "batch_size": 2}
    config = f"configs/nucl_finetune.py:{tmp_path}/model,text"
    address, logs = free_address(), [tmp_path / f"{i}.log" for i in range(2)]
    running = []
    for i, log in enumerate(logs):
        flags = flags_of(config, tmp_path / f"disk {i}", **settings)
        flags.append(f"--distributed={address},2,{i}")
        running.append(start("scripts/train.py", *flags, log=log))
    assert end(running, logs) == [2, 2]
    assert all("processes 1 do not see the work directory" in log.read_text() for log in logs)
    assert not (tmp_path / "disk 0").exists()


def test_local_rows_of_one_process_are_all_rows_and_uneven_ones_are_named():
    mesh = partition.make_mesh()
    assert local_rows(partition.batch_sharding(mesh), 6, 2) == list(range(6))
    refused("batch_size=5 with accumulation=2", local_rows, partition.batch_sharding(mesh), 5, 2)


@pytest.mark.parametrize("how", ["me", "localhost:1,2", "localhost:1,2,2", "localhost,2,0"])
def test_a_mistyped_way_to_join_is_named(how):
    refused("distributed=", distributed.initialize, how)


@pytest.mark.parametrize(
    ("how", "slurm", "words"),
    [
        ("", {}, ""),
        ("", {"STEP_NUM_TASKS": "1"}, ""),
        ("", {"NTASKS": "4"}, ""),  # the process of a batch script is in no step
        ("", {"STEP_NUM_TASKS": "4"}, "one of 4 processes and sees only its own 1"),
        ("auto", {"STEP_NUM_TASKS": "4"}, "--distributed=alone makes"),
        ("alone", {"STEP_NUM_TASKS": "4"}, ""),  # points of a sweep
        ("localhost:1,2,0", {}, "one of 2 processes"),
        ("auto", {"GPUS_ON_NODE": "8", "STEP_TASKS_PER_NODE": "1(x2)"}, "1 of this node's 8 GPUs"),
        ("auto", {"GPUS_ON_NODE": "8", "STEP_TASKS_PER_NODE": "8(x2)"}, ""),
        ("auto", {"GPUS_ON_NODE": "", "STEP_TASKS_PER_NODE": "1,4"}, ""),
    ],
)
def test_a_run_that_was_to_be_several_is_not_silently_one(monkeypatch, how, slurm, words):
    for key, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    if "GPUS_ON_NODE" in slurm:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    if words:
        refused(words, distributed.devices_seen, how)
    else:
        assert re.match("process 0 of 1: 1 of 1 .pu devices", distributed.devices_seen(how))


def test_a_command_says_so_before_it_loads(tmp_path):
    log, environment = tmp_path / "log", {**ENVIRONMENT, "SLURM_STEP_NUM_TASKS": "2"}
    command = ["scripts/train.py", f"--workdir={tmp_path / 'run'}"]
    assert end([start(*command, log=log, environment=environment)], [log]) == [2]
    assert re.fullmatch("error: distributed='': this is one of 2 .*\n", log.read_text())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sizes", [(0, 1, 1), (-1, -1, 1), (1, 1, 2)])
def test_meshes_that_do_not_fit_are_named(sizes):
    refused("mesh", partition.make_mesh, *sizes)
