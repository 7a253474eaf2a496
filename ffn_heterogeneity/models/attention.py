"""Attention, causal or bidirectional: grouped queries, rotary, windows, soft-caps, packed rows."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from ffn_heterogeneity.models import splash
from ffn_heterogeneity.models.blocked import (
    ATTENTION_RESIDUALS,
    as_rows,
    blocked,
    by_key_head,
    by_query_head,
    first_key_share,
)
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.linear import Linear, drawn, dropout, rescaled, scaled
from ffn_heterogeneity.models.norms import Norm
from ffn_heterogeneity.models.options import AMPERE, HOPPER, RunOptions, gpu_generation
from ffn_heterogeneity.models.relative import on_block
from ffn_heterogeneity.models.rotary import apply_rotary
from ffn_heterogeneity.wording import check_choice

KERNELS = ("auto", "xla", "plain", "cudnn", "splash")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """The keys that each query sees, and static facts that let kernels skip keys.

    Traced masks cannot be inspected; static facts about them are stored here. `Mask(array)` states
    no facts and works with the plain and the fused kernel.

    Attributes:
      visible: bool [B or 1, T, S].
      causal: no query sees a key after it in the row.
      both_ways: queries may see keys on both sides, so no key may be skipped.
      window: w: no query sees a key w or more positions before it; None: no such bound.
      in_order: `causal`, `window` and `segments` describe `visible` completely, for rows that are
        not padding.
      segments: int [B, T], document number of each position, or None: one document per row.
    """

    visible: jax.Array
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    both_ways: bool = dataclasses.field(default=False, metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    in_order: bool = dataclasses.field(default=False, metadata={"static": True})
    segments: jax.Array | None = None


def attention_mask(
    q_positions_bt: jax.Array,
    kv_positions_bs: jax.Array,
    window: int | None,
    q_segments_bt: jax.Array | None = None,
    kv_segments_bs: jax.Array | None = None,
    causal: bool = True,
) -> Mask:
    """Build the mask [B, T, S] of positions, a window and packed documents.

    Query at position t sees key at position s of the same segment if s <= t (`causal`) and, with a
    window w, |t - s| < w. Queries and keys may differ in number (a KV cache: S > T).
    """
    distance = q_positions_bt[:, :, None] - kv_positions_bs[:, None, :]
    mask = distance >= 0 if causal else jnp.ones(distance.shape, bool)
    if window is not None:
        mask &= (distance if causal else jnp.abs(distance)) < window
    if q_segments_bt is not None and kv_segments_bs is not None:
        mask &= q_segments_bt[:, :, None] == kv_segments_bs[:, None, :]
    if not causal:
        return Mask(mask, both_ways=True)
    return Mask(mask, causal=True, window=window)


def tree_mask(subtree_ends_bt: jax.Array) -> jax.Array:
    """Mask of ancestors in trees of tokens in depth-first order: bool [B, T, S].

    Position t is in the subtree of position s (or equal to it) iff s <= t < subtree_ends[s].
    """
    places = jnp.arange(subtree_ends_bt.shape[1])
    before = places[None, None, :] <= places[None, :, None]
    return before & (places[None, :, None] < subtree_ends_bt[:, None, :])


def with_kernel(
    options: RunOptions, config: ModelConfig, length: int, in_order: bool = True
) -> RunOptions:
    """Return `options` with the kernel that its `attention` selects, from static facts only.

    If heads and rows are suitable, "auto" selects cuDNN's fused kernel on a GPU from Ampere on
    (half precision, no soft-cap, heads of at most 128, 256 on Hopper and later, even lengths) and
    splash attention on a TPU (row lengths that are multiples of 128). Otherwise it selects "xla",
    the blocked form.

    Args:
      length: T.
      in_order: as in `Mask`.

    Raises:
      ValueError: an unknown name, or a kernel that does not support the model or rows.
    """
    name = options.attention
    check_choice("attention kernel", name, KERNELS)
    if config.positions == "relative":
        if name not in ("auto", "plain", "xla"):
            raise ValueError(
                f"attention={name!r} has no bias by distance, which a {config.family} model needs: "
                "use attention='auto', 'xla' or 'plain'"
            )
        return dataclasses.replace(options, attention="xla" if name == "auto" else name)
    if name == "cudnn" and config.attention_softcap is not None:
        raise ValueError("cuDNN attention has no soft-cap: use attention='auto' or 'xla'")
    if name == "cudnn" and not _whole_key_heads(config, options):
        raise ValueError(
            f"cuDNN attention: mesh.tensor does not divide {config.n_kv_heads} key heads: use "
            "attention='auto' or 'xla'"
        )
    causal = all(layer.causal for layer in config.layers)
    if name == "splash" and not causal:
        raise ValueError(
            f"splash attention is causal here, and a {config.family} model sees both ways: use "
            "attention='auto' or 'xla'"
        )
    fits_splash = causal and in_order and length % splash.LANES == 0
    if name == "splash" and not fits_splash:
        raise ValueError(
            f"splash attention needs ordered rows, their length a multiple of {splash.LANES}, got "
            f"{length}: use attention='auto' or 'xla'"
        )
    if name == "auto":
        half = options.compute_dtype in (jnp.bfloat16, jnp.float16)
        fits_cudnn = config.attention_softcap is None and config.head_dim % 8 == 0
        fits_cudnn &= config.head_dim <= _largest_head() and _whole_key_heads(config, options)
        # With a mask, rows of odd lengths have no gradient there; one token (decoding) needs none.
        fits_cudnn &= length == 1 or length % 2 == 0
        name = "xla"
        if options.on == "gpu" and half and fits_cudnn:
            name = "cudnn"
        elif options.on == "tpu" and fits_splash:
            name = "splash"
    return dataclasses.replace(options, attention=name)


def _whole_key_heads(config: ModelConfig, options: RunOptions) -> bool:
    """True if each device of a mesh has whole key heads, as cuDNN's partitioning needs."""
    mesh = getattr(options.activations, "mesh", None)
    return mesh is None or config.n_kv_heads % mesh.shape["tensor"] == 0


