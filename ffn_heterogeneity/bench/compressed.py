"""Cost of compressed models compared with the whole one (MLP Fusion's Tables VII and VIII)."""

import functools
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.bench import timing
from ffn_heterogeneity.bench.cases import train_step, trained_leaves
from ffn_heterogeneity.bench.timing import compiled
from ffn_heterogeneity.heads import make_head, with_head
from ffn_heterogeneity.heads.classification import Classification
from ffn_heterogeneity.io.load import Model, load_config
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import HeadConfig, ModelConfig
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.adapt import LORA_ON_MLPS, MLPS
from ffn_heterogeneity.tree import flatten
from ffn_heterogeneity.wording import check_choice

# "LoRA" trains the adapters alone, "mlp_lora" (Table VII) all but the MLPs' kernels.
METHODS = ("LoRA", "fusion", "structured", "svd", "unstructured")
WHOLE, MLP_LORA = "whole", "mlp_lora"


def time_fusion(config: Any, *_: Any) -> dict[str, Any]:
    """Training steps and forward passes of compressed classifiers with random weights, in float32.

    The model is `config.model`, on random rows [batch, seq_len]. Three quarters of the FFNs'
    neurons (or weights) are removed from the last two thirds of its layers or, with experts, from
    the last 4 sparse layers of each stack. Timed are "forward" and "train step", if `config.calls`
    has them. Each program has its operations, "gflop", as counted by XLA (which counts loops over
    blocks of an expert's rows once); "models" has each model's parameters, and those that train.

    Raises:
      ValueError: an unknown method.
    """
    for method in config.methods:
        check_choice("methods", method, (*METHODS, MLP_LORA))
    rows, key = (config["batch"], config["seq_len"]), jax.random.key(0)
    shape, head = load_config(config.model), HeadConfig.of("classification", vars(Classification()))
    shape, params = with_head(shape, causal_lm.init(shape, key), head, key)
    uncompressed = Model(shape, jax.tree.map(np.asarray, params), None, config.model)
    del params
    rng, programs, sizes = np.random.default_rng(0), {}, {}
    batch = {
        "tokens": rng.integers(0, shape.vocab_size, rows, np.int32),
        "segment_ids": np.ones(rows, np.int32),
        "target": rng.integers(0, 2, rows[0]).astype(np.float32),
        "valid": np.ones(rows[0], bool),
    }
    for method in (WHOLE, *(config.methods or METHODS)):
        model, held = _made(uncompressed, method), []
        forward = functools.partial(_predict, model.config)
        freeze = (f"{MLPS}/kernel$",) if method == MLP_LORA else ()
        given = {"optimizer": config.optimizer, "freeze": freeze}
        step = train_step(model, forward, ["classification"], batch, held, **given)
        if "train step" in config.calls:
            programs[f"{method}, step"] = compiled(*step)
        if "forward" in config.calls:
            predict = jax.jit(functools.partial(_answer, forward))
            programs[f"{method}, forward"] = compiled(predict, held, batch)
        trained = trained_leaves(model, freeze)
        leaves = {path: x.size for path, x in flatten(model.params).items()}
        of_trained = sum(size for path, size in leaves.items() if trained[path])
        sizes[method] = {"parameters": sum(leaves.values()), "trainable": of_trained}
        del model, step  # of the largest models only states are in memory
    pairs = [
        (one, f"{WHOLE}, {one.split(', ')[1]}") for one in programs if not one.startswith(WHOLE)
    ]
    title = f"{config.model}, {rows[0]} x {rows[1]} tokens; float32"
    timings = timing.compare(title, programs, config.repetitions, timing.ratios_of(pairs))
    for name, row in timings["programs"].items():
        row["gflop"] = programs[name][0].cost_analysis()["flops"] / 1e9
    return timings | {"models": sizes, "optimizer": config.optimizer}


def _made(whole: Model, method: str) -> Model:
    if method == WHOLE:
        return whole
    if method in ("LoRA", MLP_LORA):
        return SURGERIES["lora"](whole, LORA_ON_MLPS)[0]
    config, sparse = whole.config, whole.config.groups.get("sparse", ())
    layers = f"{config.n_layers // 3}-{config.n_layers - 1}"
    if sparse:
        last = [[i for i in sparse if i in range(*ends)][-4:] for ends in config.stacks.values()]
        layers = ",".join(str(i) for stack in last for i in stack)
    settings = {"method": method, "ratio": 0.75, "layers": layers}
    return SURGERIES["fuse"](whole, settings)[0]


def _predict(model: ModelConfig, params: dict, batch: dict, **given: Any) -> dict:
    # Unrolled, because XLA counts the operations of a loop's body only once.
    outputs = causal_lm.forward(model, params, batch, options=RunOptions(unroll=True), **given)
    head = make_head(model, model.head)
    return outputs | {"predictions": head.apply(params, outputs, batch, lambda x: x)}


def _answer(forward: Any, state: Any, batch: dict) -> tuple:
    """(the state, which passes through, predictions): a forward pass with a step's weights."""
    return state, forward(state.params, batch)["predictions"]
