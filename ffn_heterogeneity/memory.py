"""The host's memory: how much is left, and what happens to it between steps."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

# glibc's mallopt parameters <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_")
_ACCELERATORS = ("nvidia[0-9]*", "accel*", "vfio/[0-9]*", "kfd")


def keep_freed_memory() -> bool:
    """Has the C library keep what a step frees, where JAX computes on the CPU; True if it does.

    XLA:CPU takes the temporaries of every call (2.5 GB in a step of SmolLM2, batch 4 x 512) from
    malloc and gives them back, and glibc returns blocks of that size to the system: each step then
    pays for 800,000 page faults, 3 CPU seconds of 24. Kept, most steps have none. The process
    holds its peak until it ends.

    Call it before JAX's first computation: its threads must not have heaps of their own yet. Does
    nothing where a GPU or TPU is in the machine (unless JAX_PLATFORMS is "cpu"), with another C
    library, or where the environment already tunes malloc.
    """
    if any(name.startswith(_OWN_SETTINGS) for name in os.environ):
        return False
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        devices = Path("/dev")
        if any(next(devices.glob(pattern), None) for pattern in _ACCELERATORS):
            return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    # One heap for all threads, which never shrinks, and no large request outside it.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
    return sum(mallopt(*setting) for setting in settings) == len(settings)


def memory_for_this_process() -> float:
    """Bytes that this process holds and can still take, by the machine and a container's limits.

    Infinite where the system does not tell. FFNH_MEMORY_GIB, where the environment sets it, is
    believed instead.

    Raises:
      ValueError: FFNH_MEMORY_GIB is no positive number.
    """
    if told := os.environ.get("FFNH_MEMORY_GIB"):
        with contextlib.suppress(ValueError):
            if (gib := float(told)) > 0:
                return gib * 2**30
        raise ValueError(f"FFNH_MEMORY_GIB={told!r}: a number of GiB is expected, e.g. 24")
    try:
        free = _kilobytes("/proc/meminfo", "MemAvailable")
        return min(free, *_left_in_groups(), math.inf) + _kilobytes("/proc/self/status", "RssAnon")
    except (OSError, LookupError, ValueError):
        return math.inf


def _kilobytes(path: str, name: str) -> int:
    """A line of /proc, in bytes."""
    return 1024 * int(Path(path).read_text().split(f"{name}:")[1].split()[0])


def _left_in_groups() -> Iterator[int]:
    """Of the control groups (v1's "memory", v2's "") with a limit around this process, if any."""
    names = {"": ("max", "current", ""), "memory": ("limit_in_bytes", "usage_in_bytes", "total_")}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kind, path = line.split(":", 2)
        own = Path("/sys/fs/cgroup", kind, path.lstrip("/"))
        # From its own up to the root, which is its own where a container sees no other.
        depth = 1 + path.rstrip("/").count("/") if kind in names else 0
        for folder in (own, *own.parents)[:depth]:
            limit, used, total = names[kind]
            with contextlib.suppress(OSError, LookupError, ValueError):  # "max": no limit
                left = int((folder / f"memory.{limit}").read_text())
                left -= int((folder / f"memory.{used}").read_text())
                stat = (folder / "memory.stat").read_text().split()
                for files in ("active_file", "inactive_file"):  # the cache gives way
                    left += int(stat[stat.index(total + files) + 1])
                yield left