def _largest_head() -> int:
    """Largest head dimension of cuDNN's kernel on this machine's GPUs; otherwise 128."""
    if jax.default_backend() != "gpu":
        return 128
    generation = gpu_generation() or 0.0  # another maker's has no cuDNN
    return 0 if generation < AMPERE else 128 if generation < HOPPER else 256


def plain_attention(
    q_btnh, k_bskh, v_bskh, mask: Mask, *, scale: float, softcap=None, drop=None, bias=None
) -> tuple:
    """softmax(cap(scale q k^T)) v in float32 accumulation; the reference every kernel must equal.

    Query head n reads key head n // (N / K).

    Args:
      drop: (key, rate) of dropout on the probabilities; None: no dropout.
      bias: added to the logits: [B or 1, N, T, S], or `relative.bias_line`; None: none.

    Returns:
      (output [B, T, N, H] in q's dtype, probabilities [B, K, N/K, T, S] in float32).
    """
    k_bkhs, v_bksh = k_bskh.transpose(0, 2, 3, 1), v_bskh.transpose(0, 2, 1, 3)
    if bias is not None and bias.ndim == 2:
        bias = on_block(bias, slice(0, q_btnh.shape[1]), slice(0, k_bskh.shape[1]))
    numbers = {"scale": scale, "softcap": softcap, "bias": bias}
    return cached_attention(q_btnh, k_bkhs, v_bksh, mask, **numbers, drop=drop)


def cached_attention(
    q_btnh, k_bkhs, v_bksh, mask: Mask, *, scale: float, softcap=None, drop=None, bias=None
) -> tuple:
    """`plain_attention` on keys and values in a cache's layout (models/decoding.py).

    The queries of one key head are the rows, and the left operand, of one matrix product: XLA:CPU
    has no fast kernel for the transposed form, which einsum makes of "btkgh,bkhs->bkgts".
    """
    q_bkgth = by_key_head(scaled(q_btnh, scale), k_bkhs.shape[1])
    wide = jnp.promote_types(q_btnh.dtype, jnp.float32)
    logits = jnp.einsum("bkqh,bkhs->bkqs", as_rows(q_bkgth), k_bkhs, preferred_element_type=wide)
    logits = logits.reshape(*q_bkgth.shape[:4], k_bkhs.shape[3])
    if bias is not None:
        logits += bias.reshape(bias.shape[0], *logits.shape[1:])
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(mask.visible[:, None, None], logits, jnp.finfo(wide).min)
    weights = jax.nn.softmax(logits, axis=-1)
    used = weights if drop is None else dropout(weights, *drop)
    out = jnp.einsum("bkqs,bksh->bkqh", as_rows(used.astype(v_bksh.dtype)), v_bksh)
    return by_query_head(out.reshape(q_bkgth.shape)), weights


