"""`--config.dry_run`: what a run needs on given devices, before a night is spent on it.

Parameters and bytes are exact (shapes and shardings). Seconds are a roofline: no step can be faster
than its products at the devices' peak, its bytes at their memory's, or what it sends at their
links'. Where there is a compiler for the devices, the real step is compiled for them: its memory
and its collectives are then the compiler's own figures.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import AbstractMesh, AxisType, Mesh
from ml_collections import ConfigDict

from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import (
    cut,
    place_batch,
    place_scalars,
    rows_of_micro_batch,
)
from ffn_heterogeneity.parallel.processes import say
from ffn_heterogeneity.paths import flatten
from ffn_heterogeneity.report.tables import markdown_table
from ffn_heterogeneity.train import hlo
from ffn_heterogeneity.train.build import Built, build, check_config, hyper_function
from ffn_heterogeneity.train.hardware import EXPECTED, GIB, Target, find_target, memory_of
from ffn_heterogeneity.train.source import model_shape, prepared
from ffn_heterogeneity.train.state import TrainState

# What else a run that does not fit may turn.
LESS = (
    "shorter seq_len, remat=full, fewer trainable leaves (train_only, lora), adafactor or more "
    "devices on mesh.fsdp or mesh.tensor need less"
)

# Batch leaves as `data.pipeline` gives them.
BATCH = {"tokens": np.int32, "targets": np.int32, "segment_ids": np.int32, "positions": np.int32,
         "loss_mask": np.bool_}  # fmt: skip


def dry_run(config: ConfigDict, workdir: str | os.PathLike) -> dict:
    """Plans the run on `config.dry_run`'s devices; prints tables and writes `<workdir>/plan.json`.

    Nothing is loaded, read or trained: a preset's or a directory's config is enough.

    Returns:
      What plan.json holds: "parameters", "bytes_per_device", "tokens_per_step", "flops_per_step",
      "seconds_per_step" and "hours" by what bounds them, and "compiled" (memory, collectives).

    Raises:
      ValueError: a key, a rule or a mesh that does not fit; one line.
    """
    check_config(config)
    dtype = {"float32": jnp.float32}.get(config.compute_dtype, jnp.bfloat16)
    if config.compute_dtype == "auto" and config.dry_run == "here" and _on_cpu():
        dtype = jnp.float32
    target = find_target(config.dry_run, dtype)
    mesh = _mesh(config, target)
    rows_of_micro_batch(mesh, config.batch_size, config.accumulation)
    built = build_shapes(config, mesh)
    sizes = {path: math.prod(leaf.shape) for path, leaf in flatten(built.state.params).items()}
    plan: dict[str, Any] = {
        "model": config.model or "new",
        "devices": target.name,
        "device_count": target.count,
        "mesh": dict(mesh.shape),
        "parameters": sum(sizes.values()),
        "trainable_parameters": sum(n for path, n in sizes.items() if built.trainable[path]),
        "bytes_per_device": state_bytes(built),
        "tokens_per_step": config.batch_size * config.seq_len,
        "flops_per_step": step_flops(config, built),
    }
    plan |= roofline(config, built, target, plan)
    plan["compiled"] = None
    if target.devices is not None:
        print("compiling the train step ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        compiled, held = compile_step(config, built)
        found = hlo.collectives(compiled.as_text()) if compiled else ()
        plan["compiled"] = {
            "seconds": time.perf_counter() - start,
            "bytes_per_device": held,
            "collectives": [list(row) for row in hlo.summary(found)],
        }
    plan["verdict"] = _verdict(config, built, target, plan)
    write_json(epath.Path(workdir) / "plan.json", plan)
    print(describe(plan, target))
    print(f"plan: {workdir}/plan.json", file=sys.stderr)
    return plan


def build_shapes(config: ConfigDict, mesh: Mesh | AbstractMesh) -> Built:
    """`build` of a model that is not read: its config, and the surgeries that prepare it, decide.

    Frozen leaves keep their storage dtype: half precision, as models are published.
    """
    model = model_shape(config)
    params = jax.eval_shape(
        lambda params: prepared(config, Model(model, params, None, "")).params,
        causal_lm.abstract_params(model, jnp.bfloat16),
    )
    return build(config, model, params, mesh)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _mesh(config: ConfigDict, target: Target):
    if target.devices is not None:
        return partition.make_mesh(**config.mesh, devices=target.devices)
    sizes = partition.mesh_sizes(**config.mesh, count=target.count)
    return AbstractMesh(sizes, partition.MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def state_bytes(built: Built) -> dict[str, int]:
    """Bytes on one device, by kind: exact, from the shardings. The gradients are as the masters."""
    described = partition.describe_shardings(built.mesh, built.state.params)
    trains = [path for path in described if built.trainable[path]]
    size = {path: leaf["bytes_per_device"] for path, leaf in described.items()}
    masters = sum(size[path] for path in trains)
    moments = partition.describe_shardings(
        built.mesh, built.state.opt_state, built.shardings[0].opt_state
    )
    return {
        "trainable parameters (float32)": masters,
        "frozen parameters": sum(size.values()) - masters,
        "optimiser state": sum(leaf["bytes_per_device"] for leaf in moments.values()),
        "gradients": masters,
    }


def step_flops(config: ConfigDict, built: Built) -> dict[str, float]:
    """Floating point operations of one step over all devices.

    "model": 2 a multiply-add; every kernel's product forward, for its input's gradient, and (where
    it trains) for its own; attention's two products over the keys a query sees (causal, windows),
    forward and twice backward. "recomputed": what rematerialisation does again. Softmax, norms and
    element-wise work are left out (they are bytes, not products).
    """
    model, tokens = built.model, config.batch_size * config.seq_len
    forward = backward = 0.0
    for path, leaf in flatten(built.state.params).items():
        if path.startswith("stack/") and path.endswith("/kernel"):
            product = 2.0 * math.prod(leaf.shape) * tokens
            forward += product
            backward += product * (2 if built.trainable[path] else 1)
    head = 2.0 * model.d_model * model.vocab_size * tokens
    head_path = "embed/embedding" if model.tied else "head/kernel"
    attention = sum(_attention_flops(model, config.seq_len, i) for i in range(model.n_layers))
    attention *= config.batch_size
    recomputed = forward + attention if built.options.remat == "full" else 0.0
    return {
        "model": forward + backward + 3 * attention
        + head * (3 if built.trainable[head_path] else 2),
        "recomputed": recomputed,
    }  # fmt: skip


def _attention_flops(model: ModelConfig, length: int, layer: int) -> float:
    """Of the scores and the weighted values of one row, forward."""
    window = min(model.layers[layer].window or length, length)
    seen = window * (window + 1) / 2 + (length - window) * window
    return 2 * 2.0 * seen * model.n_heads * model.head_dim


def roofline(config: ConfigDict, built: Built, target: Target, plan: dict) -> dict[str, Any]:
    """Seconds a step by what bounds it, the expected ones, and the hours of the whole run."""
    chip, flops = target.chip, plan["flops_per_step"]
    seconds = {
        "products": (flops["model"] + flops["recomputed"]) / target.count / chip.flops,
        "memory": _bytes_moved(built, plan) / chip.bandwidth,
    }
    if chip.links:
        seconds["links"] = _bytes_sent(config, built) / chip.links
    bound = max(seconds.values())
    expected = max(bound, seconds["products"] / EXPECTED[chip.source])
    return {
        "seconds_per_step": seconds | {"roofline": bound, "expected": expected},
        "hours": {
            "roofline": config.steps * bound / 3600,
            "expected": config.steps * expected / 3600,
        },
        "rates": chip.source,
    }


def _passes(built: Built) -> int:
    """How often a step reads the layers' weights: forward, backward, and once more recomputed."""
    return 3 if built.options.remat == "full" else 2


