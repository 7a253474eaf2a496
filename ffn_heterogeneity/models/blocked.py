"""Attention over blocks of queries, skipping keys that no query of the block can see.

With a causal mask, keys after the block are skipped, with a window also those before it; with any
other mask none.
"""

import functools

import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.kept import named
from ffn_heterogeneity.models.relative import on_block

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


def blocks_of(
    t: int, window: int | None, causal: bool = True, keys: int | None = None
) -> list[tuple[slice, slice, int]]:
    """Return blocks: (queries, the keys that they can see, number of sequential parts).

    Without `causal` all keys are visible, `keys` of them (None: t).

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
        visible = slice(first, stop) if causal else slice(0, keys or t)
        blocks.append((slice(start, stop), visible, parts))
    return blocks


def _in_turn(function, parts: int, carry, block: dict[str, jax.Array]):
    """Apply `carry, results = function(carry, block)` to the parts of a block and join them.

    It is a loop, because in straight-line code a compiler may compute all blocks before it uses the
    first: their logits, T^2 numbers per head, would be in memory at once.

    Args:
      block: arrays [B or 1, K or 1, G or 1, Q, ...], like the results.
    """
    if parts == 1:
        return function(carry, block)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:3], parts, -1, *x.shape[4:]), 3, 0)

    def whole(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], parts * x.shape[4], *x.shape[5:])

    carry, results = jax.lax.scan(function, carry, jax.tree.map(cut, block))
    return carry, jax.tree.map(whole, results)


def as_rows(x_bkgth: jax.Array) -> jax.Array:
    """[B, K, G, T, ...] -> [B, K, G * T, ...]: the queries of one key head, as matrix rows."""
    b, k, g, t = x_bkgth.shape[:4]
    return x_bkgth.reshape(b, k, g * t, *x_bkgth.shape[4:])


def _block_logits(q_bkgqh, k_bksh, mask, softcap, bias=None):
    """(capped and masked logits [B, K, G, Q, S], tanh of the cap or None), at least float32.

    Args:
      bias: [1, K, G, Q, S], added to the logits before the cap.
    """
    wide = jnp.promote_types(q_bkgqh.dtype, jnp.float32)
    # Turned in memory: where H is the last axis of both, XLA:CPU takes up to 1.7 times as long.
    q_bkhq = jax.lax.optimization_barrier(as_rows(q_bkgqh).swapaxes(2, 3))
    logits = jnp.einsum("bkhq,bksh->bkqs", q_bkhq, k_bksh, preferred_element_type=wide)
    logits = logits.reshape(*q_bkgqh.shape[:4], k_bksh.shape[2])
    if bias is not None:
        logits += bias
    bent = None
    if softcap is not None:
        bent = jnp.tanh(logits / softcap)
        logits = softcap * bent
    return jnp.where(mask, logits, jnp.finfo(wide).min), bent


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def blocked(q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, bias_nd, softcap, window, causal):
    """Attention of scaled queries [B, K, N/K, T, H] on keys and values [B, K, S, H], in blocks.

    With w = exp(l - max l), z = sum w and o = (w v) / z for a row, the backward pass recomputes w
    from q, k and the saved (o, max l, z), and with u = do / z computes

        dv = w^T u,   dl = w (u v^T - sum(u o)),   then through the soft-cap and the product.

    With dropout, o = ((k w) v) / z, dv = (k w)^T u and dl = w (k u v^T - sum(u o)). A bias has the
    gradient dl, summed over rows and diagonals.

    The three saved arrays are named `ATTENTION_RESIDUALS` for rematerialization policies. Reverse
    mode only.

    Args:
      mask_bts: bool [B or 1, T, S].
      keep_bkgts: k, the weights that dropout keeps, not rescaled. None: all.
      bias_nd: `relative.bias_line`, added to the logits, for S = T. None: none.
      window, causal: keys that the mask is known to hide: with `causal` those after each query and
        beyond `window`; otherwise none.
    """
    known = (softcap, window, causal)
    return _blocked_fwd(q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, bias_nd, *known)[0]


def _blocked_fwd(q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, bias_nd, softcap, window, causal):
    results = []
    for rows, keys, parts in blocks_of(q_bkgth.shape[3], window, causal, k_bksh.shape[2]):
        block = functools.partial(_block_fwd, k_bksh[:, :, keys], v_bksh[:, :, keys], softcap)
        operands = _rows_of(rows, keys, {"q": q_bkgth}, keep_bkgts, bias_nd, mask_bts)
        results.append(_in_turn(block, parts, None, operands)[1])
    outputs = tuple(
        named(jnp.concatenate(result, axis=3), ATTENTION_RESIDUALS)
        for result in zip(*results, strict=True)
    )
    return outputs[0], (q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, bias_nd, *outputs)


def _rows_of(rows: slice, keys: slice, by_query: dict, keep_bkgts, bias_nd, mask_bts) -> dict:
    """A block's rows of the arrays by query, what dropout keeps, the bias and the mask."""
    block = {name: x[:, :, :, rows] for name, x in by_query.items()}
    if keep_bkgts is not None:
        block["keep"] = keep_bkgts[:, :, :, rows, keys]
    if bias_nd is not None:
        bias, heads = on_block(bias_nd, rows, keys), by_query["q"].shape[1:3]
        block["bias"] = bias.reshape(1, *heads, *bias.shape[2:])
    return block | {"mask": mask_bts[:, None, None, rows, keys]}


