"""The programs of h100_experts.json and h100_softcap.json, next to this file.

python docs/results/benchmarks/h100_kernels.py experts|softcap <out.json> [tiny]

`tiny` tries it on a CPU. A form that fails is named and left out. tokamax is optional.
The figures are from an earlier form of these programs, on the same shapes; this one has run on a
CPU only.
"""

import functools
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.bench.timing import paired_interval
from ffn_heterogeneity.models import attention

TINY = "tiny" in sys.argv
ROUNDS, QUEUED = (2, 1) if TINY else (12, 4)
try:
    import tokamax  # pyright: ignore[reportMissingImports]
except ImportError:
    tokamax = None


def ordered(ids, e):
    """(the order of (token, expert) pairs by expert, rows per expert)."""
    flat = ids.reshape(-1)
    return jnp.argsort(flat, stable=True), jnp.bincount(flat, length=e)


def back(y, order, w, x):
    """The weighted sum over a token's experts, of rows in the experts' order."""
    n, k = w.shape
    inverse = jnp.zeros(n * k, jnp.int32).at[order].set(jnp.arange(n * k, dtype=jnp.int32))
    y = y[inverse].reshape(n, k, -1)
    return jnp.einsum("nkd,nk->nd", y.astype(jnp.float32), w).astype(x.dtype)


