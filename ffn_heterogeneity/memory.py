"""The host's memory between steps."""

from __future__ import annotations

import ctypes
import os
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
