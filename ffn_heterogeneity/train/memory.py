"""Host memory that this process can still use."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path


def memory_for_this_process() -> float:
    """Bytes that this process uses and can still use, by the machine's and container's limits.

    Infinite if the system does not report it. The environment variable FFNH_MEMORY_GIB takes
    priority.

    Raises:
      ValueError: FFNH_MEMORY_GIB is not a positive number.
    """
    if setting := os.environ.get("FFNH_MEMORY_GIB"):
        with contextlib.suppress(ValueError):
            if (gib := float(setting)) > 0:
                return gib * 2**30
        raise ValueError(f"FFNH_MEMORY_GIB={setting!r}: expected a number of GiB, e.g. 24")
    try:
        free = _kilobytes("/proc/meminfo", "MemAvailable")
        return min(free, *_left_in_groups(), math.inf) + _kilobytes("/proc/self/status", "RssAnon")
    except (OSError, LookupError, ValueError):
        return math.inf


def _kilobytes(path: str, name: str) -> int:
    """Value of a line of /proc, in bytes."""
    return 1024 * int(Path(path).read_text().split(f"{name}:")[1].split()[0])


def _left_in_groups() -> Iterator[int]:
    """Bytes left in each control group (v1's "memory", v2's "") with a limit on this process."""
    names = {"": ("max", "current", ""), "memory": ("limit_in_bytes", "usage_in_bytes", "total_")}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kind, path = line.split(":", 2)
        group = Path("/sys/fs/cgroup", kind, path.lstrip("/"))
        # From the process's group up to the root (in a container they may be the same).
        depth = 1 + path.rstrip("/").count("/") if kind in names else 0
        for folder in (group, *group.parents)[:depth]:
            limit, used, total = names[kind]
            with contextlib.suppress(OSError, LookupError, ValueError):  # "max": no limit
                left = int((folder / f"memory.{limit}").read_text())
                left -= int((folder / f"memory.{used}").read_text())
                stat = (folder / "memory.stat").read_text().split()
                for files in ("active_file", "inactive_file"):  # page cache can be freed
                    left += int(stat[stat.index(total + files) + 1])
                yield left
