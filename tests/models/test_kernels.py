"""Kernels of other machines as far as this one shows them: splash attention interpreted, cuDNN's
and the bfloat16 units' by the programs that call them."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from tiny_models import random_params, tiny_of

from ffn_heterogeneity.losses.cross_entropy import chunked_nll
from ffn_heterogeneity.models import causal_lm, options
from ffn_heterogeneity.models.attention import attention_mask, plain_attention, with_kernel
from ffn_heterogeneity.models.linear import wide_product
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.splash import splash_attention
from ffn_heterogeneity.models.stack import REMAT_POLICIES

T = 256


def rows(*heads, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(2, T, h, 32)), jnp.float32) for h in heads]


@pytest.mark.parametrize(("window", "softcap", "packed"), [(None, None, False), (100, 20.0, True)])
def test_splash_equals_the_plain_form(window, softcap, packed):
    q, k, v = rows(4, 2, 2)
    segments = jnp.asarray(np.repeat([[1, 2, 0], [1, 1, 2]], [100, 120, 36], axis=1))
    segments = segments if packed else None
    positions = jnp.arange(T)[None]
    mask = attention_mask(positions, positions, window, segments, segments)

    def plain(q, k, v):
        return plain_attention(q, k, v, mask, scale=0.2, softcap=softcap)[0]

    keywords = {"segments_bt": segments, "scale": 0.2, "softcap": softcap, "window": window}
    splash = functools.partial(splash_attention, interpret=True, **keywords)
    results = []
    for form in (plain, splash):
        run = jax.jit(lambda *x, f=form: jax.vjp(f, *x)[1](jnp.sin(jnp.arange(32.0)) + 0 * x[0]))
        results.append((jax.jit(form)(q, k, v), *run(q, k, v)))
    for number, (expected, got) in enumerate(zip(*results, strict=True)):
        bound = 1e-4 if number else 1e-5
        assert np.abs(expected - got).max() <= bound * np.abs(expected).max()


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_model_by_splash_equals_the_model(family):
    """A model in the scan, with the family's windows, soft-caps and packed documents."""
    config = dataclasses.replace(tiny_of(family, 3), head_dim=8)
    params = random_params(config)
    half = jnp.arange(T)[None] >= 100
    batch = {
        "tokens": jnp.asarray(np.random.default_rng(0).integers(0, 29, (1, T))),
        "segment_ids": 1 + half,
        "positions": jnp.where(half, jnp.arange(T) - 100, jnp.arange(T)),
    }
    hidden = {}
    for kernel in ("plain", "splash"):
        options = RunOptions(attention=kernel)
        run = jax.jit(functools.partial(causal_lm.forward, config, options=options))
        hidden[kernel] = run(params, batch)["hidden"]
    scale = np.abs(hidden["plain"]).max()
    assert np.abs(hidden["plain"] - hidden["splash"]).max() <= 1e-5 * scale


def calls_of_cudnn(config, monkeypatch, **options):
    """(mask type, window) of each call of the fused kernel in a gradient lowered for a GPU."""
    from jax._src.cudnn import fused_attention_stablehlo

    # Without a GPU, only the program is checked.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    options = RunOptions(compute_dtype=jnp.bfloat16, platform="gpu", **options)
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32)
    batch = dict.fromkeys(("tokens", "segment_ids", "positions"), ids)

    def loss(params, batch):
        hidden = causal_lm.forward(config, params, batch, options=options)["hidden"]
        return jnp.sum(hidden.astype(jnp.float32))

    traced = jax.jit(jax.grad(loss)).trace(causal_lm.abstract_params(config), batch)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kinds = re.findall(r"mask_type\\22: \\22(\w+)", text)
    return list(zip(kinds, re.findall(r"sliding_window_length\\22: (\d+|null)", text), strict=True))


def test_a_row_of_one_document_is_causal_to_cudnn(monkeypatch):
    """cuDNN then skips masked positions; packed rows have a mask."""
    config = dataclasses.replace(tiny_of("gemma3", 2), head_dim=8)
    layers = [
        dataclasses.replace(x, window=w) for x, w in zip(config.layers, (50, None), strict=True)
    ]
    config = dataclasses.replace(config, layers=tuple(layers))
    alone = calls_of_cudnn(config, monkeypatch, packed=False)
    assert {kind for kind, _ in alone} == {"CAUSAL"} and {w for _, w in alone} >= {"50"}
    packed = calls_of_cudnn(config, monkeypatch)
    assert packed and {kind for kind, _ in packed} == {"NO_MASK"}
    # Only the mask hides an encoder's padding.
    encoder = dataclasses.replace(tiny_of("bert", 2), head_dim=8, max_position=256)
    both_ways = calls_of_cudnn(encoder, monkeypatch, packed=False)
    assert both_ways and {kind for kind, _ in both_ways} == {"NO_MASK"}


