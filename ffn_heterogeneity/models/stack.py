"""Layers as a few scans: segments of repeated patterns, probes, rematerialization, restacking.

Consecutive layers are grouped into segments. A segment is a short pattern of layers (Gemma-2:
local, global) repeated r times; its parameters are stacked, each leaf `[r, ...]`, and one
`lax.scan` runs it. In a segment that starts at layer s with P slots, slot p of repeat j is layer
s + j * P + p.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.models.block_cosine import BLOCK_COSINE
from ffn_heterogeneity.models.blocked import ATTENTION_RESIDUALS
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.kept import BLOCK_INPUT
from ffn_heterogeneity.models.linear import WIDE_PRODUCT
from ffn_heterogeneity.tree import flatten, subtree
from ffn_heterogeneity.wording import check_choice

MAX_PATTERN = 8

REMAT_POLICIES: dict[str, Callable | None] = {
    # name -> policy of jax.checkpoint; "none" saves every intermediate, "full" only block inputs
    # (and three numbers per token, if a probe compares them with the outputs).
    "none": None,
    "full": jax.checkpoint_policies.save_only_these_names(BLOCK_INPUT, BLOCK_COSINE),
    # The products of the linear layers, and the residuals of attention.
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(
            ATTENTION_RESIDUALS, WIDE_PRODUCT, BLOCK_INPUT, BLOCK_COSINE
        ),
    ),
    "attention_output": jax.checkpoint_policies.save_only_these_names(
        "attention_output", BLOCK_INPUT, BLOCK_COSINE
    ),
}


@dataclasses.dataclass(frozen=True)
class Segment:
    """A pattern of `slots` layers, repeated `repeats` times, from layer `start` on."""

    start: int
    slots: int
    repeats: int

    def layer(self, slot: int, repeat: int = 0) -> int:
        """Index in the model of the layer at this slot and repeat."""
        return self.start + repeat * self.slots + slot


def segmentation(signatures: Sequence[Hashable]) -> tuple[Segment, ...]:
    """Group layers by repeated signature patterns: greedy, longest cover, then shortest pattern.

    Args:
      signatures: one per layer; equal ones may share a stacked leaf.
    """
    segments, start, total = [], 0, len(signatures)
    while start < total:
        best = (1, 1)
        for slots in range(1, min(MAX_PATTERN, total - start) + 1):
            repeats = 1
            pattern = signatures[start : start + slots]
            while signatures[start + repeats * slots : start + (repeats + 1) * slots] == pattern:
                repeats += 1
            # A pattern without repeats has no advantage over single layers.
            if repeats > 1 and slots * repeats > best[0] * best[1]:
                best = (slots, repeats)
        segments.append(Segment(start, *best))
        start += best[0] * best[1]
    return tuple(segments)


def tree_segments(stack: dict) -> tuple[Segment, ...]:
    """Return the segments of a stacked tree, from the tree itself.

    Raises:
      ValueError: a slot's leaves disagree on their leading axis.
    """
    segments, start = [], 0
    for i in range(len(stack)):
        tree = stack[f"segment_{i}"]
        repeats = {path: leaf.shape[0] for path, leaf in flatten(tree).items()}
        if len(set(repeats.values())) != 1:
            raise ValueError(f"segment_{i}: leaves differ in their leading axis: {repeats}")
        segment = Segment(start, len(tree), next(iter(repeats.values())))
        segments.append(segment)
        start += segment.slots * segment.repeats
    return tuple(segments)


class Slot(NamedTuple):
    """Layers that share leaves: those of one slot of a segment, or a single layer.

    Attributes:
      path: "stack/segment_0/slot_1", or "layers/3".
      layers: their indices; for stacked leaves in the order of the first axis.
    """

    path: str
    layers: tuple[int, ...]
    tree: dict
    stacked: bool


def slots(params: dict) -> list[Slot]:
    """Slots of all layers of a tree, stacked or not."""
    if "layers" in params:
        return [Slot(f"layers/{i}", (i,), tree, False) for i, tree in enumerate(params["layers"])]
    all_slots = []
    for i, segment in enumerate(tree_segments(params["stack"])):
        for slot in range(segment.slots):
            layers = tuple(segment.layer(slot, repeat) for repeat in range(segment.repeats))
            tree = params["stack"][f"segment_{i}"][f"slot_{slot}"]
            all_slots.append(Slot(f"stack/segment_{i}/slot_{slot}", layers, tree, True))
    return all_slots


def layer_names(params: dict) -> dict[str, tuple[str, ...]]:
    """Names of every leaf of a stacked tree: for a stacked leaf one per layer, "layers/3/ffn/...".

    So patterns can refer to layers, regardless of the stacking.
    """
    names = {path: (path,) for path in flatten(params)}
    for slot in slots(params):
        for path in flatten(slot.tree):
            per_layer = tuple(f"layers/{layer}/{path}" for layer in slot.layers)
            names[f"{slot.path}/{path}"] = per_layer
    return names


def layer_leaves(params: dict, name: str = "") -> Iterator[tuple[int, Any]]:
    """Iterate over (layer index, subtree at `name`, e.g. "ffn/down"; "" is all) of any tree.

    Only that subtree of a stacked tree is sliced.
    """
    places = {}
    for slot in slots(params):
        places |= {layer: (slot, repeat) for repeat, layer in enumerate(slot.layers)}
    for layer in sorted(places):
        slot, repeat = places[layer]
        tree = subtree(slot.tree, name)
        yield layer, jax.tree.map(lambda leaf, j=repeat: leaf[j], tree) if slot.stacked else tree


def unstack(params: dict) -> dict:
    """{"stack": ...} -> {"layers": [one tree per layer]}; exact inverse of `restack`."""
    if "layers" in params:
        return params
    rest = {name: tree for name, tree in params.items() if name != "stack"}
    return {**rest, "layers": [tree for _, tree in layer_leaves(params)]}


def restack(config: ModelConfig, params: dict) -> dict:
    """{"layers": [...]} -> {"stack": ...}: layers of equal config and shapes share leaves.

    Raises:
      ValueError: the number of layers is not the config's.
    """
    if "stack" in params:
        return params
    layers = params["layers"]
    if len(layers) != config.n_layers:
        raise ValueError(f"the tree holds {len(layers)} layers, the config {config.n_layers}")
    signatures = [
        (layer, tuple((path, leaf.shape, str(leaf.dtype)) for path, leaf in flatten(tree).items()))
        for layer, tree in zip(config.layers, layers, strict=True)
    ]
    stack = {}
    for i, segment in enumerate(segmentation(signatures)):
        stack[f"segment_{i}"] = {
            f"slot_{slot}": jax.tree.map(
                stack_leaves,
                *(layers[segment.layer(slot, repeat)] for repeat in range(segment.repeats)),
            )
            for slot in range(segment.slots)
        }
    rest = {name: tree for name, tree in params.items() if name != "layers"}
    return {**rest, "stack": stack}


def encoder_part(config: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """(config, stacked parameters) of an encoder-decoder's encoder as a separate model."""
    layers = unstack(params)["layers"][: config.n_encoder_layers]
    made = {"embed": params["embed"], "final_norm": params["encoder_norm"], "layers": layers}
    if "relative" in params:
        made["relative"] = {"encoder": params["relative"]["encoder"]}
    return config.encoder(), restack(config.encoder(), made)


