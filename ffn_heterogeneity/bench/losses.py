"""The measured cost of the losses: NUCL against the paper's listing, chunked against plain NLL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.bench import timing
from ffn_heterogeneity.bench.timing import Interval, Questions, compare, ratio_interval
from ffn_heterogeneity.losses.cross_entropy import chunked_nll
from ffn_heterogeneity.losses.nucl import nucl
from ffn_heterogeneity.losses.nucl_listing import compute_nucl_listing
from ffn_heterogeneity.losses.nucl_rows import VARIANTS

ALPHA = 1e-3
NUCL_QUESTIONS: Questions = {
    "What does NUCL add to an update?": ("Times added to the update", r"(.* / .*)", r"W \[.*?(?=;)")
}
SIZE, SPENT = r"\[B.*(?=;)", "Times of the value and its gradient"
NLL_QUESTIONS: Questions = {
    "What does the loss cost beside bare products?": (SPENT, r"((?:plain|chunked) / .*)", SIZE),
    "What do few target positions save?": (SPENT, r"(1 target in .* / .*)", SIZE),
}


def benchmark_nucl(
    shape: Sequence[int] = (26, 2304, 576), variants: Sequence[str] = ("mstd",), rounds: int = 15
) -> dict[str, Any]:
    """Time and memory that NUCL adds to a donated SGD update W <- W - lr (g + alpha dNUCL/dW).

    Prints and returns what `compare` says of the update alone, with the paper's listing and with
    the closed form, and of a bare row sum (one read of W: the floor). Ratios are of added times.

    Args:
      shape: [layers, m, n] of the float32 stack of outgoing kernels.
      variants: of "ent", "gini", "mstd".
      rounds: timed rounds.
    """
    updates = {"update alone": donated_update()}
    for variant in variants:
        i = VARIANTS.index(variant)
        updates[f"{variant} listing"] = donated_update(lambda w, i=i: compute_nucl_listing(w)[i])
        updates[f"{variant} closed form"] = donated_update(functools.partial(nucl, variant=variant))
    w = 0.02 * jax.random.normal(jax.random.key(0), tuple(shape), jnp.float32)
    gradient, alpha = 0.1 * w, jnp.float32(ALPHA)
    compiled = {name: one.lower(w, gradient, alpha).compile() for name, one in updates.items()}
    row_sum, held = jax.jit(lambda w: jnp.sum(w, axis=-1)).lower(w).compile(), [w]
    calls = {name: timing.stepping(x, held, gradient, alpha) for name, x in compiled.items()}

    def ratios(seconds: Mapping[str, np.ndarray]) -> dict[str, Interval]:
        base, floor, found = seconds["update alone"], seconds["row sum"], {}
        for variant in variants:
            listing, closed = seconds[f"{variant} listing"], seconds[f"{variant} closed form"]
            found[f"{variant}: listing / closed form"] = ratio_interval(listing, closed, base)
            found[f"{variant}: closed form / row sum"] = ratio_interval(closed - base, floor)
        return found

    compiled["row sum"], calls["row sum"] = row_sum, lambda: row_sum(held[0])
    title = f"donated SGD update of W {list(shape)} float32; ratios of what is added to it"
    return compare(title, compiled, calls, rounds, ratios)


def donated_update(loss: Callable[[jax.Array], jax.Array] | None = None) -> Any:
    """Jitted (W, gradient, alpha) -> (W after a step of SGD on gradient + alpha * loss's, {})."""

    @functools.partial(jax.jit, donate_argnums=0)
    def update(w, gradient, alpha):
        if loss is not None:
            gradient = gradient + jax.grad(lambda w, loss=loss: alpha * loss(w))(w)
        return w - 1e-3 * gradient, {}

    return update


def benchmark_nll(shape: Sequence[int] = (4, 512, 576, 49_152), rounds: int = 5) -> dict[str, Any]:
    """Value and gradient of the NLL of a tied head: chunked against plain, time and memory.

    Prints and returns what `compare` says of both, of three bare products of the same size (the
    floor), and of the chunked form where one position in 10 or in 100 is a target.

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
    calls = {name: functools.partial(one, *arguments) for name, one in compiled.items()}
    masked = jax.jit(functions["chunked"]).lower(*arguments, jnp.ones((b, t), bool)).compile()
    for share in (10, 100):
        mask = jax.random.permutation(keys[2], jnp.arange(b * t) < b * t // share).reshape(b, t)
        calls[f"1 target in {share}"] = functools.partial(masked, *arguments, mask)
        compiled[f"1 target in {share}"] = masked
    pairs = [("plain", "chunked"), ("chunked", "three products")]
    pairs += [(f"1 target in {share}", "chunked") for share in (10, 100)]
    title = f"value and gradient of the NLL, [B, T, D, V] = {list(shape)} float32"
    return compare(title, compiled, calls, rounds, timing.ratios_of(pairs, ratio_interval))


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
