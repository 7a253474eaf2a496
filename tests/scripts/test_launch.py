"""scripts/launch/: the commands, and a real run that is killed repeatedly."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib

import pytest
from packaging.requirements import Requirement
from tiny_models import REPOSITORY, TEXT, save_tiny
from tiny_runs import flags_of, metrics, run_program

LAUNCH = REPOSITORY / "scripts" / "launch"


def run(script, *arguments, **environment):
    pipes = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(["bash", LAUNCH / script, *map(str, arguments)], **pipes)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_help_and_no_arguments(script):
    code, out, _ = run(script, "--help")
    assert code == 0 and f"scripts/launch/{script}" in out and "#" not in out
    assert run(script)[0] == 2


TPU = "gcloud compute tpus tpu-vm {} ffn --zone=us-west4-a"
WHERE = "--accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite"


def test_every_command_for_a_tpu():
    """The expected commands, word by word after the shell's splitting."""
    command = ("train", "--config=nucl_finetune:gemma2_2b,gsm8k", "--workdir=gs://b/a run")
    code, out, _ = run("tpu_vm.sh", "--print", "keep", *command, SOURCE="git+https://example.org/x")
    lines = [shlex.split(line, comments=True) for line in out.splitlines()]
    assert code == 0 and lines.pop(0) == []
    assert lines[0] == f"{TPU.format('delete')} --quiet".split()
    assert lines[1] == f"{TPU.format('create')} {WHERE} --spot".split()
    ssh = f"{TPU.format('ssh')} --worker=all".split()
    locked, where = f"{LAUNCH}/locked/py3.12.txt", "--zone=us-west4-a --worker=all"
    scp = f"gcloud compute tpus tpu-vm scp {locked} ffn:ffn-locked.txt {where}"
    assert lines[2] == scp.split()
    assert lines[3][:-1] == ssh and lines[4][:-1] == ssh and len(lines) == 5
    steps = map(shlex.split, lines[3][-1].removeprefix("--command=").split(" && "))
    install = ["~/.local/bin/uv", "pip", "install", "-q", "--python", "~/ffn/bin/python"]
    assert [*steps][2:] == [
        [*install, "--require-hashes", "-r", "~/ffn-locked.txt"],
        [*install, "--no-deps", "ffn-heterogeneity @ git+https://example.org/x"],
    ]
    assert shlex.split(lines[4][-1].removeprefix("--command=")) == ["~/ffn/bin/ffnh", *command]


@pytest.mark.parametrize("path", sorted((LAUNCH / "locked").glob("*.txt")), ids=lambda x: x.stem)
def test_what_is_locked_is_all_that_is_needed(path):
    """Every requirement has hashes; those of the package are there, in a version that it allows."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    pins, hashes = {}, 0
    for line in lines:
        if line.startswith("    --hash=sha256:"):
            hashes += 1
            continue
        assert hashes or not pins, f"{line} follows one without a hash"
        name, _, version = line.removesuffix(" \\").partition(" ;")[0].partition("==")
        pins[name.partition("[")[0].lower().replace("_", "-")], hashes = version, 0
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    for requirement in map(Requirement, wanted):
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(pins[name], prereleases=True), name
    assert len(pins) > 100 and "libtpu" in pins
    code, out, _ = run("tpu_vm.sh", "--print", "create", SPOT="0", ZONE="eu-1", TPU="t")
    assert (
        out.split()
        == f"{TPU} {WHERE}".format("create")
        .replace("us-west4-a", "eu-1")
        .replace(" ffn ", " t ")
        .split()
    )
    code, _, error = run("tpu_vm.sh", "--print", "keep", "train", "--workdir=runs/x", SOURCE="x")
    assert code == 2 and "gs://" in error
    assert run("tpu_vm.sh", "setup", SOURCE="")[0] == 2


def test_slurm_jobs(tmp_path):
    """Runs the array's job here, as its second task."""
    points = tmp_path / "points"
    points.write_text("echo 'a  b'\n\necho \"c  d\" $((1 + 1)) $'x\\ny'\n")
    code, out, _ = run("slurm.sh", "--print", "array", points, "--time=1:00")
    command, _, job = out.partition("\n")
    asked = "sbatch --requeue --open-mode=append --signal=B:TERM@120 --array=1-2 --time=1:00"
    assert code == 0 and command.split() == asked.split()
    task = run_program("bash", given=job, SLURM_ARRAY_TASK_ID="2")
    assert task.out == "c  d 2 x\ny\n", task
    for half in ("echo 'a\nb'\n", "echo a\necho 'a"):
        points.write_text(half)
        code, out, error = run("slurm.sh", "--print", "array", points)
        assert code == 2 and not out and "no whole command: echo 'a\n" in error
    code, out, error = run("slurm.sh", "--print", "nodes", "four", "train")
    assert code == 2 and not out and "nodes four: a number is expected" in error
    job = (4, "train", "--workdir=a b", "--", "--gpus-per-node=8")
    code, out, _ = run("slurm.sh", "--print", "nodes", *job)
    assert code == 0 and "--nodes=4 --gpus-per-node=8" in out.splitlines()[0]
    assert re.search(r"srun \S+ ffnh train --workdir=a\\ b --distributed=auto$", out.strip())


