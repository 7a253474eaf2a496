"""Training steps of configs, in turns: what a piece of a step costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from ffn_heterogeneity.bench.timing import Interval, Questions, compare, paired_interval, stepping
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import cut, place_batch, place_scalars
from ffn_heterogeneity.train.build import build
from ffn_heterogeneity.train.fit import compile_step
from ffn_heterogeneity.train.settings import TrainConfig, hyper_function, read
from ffn_heterogeneity.train.source import starting_model
from ffn_heterogeneity.train.state import create_state

QUESTIONS: Questions = {
    "What do pieces of a training step cost?": (
        "Times of a whole step / that of the last config, on one model",
        r"(.* / .*)",
        r"^[^;]+",
    )
}


def benchmark_steps(config: ConfigDict, load: Callable[[str], ConfigDict]) -> dict:
    """Times the training steps that `config.configs` describe ("configs/five.py:<model>,mrpc"),
    each on the model that its surgeries prepare and on random rows [batch, seq_len].

    Args:
      load: reads a config of that form.

    Returns:
      As `timing.compare`; of each program also "bytes", of the whole step.

    Raises:
      ValueError: fewer than two configs, or as `starting_model` and `build`.
    """
    specs = tuple(map(str, config["configs"]))
    if len(set(specs)) < 2:
        raise ValueError(f"configs={specs}: name two training configs or more")
    rows, length = int(config["batch"]), int(config["seq_len"])
    programs, calls, together = {}, {}, {}
    names = [re.sub(r"[^:,]*/", "", spec) for spec in specs]  # without directories
    for spec, name in zip(specs, names, strict=True):
        own = load(spec)
        own.batch_size, own.compute_dtype = rows, "float32"
        own.update(
            {"lengths": (length,), "together": 1} if "lengths" in own else {"seq_len": length}
        )
        programs[name], calls[name], together[name] = _step(read(own))
    title = f"{names[-1]}, {rows} x {length} tokens; float32"
    found = compare(title, programs, calls, int(config["repetitions"]), _ratios)
    for name, size in together.items():
        found["programs"][name]["bytes"] = size
    return found


def _step(config: TrainConfig) -> tuple[jax.stages.Compiled, Callable[[], Any], float]:
    """(the compiled step, a call of it, the bytes that it needs together)."""
    model = starting_model(config)
    mesh = partition.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    built = build(config, model, mesh)
    made = create_state(
        model.params, built.optimizer, built.trainable, shardings=built.shardings[0]
    )
    compiled, sizes = compile_step(config, built, made)
    if compiled is None:
        raise ValueError(f"{config.model}: the step does not fit in the device's memory")
    rng = np.random.default_rng(0)
    batch = {}
    for name, leaf in built.objective.shapes(config.batch_size, built.objective.longest).items():
        is_text = name == "tokens"
        drawn = (
            rng.integers(0, model.config.vocab_size, leaf.shape) if is_text else np.ones(leaf.shape)
        )
        batch[name] = drawn.astype(leaf.dtype)
    batch = place_batch(cut(batch, config.accumulation), built.shardings[1])
    hyper = {k: np.float32(x) for k, x in hyper_function(config, built.objective.terms)(0).items()}
    hyper = place_scalars(hyper, built.shardings[2])
    return compiled, stepping(compiled, made, batch, hyper), sizes["together"]


def _ratios(seconds: Mapping[str, np.ndarray]) -> dict[str, Interval]:
    *others, base = seconds
    return {f"{name} / {base}": paired_interval(seconds[name], seconds[base]) for name in others}