def _bytes_moved(built: Built, plan: dict) -> float:
    """Least bytes to and from one device's memory: weights read each pass, the state once each way.

    Weights are read gathered over `fsdp`, in the compute dtype.
    """
    state = plan["bytes_per_device"]
    weights = plan["parameters"] * jnp.dtype(built.options.compute_dtype).itemsize
    weights /= built.mesh.shape["tensor"]
    update = state["trainable parameters (float32)"] + state["optimiser state"]
    return _passes(built) * weights + 2 * update + 2 * state["gradients"]


def _bytes_sent(config: ConfigDict, built: Built) -> float:
    """Least bytes one device sends: weights gathered each pass, gradients scattered over `fsdp` and
    reduced over `data`, and the two activations that a layer reduces over `tensor` each pass."""
    shape, width = built.mesh.shape, jnp.dtype(built.options.compute_dtype).itemsize
    data, fsdp, tensor = (shape[axis] for axis in partition.MESH_AXES)
    sizes = {path: math.prod(leaf.shape) for path, leaf in flatten(built.state.params).items()}
    weights = sum(sizes.values()) / tensor
    gradients = 4 * sum(n for path, n in sizes.items() if built.trainable[path]) / tensor
    sent = (fsdp - 1) / fsdp * (_passes(built) * weights * width + gradients)
    sent += 2 * (data - 1) / data * gradients / fsdp
    tokens = config.batch_size * config.seq_len / (data * fsdp)
    reduced = 2 * (_passes(built)) * built.model.n_layers * tokens * built.model.d_model * width
    return sent + 2 * (tensor - 1) / tensor * reduced


def compile_step(
    config: ConfigDict, built: Built, state: TrainState | None = None, rows: int = 0
) -> tuple[jax.stages.Compiled | None, dict[str, float]]:
    """(the real step, compiled for the mesh's devices; bytes on one of them while it runs).

    None and infinity where the compiler itself finds it too large (the TPU's does).

    Args:
      state: as the run has it: then this is the very program that the loop's first call finds.
      rows: of a batch that this process feeds, with `state`.
    """
    shape = rows or config.batch_size, config.seq_len
    batch = cut({k: np.zeros(shape, dtype) for k, dtype in BATCH.items()}, config.accumulation)
    hyper, platforms = {k: np.float32(x) for k, x in hyper_function(config)(0).items()}, None
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
    kept = memory.argument_size_in_bytes
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return compiled, {
        "arguments (state, batch)": kept,
        "temporary (gradients, activations)": memory.temp_size_in_bytes,
        "results": made,
        "together": kept + memory.temp_size_in_bytes + made,
    }


