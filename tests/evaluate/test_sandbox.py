"""The real sandbox against programs that try to escape (hostile_programs.py)."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hostile_programs import DAEMON, HOSTILE, PRIVILEGES
from tiny_runs import refused, run_program

from ffn_heterogeneity.evaluate.sandbox import one_program
from ffn_heterogeneity.evaluate.sandbox import programs as sandbox
from ffn_heterogeneity.evaluate.sandbox.programs import Limits, Outcome, SandboxError, run_code

SANDBOX = Path(sandbox.__file__).parent
PACKAGE = SANDBOX.parent.parent
FEW = {"wall_seconds": 20.0, "cpu_seconds": 1, "files": 64, "processes": 3}
BYTES = {"memory_bytes": 256 << 20, "file_bytes": 1 << 20, "disk_bytes": 4 << 20}
LIMITS = Limits(**FEW, **BYTES, output_bytes=1 << 16)
SECRET = "planted-secret-4711"
BOTH = pytest.mark.parametrize("mechanism", ["namespaces", "bwrap"])


def alive(tag: str) -> Path | None:
    """The /proc directory of the process with that name, or None."""
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if path.read_text().strip() == tag:
                return path.parent
    return None


@BOTH
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_fail(mechanism, name):
    program, endings = HOSTILE[name]
    # Filling 256 MB takes more than a second on a machine with slow page allocation.
    limits = dataclasses.replace(LIMITS, cpu_seconds=10) if endings == {"memory"} else LIMITS
    start = time.monotonic()
    outcome = run_code(program, allow=True, limits=limits, mechanism=mechanism)
    assert not outcome.passed and outcome.status in endings, outcome
    assert len(outcome.stdout) <= 2000 and len(outcome.stderr) <= 2000
    assert time.monotonic() - start < LIMITS.wall_seconds + 10


def test_a_sandbox_that_could_not_start_is_tried_again(monkeypatch):
    wanted, tried = Outcome(True, "passed", "", "", 0.1), []

    def busy(*_):
        tried.append(BlockingIOError(11, "no process") if tried else SandboxError("not ready"))
        if len(tried) < 3:
            raise tried[-1]
        return wanted

    monkeypatch.setattr(sandbox, "run_once", busy)
    monkeypatch.setattr(sandbox, "PAUSES", (0, 0))
    assert run_code("", allow=True, mechanism="bwrap") == wanted
    monkeypatch.setattr(sandbox, "PAUSES", ())
    tried.clear()
    refused("not ready", run_code, "", allow=True, mechanism="bwrap")


@BOTH
def test_many_files(mechanism):
    program = "i = 0\nwhile True:\n  open(f'{i}', 'w').close()\n  i += 1"
    status = run_code(program, allow=True, limits=LIMITS, mechanism=mechanism).status
    assert status == {"namespaces": "failed", "bwrap": "timeout"}[mechanism]


@BOTH
def test_what_is_outside_stays_outside(mechanism, tmp_path, monkeypatch):
    """Files, connections, environment and processes outside are neither visible nor changed."""
    monkeypatch.setenv("SANDBOX_TEST", SECRET)
    sentinel = tmp_path / "sentinel"
    sentinel.write_text(SECRET)
    tmp_path.chmod(0o777)
    sentinel.chmod(0o666)

    def run(program: str) -> Outcome:
        outcome = run_code(program, allow=True, limits=LIMITS, mechanism=mechanism)
        assert SECRET not in outcome.stdout + outcome.stderr
        return outcome

    for attempt in ("print(open({!r}).read())", "import os; os.remove({!r})"):
        outcome = run(attempt.format(str(sentinel)))
        assert outcome.status == "failed" and "FileNotFoundError" in outcome.stderr
    assert sentinel.read_text() == SECRET
    for path in (PACKAGE, Path(sys.prefix), Path.home() / ".bashrc", Path("/etc/passwd")):
        shown = run(f"import os; print(os.path.exists({str(path)!r}))").stdout
        if not any(path.is_relative_to(view) for _, view in one_program.views()):
            assert shown == "False\n", path
    for number in ("os.getppid()", "1", str(os.getpid())):
        outcome = run(f"import os; print(open(f'/proc/{{{number}}}/environ').read())")
        assert outcome.status == "failed"
    assert run("import os; assert not os.environ; assert os.getpid() < 10").passed
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        place = ("127.0.0.1", server.getsockname()[1])
        assert run(f"import socket; socket.create_connection({place})").status == "failed"
        with pytest.raises(BlockingIOError):
            server.accept()


@BOTH
def test_no_privileges(mechanism):
    outcome = run_code(PRIVILEGES, allow=True, limits=LIMITS, mechanism=mechanism)
    assert outcome.passed, outcome
    children = "import os, time\nn = 0\ntry:\n  while True:\n    if not os.fork(): time.sleep(60)\n"
    children += "    n += 1\nexcept OSError: print(n)"
    for processes in (1, 4):
        limits = dataclasses.replace(LIMITS, processes=processes)
        outcome = run_code(children, allow=True, limits=limits, mechanism=mechanism)
        assert outcome.passed and outcome.stdout == f"{processes - 1}\n"


@BOTH
def test_nothing_stays(mechanism):
    mounts, files = Path("/proc/self/mountinfo").read_text(), os.listdir("/proc/self/fd")
    tag = f"sbx{os.getpid()}{mechanism[0]}"
    assert run_code(DAEMON.format(tag=tag), allow=True, limits=LIMITS, mechanism=mechanism).passed
    assert not alive(tag)
    hang = DAEMON.format(tag=tag) + "time.sleep(60)"
    limits = dataclasses.replace(LIMITS, wall_seconds=0.5)
    start = time.monotonic()
    assert run_code(hang, allow=True, limits=limits, mechanism=mechanism).status == "timeout"
    assert time.monotonic() - start < 10 and not alive(tag)
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert os.listdir("/proc/self/fd") == files


@BOTH
def test_dies_with_its_parent(mechanism):
    tag = f"sbp{os.getpid()}{mechanism[0]}"
    code = "from ffn_heterogeneity.evaluate.sandbox.programs import *; import sys; "
    code += "run_code(sys.argv[1], allow=True, mechanism=sys.argv[2])"
    program = DAEMON.format(tag=tag) + "time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code, program, mechanism], cwd=PACKAGE.parent)
    try:
        process = wait_for(lambda: alive(tag))
        if mechanism == "namespaces":  # it is killed first if memory is short
            assert (process / "oom_score_adj").read_text() == "1000\n"
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not alive(tag))


def wait_for(condition, seconds: float = 20.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


RIGHT = """\r
import bisect, collections, ctypes, datetime, decimal, hashlib, itertools, json, re, zlib\r
from dataclasses import dataclass\r
@dataclass\r
class Point:\r
    x: int = 0\r
