"""The host's memory: how much this process can still take."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path


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