def stack_leaves(*leaves):
    if not all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return jnp.stack(leaves)
    # Files store many kernels transposed: by default numpy keeps that order, and copies again
    # later.
    made = np.empty((len(leaves), *leaves[0].shape), leaves[0].dtype)
    return np.stack(leaves, out=made)


def check_stack(config: ModelConfig, stack: dict) -> tuple[Segment, ...]:
    """The tree's segments, after checking that each slot's layers share one `LayerConfig`.

    Raises:
      ValueError: the tree does not fit the config; the message names the layer.
    """
    segments = tree_segments(stack)
    total = sum(segment.slots * segment.repeats for segment in segments)
    if total != config.n_layers:
        raise ValueError(f"the tree holds {total} layers, the config {config.n_layers}")
    for segment in segments:
        for repeat in range(1, segment.repeats):
            for slot in range(segment.slots):
                index = segment.layer(slot, repeat)
                if config.layers[index] != config.layers[segment.layer(slot)]:
                    raise ValueError(
                        f"layer {index} is stacked with layer {segment.layer(slot)} but their "
                        "configs differ: restack the tree with this config"
                    )
    return segments


def per_layer_slices(tree: Any, segment: Segment, first: int = 0) -> Any:
    """Leaves of the layers from `first` on, [L, ...] -> this segment's [r, P, ...]."""

    def cut(leaf):
        start = segment.start - first
        rows = leaf[start : start + segment.repeats * segment.slots]
        return rows.reshape(segment.repeats, segment.slots, *leaf.shape[1:])

    return jax.tree.map(cut, tree)


def run_stack(
    config: ModelConfig,
    stack: dict,
    x: jax.Array,
    run_layer: Callable,
    *,
    per_layer: Any = None,
    remat: str = "none",
    unroll: int | bool = 1,
    span: tuple[int, int] | None = None,
) -> tuple[jax.Array, Any]:
    """Run every layer, or those of a span, with one scan per segment.

    Args:
      run_layer: (layer index for static facts, layer params, x, this layer's slice of `per_layer`)
        -> (x, small tree). The index is that of the pattern's first occurrence, which repeats
        share: values that differ between repeats must be in `per_layer`.
      per_layer: tree of [L, ...] leaves, of the layers that run, sliced into the scan.
      remat: a name of `REMAT_POLICIES`, applied to each layer.
      unroll: as in `lax.scan`; True unrolls each segment completely.
      span: (the first layer, the layer behind the last) of whole segments; None: all layers.

    Returns:
      (x, the layers' small trees stacked to [L, ...]; None if they are empty).
    """
    check_choice("remat", remat, REMAT_POLICIES)
    collected = []
    first, end = span or (0, config.n_layers)
    for i, segment in enumerate(check_stack(config, stack)):
        if not first <= segment.start < end:
            continue
        segment_params = stack[f"segment_{i}"]
        # A completely unrolled scan is not a loop.
        looped = unroll is not True and segment.repeats > max(int(unroll), 1)

        def body(x, scanned, segment=segment, looped=looped):
            params, sliced = scanned
            seen = []
            for slot in range(segment.slots):
                layer_slice = jax.tree.map(lambda leaf, p=slot: leaf[p], sliced)
                call = _with_remat(run_layer, segment.layer(slot), remat, looped)
                x, small = call(params[f"slot_{slot}"], x, layer_slice)
                seen.append(small)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen)

        slices = per_layer_slices(per_layer, segment, first)
        x, small = jax.lax.scan(body, x, (segment_params, slices), unroll=unroll)
        # [r, P, ...] -> [r * P, ...]: layer order.
        collected.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), small))
    return x, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *collected)


def _with_remat(run_layer: Callable, index: int, remat: str, looped: bool) -> Callable:
    def call(params, x, layer_slice):
        return run_layer(index, params, x, layer_slice)

    if remat == "none":
        return call
    # Inside a loop XLA cannot remove the recomputation (CSE); outside, this must be prevented.
    return jax.checkpoint(call, policy=REMAT_POLICIES[remat], prevent_cse=not looped)
