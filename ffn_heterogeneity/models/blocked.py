"""Attention over blocks of queries, skipping keys that no query of the block can see.

With a causal mask, keys after the block are skipped, with a window also those before it; with any
other mask none.
"""

import functools

import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.kept import named

MIN_BLOCK = 128
# Names of the backward pass's residuals in addition to q, k, v, for rematerialization policies.
ATTENTION_RESIDUALS = "attention_residuals"


def by_key_head(q_btnh: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B, K, N/K, T, H]."""
    b, t, n, h = q_btnh.shape
    return q_btnh.reshape(b, t, kv_heads, n // kv_heads, h).transpose(0, 2, 3, 1, 4)


def by_query_head(x_bkgth: jax.Array) -> jax.Array:
    """[B, K, G, T, H] -> [B, T, K G, H], the inverse of `by_key_head`."""
    b, k, g, t, h = x_bkgth.shape
    return x_bkgth.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, h)


def blocks_of(t: int, window: int | None, causal: bool = True) -> list[tuple[slice, slice, int]]:
    """Return blocks: (queries, the keys that they can see, number of sequential parts).

    Without `causal` all keys are visible.

    There are at most 16 blocks, so that the program stays small. Longer rows than 16 blocks of
    `MIN_BLOCK` queries have 8 blocks, in parts of `MIN_BLOCK` queries if that divides them.
    """
    block, parts = max(MIN_BLOCK, -(-t // 16)), 1
    if block > MIN_BLOCK and t % (8 * MIN_BLOCK) == 0:
        block, parts = t // 8, t // (8 * MIN_BLOCK)
    blocks = []
    for start in range(0, t, block):
        stop = min(start + block, t)
        first = 0 if window is None else max(0, start - window + 1)
        keys = slice(first, stop) if causal else slice(0, t)
        blocks.append((slice(start, stop), keys, parts))
    return blocks


def _in_turn(function, parts: int, carry, *by_row: jax.Array):
    """Apply `carry, results = function(carry, by_row)` to the parts of a block and join them.

    It is a loop, because in straight-line code a compiler may compute all blocks before it uses the
    first: their logits, T^2 numbers per head, would be in memory at once.

    Args:
      by_row: arrays [B, K, G, Q, ...], like the results; the last one is [B, Q, ...].
    """
    if parts == 1:
        return function(carry, by_row)

    def cut(x: jax.Array, axis: int) -> jax.Array:
        size = x.shape[axis] // parts
        return jnp.moveaxis(x.reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :]), axis, 0)

    def whole(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], parts * x.shape[4], *x.shape[5:])

    xs = (*(cut(x, 3) for x in by_row[:-1]), cut(by_row[-1], 1))
    carry, results = jax.lax.scan(function, carry, xs)
    return carry, jax.tree.map(whole, results)


def as_rows(x_bkgth: jax.Array) -> jax.Array:
    """[B, K, G, T, ...] -> [B, K, G * T, ...]: the queries of one key head, as matrix rows."""
    b, k, g, t = x_bkgth.shape[:4]
    return x_bkgth.reshape(b, k, g * t, *x_bkgth.shape[4:])


def _block_logits(q_bkgqh, k_bksh, mask_bqs, softcap):
    """(capped and masked logits [B, K, G, Q, S], tanh of the cap or None), at least float32."""
    wide = jnp.promote_types(q_bkgqh.dtype, jnp.float32)
    logits = jnp.einsum("bkqh,bksh->bkqs", as_rows(q_bkgqh), k_bksh, preferred_element_type=wide)
    logits = logits.reshape(*q_bkgqh.shape[:4], k_bksh.shape[2])
    bent = None
    if softcap is not None:
        bent = jnp.tanh(logits / softcap)
        logits = softcap * bent
    return jnp.where(mask_bqs[:, None, None], logits, jnp.finfo(wide).min), bent


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def blocked(q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, softcap, window, causal):
    """Attention of scaled queries [B, K, N/K, T, H] on keys and values [B, K, T, H], in blocks.

    With w = exp(l - max l), z = sum w and o = (w v) / z for a row, the backward pass recomputes w
    from q, k and the saved (o, max l, z), and with u = do / z computes

        dv = w^T u,   dl = w (u v^T - sum(u o)),   then through the soft-cap and the product.

    With dropout, o = ((k w) v) / z, dv = (k w)^T u and dl = w (k u v^T - sum(u o)).

    The three saved arrays are named `ATTENTION_RESIDUALS` for rematerialization policies. Reverse
    mode only.

    Args:
      mask_bts: bool [B or 1, T, T].
      keep_bkgts: k, the weights that dropout keeps, not rescaled. None: all.
      window, causal: keys that the mask is known to hide: with `causal` those after each query and
        beyond `window`; otherwise none.
    """
    known = (softcap, window, causal)
    return _blocked_fwd(q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, *known)[0]


def _blocked_fwd(q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, softcap, window, causal):
    results = []
    for rows, keys, parts in blocks_of(q_bkgth.shape[3], window, causal):
        block = functools.partial(_block_fwd, k_bksh[:, :, keys], v_bksh[:, :, keys], softcap)
        operands = _rows_of(rows, keys, (q_bkgth,), keep_bkgts, mask_bts)
        results.append(_in_turn(block, parts, None, *operands)[1])
    outputs = tuple(
        named(jnp.concatenate(result, axis=3), ATTENTION_RESIDUALS)
        for result in zip(*results, strict=True)
    )
    return outputs[0], (q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, *outputs)


def _rows_of(rows: slice, keys: slice, by_query, keep_bkgts, mask_bts) -> tuple:
    """Slice a block's rows: of arrays by query, of `keep_bkgts` if given, and of the mask."""
    keep = () if keep_bkgts is None else (keep_bkgts[:, :, :, rows, keys],)
    return (*(x[:, :, :, rows] for x in by_query), *keep, mask_bts[:, rows, keys])


