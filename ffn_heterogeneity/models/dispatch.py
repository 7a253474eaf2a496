"""Products of rows, sorted by expert, with the kernels of their experts.

    y_r = x_r K[e(r)],    x [R, in], K [E, in, out]

Four implementations with equal results: "dense" (every row times every kernel, then a choice: the
reference), "blocks" (consecutive rows of one expert, block by block), "batched" (all blocks at
once, each with a copy of its kernel) and "ragged" (`jax.lax.ragged_dot`). On CPUs and GPUs
`ragged_dot` expands to E dense products; on GPUs loops whose length is not known cost too much
(docs/performance.md).

Cost of "blocks": an expert's rows are padded to whole blocks in the loop, not in memory; only
experts that have rows are read. Rows behind the last expert's belong to none: `grouping` adds
`block` of them, into which the last block reaches; the products of those before are 0.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ffn_heterogeneity.models.kept import named
from ffn_heterogeneity.models.linear import WIDE_PRODUCT, turned
from ffn_heterogeneity.wording import check_choice

DISPATCHES = ("dense", "blocks", "batched", "ragged")
DEFAULTS = {"cpu": "blocks", "tpu": "ragged"}  # by platform; elsewhere (GPUs) "batched"
# Larger blocks waste more rows at the end of an expert's; smaller ones multiply more slowly, and
# batched ones need more copies of kernels.
LARGEST = {"blocks": 128, "batched": 512}


def chosen_dispatch(name: str, platform: str) -> str:
    """The implementation; "auto" is the platform's of `DEFAULTS`."""
    if name == "auto":
        return DEFAULTS.get(platform, "batched")
    check_choice("dispatch", name, DISPATCHES)
    return name


class Groups(NamedTuple):
    """The order of N rows by expert.

    Attributes:
      order: int32 [N + block], the rows' places; the last `block` are any.
      inverse: int32 [N], each row's place in that order.
      sizes: int32 [E], the number of rows of each expert.
    """

    order: jax.Array
    inverse: jax.Array
    sizes: jax.Array


