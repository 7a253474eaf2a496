"""NUCL against the listing, a float64 oracle, finite differences; rows that break the listing."""

import functools

import jax
import jax.numpy as jnp
import nucl_oracle as oracle
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiny_runs import refused

from ffn_heterogeneity.losses.nucl import VARIANTS, compute_nucl, nucl, nucl_rows
from ffn_heterogeneity.losses.nucl_listing import compute_nucl_listing


def gaussian(*shape, scale=0.02, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * np.float32(scale)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _gradient(w, variant, axis):
    return jax.grad(lambda w: nucl(w, variant, axis=axis))(w)


def gradient(w, variant, axis=-1):
    return np.asarray(_gradient(w, variant, axis))


# 576 and 2304 take the runs that XLA:CPU vectorises, 100 and 37 the plain sums, 1 is degenerate.
@pytest.mark.parametrize("shape", [(40, 576), (2, 3, 2304), (5, 100), (7, 37), (3, 2)])
def test_equals_the_listing_in_value_and_gradient(shape):
    # A combination of the three with different weights: each has its cotangent.
    weights = jnp.asarray([0.5, 2.0, 300.0])

    def combined(w, function):
        values = jnp.stack(function(w))
        return jnp.dot(weights, values), values

    both = jax.jit(jax.grad(combined, has_aux=True), static_argnums=1)
    (ours, values), (listing, listed) = (
        both(jnp.asarray(gaussian(*shape)), f) for f in (compute_nucl, compute_nucl_listing)
    )
    np.testing.assert_allclose(values, listed, rtol=1e-5)
    assert oracle.gap(ours, listing) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(64, 576), (2, 17, 2304), (9, 37)])
@pytest.mark.parametrize("heavy", [False, True])
def test_equals_the_float64_oracle(variant, shape, heavy):
    w = gaussian(*shape)
    if heavy:
        w = np.random.default_rng(1).standard_t(2, shape).astype(np.float32)
    np.testing.assert_allclose(nucl_rows(w, variant), oracle.rows(w, variant), rtol=3e-6)
    assert oracle.gap(gradient(w, variant), oracle.gradient(w, variant)) < 3e-6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(3, 576, 40), (48, 9), (37, 11)])
def test_columns_equal_the_rows_of_the_transpose(variant, shape):
    w = gaussian(*shape)
    turned = np.swapaxes(w, -1, -2)
    np.testing.assert_allclose(nucl_rows(w, variant, axis=-2), oracle.rows(turned, variant), 3e-6)
    expected = np.swapaxes(oracle.gradient(turned, variant), -1, -2)
    assert oracle.gap(gradient(w, variant, axis=-2), expected) < 3e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_by_finite_differences_in_float64(variant):
    with jax.enable_x64(True):
        w = np.random.default_rng(3).normal(size=(4, 12)) * 0.1
        w[0, 3] = 1e-3
        w[1] = 0.1 * np.sign(w[1]) * (1 + 1e-2 * w[1])  # nearly uniform
        w[2] *= 1e-14  # beyond the fast range
        assert nucl_rows(jnp.asarray(w), variant).dtype == jnp.float64
        got = np.asarray(jax.grad(lambda w: nucl(w, variant))(jnp.asarray(w)))
        weights = np.linspace(1, 2, 4)
        weighted = jax.grad(lambda w: jnp.sum(nucl_rows(w, variant) * weights))(jnp.asarray(w))
        weighted = np.asarray(weighted)
        for i, j in np.ndindex(*w.shape):
            step = 1e-5 * abs(w[i, j])
            up, down = w.copy(), w.copy()
            up[i, j] += step
            down[i, j] -= step
            slope = (oracle.rows(up, variant) - oracle.rows(down, variant)).sum() / (2 * step)
            tolerance = 1e-5 * np.abs(got[i]).max()
            assert abs(got[i, j] - slope) < tolerance, (i, j)
            assert abs(weighted[i, j] - weights[i] * slope) < 2 * tolerance, (i, j)


