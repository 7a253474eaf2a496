"""Splash attention: JAX's blocked kernel for TPUs, with soft-caps, windows and packed documents."""

import functools

import jax
from jax.sharding import PartitionSpec

from ffn_heterogeneity.models.linear import scaled

LANES = 128
# Block size of queries and keys: larger ones need fewer steps; this one fits a TPU's fast memory.
LARGEST_BLOCK = 512


def splash_attention(
    q_btnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    segments_bt: jax.Array | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    activations: jax.sharding.Sharding | None = None,
    interpret: bool = False,
    residuals: str | None = None,
) -> jax.Array:
    """Causal self-attention without [T, T] scores in memory, forward or backward.

    Query head n reads key head n // (N / K); see `attention.plain_attention`.

    Args:
      segments_bt: int [B, T]: positions see only their document; None: one document per row.
      window: a query sees itself and the w - 1 positions before it.
      activations: on a mesh, the sharding of the residual stream: every device computes its rows,
        and its heads if "tensor" divides the key heads.
      interpret: run the kernel's program with XLA, on any platform (slow).
      residuals: name of the backward pass's residuals besides q, k, v, for rematerialization.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    local = functools.partial(
        _local, softcap=softcap, window=window, interpret=interpret, residuals=residuals
    )
    heads_first = [x.transpose(0, 2, 1, 3) for x in (scaled(q_btnh, scale), k_bskh, v_bskh)]
    mesh = getattr(activations, "mesh", None)
    if mesh is not None and mesh.size > 1:
        rows = activations.spec[0]
        heads = "tensor" if k_bskh.shape[2] % mesh.shape["tensor"] == 0 else None
        along, row = PartitionSpec(rows, heads), PartitionSpec(rows)
        local = jax.shard_map(
            local, mesh=mesh, in_specs=(along, along, along, row), out_specs=along, check_vma=False
        )
    q_bnth, k_bksh, v_bksh = heads_first
    out = local(q_bnth, k_bksh, v_bksh, segments_bt)
    return out.transpose(0, 2, 1, 3)


def _local(q_bnth, k_bksh, v_bksh, segments_bt, *, softcap, window, interpret, residuals):
    """Attention of the rows and heads of one device."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    heads, length = q_bnth.shape[1:3]
    shape = (length, length)
    seen = library.CausalMask(shape)
    if window is not None:
        seen = library.LocalMask(shape, (window - 1, 0), 0)
    block = max(size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if length % size == 0)
    kernel = library.make_splash_mha_single_device(
        library.MultiHeadMask([seen] * heads),
        block_sizes=library.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        attn_logits_soft_cap=softcap,
        interpret=interpret,
        residual_checkpoint_name=residuals,
    )
    if segments_bt is None:
        return jax.vmap(kernel)(q_bnth, k_bksh, v_bksh)
    ids = library.SegmentIds(segments_bt, segments_bt)
    return jax.vmap(kernel)(q_bnth, k_bksh, v_bksh, segment_ids=ids)