def grouping(expert_n: jax.Array, experts: int, dispatch: str = "blocks") -> Groups:
    """Sort rows by expert; those of an expert >= `experts` come last and are not counted."""
    order = jnp.argsort(expert_n, stable=True)
    sizes_e = jnp.sum(expert_n[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    block = block_size(len(expert_n), experts, dispatch)
    return Groups(jnp.pad(order, (0, block)), jnp.argsort(order), sizes_e)


def block_size(rows: int, experts: int, dispatch: str = "blocks") -> int:
    """A power of two: half of an expert's mean number of rows, at most that of `LARGEST`.

    1 if the dispatch has no blocks.
    """
    return min(LARGEST.get(dispatch, 1), 1 << max(0, -(-rows // (2 * experts)) - 1).bit_length())


def grouped_product(
    x_ri: jax.Array, kernel_eio: jax.Array, groups: Groups, dispatch: str
) -> jax.Array:
    """Multiply each row by its expert's kernel, [R, out] in x's dtype; sums are at least float32.

    Args:
      x_ri: rows in the order of `groups`, R = N + block.
      dispatch: one of `DISPATCHES`.
    """
    x_ri, kernel_eio, sizes_e = map(jnp.asarray, (x_ri, kernel_eio, groups.sizes))
    if dispatch in ("blocks", "batched"):
        size = len(groups.order) - len(groups.inverse)
        return _blocks(x_ri, kernel_eio, sizes_e, size, dispatch == "batched")
    kernel_eio = kernel_eio.astype(x_ri.dtype)
    wide = jnp.promote_types(x_ri.dtype, jnp.float32)
    if dispatch == "ragged":
        y_ro = jax.lax.ragged_dot(x_ri, kernel_eio, sizes_e, preferred_element_type=wide)
        return y_ro.astype(x_ri.dtype)
    expert_r = jnp.searchsorted(jnp.cumsum(sizes_e), jnp.arange(len(x_ri)), side="right")
    y_ero = jnp.einsum("ri,eio->ero", x_ri, kernel_eio, preferred_element_type=wide)
    own_er = expert_r == jnp.arange(len(kernel_eio))[:, None]
    return jnp.sum(jnp.where(own_er[..., None], y_ero, 0), axis=0).astype(x_ri.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def permuted(x_nd: jax.Array, order: jax.Array, inverse: jax.Array, copies: int) -> jax.Array:
    """x[order // copies]: rows in another order, each of x's rows `copies` times.

    Its gradient is a gather by `inverse` and a sum, where JAX would scatter.
    """
    return x_nd[order // copies]


def _permuted_bwd(copies: int, inverse: jax.Array, g: jax.Array) -> tuple:
    rows = g[inverse].reshape(-1, copies, g.shape[-1])
    wide = jnp.promote_types(g.dtype, jnp.float32)
    return jnp.sum(rows, axis=1, dtype=wide).astype(g.dtype), None, None


permuted.defvjp(
    lambda x, order, inverse, copies: (permuted.fun(x, order, inverse, copies), inverse),
    _permuted_bwd,
)


# ---- "blocks" and "batched"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _blocks(
    x_ri: jax.Array, kernel_eio: jax.Array, sizes_e: jax.Array, size: int, batched: bool
) -> jax.Array:
    forward = _batched_forward if batched else _forward
    return named(forward(x_ri, kernel_eio, sizes_e, size), WIDE_PRODUCT)


def _blocks_bwd(size: int, batched: bool, residuals: tuple, g_ro: jax.Array) -> tuple:
    x_ri, kernel_eio, sizes_e = residuals
    forward = _batched_forward if batched else _forward
    gradient = _batched_kernel_gradient if batched else _kernel_gradient
    dx = forward(g_ro, kernel_eio, sizes_e, size, transposed=True)
    return dx, gradient(x_ri, g_ro, sizes_e, size).astype(kernel_eio.dtype), None


_blocks.defvjp(
    lambda x, w, sizes, *how: (_blocks.fun(x, w, sizes, *how), (x, w, sizes)), _blocks_bwd
)


def _each_expert(sizes_e: jax.Array, start: Any, step: Callable[..., Any]) -> Any:
    """Fold carry = step(expert, its first row, the row behind its last, carry) over experts.

    Only over experts with rows, in order: the weights of the others are not read.
    """
    ends = jnp.cumsum(sizes_e)
    used = jnp.argsort(sizes_e == 0, stable=True)

    def body(i: jax.Array, carry: Any) -> Any:
        expert = used[i]
        return step(expert, ends[expert] - sizes_e[expert], ends[expert], carry)

    return jax.lax.fori_loop(0, jnp.count_nonzero(sizes_e), body, start)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _forward(
    x_ri: jax.Array, kernel_eio: jax.Array, sizes_e: jax.Array, size: int, transposed: bool = False
) -> jax.Array:
    """[R, out]; with `transposed` the products with the transposed kernels.

    An expert's last block overlaps the next expert's rows, which are written after it.
    """

    def step(expert: jax.Array, first: jax.Array, end: jax.Array, y: jax.Array) -> jax.Array:
        kernel = jax.lax.dynamic_index_in_dim(kernel_eio, expert, keepdims=False)
        kernel = kernel.astype(x_ri.dtype)
        kernel = _transposed(kernel) if transposed else kernel

        def block(i: jax.Array, y: jax.Array) -> jax.Array:
            at = first + i * size
            product = _product(jax.lax.dynamic_slice_in_dim(x_ri, at, size), kernel)
            return jax.lax.dynamic_update_slice_in_dim(y, product.astype(y.dtype), at, axis=0)

        return jax.lax.fori_loop(0, -(-(end - first) // size), block, y)

    out = kernel_eio.shape[1 if transposed else 2]
    y = _each_expert(sizes_e, jnp.zeros((len(x_ri), out), x_ri.dtype), step)

    def clear(i: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(y, zeros, total + i * size, axis=0)

    total, zeros = jnp.sum(sizes_e), jnp.zeros((size, out), y.dtype)
    return jax.lax.fori_loop(0, -(-(len(y) - size - total) // size), clear, y)


def _transposed(matrix: jax.Array) -> jax.Array:
    """The transpose; in half precision in memory, for the reason in `linear.wide_product`."""
    return turned(matrix) if matrix.dtype.itemsize < 4 else matrix.T


def _kernel_gradient(x_ri: jax.Array, g_ro: jax.Array, sizes_e: jax.Array, size: int) -> jax.Array:
    """[E, in, out], at least float32: the sum of x^T g over each expert's rows."""
    wide = jnp.promote_types(x_ri.dtype, jnp.float32)
    sums = jnp.zeros((len(sizes_e), x_ri.shape[1], g_ro.shape[1]), wide)

    def step(expert: jax.Array, first: jax.Array, end: jax.Array, sums: jax.Array) -> jax.Array:
        def block(i: jax.Array, total: jax.Array) -> jax.Array:
            at = first + i * size
            own = (at + jnp.arange(size) < end)[:, None]
            # Both: 0 times the next expert's NaN would be NaN.
            x_bi, g_bo = (
                jnp.where(own, jax.lax.dynamic_slice_in_dim(rows, at, size), 0)
                for rows in (x_ri, g_ro)
            )
            return total + _product(_transposed(x_bi), g_bo)

        blocks = -(-(end - first) // size)
        total = jax.lax.fori_loop(0, blocks, block, jnp.zeros_like(sums[0]))
        return jax.lax.dynamic_update_index_in_dim(sums, total, expert, axis=0)

    return _each_expert(sizes_e, sums, step)


def _block_rows(sizes_e: jax.Array, rows: int, size: int) -> tuple[jax.Array, ...]:
    """Places of blocks and rows, for [R] rows of which the last `size` are no expert's.

    Returns:
      (the expert of each block [B], its rows [B, size], whether they are the expert's [B, size],
      the place of each row in [B * size], [R]; B * size if it has none).
    """
    blocks_e, ends = -(-sizes_e // size), jnp.cumsum(sizes_e)
    last = jnp.cumsum(blocks_e)
    count = (rows - size) // size + len(sizes_e)  # enough for any sizes
    expert_b = jnp.searchsorted(last, jnp.arange(count), side="right")
    expert_b = jnp.minimum(expert_b, len(sizes_e) - 1)
    in_expert = jnp.arange(count) - (last - blocks_e)[expert_b]
    first = (ends - sizes_e)[expert_b] + in_expert * size
    rows_bs = first[:, None] + jnp.arange(size)
    own_bs = (rows_bs < ends[expert_b][:, None]) & (jnp.arange(count) < last[-1])[:, None]
    expert_r = jnp.searchsorted(ends, jnp.arange(rows), side="right")
    safe_r = jnp.minimum(expert_r, len(sizes_e) - 1)
    place_r = (last - blocks_e)[safe_r] * size + jnp.arange(rows) - (ends - sizes_e)[safe_r]
    place_r = jnp.where(expert_r < len(sizes_e), place_r, count * size)
    return expert_b, jnp.minimum(rows_bs, rows - 1), own_bs, place_r


def _batched_forward(
    x_ri: jax.Array, kernel_eio: jax.Array, sizes_e: jax.Array, size: int, transposed: bool = False
) -> jax.Array:
    """The result of `_forward`, from one batched product."""
    expert_b, rows_bs, _, place_r = _block_rows(sizes_e, len(x_ri), size)
    wide = jnp.promote_types(x_ri.dtype, jnp.float32)
    kernel_bio = kernel_eio.astype(x_ri.dtype)[expert_b]
    equation = "bso,bio->bsi" if transposed else "bsi,bio->bso"
    y_bso = jnp.einsum(equation, x_ri[rows_bs], kernel_bio, preferred_element_type=wide)
    y_ro = y_bso.astype(x_ri.dtype).reshape(-1, y_bso.shape[-1])
    return y_ro.at[place_r].get(mode="fill", fill_value=0)


def _batched_kernel_gradient(
    x_ri: jax.Array, g_ro: jax.Array, sizes_e: jax.Array, size: int
) -> jax.Array:
    """The result of `_kernel_gradient`, from one batched product and sums over experts' blocks."""
    expert_b, rows_bs, own_bs, _ = _block_rows(sizes_e, len(x_ri), size)
    wide = jnp.promote_types(x_ri.dtype, jnp.float32)
    x_bsi, g_bso = (jnp.where(own_bs[..., None], rows[rows_bs], 0) for rows in (x_ri, g_ro))
    sums_bio = jnp.einsum("bsi,bso->bio", x_bsi, g_bso, preferred_element_type=wide)
    return jax.ops.segment_sum(sums_bio, expert_b, len(sizes_e), indices_are_sorted=True)
