"""The memory of a step's temporaries, measured in separate processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import REPOSITORY
from tiny_runs import flags_of, write_rows

# A command whose output counts the starts.
PROGRAM = """
import os, resource, sys
from ffn_heterogeneity.launch.huge_pages import restart_with_huge_pages
print("started", flush=True)
restart_with_huge_pages()
if "STARTS" in os.environ:
    print(0)
    sys.exit()
import jax, jax.numpy as jnp
step = jax.jit(lambda x: (x @ x.T) @ x)  # 256 MB between the two
x = jnp.ones((8192, 16))
step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ASKED = PAGES.exists() and "[madvise]" in PAGES.read_text()
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "step.py").write_text(PROGRAM)
    return tmp_path / "step.py"


def started(*command, **environment) -> tuple[int, int]:
    """The number of starts that the program printed, and the page faults of 8 calls."""
    command = [sys.executable, *map(str, command)]
    *starts, faults = subprocess.check_output(command, env=CLEAN | environment).split()
    return len(starts), int(faults)


def test_a_command_starts_again_on_huge_pages(script):
    """With the same flags, and only once."""
    starts, faults = started(script, "--a=1", "b c")
    assert starts == 1 + ASKED
    if ASKED:
        _, small = started(script, MALLOC_ARENA_MAX="8")
        assert small > 8 * 60_000
        assert faults < small / 20


@pytest.mark.parametrize("argv", [["{}"], ["{}", "-x"]])
def test_only_commands_of_ours_do(script, argv):
    """The interpreter of a notebook or a test that runs the script must not be replaced."""
    argv = [word.replace("{}", str(script)) for word in argv]
    code = f"import runpy, sys; sys.argv = {argv}; runpy.run_path(sys.argv[0])"
    assert started("-c", code, *argv[1:], STARTS="1")[0] == 1


@pytest.mark.parametrize("environment", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "x.y=1"}])
def test_the_users_own_settings_win(script, environment):
    assert started(script, STARTS="1", **environment)[0] == 1


@pytest.mark.slow
@pytest.mark.skipif(not ASKED, reason="this machine's kernel gives no huge pages to who asks")
def test_a_run_needs_what_it_said(smollm2_gguf, tmp_path):
    """SmolLM2, 5 steps of LoRA with MacDrop; if freed memory was kept, they took 5 to 9 GiB."""
    row = {"instruction": "Count.", "input": "", "output": " 1 2 3" * 60}
    settings = {"data.path": write_rows(tmp_path / "rows.jsonl", [row] * 200), "data.packing": True}
    settings |= {"steps": 5, "batch_size": 3, "accumulation": 1, "seq_len": 512}
    settings |= {"optimizer.warmup_steps": 1}
    config = f"configs/macdrop_sft.py:{smollm2_gguf},lora,macdrop"
    command = [sys.executable, "scripts/train.py", *flags_of(config, tmp_path / "run", **settings)]
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=CLEAN, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
    text = (tmp_path / "said").read_text()
    assert status == 0, text
    needed = float(re.search(r"a step \(.*\) needs ([\d.]+) of", text)[1])
    # In addition: Python, JAX, and the file of the model.
    assert needed < usage.ru_maxrss / 2**20 < needed + 1.5, (needed, usage.ru_maxrss)
