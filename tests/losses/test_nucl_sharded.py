"""The two-pass form of NUCL for weights on a mesh: the same numbers as the one-pass form's.

On real meshes: tests/test_meshes.py. Here the form itself, on the rows that break formulas.
"""

import functools

import jax
import jax.numpy as jnp
import nucl_oracle as oracle
import numpy as np
import pytest

from ffn_heterogeneity.losses.nucl import VARIANTS, nucl_rows

N = 96
SIGNS = np.where(np.arange(N) % 3, 1.0, -1.0)


def hostile() -> dict[str, np.ndarray]:
    ordinary = np.random.default_rng(0).normal(size=N)
    one_zero = ordinary.copy()
    one_zero[5] = 0
    rows = {
        "ordinary": 0.02 * ordinary,
        "all zero": np.zeros(N),
        "minus zero": -np.zeros(N),
        "one zero": one_zero,
        "one weight": np.eye(1, N, 7)[0] * 0.3,
        "1e-24": ordinary * 1e-24,
        "1e-28": ordinary * 1e-28,
        "1e24": ordinary * 1e24,
        "1e38": SIGNS * np.linspace(1e38, 3.4e38, N),
        "nearly uniform": SIGNS * 0.1 * (1 + 1e-4 * ordinary),
        "uniform": SIGNS * 0.1,
        "uniform, third": SIGNS / 3,
        "uniform, tiny": SIGNS * 1e-24,
        "uniform, huge": SIGNS * 3e38,
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def both(w, variant, axis, sharded):
    values, back = jax.vjp(lambda w: nucl_rows(w, variant, axis=axis, sharded=sharded), w)
    # Every row its own cotangent.
    return values, back(jnp.linspace(1, 2, values.size).reshape(values.shape))[0]


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_hostile_rows_have_the_values_and_gradients_of_the_one_pass_form(variant, axis):
    rows = hostile()
    matrix = np.stack(list(rows.values()))
    w = jnp.asarray(matrix if axis == -1 else matrix.T)
    ours, single = both(w, variant, axis, True), both(w, variant, axis, False)
    exact = oracle.rows(matrix, variant)
    cotangent = np.linspace(1, 2, len(rows))
    slopes = oracle.gradient(matrix, variant) * cotangent[:, None]
    for form in (ours, single):
        gradient = np.asarray(form[1]) if axis == -1 else np.asarray(form[1]).T
        for i, name in enumerate(rows):
            value = float(form[0][i])
            tolerance = 2e-5 if name == "nearly uniform" else 5e-6
            rounding = 1e-6 if name == "one weight" else 1e-9  # for an exact 0: of 1 - q, log Z
            assert abs(value - exact[i]) <= tolerance * abs(exact[i]) + rounding, name
            assert np.isfinite(gradient[i]).all(), name
            if name.startswith("nearly"):
                assert oracle.gap(gradient[i], slopes[i]) < 5e-3, name
            # 1 / Z is subnormal at 1e38: only a finite gradient is promised.
            elif name not in ("1e38", "uniform, huge"):
                flat = name == "one weight" or name.startswith("uniform")
                # A gradient that is 0 in exact arithmetic is a rounding error here, in units of 1 /
                # Z.
                noise = 1e-5 / np.abs(matrix[i]).sum(dtype=np.float64) if flat else 0
                bound = 1e-5 * np.abs(slopes[i]).max() + cotangent[i] * noise
                assert np.abs(gradient[i] - slopes[i]).max() <= bound, name
            assert (gradient[i][matrix[i] == 0] == 0).all(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_uniform_rows_and_empty_ones_are_exact(variant):
    rows = hostile()
    names = [name for name in rows if name.startswith("uniform") or name.endswith("all zero")]
    values, slopes = both(jnp.stack([rows[name] for name in names]), variant, -1, True)
    for name, value, slope in zip(names, values, slopes, strict=True):
        if variant == "mstd" or name == "all zero":
            assert value == 0 and (slope == 0).all(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_weights_are_summed_in_float32(variant):
    w = jnp.asarray(np.random.default_rng(3).normal(size=(16, 2304)) * 0.02, jnp.bfloat16)
    exact = np.asarray(w, np.float64)
    values = nucl_rows(w, variant, sharded=True)
    assert values.dtype == jnp.float32
    np.testing.assert_allclose(values, oracle.rows(exact, variant), rtol=3e-6)
    gradient = jax.grad(lambda w: nucl_rows(w, variant, sharded=True).sum())(w)
    assert gradient.dtype == jnp.bfloat16
    assert oracle.gap(gradient, oracle.gradient(exact, variant)) < 2**-8
