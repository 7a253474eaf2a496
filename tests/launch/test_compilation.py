"""Compiled programs in the user's cache: reused, private, and never a cause of errors."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import REPOSITORY

from ffn_heterogeneity.launch import compilation

PROGRAM = """
import sys
import jax
from ffn_heterogeneity.launch.compilation import keep_compiled
keep_compiled("off" not in sys.argv)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.endswith("cache_hits")))
print(float(jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((8, 8)))), any(hits))
"""


def run(*arguments, **environment) -> str:
    """The output of the program; checks that it prints nothing else."""
    clean = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    clean["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    pipes = {"capture_output": True, "text": True, "check": True, "cwd": REPOSITORY}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=clean | environment, **pipes)
    assert done.stderr == ""
    return done.stdout.strip()


def entries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    here = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert run(**here) == "512.0 False"
    made = entries(tmp_path)
    assert made and run(**here) == "512.0 True" and entries(tmp_path) == made
    assert run("off", **here) == "512.0 False"
    cache = str(tmp_path / "own")
    assert run(**here, JAX_COMPILATION_CACHE_DIR=cache) == "512.0 False" and entries(Path(cache))
    for path in made:  # the state after a process was killed in a write
        path.write_bytes(path.read_bytes()[:-20])
    assert run(**here) == "512.0 False"


def test_where_nothing_can_be_kept_nothing_is(tmp_path):
    (tmp_path / "file").touch()
    assert run(HOME=str(tmp_path / "file"), XDG_CACHE_HOME="") == "512.0 False"
    assert not entries(tmp_path / "file")


def test_the_directory_is_private_and_of_this_kind_of_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = compilation.cache_directory()
    assert here.stat().st_mode & 0o777 == 0o700 and here.is_relative_to(tmp_path)
    here.chmod(0o777)
    assert compilation.cache_directory() is None
    monkeypatch.setattr(os, "cpu_count", lambda: 999)
    assert compilation.cache_directory() not in (here, None)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert compilation.cache_directory() is None and not Path("relative").exists()


@pytest.mark.parametrize(("days", "stays"), [(29, True), (31, False)])
def test_old_entries_go(tmp_path, monkeypatch, days, stays):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = compilation.cache_directory() / "entry"
    entry.touch()
    os.utime(entry, (time.time() - days * 86_400,) * 2)
    assert compilation.cache_directory() and entry.exists() == stays
