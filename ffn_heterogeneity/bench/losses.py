"""What the losses cost, measured: NUCL against the paper's listing, chunked against plain NLL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.bench.timing import (
    figures,
    ratio_interval,
    table_of_figures,
    table_of_ratios,
    take_turns,
    temporary_bytes,
)
from ffn_heterogeneity.losses.nll import chunked_nll
from ffn_heterogeneity.losses.nucl import nucl
from ffn_heterogeneity.losses.nucl_listing import compute_nucl_listing
from ffn_heterogeneity.losses.nucl_rows import VARIANTS

ALPHA = 1e-3


def benchmark_nucl(
    shape: Sequence[int] = (26, 2304, 576), variants: Sequence[str] = ("mstd",), rounds: int = 15
) -> dict[str, Any]:
    """Time and memory that NUCL adds to a donated SGD update W <- W - lr (g + alpha dNUCL/dW).

    Prints tables and returns them and their figures: per program "median_ms", "fastest_ms",
    "added_ms" and "temporary_mb"; "floor_ms", a bare row sum (one read of W); per variant
    "listing_over_closed_form" and "added_over_floor", each [ratio, low, high] of added times.

    Args:
      shape: [layers, m, n] of the float32 stack of outgoing kernels.
      variants: of "ent", "gini", "mstd".
      rounds: timed rounds.
    """
    updates = {"update alone": donated_update()}
    for variant in variants:
        updates[f"{variant} listing"] = donated_update(functools.partial(_listing, variant))
        updates[f"{variant} closed form"] = donated_update(functools.partial(nucl, variant=variant))
    w = 0.02 * jax.random.normal(jax.random.key(0), tuple(shape), jnp.float32)
    gradient, alpha = 0.1 * w, jnp.float32(ALPHA)
    compiled = {name: one.lower(w, gradient, alpha).compile() for name, one in updates.items()}
    row_sum = jax.jit(_row_sum).lower(w).compile()
    holder = {"w": w}

    def turn(name: str) -> jax.Array:
        holder["w"] = compiled[name](holder["w"], gradient, alpha)
        return holder["w"]

    turns = {name: functools.partial(turn, name) for name in compiled}
    seconds = take_turns(turns | {"row sum": lambda: row_sum(holder["w"])}, rounds)
    base, floor = seconds["update alone"], seconds["row sum"]
    programs = {name: figures(seconds[name], one) for name, one in compiled.items()}
    for row in programs.values():
        row["added_ms"] = row["median_ms"] - programs["update alone"]["median_ms"]
    floor_ms, platform = 1e3 * float(np.median(floor)), jax.default_backend()
    title = f"donated SGD update of W {list(shape)} float32, {platform}; "
    title += f"row sum (the floor): {floor_ms:.2f} ms"
    tables, ratios = [table_of_figures(title, programs)], {}
    for variant in variants:
        listing, closed = seconds[f"{variant} listing"], seconds[f"{variant} closed form"]
        ratios[variant] = {
            "listing_over_closed_form": ratio_interval(listing, closed, base),
            "added_over_floor": ratio_interval(closed - base, floor),
        }
        named = {f"{variant}, added: {name}": one for name, one in ratios[variant].items()}
        tables.append(table_of_ratios(named))
    return {
        "rounds": rounds,
        "floor_ms": floor_ms,
        "programs": programs,
        "tables": tables,
        **ratios,
    }


def donated_update(loss: Callable[[jax.Array], jax.Array] | None = None) -> Any:
    """Jitted (W, gradient, alpha) -> W after a step of SGD on the gradient plus alpha * loss's."""

    @functools.partial(jax.jit, donate_argnums=0)
    def update(w, gradient, alpha):
        if loss is not None:
            gradient = gradient + jax.grad(lambda w: alpha * loss(w))(w)
        return w - 1e-3 * gradient

    return update


def _listing(variant: str, w: jax.Array) -> jax.Array:
    return compute_nucl_listing(w)[VARIANTS.index(variant)]


def _row_sum(w: jax.Array) -> jax.Array:
    return jnp.sum(w, axis=-1)


