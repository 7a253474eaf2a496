"""Language models, encoders and encoder-decoders: forward, logits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ffn_heterogeneity.models.attention import with_kernel
from ffn_heterogeneity.models.block import Block
from ffn_heterogeneity.models.block_cosine import end_link, lend, linked_cosine
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.context import (
    encoder_batch,
    is_in_order,
    layer_contexts,
    memory_mask,
    row_positions,
    stack_bias,
    with_both_sides,
)
from ffn_heterogeneity.models.experts import JITTER
from ffn_heterogeneity.models.kept import BLOCK_INPUT, keep
from ffn_heterogeneity.models.leaves import abstract_params as abstract_params
from ffn_heterogeneity.models.leaves import init as init
from ffn_heterogeneity.models.linear import DROP, Linear, scaled
from ffn_heterogeneity.models.linear import dropout as drop_out
from ffn_heterogeneity.models.norms import Norm
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import run_stack

# The embeddings' part of a step's dropout key; the layers split the key itself.
_EMBEDDING_KEY = 0xE3BED


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
    """Compute the hidden states after the final norm, and the probes' values.

    Args:
      params: stacked tree.
      batch: "tokens" int32 [B, T]; optional "segment_ids" [B, T] (tokens see only their segment)
        and "positions" [B, T] (default 0..T-1; for learned positions, the index within the
        segment). Within a segment positions must increase. For a model with token types,
        "token_types" [B, T] (default 0).
        For an encoder-decoder, "tokens" are the decoder's, and "encoder_tokens" [B, S] and
        "encoder_segment_ids" the encoder's; the decoder sees all of them but padding (id 0). With
        a head, and without "encoder_tokens", both read "tokens" (`context.with_both_sides`).
        Or "subtree_ends" [B, T] with "positions": the rows are trees of tokens in depth-first
        order, and position t sees position s iff s <= t < subtree_ends[s] (evaluate/scoring.py).
      probes: `probes.base.Probe` instances with distinct names.
      per_layer: {probe name: tree of [L, ...] leaves} passed to the probes layer by layer; of an
        encoder-decoder also {"encoder": tree of [L_e, ...], "decoder": tree of [L_d, ...]}.
      dropout: (key, rate), or None. Rate None: dropout only in adapters; routers' noise as well.

    Returns:
      {"hidden": [B, T, D] in the compute dtype, "probes": {name: tree of [L, ...]}}; for a model
      with a pooler also "pooled" [B, D]. Of an encoder-decoder, the decoder's, also
      "encoder_hidden" [B, S, D] after the encoder's norm; sums of probes are of all layers, the
      encoder's first, and rows of examples {"encoder": [L_e, ...], "decoder": [L_d, ...]}.

    Raises:
      ValueError: rows longer than the table of learned positions.
    """
    return _run(config, params, batch, options, probes, per_layer=per_layer, dropout=dropout)


def nudged(
    config: ModelConfig, params: dict, batch: dict, nudges_lbtd: jax.Array, **given: Any
) -> dict:
    """Run `forward`, given `options` and `probes`, with `nudges` added to the FFNs' outputs.

    The gradient with respect to a zero nudge is the gradient of the FFN's output, token by token.
    An encoder-decoder needs a head, for which both stacks read the same rows.
    """
    if config.head is None:
        require_one_stack(config, "the gradient of each token's FFN output without a head")
    return _run(config, params, batch, nudges=nudges_lbtd, **given)


def _run(config, params, batch, options, probes=(), per_layer=None, dropout=None, nudges=None):
    extra = _of_layers(config, probes, per_layer, dropout, nudges)
    seen, memory, given = {}, None, {"probes": probes, "extra": extra, "dropout": dropout}
    if config.kind == "encoder_decoder":
        if config.head is not None and "encoder_tokens" not in batch:
            batch = with_both_sides(config, batch)
        before = encoder_batch(config, batch)
        # One lookup: the gradient of each is as large as the table.
        both = jnp.concatenate([before["tokens"], batch["tokens"]], axis=1)
        x = _begin(config, params, {"tokens": both}, options, dropout)
        x, x_decoder = jnp.split(x, [before["tokens"].shape[1]], axis=1)
        x, seen = _run_span(config, params, x, before, options, "encoder", **given)
        memory = _stack_norm(config, params, "encoder", x)
        given["memory"], x = (memory, memory_mask(before)), x_decoder
    else:
        x = _begin(config, params, batch, options, dropout)
    last = next(reversed(config.stacks))
    x, after = _run_span(config, params, x, batch, options, last, **given)
    hidden = finish(config, params, x)
    more = {} if memory is None else {"encoder_hidden": memory}
    if config.pooler:
        more["pooled"] = pool(config, params, hidden, batch.get("segment_ids"), options)
    return {"hidden": hidden, "probes": _joined(probes, seen, after), **more}


def encode(config: ModelConfig, params: dict, batch: dict, options: RunOptions) -> Any:
    """The states of an encoder-decoder's encoder after its norm, [B, S, D].

    Args:
      batch: the encoder's: "tokens" [B, S], and "segment_ids" (0: padding).
    """
    given = {"probes": (), "extra": _of_layers(config, (), None, None, None), "dropout": None}
    x = _begin(config, params, batch, options, None)
    x, _ = _run_span(config, params, x, batch, options, "encoder", **given)
    return _stack_norm(config, params, "encoder", x)


def _joined(probes: tuple, encoder: dict, decoder: dict) -> dict:
    """Results of both stacks: sums of all layers together, rows of examples by stack."""
    if not encoder:
        return decoder

    def both(probe: Any) -> Any:
        mine, other = encoder[probe.name], decoder[probe.name]
        if probe.kind == "example":
            return {"encoder": mine, "decoder": other}
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), mine, other)

    return {probe.name: both(probe) for probe in probes}


def _begin(config, params, batch, options, dropout):
    """The residual stream before the first layer, with dropout, [B, T, D]."""
    positions = row_positions(batch) if config.position_rows else None
    x = embed(config, params, batch["tokens"], options, positions, batch.get("token_types"))
    if config.position_rows and dropout is not None and dropout[1] is not None:
        x = drop_out(x, jax.random.fold_in(dropout[0], _EMBEDDING_KEY), dropout[1])
    return x


def _run_span(config, params, x, batch, options, stack, *, probes, extra, dropout, memory=None):
    """(residual stream after the layers of one stack, results of the probes)."""
    tokens, span = batch["tokens"], config.stacks[stack]
    extra = _of_stack(extra, stack, span) if len(config.stacks) > 1 else extra
    if "subtree_ends" in batch:
        require_decoder(config, "a tree of tokens")
    options = with_kernel(options, config, tokens.shape[1], is_in_order(batch))
    needs = frozenset().union(*(probe.needs for probe in probes))
    with_cosine = "block_cosine" in needs
    context = layer_contexts(config, batch, tokens.shape, options.packed)
    bias = stack_bias(config, params, stack, batch, tokens.shape[1])

    def run_layer(index, layer_params, carried, extra):
        x, link = carried
        if options.wide_products:
            x = keep(x, BLOCK_INPUT)
        weights, sinks = ("attention_weights" in needs, "sink_weights" in needs)
        block = Block(config, config.layers[index], options, weights, sinks and not weights)
        if with_cosine:
            x, link = lend(x, link)
        drop, rngs = None, {}
        if dropout is not None:
            key = extra["dropout_key"]
            rngs = {DROP: jax.random.fold_in(key, 2), JITTER: jax.random.fold_in(key, 5)}
            drop = None if dropout[1] is None else (extra["dropout_key"], dropout[1])
        rotary, mask = context[index]
        leaves = {"params": layer_params} | extra["beside"]
        x, seen = block.apply(leaves, x, rotary, mask, drop, None, bias, memory, rngs=rngs)
        if with_cosine:
            value, link = linked_cosine(seen.block_input, seen.block_output, link)
            seen = dataclasses.replace(seen, block_cosine=value)
        if probes:
            norm = functools.partial(_stack_norm, config, params, stack)
            seen = dataclasses.replace(seen, is_last=extra["is_last"], final_norm=norm)
        results = {
            probe.name: probe.function(seen, batch, extra["probes"].get(probe.name))
            for probe in probes
        }
        return (hold(x, options.activations), link), results

    # Sharded, and under vmap batched, like x; its forward value is meaningless.
    link = jax.lax.stop_gradient(x) if with_cosine else None
    how = {"per_layer": extra, "remat": options.remat, "unroll": options.unroll, "span": span}
    (x, link), seen = run_stack(config, params["stack"], (x, link), run_layer, **how)
    return end_link(x, link, seen) if with_cosine else (x, seen)


def _of_stack(extra: dict, stack: str, span: tuple[int, int]) -> dict:
    """[L, ...] leaves of one stack; a probe's, whose rows may be unlike, are already by stack."""

    def cut(leaf: Any) -> Any:
        return leaf[slice(*span)]

    probes = {
        name: tree[stack] if isinstance(tree, dict) and stack in tree else jax.tree.map(cut, tree)
        for name, tree in extra["probes"].items()
    }
    rest = {name: jax.tree.map(cut, tree) for name, tree in extra.items() if name != "probes"}
    return rest | {"probes": probes}


