"""Several processes of one run: how they connect, and which one prints."""

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.wording import first_line

ALONE = "alone"  # One of several tasks of a SLURM step, each a separate run.
WAYS = (
    "'', 'auto' (TPU pod, SLURM, Open MPI), <host>:<port>,<processes>,<index>, or 'alone' (one of "
    "several SLURM tasks that are separate runs)"
)


# Threads per device of a program: one for itself, one for each collective that it started during
# other work.
THREADS_PER_FAKE_DEVICE = 4


def give_fake_devices_threads() -> int:
    """Provide enough threads for the fake CPU devices of XLA_FLAGS, if any; return their number.

    XLA:CPU runs independent parts of a program on a pool of as many threads as there are devices
    (or cores), and a collective keeps its thread until the other devices arrive. If all threads
    wait like this, the awaited part never starts, and after 40 seconds the process dies with
    "Termination timeout for all reduce". NPROC is the pool's size; a value set in the environment
    is kept. Call it before JAX's first computation.
    """
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.getenv("XLA_FLAGS", ""))
    devices = int(asked[-1]) if asked else 0
    if devices > 1:
        os.environ.setdefault("NPROC", str(THREADS_PER_FAKE_DEVICE * devices))
    return devices


def initialize(how: str) -> None:
    """Connect this process with the others; call it before any computation.

    Args:
      how: "" and "alone": no other processes; "auto": JAX finds the others (TPU pods, SLURM, Open
        MPI); "<host>:<port>,<processes>,<index>": address of process 0, number of processes, and
        index of this process.

    Raises:
      ValueError: an invalid `how`, or the others cannot be reached.
    """
    if how in ("", ALONE):
        return
    arguments: dict[str, Any] = {}
    if how != "auto":
        parts = how.split(",")
        if len(parts) != 3 or ":" not in parts[0] or not (parts[1] + parts[2]).isdigit():
            raise ValueError(f"distributed={how!r}: write one of {WAYS}")
        address, count, index = parts[0], int(parts[1]), int(parts[2])
        if not 0 <= index < count:
            raise ValueError(f"distributed={how!r}: process {index} is not one of {count}")
        arguments = {"coordinator_address": address, "num_processes": count, "process_id": index}
    try:
        jax.distributed.initialize(**arguments)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"distributed={how!r}: the processes could not be joined ({first_line(error)}); "
            "start every process, each with its own index, and check the address"
        ) from error
    # XLA:CPU loses the order of collectives in and around a loop if a program comes from the cache:
    # one process then sums while another gathers, and both wait forever (jaxlib 0.10.2).
    # GPUs of several nodes compile together: all must find a program in the cache, or none. Only
    # who names a directory knows that the nodes share it.
    alone = jax.process_count() == 1 or "JAX_COMPILATION_CACHE_DIR" in os.environ
    if jax.default_backend() == "cpu" or (jax.default_backend() == "gpu" and not alone):
        jax.config.update("jax_enable_compilation_cache", False)


def devices_seen(how: str) -> str:
    """One-line description of the devices of this process and its run; `how` as in `initialize`.

    Raises:
      ValueError: one of several processes, or a process on a node with several GPUs, sees only its
        own devices. (Under SLURM, JAX gives a process one GPU of its node, see jax #16788.)
    """
    here, together = jax.local_device_count(), jax.device_count()
    count = int(how.split(",")[1]) if "," in how else _of_slurm("STEP_NUM_TASKS")
    if count > 1 and together == here and how != ALONE:
        raise ValueError(
            f"distributed={how!r}: this is one of {count} processes and sees only its own {here} "
            f"devices; --distributed=auto joins them, --distributed={ALONE} makes each a "
            "separate run"
        )
    gpus = _of_slurm("GPUS_ON_NODE") if jax.default_backend() == "gpu" else 0
    used = here * _of_slurm("STEP_TASKS_PER_NODE")
    if how == "auto" and used < gpus and "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        raise ValueError(
            f"distributed='auto': {used} of this node's {gpus} GPUs would be used: start a task "
            f"for each (--ntasks-per-node={gpus}), or set JAX_LOCAL_DEVICE_IDS"
        )
    return (
        f"process {jax.process_index()} of {jax.process_count()}: {here} of {together} "
        f"{jax.default_backend()} devices"
    )


def _of_slurm(name: str) -> int:
    """Largest number in a variable, by default 1; in "2(x3),1", 2 tasks per node, not 3 nodes."""
    text = re.sub(r"\(x\d+\)", "", os.getenv(f"SLURM_{name}", ""))
    return max(map(int, re.findall(r"\b\d+\b", text)), default=1)


def is_main() -> bool:
    """True for the process that writes metrics, results and the exported model."""
    return jax.process_index() == 0


def say(line: str) -> None:
    """Print a note on standard error, once for all processes."""
    if is_main():
        print(line, file=sys.stderr, flush=True)


def answer(line: str) -> None:
    """Print a result on standard output, once for all processes."""
    if is_main():
        print(line, flush=True)


def gathered(value: Any) -> np.ndarray:
    """A number (at most 32 bits) of every process, [processes]; all must call it."""
    if jax.process_count() == 1:
        return np.asarray([value])
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(np.asarray(value))).reshape(-1)


def on_main(function: Callable[[], Any]) -> Any:
    """Run `function` in the main process while the others wait; return None in the others.

    Raises:
      RuntimeError: in the others, if it raised in the main process.
    """
    if jax.process_count() == 1:
        return function()
    from jax.experimental import multihost_utils

    result, failed = None, None
    if is_main():
        try:
            result = function()
        except BaseException as error:  # the others must not wait forever
            failed = error
    good = bool(multihost_utils.broadcast_one_to_all(failed is None))
    if failed is not None:
        raise failed
    if not good:
        raise RuntimeError(f"process {jax.process_index()} ends: the main process failed")
    return result
