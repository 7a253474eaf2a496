"""Freed memory stays with the process: measured in one of its own."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from ffn_heterogeneity.memory import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else False)
step = jax.jit(lambda x: (x @ x.T) @ x)  # 256 MB between the two
x = jnp.ones((8192, 16))
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    last = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(last)
"""


def faults(how: str, **environment) -> tuple[str, int]:
    """What keep_freed_memory said, and the page faults of the third call."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env=clean | environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said, count = done.stdout.split()
    return said, int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_the_next_step_finds_its_pages():
    said, kept = faults("keep")
    _, given_back = faults("no")
    assert said == "True"
    assert kept < given_back / 10 and given_back > 10_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_the_users_own_settings_win():
    assert faults("keep", MALLOC_ARENA_MAX="2")[0] == "False"
