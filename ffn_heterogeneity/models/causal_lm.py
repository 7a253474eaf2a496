"""Decoder-only language models: init, forward, logits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ffn_heterogeneity.models.attention import Mask, attention_mask, tree_mask, with_kernel
from ffn_heterogeneity.models.block import Block
from ffn_heterogeneity.models.block_cosine import end_link, lend, linked_cosine
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.linear import DROP, normal_init
from ffn_heterogeneity.models.norms import Norm
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.rotary import rotary_tables
from ffn_heterogeneity.models.stack import run_stack, segmentation
from ffn_heterogeneity.paths import flatten


# Compiled whole: operation by operation it takes ten times as long.
@functools.partial(jax.jit, static_argnums=(0, 2))
def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict:
    """Random parameters, stacked: kernels and embeddings N(0, 0.02^2), norms 1, biases 0."""
    embed_key, head_key, layers_key = jax.random.split(key, 3)
    x = jnp.zeros((1, 2, config.d_model), jnp.float32)
    positions = jnp.zeros((1, 2), jnp.int32)
    layer_keys = jax.random.split(layers_key, config.n_layers)
    stack = {}
    for i, segment in enumerate(segmentation(config.layers)):
        stack[f"segment_{i}"] = {}
        for slot in range(segment.slots):
            layer = config.layers[segment.layer(slot)]
            rotary = rotary_tables(layer.rope, config.head_dim, positions)
            mask = attention_mask(positions, positions, None)
            block = Block(config, layer)
            indices = [segment.layer(slot, repeat) for repeat in range(segment.repeats)]

            def init_one(k, block=block, rotary=rotary, mask=mask):
                return block.init(k, x, rotary, mask)["params"]

            stack[f"segment_{i}"][f"slot_{slot}"] = jax.vmap(init_one)(
                layer_keys[jnp.asarray(indices)]
            )
    table = (config.vocab_size, config.d_model)
    params = {
        "embed": {"embedding": normal_init(embed_key, table, jnp.float32)},
        "stack": stack,
    }
    final_norm = Norm(config).init(layers_key, x).get("params")
    if final_norm:  # a norm without parameters has no place in the tree
        params["final_norm"] = final_norm
    if not config.tied:
        params["head"] = {"kernel": normal_init(head_key, table[::-1], jnp.float32)}
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> dict:
    """Shapes and dtypes of `init` without computing anything (27B parameters in a second)."""
    return jax.eval_shape(lambda key: init(config, key, dtype), jax.random.key(0))


def forward(
    config: ModelConfig,
    params: dict,
    batch: dict,
    *,
    options: RunOptions = RunOptions(),
    probes: tuple = (),
    per_layer: dict | None = None,
    dropout: tuple[jax.Array, jax.Array | None] | None = None,
) -> dict:
    """Hidden states after the final norm, and what the probes saw.

    Args:
      params: stacked tree.
      batch: "tokens" int32 [B, T]; optional "segment_ids" [B, T] (tokens see their own segment
        only) and "positions" [B, T] (default 0..T-1). Within a segment positions must increase.
        Or "subtree_ends" [B, T] with "positions": the rows are trees of tokens in depth-first
        order, and place t sees place s iff s <= t < subtree_ends[s] (evaluate/scoring.py).
      probes: `probes.base.Probe` instances with distinct names.
      per_layer: {probe name: tree of [L, ...] leaves} handed to the probes layer by layer.
      dropout: (key, rate), where a rate None drops in adapters alone; or None for none.

    Returns:
      {"hidden": [B, T, D] in the compute dtype, "probes": {name: tree of [L, ...]}}.
    """
    tokens = batch["tokens"]
    x = embed(config, params, tokens, options)
    options = with_kernel(options, config, tokens.shape[1], is_in_order(batch))
    needs = frozenset().union(*(probe.needs for probe in probes))
    with_cosine = "block_cosine" in needs
    context = _context(config, batch, tokens.shape, options.packed)

    def run_layer(index, layer_params, carried, extra):
        x, link = carried
        whole, sinks = ("attention_weights" in needs, "sink_weights" in needs)
        block = Block(config, config.layers[index], options, whole, sinks and not whole)
        if with_cosine:
            x, link = lend(x, link)
        drop, rngs = None, {}
        if dropout is not None:
            rngs = {DROP: jax.random.fold_in(extra["dropout_key"], 2)}
            drop = None if dropout[1] is None else (extra["dropout_key"], dropout[1])
        rotary, mask = context[index]
        x, seen = block.apply({"params": layer_params}, x, rotary, mask, drop, rngs=rngs)
        if with_cosine:
            value, link = linked_cosine(seen.block_input, seen.block_output, link)
            seen = dataclasses.replace(seen, block_cosine=value)
        if probes:
            seen = dataclasses.replace(
                seen, is_last=extra["is_last"], final_norm=functools.partial(finish, config, params)
            )
        results = {
            probe.name: probe.function(seen, batch, extra["probes"].get(probe.name))
            for probe in probes
        }
        return (hold(x, options.activations), link), results

    extra: dict = {"probes": per_layer or {}}
    if probes:
        extra["is_last"] = jnp.arange(config.n_layers) == config.n_layers - 1
    if dropout is not None:
        extra["dropout_key"] = jax.random.split(dropout[0], config.n_layers)
    # Laid out, and under vmap batched, as x is; what it holds means nothing on the way forward.
    link = jax.lax.stop_gradient(x) if with_cosine else None
    (x, link), seen = run_stack(
        config,
        params["stack"],
        (x, link),
        run_layer,
        per_layer=extra,
        remat=options.remat,
        unroll=options.unroll,
    )
    if with_cosine:
        x, seen = end_link(x, link, seen)
    return {"hidden": finish(config, params, x), "probes": seen}


def embed(config: ModelConfig, params: dict, tokens_bt: jax.Array, options: RunOptions):
    """The residual stream before the first layer, [B, T, D] in the compute dtype."""
    table = hold(params["embed"]["embedding"], options.table)
    x = table[tokens_bt].astype(options.compute_dtype)
    return hold(x * jnp.asarray(config.embedding_multiplier, x.dtype), options.activations)


def finish(config: ModelConfig, params: dict, x_btd: jax.Array) -> Any:
    """What the head sees: the residual stream after the last layer and the final norm."""
    return Norm(config).apply({"params": params.get("final_norm", {})}, x_btd)


def hold(x: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """`x`, laid out as `sharding` says; None leaves it to XLA."""
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def is_in_order(batch: dict) -> bool:
    """Whether places of a row, its documents and a window say which keys a query sees."""
    return "subtree_ends" not in batch and ("positions" not in batch or "segment_ids" in batch)


def _context(config: ModelConfig, batch: dict, shape: tuple[int, int], packed: bool) -> list[tuple]:
    """(rotary tables, mask) of each layer; layers of one kind share theirs."""
    positions = batch.get("positions")
    segments = batch.get("segment_ids")
    if positions is None:
        positions = jnp.arange(shape[1], dtype=jnp.int32)[None]
    rotary, masks = {}, {}
    for layer in config.layers:
        if layer.rope not in rotary:
            rotary[layer.rope] = rotary_tables(layer.rope, config.head_dim, positions)
        # A window no shorter than the row hides nothing.
        window = None if layer.window is None or layer.window >= shape[1] else layer.window
        if window not in masks:
            mask = attention_mask(positions, positions, window, segments, segments)
            if is_in_order(batch):
                several = segments if packed else None
                mask = dataclasses.replace(mask, in_order=True, segments=several)
            masks[window] = mask
            if "subtree_ends" in batch:
                # What a window shows is not a stretch of the row there: `visible` alone says it.
                visible = masks[window].visible & tree_mask(batch["subtree_ends"])
                masks[window] = Mask(visible, causal=True)
    result = []
    for layer in config.layers:
        window = layer.window if layer.window in masks else None
        result.append((rotary[layer.rope], masks[window]))
    return result


def platform_of(mesh: Mesh | AbstractMesh | None) -> str:
    """Of the mesh's devices ("cpu", "gpu", "tpu"); where it has none, the default backend."""
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()


