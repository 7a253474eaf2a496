"""Next-token cross-entropy, chunked, with its own backward pass.

    l = z, or cap tanh(z / cap) under a soft-cap,  z = h K        (float32)
    NLL = logsumexp(l) - l_y
    dNLL/dz = (softmax(l) - onehot(y)) (1 - (l / cap)^2)          (the last factor under a soft-cap)

Logits exist for one chunk of rows at a time, and only for targets: if few positions are targets
(short answers after long prompts), the head's cost is proportional to their number. When the sum is
differentiated, the gradient is computed together with the value (three products, not four, because
no logits are computed twice) and only scaled by the upstream cotangent later. dK is accumulated in
float32 for any kernel dtype.

On a mesh every device processes its rows: chunks of all rows or of V would gather every token's
state or the whole embedding.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ffn_heterogeneity.models.causal_lm import platform_of
from ffn_heterogeneity.models.linear import turned
from ffn_heterogeneity.wording import check_choice, check_number

# Float32 logits of one chunk, by platform. On accelerators a chunk needs about a thousand tokens
# before its products outweigh the read and write of the float32 dK; a CPU prefers its caches.
CHUNK_BYTES = 2**30
CHUNK_BYTES_CPU = 2**27
# Rows of a chunk's part below which a separate loop does not pay.
FEW_ROWS = 16
# Rows from which turning the float32 gradient of a tied kernel, [V, D], costs less than it gains.
MANY_ROWS = 1024
LAYOUTS = ("vd", "dv")
# How a mesh shards the kernel, as in parallel.partition.
KERNEL_SPECS = {"vd": PartitionSpec("tensor", "fsdp"), "dv": PartitionSpec("fsdp", "tensor")}


class NLLSums(NamedTuple):
    """Sums over target positions; `total` alone is differentiable.

    Attributes:
      total: sum of the NLL in nats, float32 (float64 for float64 inputs).
      count: number of target positions, float32.
      correct: number of them whose target has the largest logit, float32.
    """

    total: jax.Array
    count: jax.Array
    correct: jax.Array


class _Static(NamedTuple):
    layout: str
    softcap: float | None
    chunk: int
    kernel_trainable: bool
    mesh: Mesh | AbstractMesh | None


def chunked_nll(
    hidden_btd: jax.Array,
    kernel: jax.Array,
    targets_bt: jax.Array,
    mask_bt: jax.Array | None = None,
    *,
    layout: str,
    softcap: float | None = None,
    chunk: int | None = None,
    kernel_trainable: bool = True,
    mesh: Mesh | AbstractMesh | None = None,
) -> NLLSums:
    """Sum of -log p(target) over the masked-in positions, without an array [B, T, V].

    Args:
      hidden_btd: final hidden states in the compute dtype (float32 or bfloat16).
      kernel: [V, D] for layout "vd" (tied embedding), [D, V] for "dv"; it is cast to the compute
        dtype, and its gradient has the kernel's dtype.
      targets_bt: int32 token ids; ignored where the mask is False.
      mask_bt: True where the target counts; None: everywhere.
      softcap: logits become cap tanh(logits / cap).
      chunk: positions of T per chunk; None: the largest number whose float32 logits fit in
        CHUNK_BYTES (CHUNK_BYTES_CPU on a CPU), on every device of the mesh.
      mesh: with axes data, fsdp, tensor: rows are sharded over the first two, and each device
        computes its rows' loss with the whole kernel (its share of the vocabulary over `tensor`).
        The kernel is gathered once and its gradient reduced once, for any number of chunks.
      kernel_trainable: False skips dK (it is returned as 0). A kernel that is not differentiated
        (a frozen head) is detected without it.

    Raises:
      ValueError: shapes that do not fit, an unknown layout, softcap or chunk out of range.
    """
    static, mask_bt = _prepare(
        hidden_btd, kernel, targets_bt, mask_bt, layout, softcap, chunk, kernel_trainable, mesh
    )
    targets_bt = jnp.asarray(targets_bt)
    # The count depends only on the mask: if only it is used, nothing else is computed.
    count = jnp.sum(mask_bt, dtype=jnp.float32)
    sums: Any = _nll(hidden_btd, kernel, targets_bt, mask_bt, static)
    total, correct = sums
    return NLLSums(total, count, correct)


def _prepare(
    hidden_btd, kernel, targets_bt, mask_bt, layout, softcap, chunk, kernel_trainable, mesh=None
):
    check_choice("layout", layout, LAYOUTS)
    if hidden_btd.ndim != 3 or kernel.ndim != 2:
        raise ValueError(f"hidden {hidden_btd.shape} must be [B, T, D], kernel {kernel.shape} 2-D")
    if kernel.shape[layout.index("d")] != hidden_btd.shape[2]:
        raise ValueError(f"kernel {kernel.shape} in layout {layout!r}, hidden {hidden_btd.shape}")
    if mask_bt is None:
        mask_bt = jnp.ones(targets_bt.shape, bool)
    for what, shape in (("targets", targets_bt.shape), ("mask", mask_bt.shape)):
        if shape != hidden_btd.shape[:2]:
            raise ValueError(f"{what} {shape} do not fit hidden {hidden_btd.shape}")
    if softcap is not None:
        check_number("softcap", softcap, "(0, inf), or None")
    batch, time, _ = hidden_btd.shape
    if chunk is None:
        size = CHUNK_BYTES_CPU if platform_of(mesh) == "cpu" else CHUNK_BYTES
        size *= 1 if mesh is None else mesh.size
        chunk = max(1, size // (4 * batch * kernel.shape[layout.index("v")]))
        # Equal chunks: the fewest that fit, none of them mostly empty.
        chunk = -(-time // -(-time // chunk))
    check_number("chunk", chunk, "[1, inf)")
    if mesh is not None and mesh.size == 1:
        mesh = None
    static = _Static(layout, softcap, min(chunk, time), kernel_trainable, mesh)
    return static, mask_bt.astype(bool)


class _Rows(NamedTuple):
    """The positions [B, T] as rows, targets first.

    Attributes:
      order: [B * T + C], the position of each row; 0 beyond the last.
      place: [B * T], the row of each position: the inverse of `order`.
      number: number of targets.
      size: C, rows per chunk.
      stop: the first row that need not be visited.
    """

    order: jax.Array
    place: jax.Array
    number: jax.Array
    size: int
    stop: jax.Array | int

    def cut(self, start, size, hidden_btd, targets_bt):
        """(states [n, D], targets [n], whether they are targets [n]) of rows from `start` on."""
        at = lax.dynamic_slice_in_dim(self.order, start, size)
        states = hidden_btd.reshape(-1, hidden_btd.shape[-1])[at]
        return states, targets_bt.reshape(-1)[at], start + jnp.arange(size) < self.number

    def fold(self, body, zeros):
        """Fold `carry = body(start, size, carry)` over chunks, and over eighths for the rest.

        The first chunk has no carry: body(0, size, None) need not write `zeros()` and add to them.
        If an eighth would be few rows, the rest is a chunk too: fewer programs to compile.
        """

        def over(number, start, size, carry):
            """Fold over `number` parts of `size` rows from `start` on."""
            return lax.fori_loop(0, number, lambda i, c: body(start + i * size, size, c), carry)

        size, eighth = self.size, self.size // 8
        if eighth < FEW_ROWS:
            return over(-(-self.stop // size), 0, size, zeros())
        chunks = (self.stop + eighth - 1) // size
        carry = lax.cond(chunks > 0, lambda: body(0, size, None), zeros)
        carry = over(chunks - 1, size, size, carry)
        start = chunks * size
        return over(-((start - self.stop) // eighth), start, eighth, carry)


def _rows(mask_bt, static) -> _Rows:
    targets_n = mask_bt.reshape(-1)
    size = min(static.chunk * mask_bt.shape[0], targets_n.size)
    order = jnp.pad(jnp.argsort(~targets_n, stable=True), (0, size))
    number = jnp.sum(targets_n, dtype=jnp.int32)
    others = number + jnp.cumsum(~targets_n, dtype=jnp.int32)
    place = jnp.where(targets_n, jnp.cumsum(targets_n, dtype=jnp.int32), others) - 1
    # Devices that share a vocabulary must take the same steps.
    shared = static.mesh is not None and static.mesh.shape["tensor"] > 1
    return _Rows(order, place, number, size, targets_n.size if shared else number)


def _logits(h_nd, kernel, static):
    """[C, V] float32, soft-capped."""
    wide = jnp.promote_types(h_nd.dtype, jnp.float32)
    equation = f"nd,{static.layout}->nv"
    logits_nv = jnp.einsum(equation, h_nd, kernel, preferred_element_type=wide)
    if static.softcap is None:
        return logits_nv
    return static.softcap * jnp.tanh(logits_nv / static.softcap)


def _log_z(logits_nv):
    """(logsumexp, max) over the vocabulary."""
    top_n = jnp.max(logits_nv, axis=-1)
    z_n = jnp.sum(jnp.exp(logits_nv - top_n[:, None]), axis=-1)
    return jnp.log(z_n) + top_n, top_n


def _chunk_loss(h_nd, kernel, y_n, mask_n, static):
    """(NLL sum, number correct, logits, logsumexp) of a chunk."""
    logits_nv = _logits(h_nd, kernel, static)
    log_z_n, top_n = _log_z(logits_nv)
    # A target outside the vocabulary reads as NaN, which stops a training run.
    places_n1 = jnp.where(mask_n, y_n, 0)[:, None]
    target_n = jnp.take_along_axis(logits_nv, places_n1, axis=-1, mode="fill")[:, 0]
    total = jnp.sum(jnp.where(mask_n, log_z_n - target_n, 0))
    correct = jnp.sum(mask_n & (target_n >= top_n), dtype=jnp.float32)
    return total, correct, logits_nv, log_z_n


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _nll(hidden_btd, kernel, targets_bt, mask_bt, static):
    kernel = kernel.astype(hidden_btd.dtype)
    return _over_mesh(_sums, static, False)(hidden_btd, kernel, targets_bt, mask_bt)


def _sums(hidden_btd, kernel, targets_bt, mask_bt, static):
    """(NLL sum, number correct)."""
    rows = _rows(mask_bt, static)

    def body(start, size, carry):
        h_nd, y_n, mask_n = rows.cut(start, size, hidden_btd, targets_bt)
        return _added(carry, _chunk_loss(h_nd, kernel, y_n, mask_n, static)[:2])

    return rows.fold(body, lambda: _zero_sums(hidden_btd))


def _added(carry, sums):
    """The sums of the chunks up to this one; `carry`: those before it, None for the first."""
    return sums if carry is None else jax.tree.map(jnp.add, carry, sums)


def _zero_sums(hidden_btd):
    wide = jnp.promote_types(hidden_btd.dtype, jnp.float32)
    return jnp.zeros((), wide), jnp.zeros((), jnp.float32)


def _nll_fwd(hidden_btd, kernel, targets_bt, mask_bt, static):
    # With symbolic_zeros each argument has a flag whether it is differentiated.
    trainable = static.kernel_trainable and kernel.perturbed
    hidden_btd, kernel, targets_bt, mask_bt = (
        argument.value for argument in (hidden_btd, kernel, targets_bt, mask_bt)
    )
    function = _sums_and_gradients if trainable else _sums_and_d_hidden
    total, correct, d_hidden_btd, d_kernel = _over_mesh(function, static, trainable)(
        hidden_btd, kernel.astype(hidden_btd.dtype), targets_bt, mask_bt
    )
    # An empty array carries the kernel's dtype: residuals must be arrays.
    return (total, correct), (d_hidden_btd, d_kernel, jnp.zeros((0,), kernel.dtype))


def _sums_and_gradients(hidden_btd, cast, targets_bt, mask_bt, static, trainable=True):
    """(NLL sum, number correct, its gradients by the hidden states and, float32, the kernel)."""
    dtype = hidden_btd.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    rows = _rows(mask_bt, static)
    # A CPU's bfloat16 units support no product with a transposed left operand (`wide_product`), and
    # float32 ones take up to twice as long if that operand is the larger: so the narrow states are
    # transposed, not the logits over the vocabulary. This turns the gradient of a tied kernel.
    tied = static.layout == "vd"
    gains = dtype == jnp.bfloat16 or not tied or rows.place.size >= MANY_ROWS
    turn = trainable and gains and platform_of(static.mesh) == "cpu"
    across = turn and tied

    def body(start, size, carry):
        d_rows, before = (nothing(), None) if carry is None else carry
        h_nd, y_n, mask_n = rows.cut(start, size, hidden_btd, targets_bt)
        more, right, logits_nv, log_z_n = _chunk_loss(h_nd, cast, y_n, mask_n, static)
        d_nv = _d_logits(logits_nv, log_z_n, y_n, mask_n, static).astype(dtype)
        d_h_nd = jnp.einsum(f"nv,{static.layout}->nd", d_nv, cast, preferred_element_type=wide)
        d_rows = lax.dynamic_update_slice_in_dim(d_rows, d_h_nd.astype(dtype), start, 0)
        d_kernel = jnp.zeros((), wide)
        if turn:
            d_kernel = jnp.dot(turned(h_nd), d_nv, preferred_element_type=wide)
        elif trainable:
            equation = f"nv,nd->{static.layout}"
            d_kernel = jnp.einsum(equation, d_nv, h_nd, preferred_element_type=wide)
        return d_rows, _added(before, (more, right, d_kernel))

    def nothing():
        return jnp.zeros((rows.order.size, hidden_btd.shape[-1]), dtype)

    def zeros():
        shape = cast.shape[:: -1 if across else 1] if trainable else ()
        return nothing(), (*_zero_sums(hidden_btd), jnp.zeros(shape, wide))

    d_rows, (total, correct, d_kernel) = rows.fold(body, zeros)
    d_kernel = d_kernel.T if across else d_kernel
    return total, correct, d_rows[rows.place].reshape(hidden_btd.shape), d_kernel


_sums_and_d_hidden = functools.partial(_sums_and_gradients, trainable=False)


def _over_mesh(function, static, trainable):
    """Run `function` on every device's rows, and add up its sums and the kernel's gradient.

    The compiler shards the vocabulary over `tensor`.
    """
    function = functools.partial(function, static=static)
    if static.mesh is None:
        return function
    along = ("data", "fsdp")
    rows, replicated = PartitionSpec(along), PartitionSpec()

    def local(*arguments):
        total, correct, *gradients = function(*arguments)
        if trainable:
            gradients[1] = gradients[1][None]
        return total[None], correct[None], *gradients

    out = (rows, rows)
    if function.func is not _sums:
        out += (rows, rows if trainable else replicated)
    mapped = jax.shard_map(
        local,
        mesh=static.mesh,
        in_specs=(rows, replicated, rows, rows),
        out_specs=out,
        axis_names=set(along),
        check_vma=False,
    )

    def together(*arguments):
        total, correct, *gradients = mapped(*arguments)
        if trainable:
            # The devices' parts, [parts, ...]: their sum is one reduction, directly to the
            # optimizer's sharding. (XLA does not reduce inside, where `tensor` is automatic.)
            place = NamedSharding(static.mesh, KERNEL_SPECS[static.layout])
            gradients[1] = lax.with_sharding_constraint(jnp.sum(gradients[1], 0), place)
        return jnp.sum(total), jnp.sum(correct), *gradients

    return together


def _d_logits(logits_nv, log_z_n, y_n, mask_n, static):
    """dNLL/dz of a chunk, float32; 0 where the mask is False."""
    p_nv = jnp.exp(logits_nv - log_z_n[:, None])
    hit_nv = lax.broadcasted_iota(y_n.dtype, p_nv.shape, 1) == y_n[:, None]
    d_nv = jnp.where(hit_nv, p_nv - 1, p_nv)
    if static.softcap is not None:
        d_nv = d_nv * (1 - jnp.square(logits_nv / static.softcap))
    return jnp.where(mask_n[:, None], d_nv, 0)


def _nll_bwd(static, residuals, cotangents):
    d_hidden_btd, d_kernel, like = residuals
    scale = 0.0 if isinstance(cotangents[0], SymbolicZero) else cotangents[0]
    d_hidden_btd = (d_hidden_btd * scale).astype(d_hidden_btd.dtype)
    if d_kernel.ndim == 0:
        return d_hidden_btd, None, None, None
    return d_hidden_btd, (d_kernel * scale).astype(like.dtype), None, None


_nll.defvjp(_nll_fwd, _nll_bwd, symbolic_zeros=True)
