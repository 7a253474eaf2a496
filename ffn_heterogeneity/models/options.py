"""Options of computing a model: dtype, rematerialisation, kernels, layouts on a mesh."""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

COMPUTE_DTYPES = ("auto", "float32", "bfloat16")
# Of Linux, for a unit that multiplies tiles of bfloat16 (five times as fast as float32 vectors).
AMX = "amx_bf16"


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of how to compute, never what: any choice gives the same numbers up to rounding.

    Attributes:
      compute_dtype: dtype of activations and of kernels when they are used.
      remat: "none", "full" (keep block inputs only), "dots", "attention_output".
      unroll: scan unrolling; 1 is best on TPU and CPU, True on GPU.
      attention: "auto" or one of models/attention.py's kernels.
      packed: a row may hold several documents. False: at most one, at its start, and what follows
        it is padding that nobody reads: fused kernels then need no mask in memory.
      platform: what "auto" is chosen for; None: the default backend. (A step may be compiled for
        another machine's devices.)
      activations, table: on a mesh, shardings of the residual stream [B, T, D] and of the
        embedding [V, D] that tokens are looked up in; None leaves them to XLA.
      cache: on a mesh, sharding of a layer's keys and values in generation, [B, K, ...].
      adapter_dropout: rate at which adapters lose inputs in training.
    """

    compute_dtype: Any = jnp.float32
    remat: str = "none"
    unroll: int | bool = 1
    attention: str = "auto"
    packed: bool = True
    platform: str | None = None
    activations: jax.sharding.Sharding | None = None
    table: jax.sharding.Sharding | None = None
    cache: jax.sharding.NamedSharding | None = None
    adapter_dropout: float = 0.0

    @property
    def on(self) -> str:
        """The platform that is computed for."""
        return self.platform or jax.default_backend()

    @property
    def wide_products(self) -> bool:
        """True if products of bfloat16 come out in float32 before they are rounded.

        XLA:CPU keeps only that form on the machine's bfloat16 units; to bfloat16 at once it makes
        a float32 product of it. Accelerators' units round on their way out.
        """
        return self.compute_dtype == jnp.bfloat16 and self.on == "cpu"


def choose_dtype(name: str, platform: str | None = None) -> Any:
    """The compute dtype that one of `COMPUTE_DTYPES` means on a platform (None: this one).

    "auto" is bfloat16 where the machine multiplies it faster, on accelerators and on CPUs with AMX,
    and float32 elsewhere.
    """
    if name != "auto":
        return jnp.dtype(name)
    fast = (platform or jax.default_backend()) != "cpu" or _has_amx()
    return jnp.dtype(jnp.bfloat16 if fast else jnp.float32)


@contextlib.contextmanager
def products(dtype: Any = jnp.float32) -> Iterator[None]:
    """Products of float32 are made in float32 inside, where `dtype`, that of a run, is float32.

    Accelerators make them of rounded factors otherwise: GPUs of TF32's, with an error of 3e-4
    (docs/performance.md), TPUs of bfloat16's. On a CPU nothing changes. A run in bfloat16 keeps the
    device's own way, since kernels of TPUs refuse the word beside factors of bfloat16. Whoever has
    set `JAX_DEFAULT_MATMUL_PRECISION` (before jax was imported, as it reads it then), or any word
    but "float32" by `jax.default_matmul_precision`, is heard.
    """
    said = jax.config.jax_default_matmul_precision
    if "JAX_DEFAULT_MATMUL_PRECISION" in os.environ or said not in (None, "float32"):
        yield
        return
    with jax.default_matmul_precision("float32" if dtype in ("float32", jnp.float32) else None):
        yield


@functools.cache
def _has_amx() -> bool:
    # XLA may have been told to do without.
    allowed = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    if allowed and "AMX" not in allowed[-1].upper():
        return False
    try:
        return AMX in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