def test_padding_after_one_document_is_not_seen():
    """The claim of `packed=False`: the causal mask hides padding from all positions in use."""
    config = tiny_of("llama", 2)
    params = random_params(config)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 29, (2, 20)))
    segments = jnp.asarray(np.arange(20)[None] < np.array([[13], [20]])).astype(jnp.int32)
    run = jax.jit(functools.partial(causal_lm.forward, config))
    masked = run(params, {"tokens": tokens, "segment_ids": segments})["hidden"]
    alone = run(params, {"tokens": tokens})["hidden"]
    np.testing.assert_allclose(masked[0, :13], alone[0, :13], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(masked[1], alone[1], rtol=1e-6, atol=1e-6)


def test_wide_products_round_as_narrow_ones_and_multiply_in_float32():
    rng = np.random.default_rng(2)
    x, w, g = (
        jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((48, 64), (64, 32), (48, 32))
    )
    exact = [np.asarray(a, np.float64) for a in (x, w, g)]
    x64, w64, g64 = exact
    product, back = jax.vjp(wide_product, x, w)
    for got, true in zip((product, *back(g)), (x64 @ w64, g64 @ w64.T, x64.T @ g64), strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), true, rtol=2**-8, atol=1e-2)
    lowered = jax.jit(lambda *a: jax.vjp(wide_product, *a[:2])[1](a[2])).lower(x, w, g).as_text()
    products = re.findall(r"stablehlo.dot_general.*", lowered)
    assert len(products) == 2  # the value is not needed
    for line in products:
        assert line.count("xbf16>") == 2 and line.rstrip().endswith("xf32>")
        # The left operand's last axis, after its transposition.
        assert "contracting_dims = [1] x" in line


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_every_product_of_the_cross_entropy_is_one_that_bfloat16_units_take(layout):
    """Results are float32, and no left operand is contracted along its first axis."""
    h, k = jnp.zeros((2, 24, 16), jnp.bfloat16), jnp.zeros((96, 16) if layout == "vd" else (16, 96))
    targets = jnp.zeros((2, 24), jnp.int32)
    function = jax.grad(lambda h, k: chunked_nll(h, k, targets, layout=layout).total, (0, 1))
    products = re.findall(r"stablehlo.dot_general.*", jax.jit(function).lower(h, k).as_text())
    assert len(products) >= 3
    for line in products:
        assert line.count("xbf16>") == 2 and line.rstrip().endswith("xf32>")
        assert "contracting_dims = [1] x" in line


def test_rematerialisation_keeps_what_wide_products_rounded():
    """The bits of the rounded value are kept, not the float32 before rounding."""
    x, w = jnp.ones((6, 4), jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16)

    def layer(x, w):
        return jnp.sum(jnp.sin(wide_product(x, w)).astype(jnp.float32))

    residuals = saved_residuals(jax.checkpoint(layer, policy=REMAT_POLICIES["dots"]), x, w)
    assert {str(a.dtype) for a, _ in residuals} == {"bfloat16", "uint16"}
    assert [a.shape for a, _ in residuals if a.dtype == jnp.uint16] == [(6, 8)]


def test_no_half_precision_is_written_into_a_stack_of_layers_on_a_cpu():
    """XLA:CPU converts the whole stack for it, at every layer."""
    config = tiny_of("llama", 3)
    params = random_params(config)
    batch = {"tokens": jnp.asarray(np.random.default_rng(3).integers(0, 29, (2, 12)))}

    def gradient(remat, dtype=jnp.bfloat16):
        options = RunOptions(dtype, remat, attention="xla", platform="cpu")

        def loss(params):
            hidden = causal_lm.forward(config, params, batch, options=options)["hidden"]
            return jnp.sum(hidden.astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss))

    exact = jax.tree.leaves(gradient("none", jnp.float32)(params))
    for remat in ("full", "dots", "attention_output"):
        text = gradient(remat).lower(params).as_text()
        written = re.findall(r"stablehlo.dynamic_update_slice.*-> tensor<3x([\dx]*)x(\w+)>", text)
        assert "bf16" not in {dtype for _, dtype in written}
        # At least the block's input.
        assert (f"2x12x{config.d_model}", "ui16") in [(s.removeprefix("1x"), d) for s, d in written]
        for one, other in zip(jax.tree.leaves(gradient(remat)(params)), exact, strict=True):
            bound = 5e-2 * float(jnp.abs(other).max())
            np.testing.assert_allclose(one, other, rtol=5e-2, atol=bound)


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        ("7.5", "float32", "xla"),  # Turing: no bfloat16 units, and cuDNN's attention needs 8.0
        ("8.0", "bfloat16", "cudnn"),
        ("9.0", "bfloat16", "cudnn"),
        ("gfx90a", "bfloat16", "xla"),  # AMD
    ],
)
def test_auto_on_old_gpus_and_others(monkeypatch, capability, dtype, kernel):
    devices = [types.SimpleNamespace(compute_capability=capability)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    assert options.choose_dtype("auto") == dtype
    run = RunOptions(compute_dtype=jnp.bfloat16, platform="gpu")
    model = dataclasses.replace(tiny_of("llama"), head_dim=64)
    assert with_kernel(run, model, 256).attention == kernel


def test_auto_is_what_the_machine_multiplies_fast(monkeypatch, tmp_path):
    """AMX if the Linux kernel reports it and XLA may use it; without a report there is none."""
    monkeypatch.delenv("XLA_FLAGS")
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 amx_bf16 amx_tile\n")
    for file, expected in (("cpuinfo", "bfloat16"), ("nothing", "float32")):
        options._has_amx.cache_clear()
        monkeypatch.setattr(options, "Path", lambda _, f=file: tmp_path / f)
        assert options.choose_dtype("auto", "cpu") == expected
        assert options.choose_dtype("auto", "tpu") == jnp.bfloat16
        assert options.choose_dtype("float32", "gpu") == jnp.float32
    monkeypatch.setattr(options, "Path", lambda _: tmp_path / "cpuinfo")
    for isa, expected in (("AVX2", "float32"), ("AMX_FP16", "bfloat16")):
        options._has_amx.cache_clear()
        monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_max_isa={isa}")
        assert options.choose_dtype("auto", "cpu") == expected
    options._has_amx.cache_clear()
