"""Positions, rotary tables, masks and biases by distance, which the layers of a batch share."""

import dataclasses

import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.attention import Mask, attention_mask, tree_mask
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.relative import bias_line, relative_bias
from ffn_heterogeneity.models.rotary import rotary_tables


def row_positions(batch: dict) -> jax.Array:
    """Return the batch's positions, by default each token's index in its segment, [B or 1, T].

    So a document's positions do not depend on where in the row it begins.
    """
    if "positions" in batch:
        return batch["positions"]
    length, segments = batch["tokens"].shape[1], batch.get("segment_ids")
    if segments is None:
        return jnp.arange(length, dtype=jnp.int32)[None]
    same_bts = segments[:, :, None] == segments[:, None, :]
    return jnp.sum(jnp.tril(same_bts, -1), axis=-1, dtype=jnp.int32)


def is_in_order(batch: dict) -> bool:
    """True if row positions, documents and a window determine which keys a query sees."""
    return "subtree_ends" not in batch and ("positions" not in batch or "segment_ids" in batch)


def layer_contexts(
    config: ModelConfig, batch: dict, shape: tuple[int, int], packed: bool
) -> list[tuple]:
    """(rotary tables, mask) of each layer; layers of one kind share theirs."""
    positions = batch.get("positions")
    segments = batch.get("segment_ids")
    if positions is None:
        positions = jnp.arange(shape[1], dtype=jnp.int32)[None]
    rotary, masks, result = {}, {}, []
    for layer in config.layers:
        if layer.rope not in rotary:
            rotary[layer.rope] = rotary_tables(layer.rope, config.head_dim, positions)
        # A window at least as long as the row hides nothing.
        window = None if layer.window is None or layer.window >= shape[1] else layer.window
        kind = (window, layer.causal)
        if kind not in masks:
            mask = attention_mask(positions, positions, window, segments, segments, layer.causal)
            # Fused kernels use the order of positions. It hides padding only in causal layers.
            if is_in_order(batch) and layer.causal:
                several = segments if packed else None
                mask = dataclasses.replace(mask, in_order=True, segments=several)
            if "subtree_ends" in batch:
                # A window's keys are not contiguous in such a row: only `visible` describes them.
                mask = Mask(mask.visible & tree_mask(batch["subtree_ends"]), causal=True)
            masks[kind] = mask
        result.append((rotary[layer.rope], masks[kind]))
    return result


def stack_bias(
    config: ModelConfig, params: dict, stack: str, batch: dict, length: int
) -> jax.Array | None:
    """The bias of a stack's attention logits by distance, or None (`Attention`)."""
    if config.positions != "relative":
        return None
    table, known = params["relative"][stack], (stack == "decoder", config.relative_distance)
    if "positions" not in batch:
        return bias_line(table, length, *known)
    return relative_bias(table, batch["positions"], batch["positions"], *known)


def with_both_sides(config: ModelConfig, batch: dict) -> dict:
    """The batch of an encoder-decoder whose two stacks read one text, `tokens` (BART's way).

    The decoder's tokens are the encoder's, shifted right after `bos_id`: at the text's last token,
    its eos, the decoder has seen all the others.
    """
    tokens = jnp.asarray(batch["tokens"])
    segments = batch.get("segment_ids", jnp.ones_like(tokens))
    before, its_segment = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (tokens, segments))
    made = {"encoder_tokens": tokens, "encoder_segment_ids": segments}
    made["tokens"] = jnp.where(its_segment == segments, before, config.bos_id)
    return batch | made


def encoder_batch(config: ModelConfig, batch: dict) -> dict:
    """The part of an encoder-decoder's batch that its encoder reads, under a single stack's names.

    Raises:
      ValueError: the batch has no row for the encoder.
    """
    if "encoder_tokens" not in batch:
        raise ValueError(
            f"a {config.family} model is an encoder-decoder: it needs encoder_tokens, and got only "
            f"{', '.join(batch)}; methods that read one text support encoders and decoders"
        )
    names = {name: f"encoder_{name}" for name in ("tokens", "segment_ids")}
    return {name: batch[other] for name, other in names.items() if other in batch}


def memory_mask(batch: dict) -> Mask:
    """The encoder's positions that the decoder sees: all but padding, [B or 1, 1, S]."""
    segments = batch.get("segment_ids")
    if segments is None:
        return Mask(jnp.ones((1, 1, batch["tokens"].shape[1]), bool), both_ways=True)
    return Mask(segments[:, None] > 0, both_ways=True)