@pytest.mark.parametrize(
    ("program", "options", "code", "starts"),
    [
        ("exit 0", (), 0, 1),
        ("exit 2", (), 2, 1),
        ("exit 130", (), 130, 1),
        ("exit 7", ("--times=3",), 7, 3),
        ("(($(wc -l < starts) == 4)) || kill -9 $$", (), 0, 4),
    ],
)
def test_when_it_starts_again(tmp_path, program, options, code, starts):
    script = f"cd {tmp_path}; echo x >> starts; {program}"
    assert run("again.sh", "--wait=0", *options, "bash", "-c", script)[0] == code
    assert len((tmp_path / "starts").read_text().splitlines()) == starts


def test_its_own_sigterm_is_passed_on_and_waited_for(tmp_path):
    script = (
        f"trap 'sleep 1; echo saved > {tmp_path}/saved; exit 143' TERM; echo on; sleep 60 & wait"
    )
    process = subprocess.Popen(
        ["bash", LAUNCH / "again.sh", "--wait=0", "bash", "-c", script], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"on\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143 and (tmp_path / "saved").exists()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_waits_to_start_again(tmp_path, sent, code):
    """SIGINT reaches the command, which ends by it; SIGTERM between two starts is a SIGTERM."""
    script = "echo on; exec sleep 60" if sent == signal.SIGINT else "echo on; exit 7"
    command = ["bash", LAUNCH / "again.sh", "--wait=60", "bash", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"on\n"
    if sent == signal.SIGTERM:
        assert b"again in 60 s" in process.stderr.readline()
        time.sleep(0.2)
    process.send_signal(sent)
    assert process.wait(timeout=30) == code


@pytest.mark.slow
def test_five_preemptions_change_nothing(tmp_path):
    """A run killed (SIGKILL) five times under again.sh writes the metrics of one left alone."""
    save_tiny(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT * 4)

    def command(workdir):
        settings = {
            "data.path": tmp_path / "text.txt",
            "data.validation_fraction": 0.2,
            "steps": 60,
        }
        settings |= {"data.passage_chars": 200, "seq_len": 64, "batch_size": 4, "eval.every": 20}
        settings |= {"checkpoint.every": 4, "optimizer.learning_rate": 1e-3, "tensorboard": False}
        flags = flags_of(f"configs/nucl_finetune.py:{tmp_path}/model,text", workdir, **settings)
        return [sys.executable, REPOSITORY / "scripts" / "train.py", *flags]

    plain = run_program(*command(tmp_path / "plain"))
    assert plain.code == 0, plain.err
    program = ["bash", LAUNCH / "again.sh", "--wait=0", *command(tmp_path / "killed")]
    process = subprocess.Popen(program, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    kills = 0
    for at in (6, 14, 26, 37, 51):
        while process.poll() is None:
            file = tmp_path / "killed" / "metrics.jsonl"
            steps = [row["step"] for row in metrics(tmp_path / "killed")] if file.exists() else [0]
            if steps and steps[-1] >= at:
                break
            time.sleep(0.02)
        for child in run_program("pgrep", "-P", process.pid).out.split():
            os.kill(int(child), signal.SIGKILL)
            kills += 1
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0 and kills == 5, error
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "plain") != []
