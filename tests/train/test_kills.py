"""Real processes killed with SIGKILL, many of them in the middle of a save, and resumed."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
from lives import PROGRAM, Launch, Life, files, half_exported, half_saved, whole
from tiny_models import TEXT, save_tiny
from tiny_runs import flags_of, metrics

BEST = "validation/nll"


def check_best(workdir, values):
    """Checks the best checkpoint without our reader, which would clean up the directory."""
    steps = whole(workdir)
    if not steps:
        return
    record = json.loads((workdir / "checkpoints" / str(steps[-1]) / "info/metadata").read_text())
    step = min((step for step in values if step <= steps[-1]), key=values.get)
    assert record["info"]["best"] == {"step": step, "metric": BEST, "value": values[step]}
    assert record["best"] == (step or None)
    assert step == 0 or step in steps


def lasting(workdir):
    """(results.json without times, bytes of the model's files; the card has times, too)."""
    results = json.loads((workdir / "results.json").read_text())
    for key in ("seconds", "tokens_per_second", "compile_seconds"):
        del results[key]
    paths = [path for path in (workdir / "model").rglob("*") if path.is_file()]
    model = {str(path.relative_to(workdir)): path.read_bytes() for path in paths}
    del model["model/README.md"]
    return results, model


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


def drill(directory, cache, steps, kills, seed):
    """Kills a run `kills` times and compares its end; returns the number of kills in saves."""
    (directory / "plain").mkdir(), (directory / "killed").mkdir()
    reference = Life(directory / "plain", steps, cache)
    reference.go()
    assert reference.end()[0] == 0
    expected = metrics(directory / "plain")
    values = {row["step"]: row[BEST] for row in expected if BEST in row}
    workdir, chance, inside = directory / "killed", random.Random(seed), 0
    life = Life(workdir, steps, cache)
    for kill in range(kills):
        life.go()
        following = Life(workdir, steps, cache)
        if kill % 4:
            life.wait_for_saves(chance.randint(1, 3))
            time.sleep(chance.uniform(0, 0.02) if kill > 1 else 0)
        else:
            life.wait_for_rows(chance.randint(0, 5))
            time.sleep(chance.uniform(0, 0.1))
        code, output = life.end(signal.SIGKILL)
        assert code == -signal.SIGKILL, f"it ended before kill {kill}: {code}\n{output}"
        inside += bool(half_saved(workdir))
        check_best(workdir, values)
        life = following
    life.go()
    code, output = life.end()
    assert code == 0, output
    assert metrics(workdir) == expected
    ends = [json.loads((directory / x / "end.json").read_text()) for x in ("plain", "killed")]
    assert ends[0] == ends[1] and ends[0]["best_step"] == min(values, key=values.get)
    assert not half_saved(workdir)
    print(f"{kills} kills, {inside} inside a save")
    return inside


def drill_on_meshes(directory, cache, steps, meshes):
    """A run that is killed on each mesh except the last, and resumed on the next."""
    (directory / "plain").mkdir(), (directory / "moved").mkdir()
    reference = Life(directory / "plain", steps, cache, meshes[0])
    workdir, chance = directory / "moved", random.Random(4)
    reference.go()
    following = Life(workdir, steps, cache, meshes[0])
    assert reference.end()[0] == 0
    for mesh in meshes[1:]:
        life, following = following, Life(workdir, steps, cache, mesh)
        life.go()
        if not whole(workdir):
            life.wait_for(1, lambda: bool(whole(workdir)))
        life.wait_for_rows(3)  # it has resumed, compiled and trained
        life.wait_for_saves(chance.randint(1, 2))
        time.sleep(chance.uniform(0, 0.02))
        code, output = life.end(signal.SIGKILL)
        assert code == -signal.SIGKILL, output
        assert whole(workdir)[-1] < steps, "killed too late to move"
    following.go()
    code, output = following.end()
    assert code == 0, output
    first, second = metrics(directory / "plain"), metrics(workdir)
    assert [row["step"] for row in first] == list(range(1, steps + 1))
    assert [row["step"] for row in second] == list(range(1, steps + 1))
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            np.testing.assert_allclose(other[key], value, rtol=1e-5, err_msg=f"{key} {one}")


@pytest.mark.slow
def test_a_run_killed_on_every_mesh_in_turn(tmp_path, cache):
    meshes = ("8,1,1", "1,8,1", "2,2,2", "1,4,2", "1,1,8", "1,1,1", "8,1,1")
    drill_on_meshes(tmp_path, cache, steps=120, meshes=meshes)


def moments(chance, startup):
    """30 in start-up, steps and saves, mixed; then 10 in the export: (kind, number, delay)."""
    mixed = ["start", "step", "save"] * 10
    chance.shuffle(mixed)
    for kind in mixed:
        yield kind, chance.randint(1, 4), chance.uniform(0, startup if kind == "start" else 0.03)
    for number in range(10):
        yield "export", number, 0


@pytest.mark.slow
def test_forty_launches_killed(tmp_path, cache):
    """Kills at start-up, in compilation, steps, saves and the export: each relaunch resumes."""
    model, text = save_tiny(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text(TEXT)
    settings = {"data__passage_chars": 400, "data__validation_fraction": 0.2, "tensorboard": False}
    settings |= {
        "steps": 160,
        "batch_size": 2,
        "seq_len": 32,
        "eval__every": 8,
        "checkpoint__every": 2,
    }
    settings |= {"data__path": text, "losses__nucl__weight": 1}
    flags = flags_of(f"configs/nucl_finetune.py:{model},text,lora", **settings)
    plain, workdir = tmp_path / "plain", tmp_path / "killed"
    start, reference = time.monotonic(), Launch(plain, flags, cache)
    reference.wait_for_rows(1)
    startup = time.monotonic() - start
    code, output = reference.end()
    assert code == 0, output
    chance, counts = random.Random(5), dict.fromkeys(("start", "step", "save", "export"), 0)
    for kind, number, delay in moments(chance, startup):
        life = Launch(workdir, flags, cache)
        if kind == "step":
            life.wait_for_rows(number)
        elif kind == "save":
            life.wait_for_saves(1)
        elif kind == "export":
            life.wait_for_export(number)
        time.sleep(delay)
        code, output = life.end(signal.SIGKILL)
        done = (workdir / "results.json").exists()
        assert code == -signal.SIGKILL and not done, f"it ended before a kill in {kind}\n{output}"
        inside = {"save": half_saved, "export": half_exported}.get(kind, lambda _: True)
        counts[kind] += bool(inside(workdir))
    last = Launch(workdir, flags, cache)
    code, output = last.end()
    assert code == 0, output
    assert metrics(workdir) == metrics(plain) and lasting(workdir) == lasting(plain)
    assert files(workdir) == files(plain)
    print(counts)
    assert counts["start"] == counts["step"] == 10
    assert counts["save"] >= 3 and counts["export"] >= 5, counts


def test_three_kills_leave_no_trace(tmp_path, cache):
    assert drill(tmp_path, cache, steps=30, kills=3, seed=1) >= 1


@pytest.mark.slow
def test_thirty_kills_leave_no_trace(tmp_path, cache):
    assert drill(tmp_path, cache, steps=150, kills=30, seed=2) >= 10


def test_sigterm_saves_within_ten_seconds(tmp_path, cache):
    life = Life(tmp_path, 100_000, cache)
    life.go()
    life.wait_for_rows(5)
    start = time.monotonic()
    code, output = life.end(signal.SIGTERM)
    seconds = time.monotonic() - start
    assert code == 143 and seconds < 10, output
    assert f"stopped at step {whole(tmp_path)[-1]}; to resume: " in output
    assert metrics(tmp_path)[-1]["step"] == whole(tmp_path)[-1] and not half_saved(tmp_path)
    print(f"saved and ended {seconds:.2f} s after SIGTERM")


def own_terminal():
    """In the child: the tests may be started with SIGHUP ignored (nohup), and a run inherits it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.slow
def test_a_terminal_that_closes(tmp_path, cache):
    """A run saves after the kernel's SIGHUP, with a terminal that cannot be written to."""
    terminal, inside = os.openpty()
    given = {"env": os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}}
    given |= {"stdin": inside, "stdout": inside, "stderr": inside, "preexec_fn": own_terminal}
    command = [sys.executable, "-W", "ignore", PROGRAM, tmp_path, "100000"]
    process = subprocess.Popen(command, start_new_session=True, **given)
    os.close(inside)
    os.write(terminal, b"go\n")
    deadline = time.monotonic() + 60
    while len(metrics(tmp_path) if (tmp_path / "metrics.jsonl").exists() else ()) < 5:
        assert time.monotonic() < deadline and process.poll() is None
        os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait(timeout=60) == 129
    assert metrics(tmp_path)[-1]["step"] == whole(tmp_path)[-1] and not half_saved(tmp_path)


def test_a_terminal_that_is_gone_before_its_signal(tmp_path):
    """Writes to it fail (EIO), but the program continues, so a run can save at the signal."""
    program = (
        "import os, sys\nfrom ffn_heterogeneity.train.console import Progress\n"
        "outer, inner = os.openpty()\nos.dup2(inner, 1), os.dup2(inner, 2), os.close(inner)\n"
        "progress = Progress(9, 0)\nos.close(outer)\n"
        "for step in range(1, 4): progress.say('a line'), progress.update(step, {}, 1.0)\n"
        "open(sys.argv[1], 'w').close()"
    )
    done = [sys.executable, "-c", program, tmp_path / "done"]
    subprocess.run(done, check=True, start_new_session=True)
    assert (tmp_path / "done").exists()