def assert_row_is(w, variant, value, *, zero_gradient):
    """Checks the row alone and in a matrix of ordinary rows, whose values must not change."""
    ordinary = gaussian(3, len(w))
    stacked = np.concatenate([ordinary[:2], np.asarray(w, np.float32)[None], ordinary[2:]])
    for matrix, index in ((np.asarray(w, np.float32)[None], 0), (stacked, 2)):
        values = np.asarray(nucl_rows(matrix, variant))
        slopes = gradient(matrix, variant)
        assert np.isfinite(values).all() and np.isfinite(slopes).all()
        np.testing.assert_allclose(values[index], value, rtol=1e-5, atol=1e-6)
        assert (slopes[index] == 0).all() == zero_gradient
    np.testing.assert_allclose(values[[0, 1, 3]], oracle.rows(ordinary, variant), rtol=3e-6)
    assert oracle.gap(slopes[[0, 1, 3]], oracle.gradient(ordinary, variant)) < 3e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_zero_row_contributes_nothing(variant):
    zeros = np.zeros(48)
    assert_row_is(zeros, variant, 0.0, zero_gradient=True)
    assert nucl_rows(jnp.zeros((1, 48)), variant)[0] == 0
    signed = np.copysign(zeros, np.arange(48) % 2 - 0.5)
    assert_row_is(signed, variant, 0.0, zero_gradient=True)


@pytest.mark.parametrize("n", [1, 7, 576])
@pytest.mark.parametrize("value", [0.1, -0.3, 1e-24, 3e38, 1 / 3])
def test_uniform_row_has_no_mstd_and_no_gradient(value, n):
    row = np.full(n, value) * np.where(np.arange(n) % 3, 1, -1)
    assert_row_is(row, "mstd", 0.0, zero_gradient=True)
    matrix = np.asarray(row, np.float32)[None]
    assert nucl_rows(matrix, "mstd")[0] == 0
    np.testing.assert_allclose(nucl_rows(matrix, "gini"), 1 - 1 / n, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(nucl_rows(matrix, "ent"), np.log(n), rtol=1e-6, atol=1e-6)
    for variant in ("gini", "ent"):
        assert np.isfinite(gradient(matrix, variant)).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_weight_inside_a_row_has_no_gradient(variant):
    w = gaussian(6, 48)
    w[2, 5] = 0.0
    w[4, ::2] = -0.0
    slopes = gradient(w, variant)
    np.testing.assert_allclose(nucl_rows(w, variant), oracle.rows(w, variant), rtol=3e-6)
    assert ((slopes == 0) == (w == 0)).all()
    assert oracle.gap(slopes, oracle.gradient(w, variant)) < 3e-6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [1e-24, 1e-28, 1e-12, 1e12, 1e24, 1e30])
