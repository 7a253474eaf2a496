"""The formulas of compensation by states, on random states."""

import dataclasses

import numpy as np
import pytest

from ffn_heterogeneity.surgery import states


def problem(seed=0, m=20, tokens=200, outputs=6):
    """(moments of three rows of four, of the rest, kept, gone, W, h of all tokens, h held out):
    states that depend on each other, of which a quarter goes."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(8, m)) * np.exp(rng.normal(size=m))
    h = rng.normal(size=(tokens, 8)) @ mix + 0.1 * rng.normal(size=(tokens, m)) + 0.2
    gone = np.sort(rng.permutation(m)[: m // 4])
    survivors, w = np.setdiff1d(np.arange(m), gone), rng.normal(size=(m, outputs))
    parts = h[: 3 * tokens // 4], h[3 * tokens // 4 :]
    moments = [moments_of(x[:, survivors], x[:, gone] @ w[gone]) for x in parts]
    return *moments, survivors, gone, w, h, parts[1]


def moments_of(g, r, first=0.0, rows=1):
    first = np.broadcast_to(np.float64(first), g.shape[1])
    return states.Moments(g.T @ g, g.T @ r, r.sum(0), np.vdot(r, r), len(g), len(g), first, rows)


def ridge_by_rows(h, survivors, gone, ridge, least=0.0):
    """C of the formula, directly from the states; no unit is less than `least`."""
    units = np.maximum(np.sqrt((h[:, survivors] ** 2).mean(0)), least)
    z = h[:, survivors] / units
    system = z.T @ z / len(h) + ridge * np.eye(len(survivors))
    return (np.linalg.inv(system) @ (z.T @ h[:, gone] / len(h))).T / units


def test_state_ridge_is_its_formula():
    *moments, survivors, gone, w, h, held = problem()
    added, _, report = states.state_ridge(*moments, w[survivors])
    c = ridge_by_rows(h, survivors, gone, report["lambda"]).T
    np.testing.assert_allclose(added, c @ w[gone], rtol=0, atol=1e-8)
    wanted, plain = ((h[:, gone] @ w[gone] - h[:, survivors] @ x @ w[gone]) for x in (c, 0 * c))
    residual = np.linalg.norm(wanted) / np.linalg.norm(plain)
    assert report["residual"] == pytest.approx(residual, rel=1e-6) and residual < 0.5
    # lambda is the best one on held-out rows.
    fitted = h[: len(h) - len(held)]
    errors = {}
    for ridge in states.LAMBDAS:
        trial = ridge_by_rows(fitted, survivors, gone, ridge).T
        errors[ridge] = np.linalg.norm(
            held[:, gone] @ w[gone] - held[:, survivors] @ trial @ w[gone]
        )
    assert report["lambda"] == min(errors, key=errors.get)
    share = errors[report["lambda"]] / np.linalg.norm(held[:, gone] @ w[gone])
    assert report["held_residual"] == pytest.approx(share, rel=1e-6)


def test_what_is_loud_on_bos_says_little_there():
    """Neurons of 1,000 times their rms on bos, three rows of it: the unit is 10% of that, and
    the others' parts hardly change. Without it bos would get 30 times as much."""
    fitted, held, survivors, gone, w, h, _ = problem()
    rms, loud = np.sqrt((h[:, survivors] ** 2).mean(0)), np.arange(len(survivors)) < 2
    on_bos = np.where(loud, 1000 * rms, rms)
    fitted = dataclasses.replace(fitted, first=3 * on_bos**2, rows=3)
    moments = fitted + dataclasses.replace(held, first=on_bos**2, rows=1)
    added = states.explained(moments, 0.3)
    c = ridge_by_rows(h, survivors, gone, 0.3, on_bos / 10).T
    np.testing.assert_allclose(added, c @ w[gone], rtol=0, atol=1e-8)
    careless = ridge_by_rows(h, survivors, gone, 0.3).T @ w[gone]
    much, little = (np.linalg.norm(on_bos @ x) for x in (careless, added))
    assert little < much / 30
    assert moments.error(added) <= moments.error(np.zeros_like(added))


@pytest.mark.parametrize("seed", range(5))
def test_no_ridge_makes_the_output_worse_than_removal_and_a_large_one_is_removal(seed):
    fitted, held, *_ = problem(seed, tokens=40)
    moments = fitted + held
    plain = moments.error(np.zeros_like(moments.crossed))
    for ridge in (1e-6, 0.1, 10.0, 1e4):
        assert moments.error(states.explained(moments, ridge)) <= plain * (1 + 1e-12)
    assert np.abs(states.explained(moments, 1e12)).max() <= 1e-6


def test_gram_is_its_formula():
    *moments, survivors, gone, w, h, _ = problem()
    added, _, report = states.gram(*moments, w[survivors])
    g = h.T @ h / len(h)
    ridge = states.GRAM * np.diag(g)[survivors].mean()
    b = g[:, survivors] @ np.linalg.inv(
        g[np.ix_(survivors, survivors)] + ridge * np.eye(len(survivors))
    )
    np.testing.assert_allclose(w[survivors] + added, b.T @ w, rtol=1e-8, atol=1e-8)
    wanted = h @ w - h[:, survivors] @ b.T @ w
    plain = h[:, gone] @ w[gone]
    assert report["residual"] == pytest.approx(
        np.linalg.norm(wanted) / np.linalg.norm(plain), rel=1e-6
    )


def test_a_removed_copy_costs_nothing():
    """Equal neurons with other outgoing weights: the kept one replaces the other, small lambda."""
    rng = np.random.default_rng(0)
    g, w = rng.normal(size=(400, 12)), rng.normal(size=(12, 5))
    moments = moments_of(g, g @ w)  # the removed twins have these states, too
    plain = moments.error(np.zeros_like(w))
    assert moments.error(states.explained(moments, 1e-9)) <= 1e-5 * plain
