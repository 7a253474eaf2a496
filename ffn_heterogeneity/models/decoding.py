"""Token by token: a cache of keys and values that rides in the carry of the layers' scans.

A batch of prompts of unequal length is padded on the left, so that every row writes the same column
and one update serves them all: row b holds its tokens in columns pads[b], pads[b] + 1, ..., and
its positions count from there. A layer's keys are `[B, K, H, S]` and its values `[B, K, S, H]`: the
two products of a token read them as they lie, where columns before heads would have a CPU turn the
whole cache round for every token. A slot of r > 1 repeats stacks theirs on a leading axis; a slot
of one has none, since XLA:CPU writes twice, and copies, what is reshaped once written. Layers
that see everything have a place for every column; layers with a window w keep the last w only:
column c lies at place c mod S.
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
from ffn_heterogeneity.models.rotary import rotary_tables
from ffn_heterogeneity.models.stack import check_stack, layer_leaves, run_stack


@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's place of keys and values, and of the new ones.

    Attributes:
      leaves: {"keys": [B, K, H, S], "values": [B, K, S, H]}, [r, ...] where the layer's slot has
        r > 1 repeats.
      repeat: which of them, a traced integer; ignored where there is one.
      column: of the first new token, a traced integer.
      fresh: nothing was written before: the new tokens see only each other.
    """

    leaves: dict[str, jax.Array]
    repeat: jax.Array
    column: jax.Array
    fresh: bool

    def extend(self, k_btkh: jax.Array, v_btkh: jax.Array) -> LayerCache:
        """The cache with the keys and values of new tokens."""
        keys = self._written("keys", k_btkh.transpose(0, 2, 3, 1), axis=3)
        values = self._written("values", v_btkh.transpose(0, 2, 1, 3), axis=2)
        return dataclasses.replace(self, leaves={"keys": keys, "values": values})

    def read(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """(keys [B, K, H, S], values [B, K, S, H]) of the layer.

        A slice of the carry: each token reads what it attends to and copies nothing else.
        """
        keys, values = self.leaves["keys"], self.leaves["values"]
        if keys.ndim > 4:
            keys, values = keys[self.repeat], values[self.repeat]
        return keys.astype(dtype), values.astype(dtype)

    def _written(self, name: str, new: jax.Array, axis: int) -> jax.Array:
        """The leaf with one layer's `new` in the places of its columns, on that layer's `axis`."""
        leaf = self.leaves[name]
        new = new.astype(leaf.dtype)
        places, count = leaf.shape[axis - 4], new.shape[axis]
        if count > places:
            # The last ones only; column c of `new` goes to place c mod S.
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
) -> dict:
    """An empty cache for `length` columns: {"segment_i": {"slot_j": {"keys", "values"}}}.

    Leaves as in `LayerCache`.

    Raises:
      ValueError: an encoder, or more columns than learned positions.
    """
    causal_lm.require_language_model(config, "generation")
    causal_lm.check_length(config, length)
    cache: dict = {}
    for i, segment in enumerate(check_stack(config, stack)):
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
            cache[f"segment_{i}"][f"slot_{slot}"] = {
                name: causal_lm.hold(jnp.zeros(shape, options.compute_dtype), sharding)
                for name, shape in shapes.items()
            }
    return cache


def _places(layer: LayerConfig, length: int) -> int:
    return length if layer.window is None else min(layer.window, length)


def cache_length(cache: dict) -> int:
    """Columns that the widest layer of the cache has places for."""
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
    """Runs new tokens on top of those in the cache.

    Args:
      tokens_bt: int32 [B, T]; they are columns column .. column + T - 1 of every row.
      pads_b: int32 [B]: how many columns at the left of each row are padding.
      cache: from `make_cache`, or from the call before; donate it.
      column: of the first new token.
      fresh: the cache is empty and column is 0: the prompt's fast path, by the kernel that training
        uses.

    Returns:
      (hidden states after the final norm [B, T, D], the cache).

    Raises:
      ValueError: an encoder; or several new tokens at once on top of a window that forgets (its
        oldest columns would be overwritten before the first of the new tokens has read them).
    """
    causal_lm.require_language_model(config, "generation")
    count, length = tokens_bt.shape[1], cache_length(cache)
    if not fresh and count > 1 and any(x.window and x.window <= length for x in config.layers):
        raise ValueError(f"{count} new tokens at once on top of a window's cache: give one by one")
    column = jnp.asarray(column, jnp.int32)
    columns_bt = column + jnp.arange(count, dtype=jnp.int32)[None]
    positions_bt = jnp.maximum(columns_bt - pads_b[:, None], 0)
    x = causal_lm.embed(config, params, tokens_bt, options, positions_bt)
    options = with_kernel(options, config, count, in_order=False)
    context = _contexts(config, columns_bt, positions_bt, pads_b, length, fresh)
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
        x, seen = block.apply({"params": layer_params}, x, rotary, mask, None, here)
        cache = {**cache, segment: {**cache[segment], slot: seen.cache.leaves}}
        return (causal_lm.hold(x, options.activations), cache), {}

    repeats = [
        repeat
        for segment in segments
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
    )
    return causal_lm.finish(config, params, x), cache


def layers_apart(params: dict) -> dict:
    """The same stacked tree with every layer in a segment of its own ([1, ...] leaves).

    For CPUs, where a scan copies each layer's slice of the weights before it is multiplied: at
    eight rows a token that is half of the time. The leaves are views, no weight is copied; what it
    costs is a program as long as the model has layers, so training does not do it.
    """
    # Through numpy: slicing a jax array would copy.
    whole = {**params, "stack": jax.tree.map(np.asarray, params["stack"])}
    stack = {
        f"segment_{layer}": {"slot_0": jax.tree.map(lambda leaf: leaf[None], tree)}
        for layer, tree in layer_leaves(whole)
    }
    return jax.device_put({**params, "stack": stack})


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
            # The column at each place: the newest of those that the place takes.
            held = last - (last - jnp.arange(places, dtype=jnp.int32)[None]) % places
            real_bs = ((held >= 0) & (held >= pads_b[:, None])).astype(jnp.int32)
            seen = attention_mask(columns_bt, held, layer.window, real_bt, real_bs).visible
            masks[kind] = Mask(seen)  # places are in no order
        result.append((rotary[layer.rope], masks[kind]))
    return result
