"""Products of rows, sorted by expert, with the kernels of their experts.

    y_r = x_r K[e(r)],    x [R, in], K [E, in, out]

Three implementations with equal results: "dense" (every row times every kernel, then a choice: the
reference), "blocks" (consecutive rows of one expert, block by block) and "ragged"
(`jax.lax.ragged_dot`). On CPUs `ragged_dot` expands to E dense products.

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

DISPATCHES = ("dense", "blocks", "ragged")
# Larger blocks waste more rows at the end of an expert's; smaller ones multiply more slowly.
LARGEST = 128


def chosen_dispatch(name: str, platform: str) -> str:
    """The implementation; "auto" is "ragged" on TPUs, else "blocks"."""
    if name == "auto":
        return "ragged" if platform == "tpu" else "blocks"
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


def grouping(expert_n: jax.Array, experts: int) -> Groups:
    """Sort rows by expert; those of an expert >= `experts` come last and are not counted."""
    order = jnp.argsort(expert_n, stable=True)
    sizes_e = jnp.sum(expert_n[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    block = block_size(len(expert_n), experts)
    return Groups(jnp.pad(order, (0, block)), jnp.argsort(order), sizes_e)


def block_size(rows: int, experts: int) -> int:
    """A power of two: half of an expert's mean number of rows, at most `LARGEST`."""
    return min(LARGEST, 1 << max(0, -(-rows // (2 * experts)) - 1).bit_length())


def grouped_product(
    x_ri: jax.Array, kernel_eio: jax.Array, groups: Groups, dispatch: str
) -> jax.Array:
    """Multiply each row by its expert's kernel, [R, out] in x's dtype; sums are at least float32.

    Args:
      x_ri: rows in the order of `groups`, R = N + block.
      dispatch: one of `DISPATCHES`.
    """
    x_ri, kernel_eio, sizes_e = map(jnp.asarray, (x_ri, kernel_eio, groups.sizes))
    if dispatch == "blocks":
        return _blocks(x_ri, kernel_eio, sizes_e, len(groups.order) - len(groups.inverse))
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


# ---- "blocks"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocks(x_ri: jax.Array, kernel_eio: jax.Array, sizes_e: jax.Array, size: int) -> jax.Array:
    return named(_forward(x_ri, kernel_eio, sizes_e, size), WIDE_PRODUCT)


def _blocks_bwd(size: int, residuals: tuple, g_ro: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_ri, kernel_eio, sizes_e = residuals
    dx = _forward(g_ro, kernel_eio, sizes_e, size, transposed=True)
    return dx, _kernel_gradient(x_ri, g_ro, sizes_e, size).astype(kernel_eio.dtype), None


_blocks.defvjp(
    lambda x, w, sizes, size: (_blocks.fun(x, w, sizes, size), (x, w, sizes)), _blocks_bwd
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
        kernel = _for_products(kernel) if transposed else kernel

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


def _for_products(kernel: jax.Array) -> jax.Array:
    """The transposed kernel: in half precision in memory, as in `linear.wide_product`."""
    return turned(kernel) if kernel.dtype.itemsize < 4 else kernel.T


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
            x_ib = _for_products(x_bi)
            return total + _product(x_ib, g_bo)

        blocks = -(-(end - first) // size)
        total = jax.lax.fori_loop(0, blocks, block, jnp.zeros_like(sums[0]))
        return jax.lax.dynamic_update_index_in_dim(sums, total, expert, axis=0)

    return _each_expert(sizes_e, sums, step)
