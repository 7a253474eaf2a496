"""A full disk or a lost mount costs a run nothing; and runs that do not fit in memory."""

import errno
import json
import os
import re
import shlex
import shutil
import signal

import jax
import pytest
import test_loop
from tiny_models import REPOSITORY, TEXT, no_file_beyond, run_script, save_tiny
from tiny_runs import flags_of, refused, small_run

from ffn_heterogeneity.io.checkpoints import Checkpoints
from ffn_heterogeneity.io.metrics import MetricsWriter
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.train import fit, memory

pytestmark = [
    pytest.mark.usefixtures("compiled_quickly"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    (root / "text.txt").write_text(TEXT)
    settings = small_run(root / "text.txt", steps=6, eval__every=3, checkpoint__every=2)
    settings |= {"optimizer__learning_rate": 1e-3, "dropout": 0.1}
    config = f"{REPOSITORY}/configs/nucl_finetune.py:{save_tiny(root / 'tiny')},text"
    return flags_of(config, **settings)


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole") / "run"
    done = run_script("train", *flags, f"--workdir={workdir}")
    assert done.code == 0, done.err
    return workdir, done.err


def test_a_run_says_what_it_needs(whole):
    said = whole[1]
    for words in (
        r"[\d,]+ parameters, computed in float32: 0.00 GiB .*; 32 tokens per step, 192 in total",
        r"compiled in [\d.]+ s; a step \(remat=dots\) needs 0.00 of [\d.]+ GiB of memory",
        # Of the four steps after the compiled one three count; the fifth is followed by one more.
        r"s per step, [\d,]+ tokens/s: 1 more take about 0:00:01 without eval",
    ):
        assert re.search(words, said), words
    assert said.index("compiled in") < said.index("step 0: validation") < said.index(" s per step,")


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the disk's file")


def broken(trouble, workdir, patch):
    """Makes the disk fail in the way of `trouble`; returns a function that repairs it."""
    if trouble == "export":
        patch.setattr(training, "save_pretrained", full)
    elif trouble == "results":
        patch.setattr(training, "write_card", full)
    elif trouble == "save":
        inner = Checkpoints.save

        def save(self, step, *arguments, **options):
            with no_file_beyond(60 if step == 4 else 1 << 30):
                inner(self, step, *arguments, **options)

        patch.setattr(Checkpoints, "save", save)
    else:
        inner = MetricsWriter.write

        def write(self, step, row):
            if step == 5 and trouble == "metrics":
                with no_file_beyond(os.stat(self.path).st_size + 9):
                    inner(self, step, row)
            if step == 5 and workdir.exists():
                workdir.rename(workdir.with_name("away"))
                (workdir / "checkpoints").mkdir(parents=True)  # the files under the mount
            inner(self, step, row)

        patch.setattr(MetricsWriter, "write", write)


LONGER = ("metrics", "export", "results")
SLOWER = [pytest.param(x, marks=pytest.mark.slow) for x in LONGER]


@pytest.mark.parametrize("trouble", ["save", "mount", *SLOWER])
def test_the_last_line_goes_on(flags, whole, tmp_path, trouble):
    workdir = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        broken(trouble, workdir, patch)
        said = run_script("train", *flags, f"--workdir={workdir}").error
    what, _, command = said.partition("; to resume: ")
    reasons = {"save": "checkpoints/4 could.*File too large", "mount": "No such.*metrics.jsonl"}
    reasons |= {"metrics": "File too large.*metrics.jsonl"}
    assert re.search(reasons.get(trouble, "No space left.*the disk's file"), what)
    words = shlex.split(command)
    assert words[1].endswith("train.py") and words[-1] == f"--workdir={workdir}"
    if trouble == "mount":
        shutil.rmtree(workdir)
        workdir.with_name("away").rename(workdir)
    again = run_script("train", *words[2:])
    assert again.code == 0, again.err
    last = {"save": 3, "metrics": 4, "mount": 4}.get(trouble, 6)  # 3 was the best so far
    assert f"resumed from {workdir}/checkpoints/{last}\n" in again.err
    assert test_loop.metrics(workdir) == test_loop.metrics(whole[0])
    files = [path / "model" / "model.safetensors" for path in (workdir, whole[0])]
    assert files[0].read_bytes() == files[1].read_bytes()
    results = [json.loads((path / "results.json").read_text()) for path in (workdir, whole[0])]
    assert results[0]["history"] == results[1]["history"]


@pytest.mark.slow
def test_five_thousand_steps_through_every_trouble(tmp_path):
    """A closed terminal, a disk that is full twice, a lost mount: results as without them."""
    options = {"steps": 5000, "checkpoint_every": 250, "eval_every": 1000}
    reference = test_loop.make_loop(tmp_path / "whole", **options).run()
    workdir, limits = tmp_path / "run", []

    def fill(room):
        limits.append(no_file_beyond((workdir / "metrics.jsonl").stat().st_size + room))
        limits[-1].__enter__()

    troubles = {
        700: lambda: os.kill(os.getpid(), signal.SIGHUP),
        1800: lambda: fill(9),
        2900: lambda: workdir.rename(tmp_path / "away"),
        3749: lambda: fill(900),  # before a save
        4400: lambda: os.kill(os.getpid(), signal.SIGTERM),
    }
    for _ in range(len(troubles) + 1):
        hook = lambda now: troubles.pop(now, lambda: None)()  # noqa: E731
        loop = test_loop.make_loop(workdir, hook=hook, **options)
        try:
            result = loop.run()
        except (OSError, ValueError) as error:
            assert re.search("File too large|No such file", str(error))
        while limits:
            limits.pop().__exit__(None, None, None)
        if (tmp_path / "away").exists():
            assert not list(workdir.glob("checkpoints/[0-9]*"))
            shutil.rmtree(workdir, ignore_errors=True)
            (tmp_path / "away").rename(workdir)
    assert not troubles and result.stopped is None
    assert test_loop.bits(result.state) == test_loop.bits(reference.state)
    assert test_loop.metrics(workdir) == test_loop.metrics(tmp_path / "whole")


# ---- memory


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_refused_with_one_that_does(flags, tmp_path, monkeypatch):
    flags = [*flags, "--config.batch_size=16", "--config.data.validation_fraction=0.0"]
    flags.append("--config.remat=full")  # only the batch size can be reduced
    planned = run_script("train", *flags, "--config.dry_run=here", f"--workdir={tmp_path / 'p'}")
    assert "the compiled step needs" in planned.out and "does NOT fit" not in planned.out
    plan = json.loads((tmp_path / "p" / "plan.json").read_text())
    room = 0.7 * plan["compiled"]["bytes_per_device"]["together"]
    needs, inner = {}, fit.compile_step

    def compile_step(plan, *arguments, **given):
        program, held = inner(plan, *arguments, **given)
        needs[plan.accumulation] = held["together"]
        return program, held

    monkeypatch.setattr(fit, "compile_step", compile_step)
    monkeypatch.setattr(fit, "memory_of", lambda devices: room)
    said = run_script("train", *flags, f"--workdir={tmp_path / 'run'}").error
    words = "a step of batch_size=16 with accumulation=1 needs .* of .* GiB of memory: "
    words += r"accumulation=(\d+) fits, with the same updates, or batch_size=(\d+)$"
    match = re.search(words, said)
    parts = int(match[1])
    assert parts * int(match[2]) == 16 and needs[parts] <= room
    assert all(size > room for n, size in needs.items() if n < parts)
    assert not (tmp_path / "run").exists(), "the corrected command can use the directory"
    monkeypatch.setattr(fit, "memory_of", lambda devices: 1)
    said = run_script("train", *flags, f"--workdir={tmp_path / 'run'}").error
    assert "training needs 0.00 of 0.00 GiB of memory (0.00 GiB trainable parameters" in said


@pytest.mark.slow
def test_a_dry_run_names_what_fits(flags, tmp_path, monkeypatch):
    from ffn_heterogeneity.train import hardware

    monkeypatch.setattr(hardware, "memory_of", lambda devices: 400_000)
    dry_flags = flags_of(batch_size=16, dry_run="here", workdir=tmp_path / "plan")
    planned = run_script("train", *flags, *dry_flags)
    assert re.search(r"it does NOT fit; (accumulation=\d+ fits|not even)", planned.out)


@pytest.mark.parametrize("kind", ["", "memory"])
def test_a_containers_limit_is_the_memory(tmp_path, monkeypatch, kind):
    """The limit of the group or of a parent group, without the page cache; cgroups v2 and v1."""
    v2 = kind == ""
    names = ("max", "current", "") if v2 else ("limit_in_bytes", "usage_in_bytes", "total_")
    group = tmp_path / "sys/fs/cgroup" / kind / "outer" / "own"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpu:/x\n0:{kind}:/outer/own\n")
    (tmp_path / "proc/self/status").write_text("Name: x\nRssAnon:\t  1000 kB\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:  8000000 kB\n")
    (group / f"memory.{names[0]}").write_text("max\n" if v2 else "9223372036854771712\n")
    for folder, limit in ((group.parent, 5_000_000), (group, None)):
        if limit:
            (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
        (folder / f"memory.{names[1]}").write_text("3000000\n")
        statistics = "" if v2 else "active_file 1\ninactive_file 2\n"
        statistics += f"{names[2]}active_file 400000\n{names[2]}inactive_file 600000\n"
        (folder / "memory.stat").write_text(statistics)
    real = memory.Path
    monkeypatch.setattr(memory, "Path", lambda first, *rest: real(f"{tmp_path}{first}", *rest))
    assert memory.memory_for_this_process() == 5_000_000 - 3_000_000 + 1_000_000 + 1_024_000
    monkeypatch.setenv("FFNH_MEMORY_GIB", "1.5")
    assert memory.memory_for_this_process() == 1.5 * 2**30
    for wrong in ("24GB", "-1", "nan"):
        monkeypatch.setenv("FFNH_MEMORY_GIB", wrong)
        refused(f"FFNH_MEMORY_GIB='{wrong}'.* number of GiB", memory.memory_for_this_process)
    monkeypatch.setenv("FFNH_MEMORY_GIB", "1.5")
    assert jax.devices()[0].platform != "cpu" or fit.memory_of(jax.devices()[:1]) < 1.5 * 2**30