def _block_fwd(k_bksh, v_bksh, softcap, _, by_row):
    """(None, (output, largest logit, sum of weights)) of queries on keys."""
    q_bkgqh, *keep, mask_bqs = by_row
    logits, _ = _block_logits(q_bkgqh, k_bksh, mask_bqs, softcap)
    largest = jnp.max(logits, -1, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, -1, keepdims=True)
    if keep:
        weights = jnp.where(keep[0], weights, 0)
    out = jnp.einsum(
        "bkqs,bksh->bkqh",
        as_rows(weights.astype(v_bksh.dtype)),
        v_bksh,
        preferred_element_type=logits.dtype,
    )
    out = (out.reshape(q_bkgqh.shape) / total).astype(q_bkgqh.dtype)
    return None, (out, largest, total)


def _blocked_bwd(softcap, window, causal, residuals, d_out_bkgth):
    q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, out, largest, total = residuals
    wide = total.dtype
    scaled = d_out_bkgth.astype(wide) / total
    inner = jnp.sum(scaled * out.astype(wide), -1, keepdims=True)
    by_row = q_bkgth, scaled, inner, largest
    dq, dk, dv = [], jnp.zeros(k_bksh.shape, wide), jnp.zeros(v_bksh.shape, wide)
    for rows, keys, parts in blocks_of(q_bkgth.shape[3], window, causal):
        block = functools.partial(_block_bwd, k_bksh[:, :, keys], v_bksh[:, :, keys], softcap)
        operands = _rows_of(rows, keys, by_row, keep_bkgts, mask_bts)
        sums = jnp.zeros(dk[:, :, keys].shape, wide)
        (dk_block, dv_block), dq_block = _in_turn(block, parts, (sums, sums), *operands)
        dk, dv = dk.at[:, :, keys].add(dk_block), dv.at[:, :, keys].add(dv_block)
        dq.append(dq_block)
    d_keys = dk.astype(k_bksh.dtype), dv.astype(v_bksh.dtype)
    return jnp.concatenate(dq, axis=3), *d_keys, None, None


def _block_bwd(k_bksh, v_bksh, softcap, sums, by_row):
    """((dk, dv) added to `sums`, dq) of queries on keys."""
    q_bkgqh, scaled, inner, largest, *keep, mask_bqs = by_row
    wide = inner.dtype
    logits, bent = _block_logits(q_bkgqh, k_bksh, mask_bqs, softcap)
    weights = jnp.exp(logits - largest)
    d_rows = as_rows(scaled.astype(v_bksh.dtype))
    d_weights = jnp.einsum("bkqh,bksh->bkqs", d_rows, v_bksh, preferred_element_type=wide)
    d_weights, used = d_weights.reshape(weights.shape), weights
    if keep:
        d_weights, used = (jnp.where(keep[0], x, 0) for x in (d_weights, used))
    d_logits = weights * (d_weights - inner)
    if bent is not None:
        d_logits = d_logits * (1 - bent * bent)
    d_logits = as_rows(jnp.where(mask_bqs[:, None, None], d_logits, 0).astype(q_bkgqh.dtype))
    dq = jnp.einsum("bkqs,bksh->bkqh", d_logits, k_bksh).reshape(q_bkgqh.shape)
    to_keys = functools.partial(jnp.einsum, "bkqs,bkqh->bksh", preferred_element_type=wide)
    dk = to_keys(d_logits, as_rows(q_bkgqh))
    dv = to_keys(as_rows(used.astype(v_bksh.dtype)), d_rows)
    return (sums[0] + dk, sums[1] + dv), dq


blocked.defvjp(_blocked_fwd, _blocked_bwd)


def first_key_share(q_bkgth, k_bksh, v_bksh, mask_bts, softcap, window, causal):
    """exp(l_0 - max l) / z, each query's weight of the first key, [B, K, G, T, 1]."""
    known = (softcap, window, causal)
    largest, total = _blocked_fwd(q_bkgth, k_bksh, v_bksh, mask_bts, None, *known)[1][-2:]
    logits, _ = _block_logits(q_bkgth, k_bksh[:, :, :1], mask_bts[:, :, :1], softcap)
    return jnp.exp(logits - largest) / total
