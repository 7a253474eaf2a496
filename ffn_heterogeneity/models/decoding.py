"""Decoding token by token with a cache of keys and values in the carry of the layers' scans.

A batch of prompts of unequal length is padded on the left, so that all rows write to the same
column with one update: row b has its tokens in columns pads[b], pads[b] + 1, ..., and its positions
count from there. A layer's keys are `[B, K, H, S]` and its values `[B, K, S, H]`, the layout that a
token's two products read. (With columns before heads, a CPU would transpose the whole cache for
every token.) A slot of r > 1 repeats stacks its caches on a leading axis. A slot of one repeat has
no such axis, because XLA:CPU writes twice, and copies, an array that is reshaped after writing.
Layers without a window store every column; layers with a window w store only the last w: column c
is at index c mod S.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.attention import Mask, attention_mask, with_kernel
from ffn_heterogeneity.models.block import Block
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.linear import Linear
from ffn_heterogeneity.models.relative import bias_line, relative_bias
from ffn_heterogeneity.models.rotary import rotary_tables
from ffn_heterogeneity.models.stack import check_stack, layer_leaves, run_stack


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Cache of one layer's keys and values, with the position of the new ones.

    Attributes:
      leaves: {"keys": [B, K, H, S], "values": [B, K, S, H]}, with a leading axis [r, ...] if the
        layer's slot has r > 1 repeats. With cross-attention also "cross_keys" and "cross_values",
        of the encoder's states, and "cross_real" bool [B, S], False at padding.
      repeat: index on that axis, a traced integer; ignored for one repeat.
      column: column of the first new token, a traced integer.
      fresh: the cache is empty, so the new tokens see only each other.
    """

    leaves: dict[str, jax.Array]
    repeat: jax.Array
    column: jax.Array
    fresh: bool

    def extend(self, k_btkh: jax.Array, v_btkh: jax.Array) -> LayerCache:
        """Return the cache with the keys and values of new tokens added."""
        keys = self._written("keys", k_btkh.transpose(0, 2, 3, 1), axis=3)
        values = self._written("values", v_btkh.transpose(0, 2, 1, 3), axis=2)
        return dataclasses.replace(self, leaves=self.leaves | {"keys": keys, "values": values})

    def cross(self, dtype: jnp.dtype) -> tuple[tuple[jax.Array, jax.Array], Mask] | None:
        """((keys, values), mask) of the encoder's states, or None without cross-attention."""
        if "cross_keys" not in self.leaves:
            return None
        each = [self.leaves[f"cross_{name}"] for name in ("keys", "values", "real")]
        if each[0].ndim > 4:
            each = [leaf[self.repeat] for leaf in each]
        keys, values, real = each
        return (keys.astype(dtype), values.astype(dtype)), Mask(real[:, None])

    def read(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """Return (keys [B, K, H, S], values [B, K, S, H]) of the layer, a slice of the carry.

        So each token reads the keys and values that it attends to, and copies nothing else.
        """
        keys, values = self.leaves["keys"], self.leaves["values"]
        if keys.ndim > 4:
            keys, values = keys[self.repeat], values[self.repeat]
        return keys.astype(dtype), values.astype(dtype)

    def _written(self, name: str, new: jax.Array, axis: int) -> jax.Array:
        """Return the leaf with one layer's `new` written at its columns along `axis`."""
        leaf = self.leaves[name]
        new = new.astype(leaf.dtype)
        places, count = leaf.shape[axis - 4], new.shape[axis]
        if count > places:
            # Only the last columns; column c of `new` is written at index c mod S.
            last = jax.lax.slice_in_dim(new, count - places, count, axis=axis)
            new = jnp.roll(last, count % places, axis=axis)
        start: list[Any] = [0, 0, 0, 0]
        start[axis] = self.column % places
        if leaf.ndim == 5:
            new, start = new[None], [self.repeat, *start]
        return jax.lax.dynamic_update_slice(leaf, new, start)


def make_cache(
    config: ModelConfig,
    stack: dict,
    rows: int,
    length: int,
    options: causal_lm.RunOptions = causal_lm.RunOptions(),
    memory: tuple[jax.Array, jax.Array] | None = None,
) -> dict:
    """Create an empty cache for `length` columns: {"segment_i": {"slot_j": {"keys", "values"}}}.

    Leaves as in `LayerCache`; of an encoder-decoder, the decoder's.

    Args:
      memory: of an encoder-decoder, the encoder's states [B, S, D], and bool [B, S], False at
        padding. Their keys and values are computed here, once.

    Raises:
      ValueError: an encoder, or more columns than learned positions.
    """
    require_predictions(config)
    causal_lm.check_length(config, length)
    cache: dict = {}
    for i, segment in enumerate(check_stack(config, stack)):
        if segment.start < config.n_encoder_layers:
            continue
        heads, sharding = (rows, config.n_kv_heads), options.cache
        if segment.repeats > 1:
            heads = (segment.repeats, *heads)
            if sharding is not None:
                sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        cache[f"segment_{i}"] = {}
        for slot in range(segment.slots):
            places = _places(config.layers[segment.layer(slot)], length)
            shapes = {
                "keys": (*heads, config.head_dim, places),
                "values": (*heads, places, config.head_dim),
            }
            leaves = {
                name: causal_lm.hold(jnp.zeros(shape, options.compute_dtype), sharding)
                for name, shape in shapes.items()
            }
            if memory is not None:
                tree = stack[f"segment_{i}"][f"slot_{slot}"]["cross_attention"]
                made = _cross_leaves(config, options, tree, *memory, segment.repeats)
                real = made.pop("cross_real")
                leaves |= {name: causal_lm.hold(leaf, sharding) for name, leaf in made.items()}
                leaves["cross_real"] = real
            cache[f"segment_{i}"][f"slot_{slot}"] = leaves
    return cache


def require_predictions(config: ModelConfig) -> None:
    """Raise ValueError for an encoder, which predicts no tokens."""
    if not config.lm_head:
        causal_lm.require_decoder(config, "generation")


def _cross_leaves(config, options, tree, states_bsd, real_bs, repeats) -> dict[str, jax.Array]:
    """Keys and values of the encoder's states for the layers of one slot."""
    linear = Linear(config.n_kv_heads * config.head_dim, config.attention_bias, options=options)

    def project(leaves: dict) -> jax.Array:
        y = linear.apply({"params": leaves}, states_bsd)
        return y.reshape(*real_bs.shape, config.n_kv_heads, config.head_dim)

    keys, values = (jax.vmap(project)(tree[name]) for name in ("k", "v"))
    real = jnp.broadcast_to(real_bs, (repeats, *real_bs.shape))
    leaves = {"keys": keys.transpose(0, 1, 3, 4, 2), "values": values.swapaxes(2, 3), "real": real}
    return {f"cross_{name}": x if repeats > 1 else x[0] for name, x in leaves.items()}


def _places(layer: LayerConfig, length: int) -> int:
    return length if layer.window is None else min(layer.window, length)


def cache_length(cache: dict) -> int:
    """Number of columns of the largest layer of the cache."""
    slots = [slot for segment in cache.values() for slot in segment.values()]
    return max(slot["values"].shape[-2] for slot in slots)


def forward_cached(
    config: ModelConfig,
    params: dict,
    tokens_bt: jax.Array,
    pads_b: jax.Array,
    cache: dict,
    column: jax.Array | int = 0,
    *,
    fresh: bool = False,
    options: causal_lm.RunOptions = causal_lm.RunOptions(),
) -> tuple[jax.Array, dict]:
    """Run the model, or an encoder-decoder's decoder, on new tokens after those in the cache.

    Args:
      tokens_bt: int32 [B, T]; columns column .. column + T - 1 of every row.
      pads_b: int32 [B]: number of padding columns at the left of each row.
      cache: from `make_cache` or the previous call; donate it.
      column: column of the first new token.
      fresh: the cache is empty and column is 0: a fast path for the prompt, with the kernel that
        training uses.

    Returns:
      (hidden states after the final norm [B, T, D], the cache).

    Raises:
      ValueError: an encoder; or several new tokens at once after a full window (they would
        overwrite the oldest columns before the first of the new tokens has read them).
    """
    require_predictions(config)
    count, length = tokens_bt.shape[1], cache_length(cache)
    if not fresh and count > 1 and any(x.window and x.window <= length for x in config.layers):
        raise ValueError(f"{count} new tokens at once on top of a window's cache: give one by one")
    column = jnp.asarray(column, jnp.int32)
    columns_bt = column + jnp.arange(count, dtype=jnp.int32)[None]
    positions_bt = jnp.maximum(columns_bt - pads_b[:, None], 0)
    x = causal_lm.embed(config, params, tokens_bt, options, positions_bt)
    options = with_kernel(options, config, count, in_order=False)
    context = _contexts(config, columns_bt, positions_bt, pads_b, length, fresh)
    bias = _bias(config, params, columns_bt, length, fresh)
    segments = check_stack(config, params["stack"])
    place_of = {
        segment.layer(slot): (f"segment_{i}", f"slot_{slot}")
        for i, segment in enumerate(segments)
        for slot in range(segment.slots)
    }

    def run_layer(index, layer_params, carried, repeat):
        x, cache = carried
        segment, slot = place_of[index]
        here = LayerCache(cache[segment][slot], repeat, column, fresh)
        rotary, mask = context[index]
        block = Block(config, config.layers[index], options)
        given = (rotary, mask, None, here, bias, here.cross(x.dtype))
        x, seen = block.apply({"params": layer_params}, x, *given)
        cache = {**cache, segment: {**cache[segment], slot: seen.cache.leaves}}
        return (causal_lm.hold(x, options.activations), cache), {}

    first = config.stacks["decoder"][0]
    repeats = [
        repeat
        for segment in segments
        if segment.start >= first
        for repeat in range(segment.repeats)
        for _ in range(segment.slots)
    ]
    (x, cache), _ = run_stack(
        config,
        params["stack"],
        (x, cache),
        run_layer,
        per_layer=jnp.asarray(repeats, jnp.int32),
        unroll=options.unroll,
        span=config.stacks["decoder"],
    )
    return causal_lm.finish(config, params, x), cache


def layers_apart(params: dict) -> dict:
    """Return the stacked tree with every layer in a separate segment ([1, ...] leaves).

    This is for CPUs, where a scan copies each layer's slice of the weights before the product: half
    of the time per token with eight rows. The leaves are views, without copies of weights. The
    program becomes as long as the model is deep, so training does not use it.
    """
    # Through numpy: slicing a jax array would copy.
    on_host = {**params, "stack": jax.tree.map(np.asarray, params["stack"])}
    stack = {
        f"segment_{layer}": {"slot_0": jax.tree.map(lambda leaf: leaf[None], tree)}
        for layer, tree in layer_leaves(on_host)
    }
    return jax.device_put({**params, "stack": stack})


def _bias(config, params, columns_bt, length, fresh) -> jax.Array | None:
    """Bias by distance of the new columns' logits, or None; such models have no window."""
    if config.positions != "relative":
        return None
    table, far = params["relative"]["decoder"], config.relative_distance
    if fresh:
        return bias_line(table, columns_bt.shape[1], True, far)
    held = jnp.arange(length, dtype=jnp.int32)[None]
    return relative_bias(table, columns_bt, held, True, far)


def _contexts(config, columns_bt, positions_bt, pads_b, length, fresh) -> list[tuple]:
    """(rotary tables, mask [B, T, S]) of each layer; layers of one kind share theirs."""
    real_bt = (columns_bt >= pads_b[:, None]).astype(jnp.int32)
    last = columns_bt[:, -1:]
    rotary, masks, result = {}, {}, []
    for layer in config.layers:
        if layer.rope not in rotary:
            rotary[layer.rope] = rotary_tables(layer.rope, config.head_dim, positions_bt)
        places = _places(layer, length)
        kind = (layer.window, places)
        if kind not in masks and fresh:
            masks[kind] = attention_mask(columns_bt, columns_bt, layer.window, real_bt, real_bt)
        elif kind not in masks:
            # The column stored at each index: the newest of those with the same c mod S.
            held = last - (last - jnp.arange(places, dtype=jnp.int32)[None]) % places
            real_bs = ((held >= 0) & (held >= pads_b[:, None])).astype(jnp.int32)
            seen = attention_mask(columns_bt, held, layer.window, real_bt, real_bs).visible
            masks[kind] = Mask(seen)  # the columns are not in order
        result.append((rotary[layer.rope], masks[kind]))
    return result
