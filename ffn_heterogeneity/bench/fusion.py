"""Steps and forward passes of compressed models, in turns (as MLP Fusion's Tables VII and VIII)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.bench.timing import Questions, compare, ratios_of, stepping
from ffn_heterogeneity.heads import make_head, with_head
from ffn_heterogeneity.heads.classification import Classification
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.classification import classification_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.models.families import preset
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.train.step import make_train_step

WHOLE, RATIO = "whole", 0.75
# XLA counts the operations of a loop's body once.
OPTIONS = RunOptions(unroll=True)
METHODS = ("fusion", "structured", "svd", "unstructured")
LORA = {"rank": 8, "alpha": 32.0, "targets": "ffn/"}  # as the paper's Table VII has it
READING = "Time / the whole model's; three quarters of the FFNs' neurons, or weights, of the last "
READING += "two thirds of its layers are gone; with LoRA none"
QUESTIONS: Questions = {
    "Is a compressed model trained faster?": (READING, r"(\w+), step / .*", r"^[^;]+"),
    "Does a compressed model answer faster?": (READING, r"(\w+), forward / .*", r"^[^;]+"),
}


def benchmark_fusion(name: str, rows: tuple[int, int], repetitions: int) -> dict:
    """Times a step on labelled rows [batch, seq_len] and a forward pass of the preset `name`, whole
    and compressed: float32, AdamW, random weights and rows.

    Returns:
      As `timing.compare`; of each program also its operations, "gflop", by XLA's own count.

    Raises:
      ValueError: an unknown model.
    """
    shape = preset(name)[0]
    head = HeadConfig.of("classification", vars(Classification()))
    key = jax.random.key(0)
    shape, params = with_head(shape, causal_lm.init(shape, key), head, key)
    whole = Model(shape, jax.tree.map(np.asarray, params), None, name)
    layers = f"{shape.n_layers // 3}-{shape.n_layers - 1}"
    models = {WHOLE: whole, "LoRA": SURGERIES["lora"](whole, LORA)[0]}
    for method in METHODS:
        settings = {"method": method, "ratio": RATIO, "layers": layers}
        models[method], _ = SURGERIES["fuse"](whole, settings)
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, shape.vocab_size, rows, np.int32),
        "segment_ids": np.ones(rows, np.int32),
        "target": rng.integers(0, 2, rows[0]).astype(np.float32),
        "valid": np.ones(rows[0], bool),
    }
    programs, calls = {}, {}
    for method, model in models.items():
        for kind, make in (("step", _step), ("forward", _forward)):
            label = f"{method}, {kind}"
            programs[label], calls[label] = make(model, batch)
    title = f"{name}, {rows[0]} x {rows[1]} tokens; float32"
    beside = [one for one in programs if not one.startswith(WHOLE)]
    ratios = ratios_of([(one, f"{WHOLE}, {one.split(', ')[1]}") for one in beside])
    found = compare(title, programs, calls, repetitions, ratios)
    for label, program in programs.items():
        found["programs"][label]["gflop"] = program.cost_analysis()["flops"] / 1e9
    return found


def _outputs(model: Model, params: dict, batch: dict, **given: Any) -> dict:
    outputs = causal_lm.forward(model.config, params, batch, options=OPTIONS, **given)
    head = make_head(model.config, model.config.head)
    return outputs | {"predictions": head.apply(params, outputs, batch, lambda x: x)}


def _forward(model: Model, batch: dict) -> tuple[Any, Callable[[], Any]]:
    """(the compiled forward pass, a call of it)."""
    params = jax.device_put(model.params)
    function = jax.jit(lambda params, batch: _outputs(model, params, batch)["predictions"])
    compiled = function.lower(params, batch).compile()
    return compiled, lambda: compiled(params, batch)


def _step(model: Model, batch: dict) -> tuple[Any, Callable[[], Any]]:
    """(the compiled training step, a call of it)."""
    leaves = declared(model.config, model.params)
    adapted = any(path.endswith("/lora_a") for path in leaves)
    only = (r"/lora_[ab]$", "^task_head/") if adapted else ()
    trainable = partition.trainable_mask(leaves, (), only)
    optimizer = make_optimizer(OptimizerConfig(name="adamw"), model.params, trainable)
    term = classification_term(TermContext("labels", model=model.config))
    step = make_train_step(functools.partial(_outputs, model), (term,), optimizer, trainable)
    state = create_state(model.params, optimizer, trainable)
    micro = {name: leaf[None] for name, leaf in batch.items()}
    hyper = {"learning_rate": jnp.float32(1e-6)}
    compiled = step.lower(state, micro, hyper).compile()
    return compiled, stepping(compiled, [state], micro, hyper)