def head_kernel(config: ModelConfig, params: dict) -> tuple[jax.Array, str]:
    """The output matrix and its layout: the tied embedding "vd" [V, D], or a head "dv" [D, V]."""
    if config.tied:
        return params["embed"]["embedding"], "vd"
    return params["head"]["kernel"], "dv"


def logits(config: ModelConfig, params: dict, hidden: jax.Array) -> jax.Array:
    """Soft-capped logits [..., V], float32, of hidden states [..., D].

    For evaluation: training uses losses/cross_entropy.py.
    """
    kernel, layout = head_kernel(config, params)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    equation = f"...d,{layout}->...v"
    values = jnp.einsum(equation, hidden, kernel.astype(hidden.dtype), preferred_element_type=wide)
    if config.final_softcap is not None:
        values = config.final_softcap * jnp.tanh(values / config.final_softcap)
    return values


def unused_leaves(
    config: ModelConfig,
    params: dict,
    run: Callable[[dict, Any], Any] | None = None,
    batch: Any = None,
) -> tuple[str, ...]:
    """Paths of leaves that nothing depends on (0.02 s; sees through scan and remat).

    Args:
      run: (params, batch) -> a tree of all that counts; None: the model's own logits.
      batch: shapes for `run`.
    """
    from jax.interpreters import partial_eval

    def own(params: dict, batch: Any) -> jax.Array:
        return logits(config, params, forward(config, params, batch)["hidden"])

    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    batch = {"tokens": jax.ShapeDtypeStruct((1, 2), jnp.int32)} if batch is None else batch
    jaxpr = jax.make_jaxpr(run or own)(abstract, batch).jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    paths = flatten(abstract)
    return tuple(path for path, is_used in zip(paths, used, strict=False) if not is_used)


def check_leaves(config: ModelConfig, params: dict, beside: str = "") -> None:
    """Refuses a tree that holds leaves nobody reads (Flax is silent about them).

    Args:
      beside: a root that others read ("task_head").

    Raises:
      ValueError: names the leaves.
    """
    unused = unused_leaves(config, params)
    refuse_unused(config, [path for path in unused if path.split("/")[0] != beside])


def refuse_unused(config: ModelConfig, unused: Sequence[str]) -> None:
    """Raises ValueError, which names the leaves, where there are any."""
    if unused:
        more = " ..." if len(unused) > 8 else ""
        raise ValueError(
            f"{len(unused)} leaves are never used by the {config.family} model: "
            f"{', '.join(unused[:8])}{more}"
        )