def _stack_norm(config: ModelConfig, params: dict, stack: str, x_btd: jax.Array) -> Any:
    """The norm after a stack, without the head's multiplier."""
    name = "encoder_norm" if stack == "encoder" and config.n_encoder_layers else "final_norm"
    if name == "final_norm" and not config.final_norm:
        return x_btd
    return Norm(config).apply({"params": params.get(name, {})}, x_btd)


def one_layer(
    config: ModelConfig, layer: int, leaves: dict, x_btd: jax.Array, batch: dict
) -> tuple[jax.Array, Any]:
    """Run one layer; return (the residual stream after it, its `block.LayerIO`).

    Args:
      leaves: the layer's leaves, unstacked.
      x_btd: the residual stream before it (`embed`, or another layer's).
      batch: as in `forward`.
    """
    if config.positions == "relative":
        raise ValueError(
            f"a {config.family} model's layers share a table of biases: this method runs them one "
            "by one, and supports models without such a table"
        )
    shape = batch["tokens"].shape
    options = with_kernel(RunOptions(), config, shape[1], is_in_order(batch))
    rotary, mask = layer_contexts(config, batch, shape, options.packed)[layer]
    block = Block(config, config.layers[layer], options)
    return block.apply({"params": leaves}, x_btd, rotary, mask)