def benchmark_nll(
    shape: Sequence[int] = (4, 512, 576, 49_152),
    rounds: int = 5,
    memory_shape: Sequence[int] = (16, 1024, 2304, 256_000),
) -> dict[str, Any]:
    """Value and gradient of the NLL of a tied head: chunked against plain, time and memory.

    Prints tables and returns them and their figures: per program "median_ms", "fastest_ms",
    "temporary_mb"; "plain_over_chunked" and "chunked_over_products" (three bare products of the
    same size, the floor) as [ratio, low, high]; "targets_one_in_...", the time relative to that
    with all positions as targets; "gib", the temporary memory of the chunked
    form, compiled and not run, for `memory_shape` in bfloat16 with a soft-cap of 30.

    Args:
      shape: [B, T, D, V], float32.
      rounds: timed rounds.
    """
    b, t, d, v = shape
    keys = jax.random.split(jax.random.key(0), 3)
    arguments = (
        jax.random.normal(keys[0], (b, t, d)),
        0.02 * jax.random.normal(keys[1], (v, d)),
        jax.random.randint(keys[2], (b, t), 0, v),
    )
    functions = {
        "plain": jax.value_and_grad(plain_nll, argnums=(0, 1)),
        "chunked": jax.value_and_grad(functools.partial(_chunked, layout="vd"), argnums=(0, 1)),
        "three products": _products,
    }
    compiled = {name: jax.jit(f).lower(*arguments).compile() for name, f in functions.items()}
    turns = {name: functools.partial(one, *arguments) for name, one in compiled.items()}
    masked = jax.jit(functions["chunked"]).lower(*arguments, jnp.ones((b, t), bool)).compile()
    for share in (10, 100):
        mask = jax.random.permutation(keys[2], jnp.arange(b * t) < b * t // share).reshape(b, t)
        turns[f"1 target in {share}"] = functools.partial(masked, *arguments, mask)
        compiled[f"1 target in {share}"] = masked
    seconds = take_turns(turns, rounds)
    programs = {name: figures(seconds[name], one) for name, one in compiled.items()}
    ratios = {
        "plain_over_chunked": ratio_interval(seconds["plain"], seconds["chunked"]),
        "chunked_over_products": ratio_interval(seconds["chunked"], seconds["three products"]),
    }
    for share in (10, 100):
        few = seconds[f"1 target in {share}"]
        ratios[f"targets_one_in_{share}"] = ratio_interval(few, seconds["chunked"])
    gib = nll_temporary_bytes(*memory_shape) / 2**30
    platform = jax.default_backend()
    title = f"value and gradient of the NLL, [B, T, D, V] = {list(shape)} float32, {platform}; "
    title += f"chunked, compiled only, {list(memory_shape)} bfloat16: {gib:.2f} GiB temporary"
    tables = [table_of_figures(title, programs), table_of_ratios(ratios)]
    return {"programs": programs, "gib": gib, "tables": tables, **ratios}


def plain_nll(hidden_btd: jax.Array, kernel_vd: jax.Array, targets_bt: jax.Array) -> jax.Array:
    """The sum of -log p(target) from whole logits: what chunking replaces."""
    logits_btv = jnp.einsum(
        "btd,vd->btv", hidden_btd, kernel_vd, preferred_element_type=jnp.float32
    )
    log_p_btv = jax.nn.log_softmax(logits_btv, axis=-1)
    return -jnp.sum(jnp.take_along_axis(log_p_btv, targets_bt[..., None], axis=-1))


def _chunked(hidden_btd, kernel_vd, targets_bt, mask_bt=None, **settings) -> jax.Array:
    return chunked_nll(hidden_btd, kernel_vd, targets_bt, mask_bt, **settings).total


def _products(hidden_btd, kernel_vd, _):
    hidden_nd = hidden_btd.reshape(-1, hidden_btd.shape[-1])
    logits_nv = hidden_nd @ kernel_vd.T
    return logits_nv @ kernel_vd, logits_nv.T @ hidden_nd


def nll_temporary_bytes(
    batch: int, time_steps: int, d_model: int, vocab: int, layout: str = "vd",
    chunk: int | None = None,
) -> int:  # fmt: skip
    """Temporary bytes of value and gradient of the chunked NLL in bfloat16; nothing is run."""
    loss = functools.partial(_chunked, layout=layout, softcap=30.0, chunk=chunk)
    shapes = (
        ((batch, time_steps, d_model), jnp.bfloat16),
        ((vocab, d_model) if layout == "vd" else (d_model, vocab), jnp.bfloat16),
        ((batch, time_steps), jnp.int32),
        ((batch, time_steps), jnp.bool_),
    )
    arguments = [jax.ShapeDtypeStruct(*one) for one in shapes]
    return temporary_bytes(jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile())
