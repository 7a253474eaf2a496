"""Times of a layer with experts: our dispatches, a dense layer, and transformers' Mixtral layer."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.bench import timing
from ffn_heterogeneity.bench.peer import PEERS
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.dispatch import DISPATCHES
from ffn_heterogeneity.models.experts import Experts
from ffn_heterogeneity.models.feed_forward import FeedForward
from ffn_heterogeneity.models.leaves import init
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.wording import check_choice

SHAPE = {"d_model": 576, "neurons": 768, "experts": 8, "top_k": 2}
# Implementations of experts in transformers, without batched_mm: it copies the kernels of a token's
# experts for every token (14 GB here).
THEIRS = ("eager", "grouped_mm")


def time_experts(config: Any, *_: Any) -> dict[str, Any]:
    """Forward pass and value with gradients of one layer of `SHAPE`, on batch x seq_len tokens."""
    check_choice("peer", config.peer, ("", PEERS[0]))
    programs = layers(config.batch, config.seq_len, config.peer)
    seconds = timing.take_turns(programs, config.repetitions)
    sizes = ", ".join(f"{name} {size}" for name, size in SHAPE.items())
    title = f"{config.batch} x {config.seq_len} tokens, {sizes}; float32"
    rows = [(name, f"{1e3 * np.median(one):.2f}") for name, one in seconds.items()]
    tables = [timing.table(f"{title}; {config.repetitions} rounds", ("program", "median ms"), rows)]
    ratios = _ratios(seconds)
    tables.append(timing.table_of_ratios(ratios))
    return {"machine": timing.machine(), "seconds": seconds, "ratios": ratios, "tables": tables}


def layers(
    batch: int, length: int, peer: str, shape: Mapping[str, int] = SHAPE
) -> dict[str, Callable[[], Any]]:
    """{name: call}; "forward" returns the output, "step" the value and (leaves, input) gradients.

    The dense layer has as many neurons as a token's experts together. The peer's layers have the
    same weights, and return the gradient of the input alone. float32, random weights and inputs.
    """
    width, m, top_k = shape["d_model"], shape["neurons"], shape["top_k"]
    both = (LayerConfig(top_k * m), LayerConfig(m, experts=shape["experts"], top_k=top_k))
    sizes = {"vocab_size": 8, "d_model": width, "n_heads": 1, "n_kv_heads": 1, "head_dim": 2}
    model = ModelConfig("llama", **sizes, layers=both)
    stack = init(model, jax.random.key(0))["stack"]
    trees = [jax.tree.map(lambda x: x[0], stack[f"segment_{i}"]["slot_0"]["ffn"]) for i in (0, 1)]
    x = jax.random.normal(jax.random.key(1), (batch, length, width))
    modules: dict[str, Any] = {"dense layer": FeedForward(model, both[0])}
    for dispatch in DISPATCHES:
        module = Experts(model, both[1], RunOptions(dispatch=dispatch))
        modules[f"experts, {dispatch}"] = module
    calls: dict[str, Callable[[], Any]] = {}
    for name, module in modules.items():

        def forward(tree: Any, x: jax.Array, module: Any = module) -> jax.Array:
            return module.apply({"params": tree}, x)[0]

        def loss(tree: Any, x: jax.Array, forward: Any = forward) -> jax.Array:
            return jnp.sum(jnp.square(forward(tree, x)))

        tree = trees[name != "dense layer"]
        calls[f"{name}, forward"] = functools.partial(jax.jit(forward), tree, x)
        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        calls[f"{name}, step"] = functools.partial(step, tree, x)
    return calls | (_theirs(trees, np.asarray(x), shape) if peer else {})


def _ratios(seconds: Mapping[str, np.ndarray]) -> dict[str, timing.Interval]:
    """Ratios of times by pass; of the peer's implementations the fastest."""
    ratios = {}
    for call in ("forward", "step"):
        ours, dense = seconds[f"experts, blocks, {call}"], seconds[f"dense layer, {call}"]
        pairs = {"blocks / dense layer": (ours, dense)}
        for other in ("dense", "ragged"):
            pairs[f"{other} / blocks"] = seconds[f"experts, {other}, {call}"], ours
        theirs = {name: seconds.get(f"torch: experts, {name}, {call}") for name in THEIRS}
        medians = {name: np.median(one) for name, one in theirs.items() if one is not None}
        if medians:
            fastest = min(medians, key=medians.__getitem__)
            pairs[f"torch's {fastest} / blocks"] = theirs[fastest], ours
            pairs["dense layer: torch's / ours"] = seconds[f"torch: dense layer, {call}"], dense
        for label, pair in pairs.items():
            ratios[f"{call}: {label}"] = timing.paired_interval(*pair)
    return ratios


def _theirs(
    trees: list[dict], x: np.ndarray, shape: Mapping[str, int]
) -> dict[str, Callable[[], Any]]:
    """Calls of transformers' dense and sparse layers with the same weights."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig, MixtralConfig
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    dense, sparse = (jax.tree.map(lambda a: torch.tensor(np.asarray(a)), tree) for tree in trees)
    width, neurons = shape["d_model"], shape["neurons"]
    one_head = {"hidden_size": width, "num_attention_heads": 1, "num_key_value_heads": 1}
    mlp = LlamaMLP(LlamaConfig(intermediate_size=shape["top_k"] * neurons, **one_head))
    for name in ("gate", "up", "down"):
        getattr(mlp, f"{name}_proj").weight.data = dense[name]["kernel"].T.contiguous()
    modules: dict[str, Any] = {"dense layer": mlp}
    turned = {name: sparse[name]["kernel"].transpose(1, 2) for name in ("gate", "up", "down")}
    for implementation in THEIRS:
        settings = MixtralConfig(intermediate_size=neurons, **one_head)
        settings.num_local_experts, settings.num_experts_per_tok = shape["experts"], shape["top_k"]
        settings._experts_implementation = implementation
        block = MixtralSparseMoeBlock(settings)
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