def what_would_fit(config: ConfigDict, built: Built, room: float) -> str:
    """The way out for a step that needs more than `room` bytes a device: the same batch in the
    fewest micro-batches that fit, each number compiled to be sure."""
    print("looking for a batch that fits ...", file=sys.stderr, flush=True)
    most = config.batch_size // (built.mesh.shape["data"] * built.mesh.shape["fsdp"])
    for n in (n for n in range(config.accumulation + 1, most + 1) if most % n == 0):
        tried = config.copy_and_resolve_references()
        tried.accumulation = n
        part = build(tried, built.model, built.state.params, built.mesh)
        if compile_step(tried, part)[1]["together"] <= room:
            smaller = config.batch_size // n * config.accumulation
            return f"accumulation={n} fits, with the same updates, or batch_size={smaller}"
    return f"not even accumulation={most} fits: {LESS}"


# ---- what a run says of itself


def check_state(config: ConfigDict, mesh: Mesh) -> str:
    """Before anything is read: a line of how much there is to do and to hold, from shapes alone.

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
    n = config.batch_size * config.seq_len
    return f"{count:,} parameters: {parts}; {n:,} tokens a step, {config.steps * n:,} in all"


def compile_checked(config: ConfigDict, built: Built, state: TrainState, rows: int) -> float:
    """`compile_step` for a run, before it evaluates or trains; the seconds that it took.

    Raises:
      ValueError: the step needs more memory than there is; names what would fit.
    """
    say("compiling the train step ...")
    start = time.perf_counter()
    need = compile_step(config, built, state, rows)[1]["together"]
    seconds, have = time.perf_counter() - start, memory_of(built.mesh.local_devices)
    if need > have:
        way_out = what_would_fit(config, built, have)
        raise ValueError(
            f"a step of batch_size={config.batch_size} with accumulation={config.accumulation} "
            f"needs {_gib(need, have)}: {way_out}"
        )
    say(f"compiled in {seconds:.1f} s; a step needs {_gib(need, have)}")
    return seconds


def _gib(need: float, have: float) -> str:
    return f"{need / GIB:.2f} of {have / GIB:.2f} GiB of memory"


# ---- as tables


def describe(plan: dict, target: Target) -> str:
    """The plan as tables."""
    lines = [
        f"{plan['model']} on {target.name} ({plan['device_count']} devices, mesh "
        + " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items()) + ")",
        f"{plan['parameters']:,} parameters, {plan['trainable_parameters']:,} of them train; "
        f"{plan['tokens_per_step']:,} tokens a step",
        "",
    ]  # fmt: skip
    held = plan["bytes_per_device"]
    rows = [(kind, f"{size / GIB:.3f}") for kind, size in held.items()]
    rows.append(("together, of the state", f"{sum(held.values()) / GIB:.3f}"))
    compiled = plan["compiled"]
    if compiled:
        rows += [
            (f"compiled: {kind}", f"{size / GIB:.3f}")
            for kind, size in compiled["bytes_per_device"].items()
        ]
    rows.append(("a device has", f"{target.chip.memory / GIB:.3f}"))
    lines += [markdown_table(("on one device", "GiB"), rows), "", plan["verdict"]]
    seconds = plan["seconds_per_step"]
    rows = [(name, f"{value * 1e3:,.2f}") for name, value in seconds.items()]
    rows += [(f"hours of the run, {name}", f"{value:,.2f} h") for name, value in
             plan["hours"].items()]  # fmt: skip
    lines += ["", markdown_table((f"a step ({plan['rates']} rates)", "ms"), rows)]
    if compiled and compiled["collectives"]:
        rows = [
            (kind, where, str(count), f"{size / 2**20:,.1f}")
            for kind, where, count, size in compiled["collectives"]
        ]
        header = ("collective", "runs", "how many", "MiB on a device")
        lines += ["", markdown_table(header, rows)]
    return "\n".join(lines)


def _verdict(config: ConfigDict, built: Built, target: Target, plan: dict) -> str:
    """Whether it fits, and what to turn where it does not."""
    needed, what = sum(plan["bytes_per_device"].values()), "the state alone"
    if plan["compiled"] is None:
        what += f" (not compiled: {target.why_not})"
    else:
        needed, what = plan["compiled"]["bytes_per_device"]["together"], "the compiled step"
    room = target.chip.memory
    verdict = f"{what} needs {needed / GIB:.2f} of {room / GIB:.1f} GiB a device"
    if needed <= room:
        return verdict
    way = what_would_fit(config, built, room) if plan["compiled"] else LESS
    return f"{verdict}: it does NOT fit; {way}"
