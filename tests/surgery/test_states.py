"""Calibration on the model's own text, and compensation by the states that are kept."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import byte_tokenizer, random_params, tiny_of

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import layer_leaves, restack, unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.surgery import SURGERIES, states
from ffn_heterogeneity.surgery.own_text import own_rows
from ffn_heterogeneity.surgery.seen import seen_states

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LLAMA = dataclasses.replace(tiny_of("llama", layers=2), vocab_size=258)


def model_of(config=LLAMA, params=None):
    params = random_params(config) if params is None else params
    return Model(config, params, byte_tokenizer(), "tiny")


def rows_of(config, count=8, seed=0):
    rng = np.random.default_rng(seed)
    return [np.append(0, rng.integers(2, config.vocab_size, n)).astype(np.int32)
            for n in rng.integers(9, 20, count)]  # fmt: skip


def states_of(config, params, rows, layer):
    """h of every real token but the first, [tokens, m] in float64, one row at a time."""
    probe = Probe("h", lambda seen, batch, _: seen.ffn_state, kind="example")
    found = []
    for row in rows:
        outputs = causal_lm.forward(config, params, {"tokens": row[None]}, probes=(probe,))
        found.append(np.asarray(outputs["probes"]["h"][layer, 0, 1:], np.float64))
    return found


def down_of(params, layer):
    return np.asarray(list(layer_leaves(params, "ffn"))[layer][1]["down"]["kernel"], np.float64)


def test_sums_and_moments_are_of_real_tokens_alone():
    """Rows of many lengths, padded: neither padding nor the first token counts."""
    params, rows = random_params(LLAMA), rows_of(LLAMA)
    seen = seen_states(LLAMA, params, rows, moments=True)
    for layer in range(2):
        each = states_of(LLAMA, params, rows, layer)
        h, held = np.concatenate(each), np.concatenate([each[3], each[7]])
        fitted = np.concatenate([x for i, x in enumerate(each) if i % 4 != 3])
        found = seen[layer]
        assert found["tokens"] == len(h)
        for name, wanted in (("mean", np.abs(h).mean(0)), ("signed", h.mean(0)),
                             ("norm", np.sqrt((h**2).sum(0)))):  # fmt: skip
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-9)
        for gram, own in zip(found["moments"], (fitted, held), strict=True):
            np.testing.assert_allclose(gram, own.T @ own / len(own), rtol=1e-5, atol=1e-9)
        assert found["held_share"] == pytest.approx(len(held) / len(h))


def problem(seed=0, m=20, tokens=200, outputs=6):
    """(seen, kept, gone, W, h of the rows fitted, h held out): states that depend on each other."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(8, m)) * np.exp(rng.normal(size=m))
    h = rng.normal(size=(tokens, 8)) @ mix + 0.1 * rng.normal(size=(tokens, m)) + 0.2
    fitted, held = h[: 3 * tokens // 4], h[3 * tokens // 4 :]
    gone = np.sort(rng.permutation(m)[: m // 4])
    w = rng.normal(size=(m, outputs))
    grams = tuple(x.T @ x / len(x) for x in (fitted, held))
    seen = {"moments": grams, "held_share": 0.25, "tokens": tokens, "signed": h.mean(0)}
    return seen, np.setdiff1d(np.arange(m), gone), gone, w, h, held


def ridge_by_rows(h, kept, gone, ridge):
    """C of the formula, from the states themselves."""
    z = h[:, kept] / np.sqrt((h[:, kept] ** 2).mean(0))
    system = z.T @ z / len(h) + ridge * np.eye(len(kept))
    return (np.linalg.inv(system) @ (z.T @ h[:, gone] / len(h))).T / np.sqrt(
        (h[:, kept] ** 2).mean(0)
    )


def test_state_ridge_is_its_formula():
    seen, kept, gone, w, h, held = problem()
    rows, report = states.state_ridge(seen, kept, gone, lambda part: w[part])
    c = ridge_by_rows(h, kept, gone, report["lambda"]).T
    np.testing.assert_allclose(rows(slice(None)), w[kept] + c @ w[gone], rtol=0, atol=1e-8)
    wanted, plain = ((h[:, gone] @ w[gone] - h[:, kept] @ x @ w[gone]) for x in (c, 0 * c))
    residual = np.linalg.norm(wanted) / np.linalg.norm(plain)
    assert report["residual"] == pytest.approx(residual, rel=1e-6) and residual < 0.5
    # lambda is the best on what was held out, of those tried.
    fitted = h[: len(h) - len(held)]
    errors = {}
    for ridge in states.LAMBDAS:
        own = ridge_by_rows(fitted, kept, gone, ridge).T
        errors[ridge] = np.linalg.norm(held[:, gone] @ w[gone] - held[:, kept] @ own @ w[gone])
    assert report["lambda"] == min(errors, key=errors.get)


@pytest.mark.parametrize("seed", range(5))
def test_no_ridge_makes_the_output_worse_than_removal_and_a_large_one_is_removal(seed):
    seen, kept, gone, w, *_ = problem(seed, tokens=40)
    gram = states._whole(seen)
    plain = states.output_error(gram, kept, gone, np.zeros((len(kept), w.shape[1])), w[gone])
    for ridge in (1e-6, 0.1, 10.0, 1e4):
        c = states.explained(gram, kept, gone, ridge)
        assert states.output_error(gram, kept, gone, c @ w[gone], w[gone]) <= plain * (1 + 1e-12)
    assert np.abs(states.explained(gram, kept, gone, 1e12)).max() <= 1e-6


def test_gram_is_its_formula():
    seen, kept, gone, w, h, _ = problem()
    rows, report = states.gram(seen, kept, gone, lambda part: w[part])
    g = h.T @ h / len(h)
    ridge = states.GRAM * np.diag(g)[kept].mean()
    b = g[:, kept] @ np.linalg.inv(g[np.ix_(kept, kept)] + ridge * np.eye(len(kept)))
    np.testing.assert_allclose(rows(slice(None)), b.T @ w, rtol=1e-8, atol=1e-8)
    wanted = h @ w - h[:, kept] @ b.T @ w
    plain = h[:, gone] @ w[gone]
    assert report["residual"] == pytest.approx(
        np.linalg.norm(wanted) / np.linalg.norm(plain), rel=1e-6
    )


def test_a_removed_copy_costs_nothing():
    """Twins whose outgoing weights differ: the one that stays takes over, with a small lambda."""
    tree = unstack(random_params(LLAMA))
    for layer in tree["layers"]:
        ffn = layer["ffn"]
        for name in ("gate", "up"):
            ffn[name]["kernel"][:, 1::2] = ffn[name]["kernel"][:, ::2]
    params = restack(LLAMA, tree)
    seen = seen_states(LLAMA, params, rows_of(LLAMA, 16), moments=True)
    width = LLAMA.ffn_widths[0]
    kept, gone = np.arange(0, width, 2), np.arange(1, width, 2)
    for layer in range(2):
        gram, w = states._whole(seen[layer]), down_of(params, layer)
        c = states.explained(gram, kept, gone, 1e-9)
        plain = states.output_error(gram, kept, gone, 0 * w[kept], w[gone])
        assert states.output_error(gram, kept, gone, c @ w[gone], w[gone]) <= 1e-5 * plain


def test_own_text_begins_with_bos_and_has_as_many_tokens_as_asked():
    model = model_of()
    rows = own_rows(model, 700, seed=3)
    assert sum(len(row) - 1 for row in rows) == 700 and {row[0] for row in rows} == {0}
    again, other = own_rows(model, 700, seed=3), own_rows(model, 700, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(rows, other, strict=False))


@pytest.mark.parametrize("criterion", ["optipfair", "wanda_sp", "flap", "entropy"])
def test_removal_without_data(criterion):
    """On the model's own text; what is compensated is nearer to the whole model on that text."""
    model = model_of()
    asked = {"criterion": criterion, "ratio": 0.25, "calibration": "own", "seed": 1}
    asked |= {"calibration_tokens": 1024}
    plain, _ = SURGERIES["prune"](model, asked)
    ridge, report = SURGERIES["prune"](model, asked | {"compensation": "state_ridge"})
    assert all(0 < one["residual"] < 1 for one in report["compensated"])
    tokens = np.stack([row[:100] for row in own_rows(model, 1024, seed=1) if len(row) >= 100])
    whole, *others = (
        np.asarray(causal_lm.forward(one.config, one.params, {"tokens": tokens})["hidden"])
        for one in (model, plain, ridge)
    )
    errors = [np.linalg.norm(other - whole) for other in others]
    assert errors[1] < errors[0]


def test_wanda_and_flap_are_their_formulas():
    from ffn_heterogeneity.surgery.criteria import layer_scores

    params, rows = random_params(LLAMA), rows_of(LLAMA)
    seen = seen_states(LLAMA, params, rows)
    h, w = np.concatenate(states_of(LLAMA, params, rows, 1)), down_of(params, 1)
    ffn = dict(list(layer_leaves(params, "ffn"))[1][1]) | {"seen": seen[1]}
    norms = np.linalg.norm(w, axis=1)
    wanted = {"wanda_sp": np.linalg.norm(h, axis=0) * norms, "flap": h.var(0) * norms**2}
    for name, values in wanted.items():
        np.testing.assert_allclose(layer_scores(name, ffn, layer=1), -values, rtol=1e-4)


def test_flaps_bias_keeps_the_mean_of_the_output():
    config = tiny_of("gpt2", layers=2)
    params = jax.tree.map(np.asarray, random_params(config))
    seen = seen_states(config, params, rows_of(config))
    ffn = dict(list(layer_leaves(params, "ffn"))[0][1])
    from ffn_heterogeneity.surgery.plan import Plan
    from ffn_heterogeneity.surgery.reduce import reduce_layer

    plan = Plan("flap", ratio=0.5, compensation="bias")
    width = config.ffn_widths[0]
    new, gone, _ = reduce_layer(ffn, plan, layer=0, cut=width // 2, seen=seen[0])
    added = seen[0]["signed"][gone] @ np.asarray(ffn["down"]["kernel"], np.float64)[gone]
    np.testing.assert_allclose(new["down"]["bias"] - ffn["down"]["bias"], added, atol=1e-6)
    kept = np.setdiff1d(np.arange(width), gone)
    np.testing.assert_array_equal(new["down"]["kernel"], ffn["down"]["kernel"][kept])


@pytest.mark.parametrize(("config", "asked", "told"), [
    (tiny_of("bert", layers=2), {}, "is an encoder"),
    (dataclasses.replace(LLAMA, bos_id=None), {}, "no bos"),
    (LLAMA, {"calibration": ""}, "calibration=<text file>, or own"),
    (LLAMA, {"calibration_tokens": 100}, "at least 512"),
    (LLAMA, {"compensation": "bias"}, "use state_ridge"),
])  # fmt: skip
def test_what_is_wrong_is_said(config, asked, told):
    settings = {"criterion": "optipfair", "ratio": 0.25, "calibration": "own"}
    settings |= {"calibration_tokens": 512, "compensation": "state_ridge"}
    with pytest.raises(ValueError, match=told):
        SURGERIES["prune"](model_of(config), settings | asked)


def test_fewer_tokens_than_neurons_are_refused():
    seen, kept, gone, w, *_ = problem()
    with pytest.raises(ValueError, match="calibration_tokens of at least 15"):
        states.state_ridge(seen | {"tokens": 10}, kept, gone, lambda part: w[part])
