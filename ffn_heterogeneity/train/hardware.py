"""Peak rates of devices: from data sheets by name, or measured on this machine."""

import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ffn_heterogeneity.train.memory import memory_for_this_process

GIB = 2**30
# Memory of Python, its libraries and the compiler in addition to a run's arrays.
PROGRAMS = 0.7 * GIB
# Expected fraction of the peak rate for a training step of dense matrix products.
# Data sheets: published runs reach 40 to 56% (nanochat 41-51%, llm.c 40-50% on H100, TinyLlama 56%
# on A100, MaxText 56-67% on v5e); ours reach 34 to 46% on an H100. Measured rates: 57% was
# SmolLM2-135M on 2 CPU cores (docs/performance.md).
EXPECTED = {"data sheet": 0.45, "measured": 0.57}


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      flops: FLOP/s of dense products (data sheets: bfloat16).
      memory: bytes.
      bandwidth: bytes/s from and to its memory.
      links: bytes/s to the other devices, one direction, all links together; 0: unknown.
      source: "data sheet" or "measured".
    """

    flops: float
    memory: float
    bandwidth: float
    links: float
    source: str = "data sheet"


# Google Cloud's TPU pages (links: the per-chip interconnect figure) and NVIDIA's data sheets (dense
# bfloat16 of the SXM modules; NVLink per direction).
CHIPS = {
    "v4": Chip(275e12, 32 * GIB, 1228e9, 300e9),
    "v5e": Chip(197e12, 16 * GIB, 819e9, 200e9),
    "v5p": Chip(459e12, 95 * GIB, 2765e9, 600e9),
    "v6e": Chip(918e12, 32 * GIB, 1640e9, 448e9),
    "a100": Chip(312e12, 80e9, 2039e9, 300e9),
    "h100": Chip(989e12, 80e9, 3350e9, 450e9),
    "h200": Chip(989e12, 141e9, 4800e9, 450e9),
}
TPUS = ("v4", "v5e", "v5p", "v6e")


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices a run is planned for.

    Attributes:
      name: the requested name.
      devices: devices to compile for; None if compiling is impossible, with the reason `why_not`.
    """

    name: str
    chip: Chip
    count: int
    devices: list[Any] | None
    why_not: str = ""


def find_target(text: str, dtype: Any) -> Target:
    """Parse "here", or "<kind>:<shape>" such as "v5e:8x8", "v4:2x2x4", "h100:8".

    libtpu (extra `tpu`) compiles TPU programs without a TPU. There is no such compiler for GPUs
    that are not available.

    Args:
      dtype: dtype of the products that are timed "here".

    Raises:
      ValueError: neither form, or no such TPU slice.
    """
    if text == "here":
        devices = jax.devices()
        return Target(devices[0].device_kind, measure(devices[0], dtype), len(devices), devices)
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", text)
    if not match or match[1] not in CHIPS:
        raise ValueError(
            f"dry_run={text!r}: write 'here' or <kind>:<number or shape>, e.g. v5e:8x8 or h100:8; "
            f"kinds: {', '.join(CHIPS)}"
        )
    kind, count = match[1], math.prod(int(n) for n in match[2].split("x"))
    if count < 1:
        raise ValueError(f"dry_run={text!r}: there must be a device")
    if kind not in TPUS:
        return Target(text, CHIPS[kind], count, None, "there is no compiler for GPUs without one")
    if importlib.util.find_spec("libtpu") is None:
        why = "libtpu compiles for TPUs anywhere, and is not installed: pip install -e '.[tpu]'"
        return Target(text, CHIPS[kind], count, None, why)
    return Target(text, CHIPS[kind], count, _topology(text))


def _topology(text: str) -> list[Any]:
    from jax.experimental import topologies

    # libtpu would query the metadata server of a TPU machine.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # Nothing runs on a chip, so several processes may compile at the same time.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # The two cores of a v4 are one device in runs; libtpu lists them separately by default.
    form = {"chip_config_name": "megacore"} if text.startswith("v4:") else {}
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=text, **form)
        return list(topology.devices)
    except Exception as error:  # jaxlib's error type
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"dry_run={text!r}: libtpu rejects it ({line[:200]})") from None


def measure(device: Any, dtype: Any) -> Chip:
    """Measure the rates of a large product and a large copy on this device, and its memory."""
    n = 1024 if device.platform == "cpu" else 8192
    # Random values: products of equal numbers need less power, so a GPU's clock is higher.
    x = jax.device_put(jax.random.normal(jax.random.key(0), (n, n), dtype), device)
    copied = jax.device_put(jnp.ones((64 * n if n < 4096 else 8 * n, n), jnp.float32), device)
    flops = 2 * n**3 / _seconds(jax.jit(jnp.matmul), x, x)
    bandwidth = 2 * copied.nbytes / _seconds(jax.jit(lambda x: x + 1), copied)
    del x, copied
    return Chip(flops, memory_of([device]), bandwidth, 0.0, "measured")


def memory_of(devices: Iterable[Any]) -> float:
    """Bytes that a run may use on each of these devices; CPU devices share the host's memory.

    Infinite if the device does not report it.
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        return max(0.0, memory_for_this_process() - PROGRAMS) / len(local)
    return min((device.memory_stats() or {}).get("bytes_limit", math.inf) for device in local)


def _seconds(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)