def blocked_attention(
    q_btnh, k_bskh, v_bskh, mask: Mask, *, scale: float, softcap=None, drop=None, bias=None
) -> jax.Array:
    """`plain_attention` over blocks of queries, skipping keys that no query of the block can see.

    For a causal mask it does half the work of the plain form, in blocks that fit a CPU's cache: 5-7
    times faster there at T = 512. There the queries and keys are those of the same T tokens (no
    cache): the query at row position t sees only keys at t - window < s <= t, also in packed rows.
    With a mask for both directions no key is skipped, and the keys may be others (S of them).

    Reverse mode only: for forward-mode derivatives use `plain_attention`.

    Args:
      bias: `relative.bias_line`, or None; of rows in order.

    Returns:
      output [B, T, N, H] in q's dtype.

    Raises:
      ValueError: a mask that is neither causal nor for both directions, or a causal one with keys
        other than the queries' own: skipped keys would be silently missing from the result.
    """
    if not isinstance(mask, Mask) or not (mask.causal or mask.both_ways):
        raise ValueError(
            "blocked attention ('xla') skips the keys after each query, and this mask is not known "
            "to hide them: use attention='plain', or make the mask by attention_mask(...)"
        )
    if mask.causal and q_btnh.shape[1] != k_bskh.shape[1]:
        raise ValueError(
            f"blocked attention ('xla') of a causal mask needs as many keys as queries, got "
            f"{q_btnh.shape[1]} queries and {k_bskh.shape[1]} keys: use attention='plain'"
        )
    # Heads before time: each (batch, kv head) is one matrix product.
    q_bkgth = by_key_head(scaled(q_btnh, scale), k_bskh.shape[2])
    keep = None
    if drop is not None:
        keep = drawn(drop[0], (*q_bkgth.shape[:4], k_bskh.shape[1]), drop[1])
    rows = (q_btnh.shape[1], k_bskh.shape[1])
    out_bkgth = blocked(
        q_bkgth,
        k_bskh.transpose(0, 2, 1, 3),
        v_bskh.transpose(0, 2, 1, 3),
        jnp.broadcast_to(mask.visible, (mask.visible.shape[0], *rows)),
        keep,
        bias,
        softcap,
        mask.window,
        mask.causal,
    )
    out_btnh = by_query_head(out_bkgth)
    return out_btnh if drop is None else rescaled(out_btnh, drop[1])


def sink_weights(
    q_btnh, k_bskh, v_bskh, mask: Mask, *, scale: float, softcap=None, bias=None
) -> jax.Array:
    """Attention of each query to the row's first key, float32 [B, T, N].

    Computed from the statistics of the blocked form, without T^2 numbers.
    """
    q_bkgth = by_key_head(scaled(q_btnh, scale), k_bskh.shape[2])
    k_bksh, v_bksh = (x.transpose(0, 2, 1, 3) for x in (k_bskh, v_bskh))
    known = (softcap, mask.window, mask.causal)
    share = first_key_share(q_bkgth, k_bksh, v_bksh, mask.visible, bias, *known)
    return by_query_head(share)[..., 0]


def attend(
    options: RunOptions, q_btnh, k_bskh, v_bskh, mask: Mask, config: ModelConfig, drop, bias
) -> jax.Array:
    """Attention output [B, T, N, H] of T queries on S keys by the kernel `options.attention`.

    Dropout of the probabilities, `drop` (key, rate), and a bias are the blocked and the plain
    form's, and a bias other than a line the plain form's.
    """
    numbers = {"scale": config.scale, "softcap": config.attention_softcap}
    if drop is not None or bias is not None:
        numbers |= {"drop": drop, "bias": bias}
        if options.attention == "xla" and (bias is None or bias.ndim == 2):
            return blocked_attention(q_btnh, k_bskh, v_bskh, mask, **numbers)
        return plain_attention(q_btnh, k_bskh, v_bskh, mask, **numbers)[0]
    if options.attention == "cudnn":
        fused = functools.partial(
            jax.nn.dot_product_attention,
            q_btnh,
            k_bskh,
            v_bskh,
            scale=config.scale,
            implementation="cudnn",
        )
        if not mask.in_order or mask.segments is not None:
            return fused(mask=mask.visible[:, None])
        # As two static flags, the mask lets the kernel skip invisible keys.
        window = None if mask.window is None else (mask.window - 1, 0)
        return fused(is_causal=True, local_window_size=window)
    if options.attention == "splash":
        return splash.splash_attention(
            q_btnh,
            k_bskh,
            v_bskh,
            mask.segments,
            window=mask.window,
            **numbers,
            activations=options.activations,
            interpret=options.on != "tpu",
            residuals=ATTENTION_RESIDUALS,
        )
    if options.attention == "plain":
        return plain_attention(q_btnh, k_bskh, v_bskh, mask, **numbers)[0]
    return blocked_attention(q_btnh, k_bskh, v_bskh, mask, **numbers)


