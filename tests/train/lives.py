"""Processes that work in a directory and are killed: the toy run, and real commands."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tiny_models import REPOSITORY

PROGRAM = Path(__file__).with_name("kill_toy.py")


def born(command, cache, **more):
    """Starts the process with a shared compilation cache, so that most time is spent in saves."""
    env = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": str(cache)}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **more}
    return subprocess.Popen([sys.executable, *command], env=os.environ | env, **pipes)


class Life:
    """One process of the run; it imports everything at its start, and waits for `go`."""

    def __init__(self, workdir, steps, cache, mesh=None):
        self.workdir = workdir
        program = [PROGRAM, workdir, str(steps)]
        if mesh:
            program = [PROGRAM.with_name("kill_mesh.py"), workdir, str(steps), mesh]
        self.process = born(["-W", "ignore", *program], cache, stdin=subprocess.PIPE)

    def go(self):
        assert self.process.stdout.readline() == "ready\n", self.process.stdout.read()
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self, number=None):
        """`(return code, output)`, after the signal `number`."""
        if number is not None:
            self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, output

    def wait_for(self, changes, look):
        """Waits until the result of `look()` changed that many times, or the process ended."""
        seen = look()
        while changes and self.process.poll() is None:
            now = look()
            changes, seen = changes - (now != seen), now
            time.sleep(0.0003)

    def wait_for_saves(self, number):
        # A save creates orbax's temporary directory and renames it: two changes.
        self.wait_for(2 * number - 1, lambda: bool(half_saved(self.workdir)))

    def wait_for_rows(self, number):
        def written():
            path = self.workdir / "metrics.jsonl"
            return path.stat().st_mtime_ns if path.exists() else 0

        self.wait_for(number, written)


def half_saved(workdir):
    return list((workdir / "checkpoints").glob("*tmp*"))


def whole(workdir):
    names = [path.name for path in (workdir / "checkpoints").glob("[0-9]*")]
    return sorted(int(name) for name in names if name.isdigit())


class Launch(Life):
    """A real command, from the start of its interpreter."""

    def __init__(self, workdir, flags, cache, script="train"):
        self.workdir = workdir
        command = [REPOSITORY / f"scripts/{script}.py", *flags, f"--workdir={workdir}"]
        self.process = born(command, cache)

    def wait_for_halves(self, number):
        """Waits until that many files or directories were created under a temporary name."""
        seen = set()

        def begun():
            seen.update(half_written(self.workdir))
            return len(seen)

        begun()  # files of an earlier process
        self.wait_for(number, begun)

    def wait_for_export(self, number):
        """Waits until part `number` of the export exists; from len(WRITTEN), until the rename."""
        before, model = set(half_exported(self.workdir)), self.workdir / "model"
        former = model.stat().st_ino if model.exists() else 0

        def reached():
            if number >= len(WRITTEN):
                return model.exists() and model.stat().st_ino != former
            new = set(half_exported(self.workdir)) - before
            return any((path / WRITTEN[number]).exists() for path in new)

        self.wait_for(1, reached)


# Files of an export, in their order.
WRITTEN = ("", "model.safetensors", "structure", "structure/model.safetensors", "config.json")
WRITTEN += ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def half_exported(workdir):
    return list(workdir.glob(".model.*"))


def half_written(workdir, since=0.0):
    """Paths with temporary names at any depth that changed after a time."""
    names = re.compile(r"\.partial|checkpoint-tmp")
    with contextlib.suppress(FileNotFoundError):  # a directory that was just renamed
        paths = [path for path in workdir.rglob("*") if names.search(path.name)]
        return [path for path in paths if path.stat().st_mtime >= since]
    return []


def files(workdir):
    """Names of all files and directories; tensorstore's own are digests."""
    names = (str(path.relative_to(workdir)) for path in workdir.rglob("*"))
    return {re.sub(r"[0-9a-f]{32}", "*", name) for name in names}