def _block_fwd(k_bksh, v_bksh, softcap, _, block):
    """(None, (output, largest logit, sum of weights)) of queries on keys."""
    q_bkgqh = block["q"]
    logits, _ = _block_logits(q_bkgqh, k_bksh, block["mask"], softcap, block.get("bias"))
    largest = jnp.max(logits, -1, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, -1, keepdims=True)
    if "keep" in block:
        weights = jnp.where(block["keep"], weights, 0)
    out = jnp.einsum(
        "bkqs,bksh->bkqh",
        as_rows(weights.astype(v_bksh.dtype)),
        v_bksh,
        preferred_element_type=logits.dtype,
    )
    out = (out.reshape(q_bkgqh.shape) / total).astype(q_bkgqh.dtype)
    return None, (out, largest, total)


def _blocked_bwd(softcap, window, causal, residuals, d_out_bkgth):
    q_bkgth, k_bksh, v_bksh, mask_bts, keep_bkgts, bias_nd, out, largest, total = residuals
    wide = total.dtype
    scaled = d_out_bkgth.astype(wide) / total
    inner = jnp.sum(scaled * out.astype(wide), -1, keepdims=True)
    by_query = {"q": q_bkgth, "scaled": scaled, "inner": inner, "largest": largest}
    dq = []
    dk, dv = (jnp.zeros(x.swapaxes(2, 3).shape, wide) for x in (k_bksh, v_bksh))
    d_bias = None if bias_nd is None else jnp.zeros_like(bias_nd)
    for rows, keys, parts in blocks_of(q_bkgth.shape[3], window, causal, k_bksh.shape[2]):
        block = functools.partial(_block_bwd, k_bksh[:, :, keys], v_bksh[:, :, keys], softcap)
        operands = _rows_of(rows, keys, by_query, keep_bkgts, bias_nd, mask_bts)
        sums = jnp.zeros(dk[..., keys].shape, wide)
        (dk_block, dv_block), results = _in_turn(block, parts, (sums, sums), operands)
        dk, dv = dk.at[..., keys].add(dk_block), dv.at[..., keys].add(dv_block)
        dq.append(results[0])
        if d_bias is not None:
            to_line = jax.linear_transpose(lambda x, r=rows, k=keys: on_block(x, r, k), bias_nd)
            on_heads = results[1].reshape(1, bias_nd.shape[0], *results[1].shape[3:])
            d_bias += to_line(on_heads.astype(bias_nd.dtype))[0]
    d_keys = dk.astype(k_bksh.dtype).swapaxes(2, 3), dv.astype(v_bksh.dtype).swapaxes(2, 3)
    return jnp.concatenate(dq, axis=3), *d_keys, None, None, d_bias


def _block_bwd(k_bksh, v_bksh, softcap, sums, block):
    """((dk, dv) added to `sums`, (dq, the bias's gradient if there is one)) of queries on keys.

    dk and dv are transposed, [B, K, H, S]: XLA:CPU takes up to 2.7 times as long for products that
    contract the rows of weights, which are larger, as the left operand.
    """
    q_bkgqh, inner = block["q"], block["inner"]
    wide = inner.dtype
    logits, bent = _block_logits(q_bkgqh, k_bksh, block["mask"], softcap, block.get("bias"))
    weights = jnp.exp(logits - block["largest"])
    d_rows = as_rows(block["scaled"].astype(v_bksh.dtype))
    d_weights = jnp.einsum("bkqh,bksh->bkqs", d_rows, v_bksh, preferred_element_type=wide)
    d_weights, used = d_weights.reshape(weights.shape), weights
    if "keep" in block:
        d_weights, used = (jnp.where(block["keep"], x, 0) for x in (d_weights, used))
    d_logits = weights * (d_weights - inner)
    if bent is not None:
        d_logits = d_logits * (1 - bent * bent)
    d_logits = jnp.where(block["mask"], d_logits, 0)
    d_bias = (_sum_of_rows(d_logits),) if "bias" in block else ()
    d_logits = as_rows(d_logits.astype(q_bkgqh.dtype))
    dq = jnp.einsum("bkqs,bksh->bkqh", d_logits, k_bksh).reshape(q_bkgqh.shape)
    to_keys = functools.partial(jnp.einsum, "bkhq,bkqs->bkhs", preferred_element_type=wide)
    dk = to_keys(as_rows(q_bkgqh).swapaxes(2, 3), d_logits)
    dv = to_keys(d_rows.swapaxes(2, 3), as_rows(used.astype(v_bksh.dtype)))
    return (sums[0] + dk, sums[1] + dv), (dq, *d_bias)


def _sum_of_rows(x: jax.Array) -> jax.Array:
    """The sum over the first axis, as a product: XLA:CPU sums few rows 20 times slower."""
    ones = jnp.ones((1, x.shape[0]), x.dtype)
    return jnp.matmul(ones, x.reshape(x.shape[0], -1), precision="highest").reshape(1, *x.shape[1:])


blocked.defvjp(_blocked_fwd, _blocked_bwd)


def first_key_share(q_bkgth, k_bksh, v_bksh, mask_bts, bias_nd, softcap, window, causal):
    """exp(l_0 - max l) / z, each query's weight of the first key, [B, K, G, T, 1]."""
    known = (softcap, window, causal)
    largest, total = _blocked_fwd(q_bkgth, k_bksh, v_bksh, mask_bts, None, bias_nd, *known)[1][-2:]
    rows, first = slice(0, q_bkgth.shape[3]), slice(0, 1)
    block = _rows_of(rows, first, {"q": q_bkgth}, None, bias_nd, mask_bts)
    logits, _ = _block_logits(
        q_bkgth, k_bksh[:, :, first], block["mask"], softcap, block.get("bias")
    )
    return jnp.exp(logits - largest) / total