class Attention(nn.Module):
    """Projections, rotary embedding, attention, output projection.

    Attributes:
      config: shapes.
      options: run options with a chosen kernel (`with_kernel`).
      with_weights: also return the probabilities (forces the plain form).
      with_sinks: return `sink_weights` instead.
    """

    config: ModelConfig
    options: RunOptions = RunOptions(attention="xla")
    with_weights: bool = False
    with_sinks: bool = False

    @nn.compact
    def __call__(self, x_btd, rotary, mask: Mask, cache=None, drop=None, bias=None, memory=None):
        """x [B, T, D], rotary tables, mask [B or 1, T, S] -> (y [B, T, D], weights, cache).

        weights [B, K, N/K, T, S]: None if they are never materialized (blocked and fused kernels);
        or `sink_weights` [B, T, N].

        `cache`: a `decoding.LayerCache`, returned with the new keys and values; None: S = T keys,
        those of x.

        `drop`: (key, rate) of dropout on the probabilities; None: no dropout.

        `bias`: added to the logits: [B or 1, N, T, S], or of rows in order `relative.bias_line`.

        `memory`: states [B, S, D] whose keys and values are attended to instead of x's own, or
        these (keys, values) in a cache's layout; None: x's.
        """
        config = self.config
        linear = functools.partial(Linear, options=self.options)
        b, t, _ = x_btd.shape

        def project(name: str, heads: int, x: jax.Array) -> jax.Array:
            y = linear(heads * config.head_dim, config.attention_bias, name=name)(x)
            if config.qkv_clip is not None:
                y = jnp.clip(y, -config.qkv_clip, config.qkv_clip)
            return y.reshape(*x.shape[:2], heads, config.head_dim)

        q_btnh = project("q", config.n_heads, x_btd)
        out = linear(config.d_model, config.attention_out_bias, name="out")
        numbers = {"scale": config.scale, "softcap": config.attention_softcap}
        if isinstance(memory, tuple):
            keys, values = memory
            y_btnh, weights = cached_attention(q_btnh, keys, values, mask, **numbers)
            return out(y_btnh.reshape(b, t, -1)), weights, None
        source = x_btd if memory is None else memory
        k_btkh = project("k", config.n_kv_heads, source)
        v_btkh = project("v", config.n_kv_heads, source)
        if config.qk_norm:
            q_btnh = Norm(config, name="q_norm")(q_btnh)
            k_btkh = Norm(config, name="k_norm")(k_btkh)
        q_btnh, k_btkh = apply_rotary(q_btnh, rotary), apply_rotary(k_btkh, rotary)
        if cache is not None:
            cache = cache.extend(k_btkh, v_btkh)
        weights = None
        if cache is not None and not cache.fresh:
            keys, values = cache.read(q_btnh.dtype)
            y_btnh, weights = cached_attention(q_btnh, keys, values, mask, **numbers, bias=bias)
        elif self.with_weights or (self.with_sinks and bias is not None and bias.ndim == 4):
            numbers |= {"drop": drop, "bias": bias}
            y_btnh, weights = plain_attention(q_btnh, k_btkh, v_btkh, mask, **numbers)
        else:
            y_btnh = attend(self.options, q_btnh, k_btkh, v_btkh, mask, config, drop, bias)
        if self.with_sinks and weights is not None:
            weights = by_query_head(weights[..., :1])[..., 0]
        elif self.with_sinks:
            weights = sink_weights(q_btnh, k_btkh, v_btkh, mask, **numbers, bias=bias)
        return out(y_btnh.reshape(b, t, -1)), weights, cache
