"""The train step compiled, and held against the devices' memory before a run begins.

Bytes of the state are exact, from shapes and shardings; those of the step are the compiler's.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ffn_heterogeneity.io.hf.structure import put_back
from ffn_heterogeneity.io.load import Model, load_kept
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import cut, local_rows, place_batch, place_scalars
from ffn_heterogeneity.parallel.processes import say
from ffn_heterogeneity.paths import flatten
from ffn_heterogeneity.train.build import AUTO_REMAT, Built, build
from ffn_heterogeneity.train.hardware import GIB, memory_of
from ffn_heterogeneity.train.settings import TrainConfig, hyper_function
from ffn_heterogeneity.train.source import model_shape, prepared
from ffn_heterogeneity.train.state import TrainState

# What else a run that does not fit may turn.
LESS = (
    "shorter seq_len, remat=full, fewer trainable leaves (train_only, lora), adafactor or more "
    "devices on mesh.fsdp or mesh.tensor need less"
)


def build_shapes(config: TrainConfig, mesh: Mesh | AbstractMesh) -> Built:
    """`build` of a model that is not read: its config, the structure that its directory keeps, and
    the surgeries that prepare it, decide.

    Frozen leaves keep their storage dtype: half precision, as models are published.
    """
    model = model_shape(config)
    beside = {} if config.is_fresh else load_kept(config.model, revision=config.revision)

    def start(params: dict, beside: dict) -> Model:
        params = put_back(model, flatten(unstack(params)), beside)
        return prepared(config, Model(model, params, None, ""))

    shapes = causal_lm.abstract_params(model, jnp.bfloat16)
    return build(config, jax.eval_shape(start, shapes, beside), mesh)


def state_bytes(built: Built) -> dict[str, int]:
    """Bytes on one device, by kind: exact, from the shardings. The gradients are as the masters."""
    described = partition.describe_shardings(built.state.params, built.shardings[0].params)
    trains = [path for path in described if built.trainable[path]]
    size = {path: leaf["bytes_per_device"] for path, leaf in described.items()}
    masters = sum(size[path] for path in trains)
    moments = partition.describe_shardings(built.state.opt_state, built.shardings[0].opt_state)
    return {
        "trainable parameters (float32)": masters,
        "frozen parameters": sum(size.values()) - masters,
        "optimiser state": sum(leaf["bytes_per_device"] for leaf in moments.values()),
        "gradients": masters,
    }


def compile_step(
    config: TrainConfig,
    built: Built,
    state: TrainState | None = None,
    length: Mapping[str, int] | None = None,
) -> tuple[jax.stages.Compiled | None, dict[str, float]]:
    """(the real step, compiled for the mesh's devices; bytes on one of them while it runs).

    None and infinity where the compiler itself finds it too large (the TPU's does).

    Args:
      state: as the run has it: then this is the very program that the loop's first call finds.
      length: of the objective's; None: the longest.
    """
    rows = config.batch_size
    if state is not None:  # those that this process feeds
        rows = len(local_rows(built.shardings[1], rows, config.accumulation))
    shapes = built.objective.shapes(rows, length or built.objective.longest)
    batch = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    batch, platforms = cut(batch, config.accumulation), None
    hyper = {k: np.float32(x) for k, x in hyper_function(config, built.objective.terms)(0).items()}
    if state is None:
        state, platforms = built.state, (built.options.platform,)
    else:
        batch = place_batch(batch, built.shardings[1])
        hyper = place_scalars(hyper, built.shardings[2])
    traced = built.train_step.trace(state, batch, hyper)
    try:
        compiled = traced.lower(lowering_platforms=platforms).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, {"together": math.inf}
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return compiled, {
        "arguments (state, batch)": arguments,
        "temporary (gradients, activations)": memory.temp_size_in_bytes,
        "results": made,
        "together": arguments + memory.temp_size_in_bytes + made,
    }


def fit(
    config: TrainConfig, built: Built, room: float, make: Callable[..., Built] = build, **given: Any
) -> tuple[Built, jax.stages.Compiled | None, dict[str, float]]:
    """(the step with the least rematerialisation that needs at most `room` bytes a device, and the
    results of `compile_step`); where none fits, the one with the most.

    Args:
      make: as `build`.
      given: to `compile_step`.
    """
    for remat in AUTO_REMAT if config.remat == "auto" else (config.remat,):
        if remat != built.options.remat:
            tried = dataclasses.replace(config, remat=remat)
            built = make(tried, _shapes_of(built), built.mesh)
        compiled, memory = compile_step(config, built, **given)
        if memory["together"] <= room:
            break
    return built, compiled, memory


def _shapes_of(built: Built) -> Model:
    return Model(built.model, built.state.params, None, "")


def what_would_fit(config: TrainConfig, built: Built, room: float) -> str:
    """The way out for a step that needs more than `room` bytes a device: the same batch in the
    fewest micro-batches that fit, each number compiled to be sure."""
    print("looking for a batch that fits ...", file=sys.stderr, flush=True)
    most = config.batch_size // (built.mesh.shape["data"] * built.mesh.shape["fsdp"])
    for n in (n for n in range(config.accumulation + 1, most + 1) if most % n == 0):
        tried = dataclasses.replace(config, accumulation=n, remat=built.options.remat)
        part = build(tried, _shapes_of(built), built.mesh)
        if compile_step(tried, part)[1]["together"] <= room:
            smaller = config.batch_size // n * config.accumulation
            return f"accumulation={n} fits, with the same updates, or batch_size={smaller}"
    return f"not even accumulation={most} fits: {LESS}"


def check_state(config: TrainConfig, mesh: Mesh) -> str:
    """A line of how much there is to do and to hold, from shapes alone, before anything is read.

    Raises:
      ValueError: the training state does not fit by itself, so no batch would help.
    """
    built, have = build_shapes(config, mesh), memory_of(mesh.local_devices)
    held = state_bytes(built)
    del held["gradients"]  # the step's
    parts = ", ".join(f"{size / GIB:.2f} GiB {kind}" for kind, size in held.items() if size)
    if (need := sum(held.values())) > have:
        raise ValueError(f"training needs {_gib(need, have)} ({parts}): {LESS}")
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(built.state.params))
    tokens = config.batch_size * built.objective.positions
    return (
        f"{count:,} parameters, computed in {built.options.compute_dtype}: {parts}; "
        f"{tokens:,} tokens a step, {config.loop.steps * tokens:,} in all"
    )


def compile_checked(
    config: TrainConfig, built: Built, state: TrainState, make: Callable[..., Built]
) -> tuple[Built, float]:
    """`fit` for a run, before it evaluates or trains: (the step, the seconds that it took to
    compile); the longest rows decide, the programs of the others are compiled behind.

    Raises:
      ValueError: the step needs more memory than there is; names what would fit.
    """
    say("compiling the train step ...")
    start = time.perf_counter()
    have = memory_of(built.mesh.local_devices)
    built, _, memory = fit(config, built, have, make, state=state)
    need = memory["together"]
    if need > have:
        way_out = what_would_fit(config, built, have)
        raise ValueError(
            f"a step of batch_size={config.batch_size} with accumulation={config.accumulation} "
            f"needs {_gib(need, have)}: {way_out}"
        )
    for length in built.objective.lengths:
        if length != built.objective.longest:
            compile_step(config, built, state, length)
    seconds, remat = time.perf_counter() - start, built.options.remat
    say(f"compiled in {seconds:.1f} s; a step (remat={remat}) needs {_gib(need, have)}")
    return built, seconds


def _gib(need: float, have: float) -> str:
    return f"{need / GIB:.2f} of {have / GIB:.2f} GiB of memory"
