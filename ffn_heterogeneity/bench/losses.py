"""What the losses cost, measured: NUCL against the paper's listing, chunked against plain NLL.

Every comparison is made inside one run: the programs take turns, round after round, so that a
machine that slows down slows all of them. Reported are medians, and ratios of medians with a 95%
bootstrap interval over rounds.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.losses.nll import chunked_nll
from ffn_heterogeneity.losses.nucl import nucl
from ffn_heterogeneity.losses.nucl_listing import compute_nucl_listing
from ffn_heterogeneity.losses.nucl_rows import VARIANTS

MEGABYTE = 1e6


def take_turns(programs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each program in each round, after one warm-up round."""
    from tqdm import tqdm

    seconds: dict[str, list[float]] = {name: [] for name in programs}
    # Shown between rounds, so never within what is measured; only on a terminal.
    for turn in tqdm(range(rounds + 1), desc="rounds", disable=None, file=sys.stderr):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: np.asarray(values) for name, values in seconds.items()}


def ratio_interval(
    numerator: np.ndarray, denominator: np.ndarray, base: np.ndarray | None = None, seed: int = 0
) -> tuple[float, float, float]:
    """(ratio of medians, 2.5% and 97.5% bootstrap bounds over rounds); `base` is taken off both.

    Infinite where the denominator's median is at or below the base's.
    """
    base = np.zeros_like(numerator) if base is None else base
    rows = np.stack([numerator, denominator, base])

    def ratio(rows):
        top, bottom, floor = np.median(rows, axis=-1)
        return np.where(bottom > floor, (top - floor) / np.maximum(bottom - floor, 1e-12), np.inf)

    picks = np.random.default_rng(seed).integers(0, rows.shape[1], (2000, rows.shape[1]))
    # method="nearest": interpolating between infinities would give NaN.
    low, high = np.percentile(ratio(rows[:, picks]), [2.5, 97.5], method="nearest")
    return float(ratio(rows)), float(low), float(high)