def test_any_scale(variant, scale):
    w = gaussian(8, 64, scale=1) * np.float32(scale)
    np.testing.assert_allclose(nucl_rows(w, variant), oracle.rows(w, variant), rtol=5e-6)
    assert oracle.gap(gradient(w, variant), oracle.gradient(w, variant)) < 1e-5
    row = w[0].astype(np.float64)
    assert_row_is(row, variant, oracle.rows(row[None], variant)[0], zero_gradient=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_largest_floats(variant):
    w = np.sign(gaussian(4, 576)) * np.linspace(1e38, 3.4e38, 576)
    np.testing.assert_allclose(nucl_rows(w, variant), oracle.rows(w, variant), rtol=5e-6)
    assert np.isfinite(gradient(w, variant)).all()


def test_nearly_uniform_rows_keep_their_digits():
    for spread in (1e-1, 1e-3, 1e-5):
        w = (0.1 * (1 + spread * gaussian(8, 576, scale=1))).astype(np.float32)
        np.testing.assert_allclose(nucl_rows(w, "mstd"), oracle.rows(w, "mstd"), rtol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_weights_accumulate_in_float32(variant):
    w = jnp.asarray(gaussian(16, 2304), jnp.bfloat16)
    exact = np.asarray(w, np.float64)
    values = nucl_rows(w, variant)
    assert values.dtype == jnp.float32
    # A bfloat16 sum of 2,304 terms would be wrong in the second digit.
    np.testing.assert_allclose(values, oracle.rows(exact, variant), rtol=3e-6)
    slopes = gradient(w, variant)
    assert slopes.dtype == jnp.bfloat16
    assert oracle.gap(slopes, oracle.gradient(exact, variant)) < 2**-8


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=40, deadline=None)
@given(
    w=hnp.arrays(
        np.float32, (3, 8), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    )
)
@example(w=np.full((3, 8), np.finfo(np.float32).max, np.float32))
@example(w=np.full((3, 8), np.finfo(np.float32).tiny, np.float32))
@example(w=np.eye(3, 8, dtype=np.float32) * np.float32(1e-38))
def test_finite_weights_give_finite_results(variant, w):
    values, slopes = value_and_gradient(w, variant)
    assert np.isfinite(values).all() and np.isfinite(slopes).all()
    assert ((slopes == 0) | (w != 0)).all()


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-60, 60), log_factor=st.floats(-2, 2))
def test_scale_free_and_blind_to_order_and_sign(variant, seed, exponent, log_factor):
    rng = np.random.default_rng(seed)
    w = rng.standard_t(3, (3, 8)).astype(np.float32)
    values, slopes = value_and_gradient(w, variant)
    # r is scale-free: exactly so for powers of two, and the gradient scales by the inverse.
    factor = np.float32(2.0**exponent)
    scaled_values, scaled_slopes = value_and_gradient(w * factor, variant)
    np.testing.assert_allclose(scaled_values, values, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scaled_slopes * factor, slopes, rtol=1e-3, atol=1e-4)
    rows = np.exp(log_factor * np.arange(3, dtype=np.float32))[:, None]
    np.testing.assert_allclose(value_and_gradient(w * rows, variant)[0], values, 1e-4, 1e-6)
    order = rng.permutation(8)
    moved_values, moved_slopes = value_and_gradient(w[:, order], variant)
    np.testing.assert_allclose(moved_values, values, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moved_slopes, slopes[:, order], rtol=1e-3, atol=1e-5)
    signs = rng.choice([-1, 1], (3, 8)).astype(np.float32)
    signed_values, signed_slopes = value_and_gradient(w * signs, variant)
    np.testing.assert_array_equal(signed_values, values)
    np.testing.assert_array_equal(signed_slopes, slopes * signs)


def value_and_gradient(w, variant):
    w = np.asarray(w, np.float32)
    return np.asarray(nucl_rows(w, variant)), gradient(w, variant)


def test_vmap_and_stacks_agree():
    w = gaussian(3, 5, 48)
    w[1, 2] = 0
    for variant in VARIANTS:
        stacked = nucl_rows(w, variant)
        np.testing.assert_allclose(jax.vmap(lambda x, v=variant: nucl_rows(x, v))(w), stacked, 1e-6)
        np.testing.assert_allclose(stacked[1], nucl_rows(w[1], variant), rtol=1e-6)
        np.testing.assert_allclose(nucl(w, variant), oracle.rows(w, variant).sum(), rtol=1e-6)


def test_what_cannot_be_computed_is_named():
    refused("'variance': choose one of", nucl_rows, jnp.ones((2, 3)), "variance")
    refused("axis=0", nucl_rows, jnp.ones((2, 3)), axis=0)
    refused("empty rows", nucl_rows, jnp.ones((2, 0)))
    refused("int32", compute_nucl, jnp.ones((2, 3), jnp.int32), error=TypeError)
