"""Run options of a model: dtype, rematerialization, kernels, shardings on a mesh."""

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
# Linux's name of the CPU flag for bfloat16 tile units (five times as fast as float32 vectors).
AMX = "amx_bf16"
# NVIDIA's compute capabilities. Before Ampere, GPUs have no bfloat16 units and no cuDNN attention.
AMPERE, HOPPER = 8.0, 9.0


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options that change only how a model is computed: results are equal up to rounding.

    Attributes:
      compute_dtype: dtype of activations, and of kernels in products.
      remat: "none", "full" (keep block inputs only), "dots", "attention_output".
      unroll: scan unrolling; 1 is best on TPU and CPU, True on GPU.
      attention: "auto" or one of models/attention.py's kernels.
      packed: a row may contain several documents. False: at most one, at its start, followed by
        unused padding; fused kernels then need no mask in memory.
      platform: platform for which "auto" chooses; None: the default backend. (A step may be
        compiled for another machine's devices.)
      activations, table: on a mesh, shardings of the residual stream [B, T, D] and of the
        embedding table [V, D]; None leaves them to XLA.
      cache: on a mesh, sharding of a layer's keys and values in generation, [B, K, ...].
      adapter_dropout: dropout rate of adapters' inputs in training.
      dispatch: "auto" or one of `models.dispatch.DISPATCHES`, for layers with experts.
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
    dispatch: str = "auto"

    @property
    def on(self) -> str:
        """The platform that the program runs on."""
        return self.platform or jax.default_backend()

    @property
    def wide_products(self) -> bool:
        """True if bfloat16 products are returned in float32 and then rounded.

        XLA:CPU uses the machine's bfloat16 units only in this form; a product that returns bfloat16
        becomes a float32 product. Accelerators' units round the result themselves.
        """
        return self.compute_dtype == jnp.bfloat16 and self.on == "cpu"


def choose_dtype(name: str, platform: str | None = None) -> Any:
    """Return the compute dtype for a name of `COMPUTE_DTYPES` on a platform (None: this one).

    "auto" is bfloat16 on machines that multiply it faster (TPUs, GPUs from Ampere on and CPUs with
    AMX), and float32 otherwise.
    """
    if name != "auto":
        return jnp.dtype(name)
    here = jax.default_backend()
    platform = platform or here
    fast = _has_amx() if platform == "cpu" else True
    if platform == here == "gpu":
        fast = (gpu_generation() or AMPERE) >= AMPERE
    return jnp.dtype(jnp.bfloat16 if fast else jnp.float32)


def gpu_generation() -> float | None:
    """NVIDIA's compute capability of this machine's GPUs, 7.5 for example (Turing).

    None for another maker's.
    """
    found = str(jax.devices()[0].compute_capability)
    return float(found) if re.fullmatch(r"\d+\.\d+", found) else None


@contextlib.contextmanager
def products(dtype: Any = jnp.float32) -> Iterator[None]:
    """Compute float32 matmuls in full float32 precision inside the block, if `dtype` is float32.

    By default accelerators round the factors: GPUs to TF32, with an error of 3e-4
    (docs/performance.md), TPUs to bfloat16. On a CPU nothing changes. A run in bfloat16 keeps the
    device's default, because TPU kernels reject the setting with bfloat16 factors. A precision set
    by the user takes priority: `JAX_DEFAULT_MATMUL_PRECISION` (which JAX reads on import), or any
    value except "float32" of `jax.default_matmul_precision`.
    """
    said = jax.config.jax_default_matmul_precision
    if "JAX_DEFAULT_MATMUL_PRECISION" in os.environ or said not in (None, "float32"):
        yield
        return
    with jax.default_matmul_precision("float32" if dtype in ("float32", jnp.float32) else None):
        yield


@functools.cache
def _has_amx() -> bool:
    # XLA_FLAGS may disable it.
    allowed = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))
    if allowed and "AMX" not in allowed[-1].upper():
        return False
    try:
        return AMX in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
