"""Compilation of the train step, and comparison with the devices' memory before a run begins.

Bytes of the state are exact, from shapes and shardings; those of the step are the compiler's.
"""

import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import cut, local_rows, place_batch, place_scalars
from ffn_heterogeneity.parallel.processes import gathered, say
from ffn_heterogeneity.train.hardware import GIB, memory_of
from ffn_heterogeneity.train.plan import Plan
from ffn_heterogeneity.train.state import TrainState

# Further advice for a run that does not fit.
LESS = (
    "shorter seq_len, remat=full, fewer trainable leaves (train_only, lora), adafactor or more "
    "devices on mesh.fsdp or mesh.tensor need less"
)


def state_bytes(plan: Plan, only: Collection[str] | None = None) -> dict[str, int]:
    """Exact bytes on one device, by kind, from the shardings; gradients have the masters' size.

    Args:
      only: paths of the parameters that are counted; None: all.
    """

    def describe(tree: Any, shardings: Any) -> dict[str, dict]:
        described = partition.describe_shardings(tree, shardings)
        # An optimizer's moments have their parameter's path behind their own names.
        layers = {path: path[max(path.find("stack/"), 0) :] for path in described}
        return {k: v for k, v in described.items() if only is None or layers[k] in only}

    described = describe(plan.state.params, plan.shardings[0].params)
    trains = [path for path in described if plan.trainable[path]]
    size = {path: leaf["bytes_per_device"] for path, leaf in described.items()}
    masters = sum(size[path] for path in trains)
    moments = describe(plan.state.opt_state, plan.shardings[0].opt_state)
    return {
        "trainable parameters (float32)": masters,
        "frozen parameters": sum(size.values()) - masters,
        "optimiser state": sum(leaf["bytes_per_device"] for leaf in moments.values()),
        "gradients": masters,
    }


def compile_step(
    plan: Plan, state: TrainState | None = None, length: Mapping[str, int] | None = None
) -> tuple[jax.stages.Compiled | None, dict[str, float]]:
    """Return (the real step, compiled for the mesh's devices; its bytes on one of them).

    (None, infinity) if the compiler rejects it as too large (the TPU's does).

    Args:
      state: the run's state; then the loop's first call uses this program.
      length: one of the objective's lengths; None: the longest.
    """
    rows = plan.batch_size
    if state is not None:  # only the rows that this process feeds
        rows = len(local_rows(plan.shardings[1], rows, plan.accumulation))
    shapes = plan.objective.shapes(rows, length or plan.objective.longest)
    batch = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
    batch, platforms = cut(batch, plan.accumulation), None
    hyper = dict.fromkeys(plan.hyper(0), np.float32(0))
    if state is None:
        state, platforms = plan.state, (plan.options.platform,)
    else:
        batch = place_batch(batch, plan.shardings[1])
        hyper = place_scalars(hyper, plan.shardings[2])
    traced = plan.train_step.trace(state, batch, hyper)
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


def compile_plan(
    plan: Plan, room: float, state: TrainState | None = None
) -> tuple[Plan, jax.stages.Compiled | None, dict[str, float]]:
    """Compile the plan with the least rematerialization that needs at most `room` bytes per device.

    If none fits, it is the plan with the most. Returns the plan and the results of `compile_step`.
    """
    remats = plan.remats[plan.remats.index(plan.options.remat) :]
    return _first_that_fits(plan, room, [(remat, plan.accumulation) for remat in remats], state)


def _first_that_fits(
    plan: Plan,
    room: float,
    choices: Sequence[tuple[str, int]],
    state: TrainState | None = None,
) -> tuple[Plan, jax.stages.Compiled | None, dict[str, float]]:
    """Return `compile_plan`'s result for the first (remat, accumulation) that fits, or the last."""
    for remat, accumulation in choices:
        made = plan.changed(remat, accumulation)
        compiled, memory = compile_step(made, state)
        if state is not None:  # compilers need not agree near the limit, and the program is one
            memory["together"] = float(gathered(np.float32(memory["together"])).max())
        if memory["together"] <= room:
            break
    return made, compiled, memory


def what_would_fit(plan: Plan, room: float) -> str:
    """Suggest a solution for a step that needs more than `room` bytes per device.

    It is the same batch in the fewest micro-batches that fit; each number is compiled.
    """
    print("looking for a batch that fits ...", file=sys.stderr, flush=True)
    most = plan.batch_size // (plan.mesh.shape["data"] * plan.mesh.shape["fsdp"])
    larger = [n for n in range(plan.accumulation + 1, most + 1) if most % n == 0]
    if larger:
        made, _, memory = _first_that_fits(plan, room, [(plan.options.remat, n) for n in larger])
        n, smaller = made.accumulation, plan.batch_size // made.accumulation * plan.accumulation
        if memory["together"] <= room:
            return f"accumulation={n} fits, with the same updates, or batch_size={smaller}"
    return f"not even accumulation={most} fits: {LESS}"


def described(plan: Plan, steps: int) -> str:
    """One-line summary of parameters, memory and tokens, computed from shapes.

    Raises:
      ValueError: the training state alone does not fit, so no batch size would help.
    """
    held, have = state_bytes(plan), _room(plan)
    del held["gradients"]  # part of the step
    parts = ", ".join(f"{size / GIB:.2f} GiB {kind}" for kind, size in held.items() if size)
    if (need := sum(held.values())) > have:
        raise ValueError(f"training needs {_gib(need, have)} ({parts}): {LESS}")
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.params))
    return (
        f"{count:,} parameters, computed in {plan.options.compute_dtype}: {parts}; "
        f"{plan.tokens:,} tokens per step, {steps * plan.tokens:,} in total"
    )


def _room(plan: Plan) -> float:
    """Memory of a device; of several processes the least, so that all choose the same program."""
    have = memory_of(plan.mesh.local_devices)
    return float(gathered(np.float32(have)).min())


def compile_checked(plan: Plan, state: TrainState) -> tuple[Plan, float]:
    """Call `compile_plan` before a run evaluates or trains; return (plan, compile seconds).

    The longest rows decide; the programs of other lengths are compiled after them.

    Raises:
      ValueError: the step needs more memory than available; the message names what would fit.
    """
    say("compiling the train step ...")
    start = time.perf_counter()
    have = _room(plan)
    plan, _, memory = compile_plan(plan, have, state)
    need = memory["together"]
    if need > have:
        way_out = what_would_fit(plan, have)
        raise ValueError(
            f"a step of batch_size={plan.batch_size} with accumulation={plan.accumulation} "
            f"needs {_gib(need, have)}: {way_out}"
        )
    for length in plan.objective.lengths:
        if length != plan.objective.longest:
            compile_step(plan, state, length)
    seconds, remat = time.perf_counter() - start, plan.options.remat
    say(f"compiled in {seconds:.1f} s; a step (remat={remat}) needs {_gib(need, have)}")
    return plan, seconds


def _gib(need: float, have: float) -> str:
    return f"{need / GIB:.2f} of {have / GIB:.2f} GiB of memory"
