"""The programs of h200_experts.json, and of soft-caps and precisions, not measured yet.

python docs/results/benchmarks/gpu_kernels.py experts|softcap|precision <out.json> [tiny]

`tiny` tries it on a CPU. A form that fails is named and left out. tokamax is optional.
h100_experts.json and h100_softcap.json are from an earlier form, with separate dispatches.
"""

import functools
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.bench import cases
from ffn_heterogeneity.bench.timing import machine, paired_interval, stepping
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import attention, causal_lm, dispatch
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.experts import _chosen_experts
from ffn_heterogeneity.models.families import preset
from ffn_heterogeneity.models.options import RunOptions

TINY = "tiny" in sys.argv
ROUNDS, QUEUED = (2, 1) if TINY else (8, 4)
try:
    import tokamax  # pyright: ignore[reportMissingImports]
except ImportError:
    tokamax = None


def ragged(dot, p, x, w, ids):
    """The package's dispatch with another product of rows sorted by expert."""
    groups = dispatch.grouping(ids.reshape(-1), p["gate"].shape[0], "ragged")
    rows = dispatch.permuted(x, groups.order, groups.inverse, ids.shape[1])[: ids.size]
    h = jax.nn.silu(dot(rows, p["gate"], groups.sizes)) * dot(rows, p["up"], groups.sizes)
    y = dot(h, p["down"], groups.sizes)[groups.inverse].reshape(*ids.shape, -1)
    return jnp.einsum("nkd,nk->nd", y.astype(jnp.float32), w).astype(x.dtype)


def package(name, block, p, x, w, ids):
    """The program of a layer with experts, after its router; `block` rows at most in a block."""
    dispatch.LARGEST[name] = block
    e, d, m = p["gate"].shape
    layer = LayerConfig(m, experts=e, top_k=ids.shape[1])
    sizes = {"vocab_size": 8, "d_model": d, "n_heads": 1, "n_kv_heads": 1, "head_dim": 2}
    model = ModelConfig("llama", **sizes, layers=(layer,))
    leaves = {part: {"kernel": kernel} for part, kernel in p.items()}
    given = model, layer, RunOptions(dispatch=name), leaves, x[None], ids[None], w[None], None
    return _chosen_experts(*given)[0][0]


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
            print(name, "failed:", repr(error)[:200], flush=True)
            continue
        print(name, "compiled", flush=True)
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
            slow = facts[name]["ms"] and facts[name]["ms"][0] > 40
            queued = 1 if slow else QUEUED
            start = time.perf_counter()
            jax.block_until_ready([call() for _ in range(queued)])
            facts[name]["ms"].append(1e3 * (time.perf_counter() - start) / queued)
    return facts


SHAPES = ((16_384, 1_024, 64, 8, 512), (8_192, 2_048, 128, 8, 768), (16_384, 1_024, 8, 2, 1_024))


def experts():
    """Tokens, D, E, top k, m; the second shape is a layer of Qwen3-30B-A3B."""
    for n, d, e, k, m in ((256, 64, 8, 2, 64), (256, 64, 64, 8, 64)) if TINY else SHAPES:
        keys = jax.random.split(jax.random.key(e * k), 6)
        shapes = {"gate": (e, d, m), "up": (e, d, m), "down": (e, m, d)}
        p = {
            name: jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=False)
        }
        x, pull = (jax.random.normal(keys[i], (n, d), jnp.bfloat16) for i in (3, 5))
        logits = jax.random.normal(keys[4], (n, e)) - 0.3 * jnp.log(1.0 + jnp.arange(e))
        top, ids = jax.lax.top_k(logits, k)
        w = jax.nn.softmax(top, -1)
        forms = {}
        if tokamax is not None:
            dot = functools.partial(tokamax.ragged_dot, implementation="mosaic_gpu")
            forms["tokamax"] = functools.partial(ragged, dot)
        forms["batched, at most 512"] = functools.partial(package, "batched", 512)
        forms["blocks, at most 128"] = functools.partial(package, "blocks", 128)
        forms["equal groups, no routing"] = equal
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (p, x))
        reference = np.asarray(jax.jit(dense)(*wide, w, ids))
        yield (
            f"E {e}, top {k}, m {m}, {n} x {d}",
            measured(forms, (p, x, w, ids), pull, (0, 1, 2), reference),
        )


def precision():
    """Training steps in float32 of SmolLM2 with TF32 and with full products, and in bfloat16."""
    model, rows = preset("smollm2_135m")[0], (1, 32) if TINY else (8, 512)
    params = causal_lm.init(model, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (rows[0], rows[1] + 1))
    batch = {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}
    batch["loss_mask"], held, calls = np.ones(rows, bool), [], {}
    for name, kind in (("tensorfloat32", "float32"), ("float32", "float32"), (None, "bfloat16")):
        options = RunOptions(remat="dots", unroll=1, compute_dtype=jnp.dtype(kind))
        forward = functools.partial(causal_lm.forward, model, options=options)
        with jax.default_matmul_precision(name):
            given = Model(model, params, None, ""), forward, ["nll"], batch, held
            step = stepping(*cases.train_step(*given))
            jax.block_until_ready(step()[1]["loss"])
        calls[f"{name or 'bfloat16'}, step"] = step, name
    facts = {name: {"ms": []} for name in calls}
    for _ in range(ROUNDS):
        for name, (step, said) in calls.items():
            with jax.default_matmul_precision(said):
                start = time.perf_counter()
                jax.block_until_ready([step()[1]["loss"] for _ in range(QUEUED)])
            facts[name]["ms"].append(1e3 * (time.perf_counter() - start) / QUEUED)
    yield f"SmolLM2-135M, {rows[0]} x {rows[1]} tokens", facts


def softcap():
    numbers = {"scale": 256**-0.5, "softcap": 50.0}
    for t, rows in ((64, 2),) if TINY else ((4_096, 2), (1_024, 8)):
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
        yield f"{rows} x {t} tokens", measured(forms, (q, k, v), pull, (0, 1, 2), reference)


def main():
    """Saves after every shape."""
    program, base = {
        "experts": (experts, "batched, at most 512"),
        "softcap": (softcap, "plain"),
        "precision": (precision, "tensorfloat32"),
    }[sys.argv[1]]
    found = {"machine": machine(), "tokamax": getattr(tokamax, "__version__", ""), "shapes": {}}
    for shape, programs in program():
        for name, facts in programs.items():
            times, other = facts["ms"], programs[f"{base}, {name.rpartition(', ')[2]}"]["ms"]
            facts |= {"median_ms": float(np.median(times)), "ratio": paired_interval(times, other)}
            print(shape, name, f"{facts['median_ms']:.3f} ms", facts["ratio"], facts.get("error"))
        found["shapes"][shape] = programs
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1))


main()