def ragged(dot, p, x, w, ids):
    order, sizes = ordered(ids, p["gate"].shape[0])
    rows = x[order // ids.shape[1]]
    h = jax.nn.silu(dot(rows, p["gate"], sizes)) * dot(rows, p["up"], sizes)
    return back(dot(h, p["down"], sizes), order, w, x)


def blocks(block, scanned, p, x, w, ids):
    """Each expert's rows are padded to a multiple of `block`, so that a block has one expert."""
    e, (n, k) = p["gate"].shape[0], ids.shape
    order, sizes = ordered(ids, e)
    count, padded = n * k // block + e, -(-sizes // block) * block
    ends, starts = jnp.cumsum(padded), jnp.cumsum(padded) - padded
    first, expert = jnp.cumsum(sizes) - sizes, ids.reshape(-1)[order]
    of = jnp.minimum(jnp.searchsorted(ends, jnp.arange(count) * block, side="right"), e - 1)
    place = starts[expert] + jnp.arange(n * k) - first[expert]
    rows = jnp.zeros((count * block, x.shape[1]), x.dtype).at[place].set(x[order // k])
    rows = rows.reshape(count, block, -1)

    def one(xb, gate, up, down):
        return (jax.nn.silu(xb @ gate) * (xb @ up)) @ down

    def step(_, inputs):
        xb, i = inputs
        return None, one(xb, p["gate"][i], p["up"][i], p["down"][i])

    if scanned:
        y = jax.lax.scan(step, None, (rows, of))[1]
    else:
        y = jax.vmap(one)(rows, p["gate"][of], p["up"][of], p["down"][of])
    return back(y.reshape(count * block, -1)[place], order, w, x)


def dense(p, x, w, ids):
    """Every expert on every token: the reference."""
    at = jnp.arange(x.shape[0])[:, None], ids
    gates = jnp.zeros((x.shape[0], p["gate"].shape[0])).at[at].set(w)

    def step(total, q):
        h = jax.nn.silu(x @ q["gate"]) * (x @ q["up"])
        return total + (h @ q["down"]).astype(jnp.float32) * q["w"][:, None], None

    start = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.scan(step, start, {**p, "w": gates.T})[0].astype(x.dtype)


def equal(p, x, w, ids):
    """A floor: groups of equal size, without routing; another result."""
    e, (n, k) = p["gate"].shape[0], ids.shape
    rows = jnp.concatenate([x] * k).reshape(e, n * k // e, -1)
    h = jax.nn.silu(jnp.einsum("ecd,edm->ecm", rows, p["gate"]))
    y = jnp.einsum("ecm,emd->ecd", h * jnp.einsum("ecd,edm->ecm", rows, p["up"]), p["down"])
    return jnp.einsum("knd,nk->nd", y.reshape(k, n, -1).astype(jnp.float32), w).astype(x.dtype)


def measured(forms, arguments, pull, slopes_of, reference):
    """{form, pass: milliseconds by round, temporary MB, relative error of the output}."""
    calls, facts = {}, {}
    for name, f in forms.items():

        def loss(pull, *given, f=f):
            return jnp.vdot(f(*given).astype(jnp.float32), pull.astype(jnp.float32))

        slopes = jax.grad(loss, tuple(1 + i for i in slopes_of))
        try:
            one = jax.jit(f).lower(*arguments).compile()
            both = jax.jit(slopes).lower(pull, *arguments).compile()
            gap = np.asarray(one(*arguments).astype(jnp.float32)) - reference
            jax.block_until_ready(both(pull, *arguments))
        except Exception as error:
            print(name, "failed:", repr(error)[:200])
            continue
        error = float(np.linalg.norm(gap) / np.linalg.norm(reference))
        for key, program, given in (
            ("forward", one, arguments),
            ("both", both, (pull, *arguments)),
        ):
            calls[f"{name}, {key}"] = functools.partial(program, *given)
            size = program.memory_analysis().temp_size_in_bytes / 1e6
            facts[f"{name}, {key}"] = {"temporary_mb": size, "error": error, "ms": []}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready([call() for _ in range(QUEUED)])
            facts[name]["ms"].append(1e3 * (time.perf_counter() - start) / QUEUED)
    return facts


def experts():
    found, n, d = {}, *((256, 64) if TINY else (16_384, 1_024))
    for e, k, m in ((8, 2, 64), (64, 8, 64)) if TINY else ((8, 2, 1_024), (64, 8, 512)):
        keys = jax.random.split(jax.random.key(e * k), 6)
        shapes = {"gate": (e, d, m), "up": (e, d, m), "down": (e, m, d)}
        p = {
            name: jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=False)
        }
        x, pull = (jax.random.normal(keys[i], (n, d), jnp.bfloat16) for i in (3, 5))
        logits = jax.random.normal(keys[4], (n, e)) - 0.3 * jnp.log(1.0 + jnp.arange(e))
        top, ids = jax.lax.top_k(logits, k)
        w, small = jax.nn.softmax(top, -1), 16 if TINY else 128
        forms = {"ragged_dot": functools.partial(ragged, jax.lax.ragged_dot)}
        if tokamax is not None:
            dot = functools.partial(tokamax.ragged_dot, implementation="mosaic_gpu")
            forms["tokamax"] = functools.partial(ragged, dot)
        forms[f"blocks of {small}, batched"] = functools.partial(blocks, small, False)
        forms[f"blocks of {4 * small}, batched"] = functools.partial(blocks, 4 * small, False)
        forms[f"blocks of {4 * small}, scanned"] = functools.partial(blocks, 4 * small, True)
        forms |= {"equal groups, no routing": equal, "dense over all experts": dense}
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (p, x))
        reference = np.asarray(jax.jit(dense)(*wide, w, ids))
        found[f"E {e}, top {k}, m {m}"] = measured(
            forms, (p, x, w, ids), pull, (0, 1, 2), reference
        )
    return found, "ragged_dot"


def softcap():
    found, numbers = {}, {"scale": 256**-0.5, "softcap": 50.0}
    for t, rows in ((64, 2),) if TINY else ((1_024, 8), (4_096, 2)):
        keys, heads = jax.random.split(jax.random.key(t), 4), (8, 4, 4, 8)
        q, k, v, pull = (
            jax.random.normal(key, (rows, t, count, 256), jnp.bfloat16)
            for key, count in zip(keys, heads, strict=True)
        )
        places = jnp.broadcast_to(jnp.arange(t), (1, t))
        mask = attention.attention_mask(places, places, None)
        fused = functools.partial(jax.nn.dot_product_attention, scale=numbers["scale"])

        def plain(q, k, v, mask=mask):
            return attention.plain_attention(q, k, v, mask, **numbers)[0]

        def blocked(q, k, v, mask=mask):
            return attention.blocked_attention(q, k, v, mask, **numbers)

        forms = {"plain": plain}
        forms["cudnn without a soft-cap"] = functools.partial(
            fused, is_causal=True, implementation="cudnn"
        )
        if tokamax is not None:
            forms["tokamax mosaic_gpu"] = functools.partial(
                tokamax.dot_product_attention,
                scale=numbers["scale"],
                is_causal=True,
                logits_soft_cap=numbers["softcap"],
                implementation="mosaic_gpu",
            )
        forms["blocked (`xla`)"] = blocked
        with jax.default_matmul_precision("float32"):
            reference = np.asarray(jax.jit(plain)(*(z.astype(jnp.float32) for z in (q, k, v))))
        found[f"{rows} x {t} tokens"] = measured(forms, (q, k, v), pull, (0, 1, 2), reference)
    return found, "plain"


def main():
    found, base = {"experts": experts, "softcap": softcap}[sys.argv[1]]()
    for shape, programs in found.items():
        for name, facts in programs.items():
            times, other = facts["ms"], programs[f"{base}, {name.rpartition(', ')[2]}"]["ms"]
            facts |= {"median_ms": float(np.median(times)), "ratio": paired_interval(times, other)}
            print(shape, name, f"{facts['median_ms']:.3f} ms", facts["ratio"], facts["error"])
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1))


main()