def f(n): return sum(range(n))\r
if __name__ == "__main__": raise ValueError("as a script")\r
assert f(10) == 45 and Point(3).x == 3\r
with open("a", "w") as file: file.write("b")\r
assert open("/tmp/a").read() == "b"\r
print("grüße", hash("a"))\r
"""


@BOTH
def test_right_programs_pass(mechanism, monkeypatch):
    def fork():
        raise AssertionError("forked a process with threads")

    if mechanism == "namespaces":
        monkeypatch.setattr(os, "fork", fork)
    first, second = (run_code(RIGHT, allow=True, mechanism=mechanism) for _ in range(2))
    assert first.passed and first.status == "passed", first
    assert first.stdout.startswith("grüße") and first.stdout == second.stdout  # same hash seed
    long = "x = 1\n" * 50_000 + "assert x == 1"
    assert run_code(long, allow=True, mechanism=mechanism).passed


def test_known_limit_a_program_made_to_cheat_passes(namespaces):
    """A documented limit: a value equal to everything passes any test of equality."""
    cheat = "class A:\n  def __eq__(self, other): return True\nf = lambda n: A()\n"
    assert run_code(cheat + "assert f(10) == 45", allow=True, mechanism=namespaces).passed


def test_nothing_runs_unless_allowed(monkeypatch):
    monkeypatch.setattr(sandbox, "run_once", lambda *_: pytest.fail("it ran"))
    for allow in (False, None, 0, "false", "true"):
        with pytest.raises(SandboxError, match="--config.allow_code_execution=true") as error:
            run_code("pass", allow=allow)
        assert "\n" not in str(error.value)


FORBIDDEN = """
import sys
sys.path.append(sys.argv[1])
import sandbox_kernel
sandbox_kernel.prctl(38, 1)
sandbox_kernel.install_filter()
from ffn_heterogeneity.evaluate.sandbox.programs import *
print(available())
run_code("print('it ran')", allow=True)
"""


def test_nothing_runs_where_namespaces_are_forbidden(namespaces):
    """Without permission for unshare, as in most containers."""
    done = run_program(sys.executable, "-c", FORBIDDEN, SANDBOX, cwd=PACKAGE.parent)
    assert done.out.startswith("Mechanism(name='none'") and "it ran" not in done.out
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("ffn_heterogeneity.evaluate.sandbox.one_program.SandboxError: ")
    assert "namespaces: [Errno 1] unshare: Operation not permitted" in last
    assert "install bubblewrap" in last


def test_a_sandbox_that_does_not_hold_is_not_trusted(namespaces, monkeypatch):
    """Each check of the sandbox fails if its limit is removed."""
    lifted = {"memory": {"memory_bytes": 1 << 40}, "file size": {"file_bytes": 1 << 30}}
    lifted |= {"disk": {"disk_bytes": 1 << 30}, "number of processes": {"processes": 64}}
    for name, change in lifted.items():
        limits = dataclasses.replace(sandbox.PROOF_LIMITS, **change)
        outcome = one_program.run_once(namespaces, sandbox.PROOF, limits)
        assert outcome.status == "failed" and f"{name} is not limited" in outcome.stderr
    monkeypatch.setattr(sandbox, "PROOF", "assert 0, 'a hole'")
    sandbox.failure.cache_clear()
    try:
        assert sandbox.failure("namespaces") == "AssertionError: a hole"
    finally:
        sandbox.failure.cache_clear()


@pytest.mark.parametrize(
    "name, value", [("cpu_seconds", 0), ("processes", 1.5), ("wall_seconds", float("nan"))]
)
def test_limits_are_positive(name, value):
    refused(f"{name}={value} must be a positive", Limits, **{name: value})


# Runs as root in a separate mount namespace: makes Python readable, becomes nobody, continues.
# A virtual environment may be readable only for root: its interpreter is called by its real path.
BECOME_NOBODY = """
import os, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from sandbox_kernel import *
prefix, stage, python = sys.base_prefix, sys.argv[1], os.path.realpath(sys.executable)
call("unshare", NEW_MOUNT)
mount("none", "/", "", MS_REC | MS_PRIVATE)
private = [str(path) for path in Path(prefix).parents if not path.stat().st_mode & 1]
if private:
    os.mkdir(f"{stage}/python")
    mount(prefix, f"{stage}/python", "", MS_BIND | MS_REC)
    mount("x", private[-1], "tmpfs", 0, "mode=755")
    os.makedirs(prefix)
    mount(f"{stage}/python", prefix, "", MS_BIND | MS_REC)
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
os.execv(python, [python, "-c", *sys.argv[2:]])
"""
NOBODY = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from ffn_heterogeneity.evaluate.sandbox.programs import *
assert os.getresuid() == (65534,) * 3
limits = Limits(**json.loads(sys.argv[3]))
for program in json.loads(sys.argv[4]):
    print(run_code(program, allow=True, limits=limits, mechanism=sys.argv[2]).status)
print(failure(sys.argv[2]))
"""


@pytest.fixture
def stage():
    """A copy of the sandbox that every user can read (pytest's own folders are private)."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        package = Path(name) / "ffn_heterogeneity"
        inside = package / "evaluate" / "sandbox"
        inside.mkdir(parents=True)
        for folder in (package, package / "evaluate", inside):
            (folder / "__init__.py").touch()
        for path in SANDBOX.glob("*.py"):
            shutil.copyfile(path, inside / path.name)
        shutil.copyfile(inside / "sandbox_kernel.py", Path(name) / "sandbox_kernel.py")
        yield name


@BOTH
def test_as_nobody(root, mechanism, stage):
    names = ["fork bomb", "100 GB", "10 GB in many files", "os._exit", "endless loop"]
    programs = [RIGHT, PRIVILEGES, *(HOSTILE[name][0] for name in names)]
    command = [sys.executable, "-c", BECOME_NOBODY, stage, NOBODY, stage, mechanism]
    given = (json.dumps(dataclasses.asdict(LIMITS)), json.dumps(programs))
    done = run_program(*command, *given, cwd="/")
    expected = ["passed", "passed", "failed", "memory", "failed", "failed", "timeout", "None"]
    assert done.out.split() == expected, done.err
