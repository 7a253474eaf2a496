"""Causal attention: grouped queries, rotary, windows, soft-caps, QK-norm, packed documents."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.linear import Linear
from ffn_heterogeneity.models.norms import RMSNorm
from ffn_heterogeneity.models.rotary import apply_rotary

KERNELS = ("auto", "xla", "plain", "cudnn")
MIN_BLOCK = 128


def attention_mask(
    q_positions_bt: jax.Array,
    kv_positions_bs: jax.Array,
    window: int | None,
    q_segments_bt: jax.Array | None = None,
    kv_segments_bs: jax.Array | None = None,
) -> jax.Array:
    """Which keys each query sees: bool [B, T, S].

    Query at position t sees key at position s of the same segment if s <= t and, with a window w,
    t - w < s. Queries and keys may differ in number (a KV cache: S > T).
    """
    distance = q_positions_bt[:, :, None] - kv_positions_bs[:, None, :]
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if q_segments_bt is not None:
        mask &= q_segments_bt[:, :, None] == kv_segments_bs[:, None, :]
    return mask


def choose_kernel(requested: str, config: ModelConfig, dtype: jnp.dtype) -> str:
    """The kernel for this platform, decided at trace time from static facts only.

    "auto" is "xla", the blocked form, on CPU and TPU; on GPU, cuDNN's fused kernel where it can be
    used: half precision, no soft-cap, heads of at most 128 (the limit that holds on every card).

    Raises:
      ValueError: an unknown name, or cuDNN asked for a soft-capped model.
    """
    if requested not in KERNELS:
        raise ValueError(f"attention kernel {requested!r}: choose one of {KERNELS}")
    if requested == "cudnn" and config.attention_softcap is not None:
        raise ValueError("cuDNN attention has no soft-cap: use attention='auto' or 'xla'")
    if requested != "auto":
        return requested
    half = dtype in (jnp.bfloat16, jnp.float16)
    fits = config.attention_softcap is None and config.head_dim <= 128
    return "cudnn" if jax.default_backend() == "gpu" and half and fits else "xla"


def plain_attention(
    q_btnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    mask_bts: jax.Array,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(cap(scale q k^T)) v in float32 accumulation; the reference every kernel must equal.

    Query head n reads key head n // (N / K).

    Returns:
      (output [B, T, N, H] in q's dtype, probabilities [B, K, N/K, T, S] in float32).
    """
    b, t, n, h = q_btnh.shape
    kv_heads = k_bskh.shape[2]
    grouped = (q_btnh * jnp.asarray(scale, q_btnh.dtype)).reshape(b, t, kv_heads, n // kv_heads, h)
    wide = jnp.promote_types(q_btnh.dtype, jnp.float32)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, k_bskh, preferred_element_type=wide)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = jnp.where(mask_bts[:, None, None], logits, jnp.finfo(wide).min)
    weights = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v_bskh.dtype), v_bskh)
    return out.reshape(b, t, n, h), weights


