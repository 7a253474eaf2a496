"""Times of a layer with experts: our dispatches, a dense layer, and transformers' Mixtral layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.bench import timing
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.dispatch import DISPATCHES
from ffn_heterogeneity.models.experts import Experts
from ffn_heterogeneity.models.feed_forward import FeedForward
from ffn_heterogeneity.models.leaves import init
from ffn_heterogeneity.models.options import RunOptions

SHAPE = {"d_model": 576, "neurons": 768, "experts": 8, "top_k": 2}
# Implementations of experts in transformers, without batched_mm: it copies the kernels of a token's
# experts for every token (14 GB here).
THEIRS = ("eager", "grouped_mm")


def time_experts(config: Any, *_: Any) -> dict[str, Any]:
    """Forward pass and value with gradients of one layer of `SHAPE`, on batch x seq_len tokens.

    The dense layer has as many neurons as a token's experts together. With a peer its layers have
    the same weights. float32; weights and tokens are random.
    """
    dense_layer = LayerConfig(SHAPE["top_k"] * SHAPE["neurons"])
    layer = LayerConfig(SHAPE["neurons"], experts=SHAPE["experts"], top_k=SHAPE["top_k"])
    sizes = {"vocab_size": 8, "d_model": SHAPE["d_model"], "n_heads": 9, "n_kv_heads": 9}
    model = ModelConfig("llama", **sizes, head_dim=64, layers=(dense_layer, layer))
    stack = init(model, jax.random.key(0))["stack"]
    leaves = [
        jax.tree.map(lambda x: x[0], stack[f"segment_{i}"]["slot_0"]["ffn"]) for i in range(2)
    ]
    x = jax.random.normal(jax.random.key(1), (config.batch, config.seq_len, SHAPE["d_model"]))
    modules: dict[str, Any] = {"dense layer": (FeedForward(model, dense_layer), leaves[0])}
    for dispatch in DISPATCHES:
        module = Experts(model, layer, RunOptions(dispatch=dispatch))
        modules[f"experts, {dispatch}"] = (module, leaves[1])
    programs: dict[str, Callable[[], Any]] = {}
    for name, (module, tree) in modules.items():

        def forward(tree: Any, x: jax.Array, module: Any = module) -> jax.Array:
            return module.apply({"params": tree}, x)[0]

        def loss(tree: Any, x: jax.Array, forward: Any = forward) -> jax.Array:
            return jnp.sum(jnp.square(forward(tree, x)))

        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        programs[f"{name}, forward"] = functools.partial(jax.jit(forward), tree, x)
        programs[f"{name}, step"] = functools.partial(step, tree, x)
    if config.peer:
        programs |= _theirs(leaves, np.asarray(x))
    seconds = timing.take_turns(programs, config.repetitions)
    fastest = {
        call: min(
            (np.median(seconds[name]), name)
            for name in seconds
            if name.endswith(call) and "torch: e" in name
        )[1]
        for call in ("forward", "step")
        if config.peer
    }
    paired, ratios = timing.paired_interval, {}
    for call in ("forward", "step"):
        blocks, dense = seconds[f"experts, blocks, {call}"], seconds[f"dense layer, {call}"]
        ratios[f"blocks / dense layer, {call}"] = paired(blocks, dense)
        for other in ("dense", "ragged"):
            ratios[f"{other} / blocks, {call}"] = paired(
                seconds[f"experts, {other}, {call}"], blocks
            )
        if config.peer:
            ratios[f"{fastest[call]} / blocks"] = paired(seconds[fastest[call]], blocks)
            ratios[f"torch: dense layer, {call} / ours"] = paired(
                seconds[f"torch: dense layer, {call}"], dense
            )
    size = f"{config.batch} x {config.seq_len} tokens, " + ", ".join(
        f"{k} {v}" for k, v in SHAPE.items()
    )
    rows = [
        (name, f"{1e3 * np.median(one):.2f}", f"{1e3 * one.min():.2f}")
        for name, one in seconds.items()
    ]
    title = f"{size}; float32; {config.repetitions} rounds"
    tables = [
        timing.table(title, ("program", "median ms", "fastest ms"), rows),
        timing.table_of_ratios(ratios),
    ]
    return {"machine": timing.machine(), "seconds": seconds, "ratios": ratios, "tables": tables}


def _theirs(leaves: list[dict], x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Calls of transformers' dense and sparse layers with the same weights."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    dense, sparse = (jax.tree.map(lambda a: torch.tensor(np.asarray(a)), tree) for tree in leaves)
    sizes = {"hidden_size": SHAPE["d_model"], "num_hidden_layers": 1}
    mlp = LlamaMLP(
        transformers.LlamaConfig(intermediate_size=len(dense["down"]["kernel"]), **sizes)
    )
    for name in ("gate", "up", "down"):
        getattr(mlp, f"{name}_proj").weight.data = dense[name]["kernel"].T.contiguous()
    modules = {"dense layer": mlp}
    for implementation in THEIRS:
        settings = transformers.MixtralConfig(
            intermediate_size=SHAPE["neurons"],
            num_local_experts=SHAPE["experts"],
            num_experts_per_tok=SHAPE["top_k"],
            **sizes,
        )
        settings._experts_implementation = implementation
        block = MixtralSparseMoeBlock(settings)
        turned = {name: sparse[name]["kernel"].transpose(1, 2) for name in ("gate", "up", "down")}
        block.experts.gate_up_proj.data = torch.cat([turned["gate"], turned["up"]], 1).contiguous()
        block.experts.down_proj.data = turned["down"].contiguous()
        block.gate.weight.data = sparse["router"]["kernel"].T.contiguous()
        modules[f"experts, {implementation}"] = block
    calls, inputs = {}, torch.tensor(x)
    for name, module in modules.items():

        def forward(module: Any = module) -> Any:
            with torch.no_grad():
                return module(inputs).numpy()

        def step(module: Any = module) -> Any:
            module.zero_grad()
            rows = inputs.clone().requires_grad_()
            module(rows).square().sum().backward()
            return rows.grad.numpy()

        calls |= {f"torch: {name}, forward": forward, f"torch: {name}, step": step}
    return calls