def paired_interval(
    numerator: np.ndarray, denominator: np.ndarray, seed: int = 0
) -> tuple[float, float, float]:
    """(median of the rounds' own ratios, 2.5% and 97.5% bootstrap bounds over rounds).

    For small differences: what moves the machine's speed from round to round falls out.
    """
    ratios = np.asarray(numerator) / np.asarray(denominator)
    picks = np.random.default_rng(seed).integers(0, len(ratios), (2000, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=-1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of temporary memory of a compiled program (beside inputs and outputs)."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def benchmark_nucl(
    shape: Sequence[int] = (26, 2304, 576),
    variants: Sequence[str] = ("mstd",),
    rounds: int = 15,
    alpha: float = 1e-3,
    seed: int = 0,
) -> dict[str, Any]:
    """Time and memory that NUCL adds to a donated SGD update W <- W - lr (g + alpha dNUCL/dW).

    Prints a table and returns its figures: per program "median_ms", "fastest_ms", "added_ms" and
    "temporary_mb";
    "floor_ms", a bare row sum (one read of W); per variant "listing_over_closed_form" and
    "added_over_floor", each [ratio, low, high] of added times.

    Args:
      shape: [layers, m, n] of the float32 stack of outgoing kernels.
      variants: of "ent", "gini", "mstd".
      rounds: timed rounds.
    """
    programs: dict[str, Any] = {"update alone": _update(None)}
    for variant in variants:
        index = VARIANTS.index(variant)
        programs[f"{variant} listing"] = _update(lambda w, i=index: compute_nucl_listing(w)[i])
        programs[f"{variant} closed form"] = _update(lambda w, v=variant: nucl(w, v))
    w = 0.02 * jax.random.normal(jax.random.key(seed), tuple(shape), jnp.float32)
    gradient, alpha = 0.1 * w, jnp.float32(alpha)
    compiled = {n: p.lower(w, gradient, alpha).compile() for n, p in programs.items()}
    row_sum = jax.jit(lambda w: jnp.sum(w, axis=-1)).lower(w).compile()
    held = {"w": w}

    def turn(name):
        held["w"] = compiled[name](held["w"], gradient, alpha)
        return held["w"]

    seconds = take_turns(
        {name: functools.partial(turn, name) for name in compiled}
        | {"row sum": lambda: row_sum(held["w"])},
        rounds,
    )
    base, floor = seconds["update alone"], seconds["row sum"]
    result: dict[str, Any] = {
        "shape": list(shape),
        "platform": jax.default_backend(),
        "rounds": rounds,
        "floor_ms": 1e3 * float(np.median(floor)),
        "programs": {name: _figures(seconds[name], compiled[name], base) for name in compiled},
    }
    for variant in variants:
        listing, closed = seconds[f"{variant} listing"], seconds[f"{variant} closed form"]
        result[variant] = {
            "listing_over_closed_form": ratio_interval(listing, closed, base),
            "added_over_floor": ratio_interval(closed - base, floor),
        }
    _print_nucl(result, variants)
    return result


def _update(loss: Callable | None):
    @functools.partial(jax.jit, donate_argnums=0)
    def update(w, gradient, alpha):
        if loss is not None:
            gradient = gradient + jax.grad(lambda w: alpha * loss(w))(w)
        return w - 1e-3 * gradient

    return update


def _figures(seconds, compiled, base=None):
    figures = {
        "median_ms": 1e3 * float(np.median(seconds)),
        "fastest_ms": 1e3 * float(np.min(seconds)),
        "temporary_mb": temporary_bytes(compiled) / MEGABYTE,
    }
    if base is not None:
        figures["added_ms"] = 1e3 * float(np.median(seconds) - np.median(base))
    return figures


def _print_nucl(result, variants):
    print(f"NUCL in a donated SGD update of W {result['shape']} float32, {result['platform']}")
    print(f"{'program':24}{'median ms':>12}{'added ms':>12}{'temporary MB':>15}")
    for name, row in result["programs"].items():
        print(
            f"{name:24}{row['median_ms']:12.1f}{row['added_ms']:12.1f}{row['temporary_mb']:15.2f}"
        )
    print(f"{'row sum (the floor)':24}{result['floor_ms']:12.1f}")
    for variant in variants:
        for name, what in (
            ("listing_over_closed_form", "added time, listing / closed form"),
            ("added_over_floor", "added time of the closed form / row sum"),
        ):
            print(f"{variant}: {what}: {_ratio_text(result[variant][name])}")


def _ratio_text(ratio: Sequence[float]) -> str:
    return f"{ratio[0]:.2f} (95% interval {ratio[1]:.2f} to {ratio[2]:.2f})"


def plain_nll(hidden_btd, kernel, targets_bt, softcap: float | None = None) -> jax.Array:
    """The sum of -log p(target) from whole logits, kernel [V, D]: what chunking replaces."""
    logits_btv = jnp.einsum("btd,vd->btv", hidden_btd, kernel, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits_btv = softcap * jnp.tanh(logits_btv / softcap)
    log_p_btv = jax.nn.log_softmax(logits_btv, axis=-1)
    return -jnp.sum(jnp.take_along_axis(log_p_btv, targets_bt[..., None], axis=-1))


def benchmark_nll(
    batch: int = 4,
    time_steps: int = 512,
    d_model: int = 576,
    vocab: int = 49_152,
    dtype: Any = jnp.float32,
    softcap: float | None = None,
    chunk: int | None = None,
    rounds: int = 5,
    memory_shape: Sequence[int] | None = (16, 1024, 2304, 256_000),
    seed: int = 0,
) -> dict[str, Any]:
    """Value and gradient of the NLL of a tied head: chunked against plain, time and memory.

    Prints a table and returns its figures: per program "median_ms", "fastest_ms", "temporary_mb";
    "plain_over_chunked" and "chunked_over_products" (three bare products of the same size, the
    floor) as [ratio, low, high]; "large", the temporary GiB of the chunked form, compiled and not
    run, for `memory_shape` = [B, T, D, V] in bfloat16 with a soft-cap of 30.
    """
    keys = jax.random.split(jax.random.key(seed), 3)
    h = jax.random.normal(keys[0], (batch, time_steps, d_model)).astype(dtype)
    kernel = (0.02 * jax.random.normal(keys[1], (vocab, d_model))).astype(dtype)
    y = jax.random.randint(keys[2], (batch, time_steps), 0, vocab)

    def chunked(h, kernel, y):
        return chunked_nll(h, kernel, y, layout="vd", softcap=softcap, chunk=chunk).total

    def products(h, kernel, y):
        flat = h.reshape(-1, d_model)
        logits = flat @ kernel.T
        return logits @ kernel, logits.T @ flat

    programs = {
        "plain": jax.jit(
            jax.value_and_grad(functools.partial(plain_nll, softcap=softcap), argnums=(0, 1))
        ),
        "chunked": jax.jit(jax.value_and_grad(chunked, argnums=(0, 1))),
        "three products": jax.jit(products),
    }
    compiled = {name: p.lower(h, kernel, y).compile() for name, p in programs.items()}
    turns = {name: functools.partial(c, h, kernel, y) for name, c in compiled.items()}
    seconds = take_turns(turns, rounds)
    result: dict[str, Any] = {
        "shape": [batch, time_steps, d_model, vocab],
        "dtype": jnp.dtype(dtype).name,
        "platform": jax.default_backend(),
        "rounds": rounds,
        "programs": {name: _figures(seconds[name], compiled[name]) for name in compiled},
        "plain_over_chunked": ratio_interval(seconds["plain"], seconds["chunked"]),
        "chunked_over_products": ratio_interval(seconds["chunked"], seconds["three products"]),
    }
    if memory_shape is not None:
        gib = nll_temporary_bytes(*memory_shape) / 2**30
        result["large"] = {"shape": list(memory_shape), "temporary_gib": gib}
    _print_nll(result)
    return result


def nll_temporary_bytes(
    batch: int,
    time_steps: int,
    d_model: int,
    vocab: int,
    layout: str = "vd",
    softcap: float | None = 30.0,
    chunk: int | None = None,
) -> int:
    """Temporary bytes of value and gradient of the chunked NLL in bfloat16; nothing is run."""
    kernel_shape = (vocab, d_model) if layout == "vd" else (d_model, vocab)
    arguments = (
        jax.ShapeDtypeStruct((batch, time_steps, d_model), jnp.bfloat16),
        jax.ShapeDtypeStruct(kernel_shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, time_steps), jnp.int32),
        jax.ShapeDtypeStruct((batch, time_steps), jnp.bool_),
    )

    def loss(h, kernel, y, mask):
        return chunked_nll(h, kernel, y, mask, layout=layout, softcap=softcap, chunk=chunk).total

    return temporary_bytes(
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
    )


def _print_nll(result):
    batch, time_steps, d_model, vocab = result["shape"]
    print(
        f"NLL, value and gradient: batch {batch} x {time_steps}, D {d_model}, V {vocab}, "
        f"{result['dtype']}, {result['platform']}"
    )
    print(f"{'program':24}{'median ms':>12}{'temporary MB':>15}")
    for name, row in result["programs"].items():
        print(f"{name:24}{row['median_ms']:12.1f}{row['temporary_mb']:15.1f}")
    print(f"plain / chunked: {_ratio_text(result['plain_over_chunked'])}")
    print(f"chunked / three products: {_ratio_text(result['chunked_over_products'])}")
    if "large" in result:
        large = result["large"]
        print(
            f"chunked, compiled only, [B, T, D, V] = {large['shape']} bfloat16, soft-cap: "
            f"{large['temporary_gib']:.2f} GiB temporary"
        )