def _of_layers(config: ModelConfig, probes, per_layer, dropout, nudges) -> dict[str, Any]:
    """[L, ...] leaves, of which every layer gets its slice."""
    perturbations = {} if nudges is None else {"perturbations": {"ffn": {"output": nudges}}}
    extra: dict[str, Any] = {"probes": per_layer or {}, "beside": perturbations}
    if probes:
        ends = [end - 1 for _, end in config.stacks.values()]
        extra["is_last"] = jnp.isin(jnp.arange(config.n_layers), jnp.asarray(ends))
    if dropout is not None:
        extra["dropout_key"] = jax.random.split(dropout[0], config.n_layers)
    return extra


def embed(
    config: ModelConfig,
    params: dict,
    tokens_bt: jax.Array,
    options: RunOptions,
    positions_bt: Any = None,
    types_bt: jax.Array | None = None,
) -> jax.Array:
    """Compute the residual stream before the first layer, [B, T, D] in the compute dtype.

    Args:
      positions_bt: [B or 1, T], for learned positions.
      types_bt: [B, T], for models with token types; None: all 0.

    Raises:
      ValueError: longer rows than learned positions.
    """
    leaves = params["embed"]
    table = hold(leaves["embedding"], options.table)
    x = table[tokens_bt].astype(options.compute_dtype)
    x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
    if config.position_rows:
        check_length(config, tokens_bt.shape[1])
        x = x + leaves["position"][positions_bt + config.first_position].astype(x.dtype)
    if config.token_types:
        types_bt = jnp.zeros_like(tokens_bt) if types_bt is None else types_bt
        x = x + leaves["token_type"][types_bt].astype(x.dtype)
    if config.embedding_norm:
        x = Norm(config).apply({"params": leaves.get("norm", {})}, x)
    return hold(x, options.activations)


