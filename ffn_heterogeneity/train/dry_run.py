"""`--config.dry_run`: the resources that a run needs on given devices.

Parameters and bytes are exact (shapes and shardings). Seconds are a roofline: a step cannot be
faster than its products at the devices' peak, its bytes at the memory bandwidth, or its
communication at the links' bandwidth. If there is a compiler for the devices, the real step is
compiled for them, and its memory and collectives are the compiler's numbers.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from etils import epath
from jax.sharding import AbstractMesh, Mesh

from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import count_parameters
from ffn_heterogeneity.models.options import choose_dtype
from ffn_heterogeneity.models.stack import tree_segments
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import rows_of_micro_batch
from ffn_heterogeneity.train import hlo
from ffn_heterogeneity.train.build import auto_remat
from ffn_heterogeneity.train.fit import LESS, compile_plan, state_bytes, what_would_fit
from ffn_heterogeneity.train.hardware import EXPECTED, GIB, TPUS, Target, find_target
from ffn_heterogeneity.train.plan import Plan, plan
from ffn_heterogeneity.train.settings import TrainConfig
from ffn_heterogeneity.tree import flatten
from ffn_heterogeneity.wording import markdown_table


def dry_run(config: TrainConfig, workdir: str | os.PathLike) -> dict:
    """Plan the run on `config.dry_run`'s devices; print tables and write `<workdir>/plan.json`.

    No weights are loaded and nothing is trained: a preset's or a directory's config is enough.

    Returns:
      The content of plan.json: "parameters", "bytes_per_device", "tokens_per_step",
      "flops_per_step", "seconds_per_step" and "hours" by bound, "compiled" (memory, collectives)
      and "stacks" (of an encoder-decoder).

    Raises:
      ValueError: an invalid key, rule or mesh, in one line.
    """
    platform = None if config.dry_run == "here" else "accelerator"
    target = find_target(config.dry_run, choose_dtype(config.compute_dtype, platform))
    if target.devices is None:  # a mesh without devices would be of this host's platform
        platform = "tpu" if config.dry_run.partition(":")[0] in TPUS else "gpu"
        remat = auto_remat(platform)[0] if config.remat == "auto" else config.remat
        dtype = str(choose_dtype(config.compute_dtype, platform))
        config = dataclasses.replace(config, compute_dtype=dtype, remat=remat)
    mesh = _mesh(config.mesh, target)
    rows_of_micro_batch(mesh, config.batch_size, config.accumulation)
    built, compilation = plan(config, mesh), None
    if target.devices is not None:
        print("compiling the train step ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        built, compiled, held = compile_plan(built, target.chip.memory)
        moved = hlo.collectives(compiled.as_text()) if compiled else ()
        compilation = {
            "seconds": time.perf_counter() - start,
            "bytes_per_device": held,
            "collectives": [list(row) for row in hlo.summary(moved)],
        }
    report: dict[str, Any] = {
        "model": config.model or "new",
        "devices": target.name,
        "device_count": target.count,
        "mesh": dict(mesh.shape),
        "compute_dtype": str(built.options.compute_dtype),
        "remat": built.options.remat,
        "compiled": compilation,
        "assumed": "; ".join(built.assumed),
        "parameters": sum(built.sizes.values()),
        "active_parameters": _active(built),
        "trainable_parameters": built.trained,
        "bytes_per_device": state_bytes(built),
        "tokens_per_step": built.tokens,
        "flops_per_step": step_flops(built),
    }
    report["stacks"] = by_stack(built, report["flops_per_step"])
    report |= roofline(built, target, report, config.loop.steps)
    report["verdict"] = _verdict(built, target, report)
    write_json(epath.Path(workdir) / "plan.json", report)
    print(describe(report, target))
    print(f"plan: {workdir}/plan.json", file=sys.stderr)
    return report


def _active(built: Plan) -> int:
    """Number of parameters that one token uses."""
    counts = count_parameters(built.model)
    return sum(built.sizes.values()) - counts["total"] + counts["active"]


def _mesh(sizes: Mapping[str, int], target: Target) -> Mesh | AbstractMesh:
    if target.devices is not None:
        return partition.make_mesh(**sizes, devices=target.devices)
    return partition.abstract_mesh(*partition.mesh_sizes(**sizes, count=target.count))


def step_flops(built: Plan) -> dict[str, float]:
    """Floating point operations of one step over all devices.

    "model": 2 per multiply-add; every kernel's product forward, for its input's gradient, and (if
    it trains) for its gradient; attention's two products over the keys that a query sees (causal,
    windows), forward and twice backward. "recomputed": the operations that rematerialization
    repeats. Of an encoder-decoder also "encoder" and "decoder", the parts of "model" without the
    head. Softmax, norms and element-wise operations are not counted (they are bound by bytes).
    """
    model, lengths, stacks = built.model, row_lengths(built), stack_leaves(built)
    tokens = {stack: built.batch_size * sum(rows) for stack, rows in lengths.items()}
    forward, total = dict.fromkeys(lengths, 0.0), dict.fromkeys(lengths, 0.0)
    for path, stack in stacks.items():  # (heads: below; a pooler reads a token a row)
        of_memory = "/cross_attention/k/" in path or "/cross_attention/v/" in path
        read = tokens["encoder" if of_memory else stack]
        product = 2.0 * built.leaves[path].reads * built.sizes[path] * read
        forward[stack] += product
        total[stack] += product * (3 if built.trainable[path] else 2)
    for stack, ends in model.stacks.items():
        attention = built.batch_size * sum(
            _attention_flops(model, layer, lengths, size)
            for size in lengths[stack]
            for layer in range(*ends)
        )
        forward[stack] += attention
        total[stack] += 3 * attention
    head = 0.0
    if built.objective.head is None:  # a task's head reads a row, not every token
        last = next(reversed(model.stacks))
        head = 2.0 * model.d_model * model.vocab_size * tokens[last]
        path = "embed/embedding" if model.tied else "head/kernel"
        head *= 3 if built.trainable[path] else 2
    recomputed = sum(forward.values()) if built.options.remat == "full" else 0.0
    apart = total if model.kind == "encoder_decoder" else {}
    return {"model": sum(total.values()) + head, "recomputed": recomputed, **apart}


def row_lengths(built: Plan) -> dict[str, tuple[int, ...]]:
    """Lengths of the rows that each stack reads; several if an example has several texts."""
    lengths = built.objective.longest
    if built.model.kind == "encoder_decoder":
        # Both stacks of a classifier read one text.
        return {"encoder": (lengths.get("S", lengths["T"]),), "decoder": (lengths["T"],)}
    return {stack: tuple(lengths.values()) for stack in built.model.stacks}


def stack_leaves(built: Plan) -> dict[str, str]:
    """{path of a layer's leaf: its stack}."""
    ends = {stack: end for stack, (_, end) in built.model.stacks.items()}
    starts = [segment.start for segment in tree_segments(built.params["stack"])]
    of = [next(stack for stack, end in ends.items() if start < end) for start in starts]
    return {
        path: of[int(path.split("/")[1].removeprefix("segment_"))]
        for path in built.sizes
        if path.startswith("stack/")
    }


def _attention_flops(model: ModelConfig, layer: int, lengths: dict, length: int) -> float:
    """Forward operations of a layer's scores and weighted values, of one row."""
    window, each = min(model.layers[layer].window or length, length), model.layers[layer]
    seen = float(length * window)
    if each.causal:
        seen = window * (window + 1) / 2 + (length - window) * window
    if each.cross_attention:
        seen += length * lengths["encoder"][0]
    return 2 * 2.0 * seen * model.n_heads * model.head_dim


def by_stack(built: Plan, flops: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Parameters, bytes on a device, tokens and operations of an encoder-decoder's stacks.

    Empty for another model.
    """
    made, stacks = {}, stack_leaves(built)
    if built.model.kind != "encoder_decoder":
        return made
    for stack, lengths in row_lengths(built).items():
        paths = {path for path, name in stacks.items() if name == stack}
        made[stack] = {
            "parameters": sum(built.sizes[path] for path in paths),
            "bytes_per_device": sum(state_bytes(built, paths).values()),
            "tokens_per_step": built.batch_size * sum(lengths),
            "flops_per_step": flops[stack],
        }
    return made


def roofline(built: Plan, target: Target, plan: dict, steps: int) -> dict[str, Any]:
    """Seconds per step by bound, the expected seconds, and the hours of the whole run."""
    chip, flops = target.chip, plan["flops_per_step"]
    seconds = {
        "products": (flops["model"] + flops["recomputed"]) / target.count / chip.flops,
        "memory": _bytes_moved(built, plan) / chip.bandwidth,
    }
    if chip.links:
        seconds["links"] = _bytes_sent(built) / chip.links
    bound = max(seconds.values())
    expected = max(bound, seconds["products"] / EXPECTED[chip.source])
    return {
        "seconds_per_step": seconds | {"roofline": bound, "expected": expected},
        "hours": {
            "roofline": steps * bound / 3600,
            "expected": steps * expected / 3600,
        },
        "rates": chip.source,
    }


def _passes(built: Plan) -> int:
    """Number of times that a step reads the layers' weights: forward, backward, recomputation."""
    return 3 if built.options.remat == "full" else 2


def _weight_bytes(built: Plan) -> float:
    """Bytes of weights that a pass reads: in the compute dtype, NF4's codes as stored."""
    width = jnp.dtype(built.options.compute_dtype).itemsize
    return sum(  # a teacher's too
        leaf.size * (1 if path.endswith("/nf4_codes") else width * built.leaves[path].holds)
        for path, leaf in flatten(built.params).items()
    )


def _bytes_moved(built: Plan, plan: dict) -> float:
    """Minimum bytes to and from a device's memory: weights in each pass, the state once each way.

    Weights are gathered over `fsdp`.
    """
    state = plan["bytes_per_device"]
    weights = _weight_bytes(built) / built.mesh.shape["tensor"]
    update = state["trainable parameters (float32)"] + state["optimiser state"]
    return _passes(built) * weights + 2 * update + 2 * state["gradients"]


def _bytes_sent(built: Plan) -> float:
    """Minimum bytes that one device sends.

    Weights are gathered in each pass, gradients scattered over `fsdp` and reduced over `data`, and
    a layer reduces two activations over `tensor` in each pass.
    """
    shape, width = built.mesh.shape, jnp.dtype(built.options.compute_dtype).itemsize
    data, fsdp, tensor = (shape[axis] for axis in partition.MESH_AXES)
    gradients = 4 * built.trained / tensor
    sent = (fsdp - 1) / fsdp * (_passes(built) * _weight_bytes(built) / tensor + gradients)
    sent += 2 * (data - 1) / data * gradients / fsdp
    ends, rows = built.model.stacks, row_lengths(built)
    through = sum((end - start) * sum(rows[stack]) for stack, (start, end) in ends.items())
    tokens = built.batch_size * through / (data * fsdp)
    reduced = 2 * _passes(built) * tokens * built.model.d_model * width
    return sent + 2 * (tensor - 1) / tensor * reduced


# ---- as tables


def describe(plan: dict, target: Target) -> str:
    """The plan as tables."""
    parameters, used = plan["parameters"], plan["active_parameters"]
    active = f"{used:,} active per token, " if used < parameters else ""
    lines = [
        f"{plan['model']} on {target.name} ({plan['device_count']} devices, mesh "
        + " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
        + ")",
        f"{parameters:,} parameters, {active}{plan['trainable_parameters']:,} of them train; "
        f"{plan['tokens_per_step']:,} tokens a step, in {plan['compute_dtype']}, "
        f"remat={plan['remat']}",
        *filter(None, [plan["assumed"]]),
        "",
    ]
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
    rows += [
        (f"hours of the run, {name}", f"{value:,.2f} h") for name, value in plan["hours"].items()
    ]
    lines += ["", markdown_table((f"a step ({plan['rates']} rates)", "ms"), rows)]
    if plan["stacks"]:
        header = (
            "stack",
            "parameters",
            "GiB of state on a device",
            "tokens a step",
            "TFLOP a step",
        )
        rows = [
            (
                name,
                f"{one['parameters']:,}",
                f"{one['bytes_per_device'] / GIB:.3f}",
                f"{one['tokens_per_step']:,}",
                f"{one['flops_per_step'] / 1e12:,.4f}",
            )
            for name, one in plan["stacks"].items()
        ]
        lines += ["", markdown_table(header, rows)]
    if compiled and compiled["collectives"]:
        rows = [
            (kind, where, str(count), f"{size / 2**20:,.1f}")
            for kind, where, count, size in compiled["collectives"]
        ]
        header = ("collective", "runs", "how many", "MiB on a device")
        lines += ["", markdown_table(header, rows)]
    return "\n".join(lines)


def _verdict(built: Plan, target: Target, plan: dict) -> str:
    """State whether the run fits, and which settings would help if it does not."""
    needed, what = sum(plan["bytes_per_device"].values()), "the state alone"
    if plan["compiled"] is None:
        what += f" (not compiled: {target.why_not})"
    else:
        needed, what = plan["compiled"]["bytes_per_device"]["together"], "the compiled step"
    room = target.chip.memory
    verdict = f"{what} needs {needed / GIB:.2f} of {room / GIB:.1f} GiB a device"
    if needed <= room:
        return verdict
    way = what_would_fit(built, room) if plan["compiled"] else LESS
    return f"{verdict}: it does NOT fit; {way}"