def blocked_attention(
    q_btnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    mask_bts: jax.Array,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """`plain_attention` over blocks of queries that skip the keys no query of the block can see.

    Half the work of the plain form for a causal mask, and blocks that stay in a CPU's cache: 5-7
    times faster there at T = 512. T queries on the same T keys (no cache): a query in row position
    t sees keys in row positions t - window < s <= t only, packed documents included.

    Returns:
      output [B, T, N, H] in q's dtype.
    """
    b, t, n, h = q_btnh.shape
    kv_heads = k_bskh.shape[2]
    group = n // kv_heads
    wide = jnp.promote_types(q_btnh.dtype, jnp.float32)
    # Heads before time: each (batch, kv head) is one matrix product.
    grouped = (q_btnh * jnp.asarray(scale, q_btnh.dtype)).reshape(b, t, kv_heads, group, h)
    q_bkgth = grouped.transpose(0, 2, 3, 1, 4)
    k_bksh, v_bksh = k_bskh.transpose(0, 2, 1, 3), v_bskh.transpose(0, 2, 1, 3)
    # At most 16 blocks, so that the program stays small for long rows.
    block = max(MIN_BLOCK, -(-t // 16))
    outputs = []
    for start in range(0, t, block):
        stop = min(start + block, t)
        first = 0 if window is None else max(0, start - window + 1)
        keys = slice(first, stop)
        size = stop - start
        q_rows = q_bkgth[:, :, :, start:stop].reshape(b, kv_heads, group * size, h)
        logits = jnp.einsum(
            "bkqh,bksh->bkqs", q_rows, k_bksh[:, :, keys], preferred_element_type=wide
        ).reshape(b, kv_heads, group, size, stop - first)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        mask = mask_bts[:, None, None, start:stop, keys]
        logits = jnp.where(mask, logits, jnp.finfo(wide).min)
        # The largest logit only shifts: no gradient through it.
        largest = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
        weights = jnp.exp(logits - largest)
        total = jnp.sum(weights, -1, keepdims=True)
        rows = weights.astype(v_bskh.dtype).reshape(b, kv_heads, group * size, stop - first)
        out = jnp.einsum("bkqs,bksh->bkqh", rows, v_bksh[:, :, keys], preferred_element_type=wide)
        outputs.append((out.reshape(b, kv_heads, group, size, h) / total).astype(q_btnh.dtype))
    out_bkgth = jnp.concatenate(outputs, axis=3) if len(outputs) > 1 else outputs[0]
    return out_bkgth.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def attend(
    kernel: str, q_btnh, k_bskh, v_bskh, mask_bts, config: ModelConfig, window: int | None
) -> jax.Array:
    """Attention output [B, T, N, H] by the chosen kernel ("xla", "plain" or "cudnn")."""
    if kernel == "cudnn":
        return jax.nn.dot_product_attention(
            q_btnh, k_bskh, v_bskh, mask=mask_bts[:, None], scale=config.scale,
            implementation="cudnn",
        )  # fmt: skip
    numbers = {"scale": config.scale, "softcap": config.attention_softcap}
    if kernel == "plain" or q_btnh.shape[1] != k_bskh.shape[1]:
        return plain_attention(q_btnh, k_bskh, v_bskh, mask_bts, **numbers)[0]
    return blocked_attention(q_btnh, k_bskh, v_bskh, mask_bts, window=window, **numbers)


class Attention(nn.Module):
    """Projections, rotary embedding, attention, output projection.

    Attributes:
      config, layer: shapes.
      kernel: "xla", "plain" or "cudnn" (already chosen).
      with_weights: return the probabilities too (forces the plain kernel).
    """

    config: ModelConfig
    layer: LayerConfig
    kernel: str = "xla"
    with_weights: bool = False

    @nn.compact
    def __call__(self, x_btd, rotary, mask_bts):
        """x [B, T, D], rotary tables, mask [B or 1, T, T] -> (y [B, T, D], weights or None)."""
        config = self.config
        b, t, _ = x_btd.shape

        def project(name: str, heads: int) -> jax.Array:
            y = Linear(heads * config.head_dim, config.attention_bias, name=name)(x_btd)
            return y.reshape(b, t, heads, config.head_dim)

        q_btnh = project("q", config.n_heads)
        k_btkh = project("k", config.n_kv_heads)
        v_btkh = project("v", config.n_kv_heads)
        if config.qk_norm:
            q_btnh = RMSNorm(config.norm_eps, config.norm_offset, name="q_norm")(q_btnh)
            k_btkh = RMSNorm(config.norm_eps, config.norm_offset, name="k_norm")(k_btkh)
        q_btnh, k_btkh = apply_rotary(q_btnh, rotary), apply_rotary(k_btkh, rotary)
        weights = None
        if self.with_weights:
            y_btnh, weights = plain_attention(
                q_btnh, k_btkh, v_btkh, mask_bts,
                scale=config.scale, softcap=config.attention_softcap,
            )  # fmt: skip
        else:
            y_btnh = attend(
                self.kernel, q_btnh, k_btkh, v_btkh, mask_bts, config, self.layer.window
            )
        out = Linear(config.d_model, config.attention_out_bias, name="out")
        return out(y_btnh.reshape(b, t, -1)), weights