def check_length(config: ModelConfig, length: int) -> None:
    """Raise ValueError if rows have more tokens than the model has learned positions."""
    if length > config.row_limit:
        raise ValueError(
            f"rows of {length} tokens: a {config.family} model with learned positions has "
            f"{config.max_position} of them"
        )


def pool(
    config: ModelConfig,
    params: dict,
    hidden_btd: jax.Array,
    segments_bt: jax.Array | None,
    options: RunOptions,
) -> Any:
    """tanh of a linear layer on the row's first token that is not padding, [B, D]."""
    first_bd = hidden_btd[:, 0]
    if segments_bt is not None:
        first_b = jnp.argmax(segments_bt > 0, axis=1)
        first_bd = jnp.take_along_axis(hidden_btd, first_b[:, None, None], axis=1)[:, 0]
    linear = Linear(config.d_model, use_bias=True, options=options)
    return jnp.tanh(linear.apply({"params": params["pooler"]}, first_bd))


def finish(config: ModelConfig, params: dict, x_btd: jax.Array) -> Any:
    """The head's input: the stream after the last layer and its final norm, if any, multiplied."""
    x_btd = _stack_norm(config, params, "decoder", x_btd)
    factor = config.output_multiplier
    return x_btd if factor == 1.0 else scaled(x_btd, factor)


def hold(x: jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Constrain `x` to `sharding`; None leaves the choice to XLA."""
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def platform_of(mesh: Mesh | AbstractMesh | None) -> str:
    """The platform of the mesh's devices ("cpu", "gpu", "tpu"), or of the default backend."""
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()


def require_decoder(config: ModelConfig, what: str) -> None:
    """Raise ValueError unless the model is a decoder: an encoder has no head, and an
    encoder-decoder predicts from another text.

    Args:
      what: the requested computation, e.g. "perplexity".
    """
    if config.kind == "encoder_decoder":
        raise ValueError(f"a {config.family} model is an encoder-decoder: {what} needs a decoder")
    if not config.lm_head:
        kind = "an encoder" if config.is_encoder else "a classifier"
        raise ValueError(
            f"a {config.family} model is {kind} without a language-model head: {what} needs a "
            "decoder with one"
        )


def require_one_stack(config: ModelConfig, what: str) -> None:
    """Raise ValueError for an encoder-decoder; `what` is the requested computation."""
    if config.kind == "encoder_decoder":
        raise ValueError(
            f"a {config.family} model is an encoder-decoder: {what} supports encoders and decoders"
        )


def head_kernel(config: ModelConfig, params: dict) -> tuple[jax.Array, str]:
    """The output matrix and its layout: the tied embedding "vd" [V, D], or a head "dv" [D, V].

    Raises:
      ValueError: an encoder.
    """
    if not config.lm_head:
        require_decoder(config, "computing logits")
    if config.tied:
        return params["embed"]["embedding"], "vd"
    return params["head"]["kernel"], "dv"


def logits(config: ModelConfig, params: dict, hidden: jax.Array) -> jax.Array:
    """Compute soft-capped logits [..., V], float32, from hidden states [..., D].

    For evaluation: training uses losses/cross_entropy.py.

    Raises:
      ValueError: an encoder.
    """
    kernel, layout = head_kernel(config, params)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    equation = f"...d,{layout}->...v"
    values = jnp.einsum(equation, hidden, kernel.astype(hidden.dtype), preferred_element_type=wide)
    if config.final_softcap is not None:
        values = config.final_softcap * jnp.tanh(values / config.final_softcap)
    return values
