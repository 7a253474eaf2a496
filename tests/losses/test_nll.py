"""Chunked NLL against the plain form and a float64 oracle: masks, uneven chunks, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nucl_oracle import gap
from tiny_runs import refused

from ffn_heterogeneity.losses import cross_entropy
from ffn_heterogeneity.losses.cross_entropy import chunked_nll
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig

B, T, D, V = 3, 23, 16, 97


def inputs(layout="vd", dtype=jnp.float32, seed=0, shape=(B, T, D, V)):
    b, t, d, v = shape
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(b, t, d)), dtype)
    kernel = jnp.asarray(rng.normal(size=(v, d) if layout == "vd" else (d, v)), dtype)
    targets = jnp.asarray(rng.integers(0, v, (b, t)), jnp.int32)
    mask = jnp.asarray(rng.random((b, t)) < 0.7)
    return hidden, kernel, targets, mask


def oracle(hidden, kernel, targets, mask, layout, softcap=None):
    """Float64: NLL [B, T], d(sum over the mask)/d hidden, and / d kernel."""
    h, k, y = np.asarray(hidden, np.float64), np.asarray(kernel, np.float64), np.asarray(targets)
    k_vd = k if layout == "vd" else k.T
    z = h @ k_vd.T
    logits = z if softcap is None else softcap * np.tanh(z / softcap)
    top = logits.max(-1, keepdims=True)
    log_z = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    values = (log_z - np.take_along_axis(logits, y[..., None], -1))[..., 0]
    d = np.exp(logits - log_z)
    np.put_along_axis(d, y[..., None], np.take_along_axis(d, y[..., None], -1) - 1, -1)
    if softcap is not None:
        d *= 1 - np.tanh(z / softcap) ** 2
    d *= np.asarray(mask)[..., None]
    d_kernel = np.einsum("btv,btd->vd", d, h)
    return values, d @ k_vd, d_kernel if layout == "vd" else d_kernel.T


CASES = [("vd", 3.0, chunk) for chunk in (None, 1, 5, 23, 100)]
CASES += [("dv", None, chunk) for chunk in (5, 16)]


@pytest.mark.parametrize(("layout", "softcap", "chunk"), CASES)
def test_equals_the_oracle(layout, softcap, chunk, monkeypatch):
    if chunk in (5, 23):  # in parts, too
        monkeypatch.setattr(cross_entropy, "FEW_ROWS", 1)
    if chunk in (23, 100):  # a tied kernel's gradient turned, as that of many rows
        monkeypatch.setattr(cross_entropy, "MANY_ROWS", B * T)
    hidden, kernel, targets, mask = inputs(layout)
    scale = 0.37

    def loss(hidden, kernel):
        sums = chunked_nll(
            hidden, kernel, targets, mask, layout=layout, softcap=softcap, chunk=chunk
        )
        return scale * sums.total, sums

    (value, sums), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        hidden, kernel
    )
    values, *expected = oracle(hidden, kernel, targets, mask, layout, softcap)
    np.testing.assert_allclose(value, scale * (values * np.asarray(mask)).sum(), rtol=1e-6)
    for got, exact in zip(gradients, expected, strict=True):
        assert gap(got, scale * exact) < 1e-5
    assert sums.count == np.asarray(mask).sum()
    # Not differentiated, the sum takes another path.
    undifferentiated = jax.jit(loss)(hidden, kernel)[1]
    np.testing.assert_allclose(undifferentiated, sums, rtol=1e-6)


def test_counts_correct_predictions():
    hidden, kernel, targets, mask = inputs()
    best = np.argmax(np.asarray(hidden) @ np.asarray(kernel).T, -1)
    targets = jnp.where(jnp.arange(T) % 2 == 0, best, targets)
    sums = chunked_nll(hidden, kernel, targets, mask, layout="vd", chunk=4)
    assert sums.correct == ((best == np.asarray(targets)) & np.asarray(mask)).sum() > 0


def test_masked_positions_are_not_seen():
    hidden, kernel, targets, mask = inputs()

    def loss(hidden, targets):
        return chunked_nll(hidden, kernel, targets, mask, layout="vd", chunk=7).total

    value, gradient = jax.value_and_grad(loss)(hidden, targets)
    assert not np.any(np.asarray(gradient)[~np.asarray(mask)])
    assert np.all(np.any(np.asarray(gradient)[np.asarray(mask)], axis=-1))
    # Targets outside the vocabulary are allowed if they are not counted, else NaN.
    assert loss(hidden, jnp.where(mask, targets, -100)) == value
    assert np.isnan(loss(hidden, jnp.where(mask, V + 3, targets)))
    nothing = chunked_nll(hidden, kernel, targets, jnp.zeros((B, T), bool), layout="vd")
    assert nothing.total == 0 and nothing.count == 0 and nothing.correct == 0


def test_large_logits_stay_finite():
    hidden, kernel, targets, mask = inputs()
    value, gradients = jax.value_and_grad(
        lambda h, k: chunked_nll(h, k, targets, mask, layout="vd", chunk=8).total, (0, 1)
    )(1e4 * hidden, kernel)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in gradients)


def test_bfloat16_kernel_gradient_accumulates_in_float32():
    hidden, kernel, targets, mask = inputs(dtype=jnp.bfloat16, shape=(2, 256, 32, 64))

    def gradient(kernel, chunk):
        return jax.grad(
            lambda k: chunked_nll(hidden, k, targets, mask, layout="vd", chunk=chunk).total
        )(kernel)

    exact = oracle(hidden, kernel, targets, mask, "vd")[2]
    errors = [gap(gradient(kernel, chunk), exact) for chunk in (256, 1)]
    assert gradient(kernel, 256).dtype == jnp.bfloat16
    # 256 additions in bfloat16 would cost several times as much as one.
    assert errors[1] < 1.2 * errors[0] < 0.01
    # A float32 master with bfloat16 states gets its gradient in float32.
    master = gradient(kernel.astype(jnp.float32), 16)
    assert master.dtype == jnp.float32 and gap(master, exact) < 0.005


def test_a_frozen_head_costs_no_kernel_gradient():
    hidden, kernel, targets, mask = inputs(shape=(2, 64, 128, 2048))

    def loss(hidden, kernel, trainable=True):
        return chunked_nll(
            hidden, kernel, targets, mask, layout="vd", chunk=8, kernel_trainable=trainable
        ).total

    def memory(gradient):
        compiled = jax.jit(gradient).lower(hidden, kernel).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    both = memory(jax.grad(loss, (0, 1)))
    noticed = memory(jax.grad(loss))
    assert noticed < both - 0.9 * kernel.nbytes
    slope, zero = jax.grad(lambda h, k: loss(h, k, False), (0, 1))(hidden, kernel)
    assert not np.any(zero)
    np.testing.assert_allclose(slope, jax.grad(loss)(hidden, kernel), rtol=1e-6)


def test_inside_scan_and_remat():
    hidden, kernel, targets, mask = inputs()

    def loss(hidden, kernel):
        def body(total, weight):
            sums = chunked_nll(hidden, kernel, targets, mask, layout="vd", chunk=5)
            return total + weight * sums.total, sums.count

        return jax.lax.scan(jax.checkpoint(body), 0.0, jnp.arange(3.0))[0]

    gradients = jax.jit(jax.grad(loss, (0, 1)))(hidden, kernel)
    expected = oracle(hidden, kernel, targets, mask, "vd")[1:]
    for got, exact in zip(gradients, expected, strict=True):
        assert gap(got, 3 * exact) < 1e-5


def config(tied, softcap):
    return ModelConfig(
        family="llama",
        vocab_size=V,
        d_model=D,
        n_heads=1,
        n_kv_heads=1,
        head_dim=16,
        layers=(LayerConfig(ffn_width=8),),
        tied=tied,
        final_softcap=softcap,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_term_reads_the_head_and_the_softcap(tied):
    layout = "vd" if tied else "dv"
    hidden, kernel, targets, mask = inputs(layout)
    params = {"embed": {"embedding": kernel}} if tied else {"head": {"kernel": kernel}}
    batch = {"targets": targets, "loss_mask": mask}
    term = nll_term(TermContext("nll", model=config(tied, 5.0)))
    value = jax.jit(term.function)(params, {"hidden": hidden}, batch)
    values = oracle(hidden, kernel, targets, mask, layout, 5.0)[0]
    np.testing.assert_allclose(value.total, (values * np.asarray(mask)).sum(), rtol=1e-6)
    assert value.denominator == np.asarray(mask).sum()
    assert 0 <= value.metrics["accuracy"] <= value.denominator
    assert (term.name, term.on, term.weight, term.targets) == ("nll", "outputs", 1.0, ())


def test_sum_reduction_divides_by_documents_and_adds_up():
    hidden, kernel, targets, _ = inputs(shape=(2, 8, D, V))
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3, 3, 0], [1, 1, 1, 1, 1, 2, 2, 2]])
    mask = jnp.asarray([[0, 1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 1, 0, 0, 1]], bool)
    term = nll_term(TermContext("nll", model=config(True, None)), "sum")
    params = {"embed": {"embedding": kernel}}

    def value(rows, with_segments=True):
        batch = {"targets": targets[rows], "loss_mask": mask[rows], "segment_ids": segments[rows]}
        if not with_segments:
            del batch["segment_ids"]
        return term.function(params, {"hidden": hidden[rows]}, batch)

    full, parts = value(slice(0, 2)), [value(slice(i, i + 1)) for i in range(2)]
    # Row 0: documents 1 and 3 have targets; row 1: both.
    assert [int(p.denominator) for p in parts] == [2, 2] and full.denominator == 4
    np.testing.assert_allclose(full.total, parts[0].total + parts[1].total, rtol=1e-6)
    assert value(slice(0, 2), with_segments=False).denominator == 2


def test_what_cannot_be_computed_is_named():
    hidden, kernel, targets, mask = inputs()
    good = {"layout": "vd"}
    refused("layout='vocab'", chunked_nll, hidden, kernel, targets, mask, layout="vocab")
    refused("in layout 'dv'", chunked_nll, hidden, kernel, targets, mask, layout="dv")
    refused(r"targets \(3, 22\)", chunked_nll, hidden, kernel, targets[:, 1:], mask, **good)
    refused(r"mask \(3, 22\)", chunked_nll, hidden, kernel, targets, mask[:, 1:], **good)
    refused("softcap=0.0", chunked_nll, hidden, kernel, targets, mask, softcap=0.0, **good)
    refused("chunk=0", chunked_nll, hidden, kernel, targets, mask, chunk=0, **good)
    refused("must be", chunked_nll, hidden[0], kernel, targets, mask, **good)
    refused("'total'", nll_term, TermContext("nll", model=config(True, None)), "total")


def test_automatic_chunks_keep_to_the_budget(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES_CPU", 4 * B * V * 10)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * B * V * 10)
    hidden, kernel, targets, mask = inputs()
    static, _ = cross_entropy._prepare(hidden, kernel, targets, mask, "vd", None, None, True)
    assert static.chunk == 8  # 23 = 7 + 8 + 8, not 3 + 10 + 10


@pytest.mark.parametrize("share", [0.0, 0.03, 0.6, 1.0])
@pytest.mark.parametrize(("chunk", "few"), [(1, 16), (5, 1), (23, 1), (23, 9)])
def test_every_target_is_visited_once_and_little_else(share, chunk, few, monkeypatch):
    """Whole chunks, then eighths: no more rows than an eighth beyond the targets; where an eighth
    is few rows, than a chunk."""
    monkeypatch.setattr(cross_entropy, "FEW_ROWS", few)
    hidden, kernel, targets, _ = inputs()
    mask = jnp.asarray(np.random.default_rng(chunk).random((B, T)) < share)
    static, mask = cross_entropy._prepare(hidden, kernel, targets, mask, "vd", None, chunk, True)
    rows = cross_entropy._rows(mask, static)
    np.testing.assert_array_equal(rows.order[rows.place], np.arange(B * T))
    numbered = jnp.arange(B * T).reshape(B, T)

    def body(start, size, carry):
        _, at, valid = rows.cut(start, size, hidden, numbered)
        seen, visited = carry or nothing()
        return seen.at[at].add(valid), visited + size

    def nothing():
        return jnp.zeros(B * T, jnp.int32), 0

    seen, visited = rows.fold(body, nothing)
    np.testing.assert_array_equal(seen.reshape(B, T), mask)
    surplus = B * chunk // 8 if B * chunk // 8 >= few else B * chunk
    assert mask.sum() <= visited < mask.sum() + surplus


def temporary_bytes(batch, length, layout, chunk):
    """Temporary bytes of value and gradient in bfloat16 at Gemma-2 2B's sizes; compiled only."""

    def loss(hidden, kernel, targets, mask):
        settings = {"layout": layout, "softcap": 30.0, "chunk": chunk}
        return chunked_nll(hidden, kernel, targets, mask, **settings).total

    shapes = (
        ((batch, length, 2304), jnp.bfloat16),
        ((256_000, 2304) if layout == "vd" else (2304, 256_000), jnp.bfloat16),
        ((batch, length), jnp.int32),
        ((batch, length), jnp.bool_),
    )
    arguments = [jax.ShapeDtypeStruct(*one) for one in shapes]
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("shape", "layout"), [((16, 1024), "vd"), ((4, 4096), "dv")])
def test_memory_at_gemma_size_compiled_only(shape, layout):
    # 16,384 tokens: whole float32 logits alone would be 15.6 GiB.
    for budget in (cross_entropy.CHUNK_BYTES_CPU, cross_entropy.CHUNK_BYTES):
        chunk = budget // (4 * shape[0] * 256_000)
        gib = temporary_bytes(*shape, layout, chunk) / 2**30
        assert gib < 6.5, (budget, gib)
