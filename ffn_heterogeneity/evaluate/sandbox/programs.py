"""Sandbox for generated programs: no network, only their own files, limits on all resources.

Each program runs in a separate bubblewrap (`bwrap`) or, if that is not installed, in separate user,
process, mount, network, ipc and host-name namespaces. It is an unprivileged user without
capabilities behind a filter of system calls (sandbox_child.py and sandbox_kernel.py). It sees
Python's standard library and the system's libraries, read-only, an empty environment, and a private
/tmp in memory. If neither mechanism works, or code execution is not allowed, nothing is run.

The sandbox does not protect against: bugs in the kernel; a program that uses all its limits (at
most processes x memory_bytes) on a machine with less memory; a program that cheats its tests, e.g.
with a class that equals everything, or by searching the interpreter for the token that proves that
the last line was reached. With bubblewrap, only time limits the number of files in /tmp.
"""

import contextlib
import functools
import shutil
import sys
import time
from typing import NamedTuple

from ffn_heterogeneity.evaluate.sandbox.one_program import (
    NOT_SET_UP,
    Limits,
    Outcome,
    SandboxError,
    run_once,
)

__all__ = ["Limits", "Mechanism", "Outcome", "SandboxError", "available", "failure", "run_code"]

WAY_OUT = (
    "install bubblewrap (bwrap), or allow user namespaces (sysctl user.max_user_namespaces; "
    "kernel.unprivileged_userns_clone=1 on Debian; "
    "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; a privileged container)"
)
PAUSES = (1.0, 5.0)  # seconds between tries to set up a sandbox


class Mechanism(NamedTuple):
    """A sandbox mechanism.

    Attributes:
      name: "bwrap", "namespaces" or "none".
      reason: why the mechanisms before it are not used.
    """

    name: str
    reason: str


def run_code(
    program: str, *, allow: bool, limits: Limits = Limits(), mechanism: str | None = None
) -> Outcome:
    """Run a Python program in a sandbox.

    It is the module `program` (`if __name__ == "__main__"` blocks do not run), with only the
    standard library, no stdin, and a fixed hash seed.

    Args:
      allow: whether the user allowed generated code to run (--config.allow_code_execution).
      mechanism: "bwrap" or "namespaces"; None: the first available.

    Raises:
      SandboxError: not allowed; no sandbox available; or it could not be set up.
    """
    if allow is not True:
        raise SandboxError(
            "this runs code a model wrote: allow it with --config.allow_code_execution=true "
            "(it runs in a sandbox)"
        )
    if mechanism is None and available().name == "none":
        raise SandboxError(
            f"code a model wrote cannot be locked in here ({available().reason}), so it was not "
            f"run: {WAY_OUT}"
        )
    return _run(mechanism or available().name, program, limits)


def _run(mechanism: str, program: str, limits: Limits) -> Outcome:
    """`run_once`, again if it could not start: a busy machine may lack processes for a moment."""
    for seconds in PAUSES:
        with contextlib.suppress(SandboxError, OSError):
            return run_once(mechanism, program, limits)
        time.sleep(seconds)
    return run_once(mechanism, program, limits)


# The test program that a sandbox must pass before `available` trusts it.
PROOF = """
import os, time
assert os.getuid() != 0 and not os.environ, "runs as root, or with an environment"
for path in ("/etc/passwd", "/proc/self", "/sys/kernel"):
    assert not os.path.exists(path), f"{path} can be seen"
def refused(name, action, *args):
    try:
        action(*args)
    except (OSError, MemoryError):
        return
    raise AssertionError(f"{name} is not limited")
refused("network", __import__("socket").socket)
refused("memory", __import__("mmap").mmap, -1, 1 << 32)
refused("file size", lambda: os.truncate(os.open("/tmp/a", os.O_CREAT | os.O_WRONLY), 10**7))
for path in ("/", os.path.dirname(os.__file__), "/dev"):
    refused(f"{path}: writing", open, os.path.join(path, "sandbox-proof"), "w")
def fill():
    for i in range(8):
        with open(f"/tmp/{i}", "wb") as file:
            file.write(bytes(10**6))
refused("disk", fill)
def fork_all():
    for _ in range(8):
        if not os.fork():
            time.sleep(60)
refused("number of processes", fork_all)
"""
PROOF_LIMITS = Limits(30.0, 10, 1 << 30, 1 << 20, 1 << 22, 64, 3)


def available() -> Mechanism:
    """The first mechanism that passes a test run here (once): bubblewrap, then namespaces."""
    if not sys.platform.startswith("linux"):
        return Mechanism("none", f"the sandbox needs Linux, this is {sys.platform}")
    reasons = []
    for name in ("bwrap", "namespaces"):
        why = failure(name)
        if why is None:
            return Mechanism(name, "; ".join(reasons) or "found, and tried")
        reasons.append(f"{name}: {why}")
    return Mechanism("none", "; ".join(reasons))


@functools.cache
def failure(name: str) -> str | None:
    """Describe in one line why a mechanism cannot be trusted here; None if it can."""
    if name == "bwrap" and not shutil.which("bwrap"):
        return "not installed"
    try:
        outcome = _run(name, PROOF, PROOF_LIMITS)
    except (SandboxError, OSError) as error:
        return str(error).removeprefix(NOT_SET_UP)
    last = (outcome.stderr.strip().splitlines() or [outcome.status])[-1]
    return None if outcome.passed else last
