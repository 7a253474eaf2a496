"""Restart of a command with its memory in huge pages."""

import contextlib
import os
import sys
from pathlib import Path

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_")
_ACCELERATORS = ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*", "kfd")


def restart_with_huge_pages() -> None:
    """Restart this command with the C library's malloc on huge pages, if that helps.

    XLA:CPU allocates the temporaries of every call with malloc (2.5 GB in a step of SmolLM2, batch
    4 x 512) and frees them, and glibc returns blocks of that size to the system. Each step then
    causes 800,000 page faults, a third of its time; with huge pages of 2 MB only a few thousand.
    Keeping freed memory instead fragments the heap: a step that needs 3 GB then holds 6 to 11 GB.
    glibc reads the setting only when a process starts.

    Returns without a restart if it would not help (a GPU or TPU computes, unless JAX_PLATFORMS is
    "cpu"; huge pages are always or never enabled; no Linux), if the environment already tunes
    malloc, under a debugger, and if this process is not one of our commands (a notebook, a test).
    """
    if any(name.startswith(_OWN_SETTINGS) for name in os.environ) or not _is_own_command():
        return
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        devices = Path("/dev")
        if any(next(devices.glob(pattern), None) for pattern in _ACCELERATORS):
            return
    with contextlib.suppress(OSError):
        if "[madvise]" in _HUGE_PAGES.read_text():
            settings = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
            sys.stdout.flush()
            sys.stderr.flush()
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], settings)


def _is_own_command() -> bool:
    """True if the command line of this process ends in this script, or `ffnh <script>`, and flags.

    False if another program runs the script inside its process.
    """
    before, line = sys.orig_argv[: -len(sys.argv)], sys.orig_argv[-len(sys.argv) :]
    if not before or line[1:] != sys.argv[1:] or sys.gettrace():
        return False
    return line[0] == sys.argv[0] or Path(before[-1]).stem == "ffnh"
