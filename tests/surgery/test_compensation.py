"""Compensation by kept neurons: each method against its formula, solved another way."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from test_similarity import brute_force, layer_of, vectors_of
from tiny_models import LLAMA, config_of, our_logits, random_params, save_tiny

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import compress
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery import least_squares
from ffn_heterogeneity.surgery.compensation import OF_WEIGHTS, outgoing_of_survivors
from ffn_heterogeneity.surgery.reduce import reduce_layer
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan

pytestmark = pytest.mark.usefixtures("compiled_quickly")
BIASED, PLACE = dataclasses.replace(LLAMA, ffn_bias=True), Place(0, None, "ffn")


def forward(ffn: dict, x: np.ndarray, act) -> np.ndarray:
    """The FFN in float64."""

    def linear(name):
        leaves = {key: np.asarray(leaf, np.float64) for key, leaf in ffn[name].items()}
        return lambda x: x @ leaves["kernel"] + leaves.get("bias", 0)

    h = act(linear("gate")(x)) * linear("up")(x) if "gate" in ffn else act(linear("up")(x))
    return linear("down")(h * np.asarray(ffn.get("neuron_scale", 1.0), np.float64))


def silu(x):
    return x / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0)


def without(ffn: dict, gone, kernel) -> dict:
    """The FFN without those neurons, its outgoing weights replaced."""
    survivors = np.setdiff1d(np.arange(ffn["down"]["kernel"].shape[0]), gone)
    smaller = take_neurons(BIASED, PLACE, ffn, survivors)
    smaller.pop("neuron_scale", None)
    return smaller | {"down": smaller["down"] | {"kernel": kernel}}


def split(m: int, count: int, rng) -> tuple[np.ndarray, np.ndarray]:
    gone = np.sort(rng.permutation(m)[:count])
    return np.setdiff1d(np.arange(m), gone), gone


def test_sum_adds_up_the_merges_in_their_order():
    ffn = layer_of(np.random.default_rng(0), 30, 4, bias=True)
    plan = RemovalPlan("similarity", count=20, compensation="sum")
    smaller, gone, report = reduce_layer(BIASED, Place(3, None, "ffn"), ffn, plan, cut=20)
    w, steps = ffn["down"]["kernel"].copy(), brute_force(ffn, 20)
    for i, j in steps:
        w[i] += w[j]
    survivors = np.setdiff1d(np.arange(30), gone)
    assert sorted(j for _, j in steps) == gone.tolist()
    np.testing.assert_array_equal(smaller["down"]["kernel"], w[survivors])
    np.testing.assert_array_equal(smaller["down"]["bias"], ffn["down"]["bias"])
    np.testing.assert_array_equal(smaller["gate"]["bias"], ffn["gate"]["bias"][survivors])
    # Nothing is lost: all rows are in some kept neuron.
    np.testing.assert_allclose(
        w[survivors].sum(axis=0), ffn["down"]["kernel"].sum(axis=0), rtol=1e-12
    )
    assert report["layer"] == 3 and report["lambda_max"] == 1 and report["condition"] is None
    assert report["lambda_norm"] == pytest.approx(20**0.5)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_sum_of_other_criteria_goes_to_the_nearest_survivor(plain, integers):
    rng = np.random.default_rng(1)
    for _ in range(20):
        draw = (lambda shape: rng.integers(-1, 2, shape)) if integers else None
        ffn = layer_of(rng, 25, 2, plain=plain, draw=draw, dtype=np.float32)
        survivors, gone = split(25, 10, rng)
        e, w = vectors_of(ffn), ffn["down"]["kernel"].astype(np.float64)
        squared = ((e[gone][:, None] - e[survivors][None]) ** 2).sum(axis=-1)
        for row, j in zip(squared, gone, strict=True):
            w[survivors[row.argmin()]] += w[j]
        outgoing, report = outgoing_of_survivors("sum", ffn, gone)
        np.testing.assert_allclose(outgoing, w[survivors], rtol=1e-6, atol=1e-6)
        residual = np.sqrt(squared.min(axis=1).sum() / (e[gone] ** 2).sum())
        assert report["residual"] == pytest.approx(residual, rel=1e-9)


@pytest.mark.parametrize("plain", [False, True])
def test_duplicates_merge_without_loss(plain):
    rng = np.random.default_rng(2)
    ffn = layer_of(rng, 24, 6, plain=plain, bias=True)
    for name in ("gate", "up"):
        if name in ffn:
            for leaf in ffn[name].values():
                leaf[..., 16:] = leaf[..., 3:11]
    x, plan = rng.normal(size=(50, 6)), RemovalPlan("similarity", count=8, compensation="sum")
    smaller, gone, report = reduce_layer(BIASED, PLACE, ffn, plan, cut=8)
    assert gone.tolist() == list(range(16, 24)) and report["residual"] == 0
    np.testing.assert_allclose(forward(smaller, x, silu), forward(ffn, x, silu), atol=1e-12)
    bare, _, report = reduce_layer(BIASED, PLACE, ffn, RemovalPlan("similarity", count=8), cut=8)
    assert report is None and np.abs(forward(bare, x, silu) - forward(ffn, x, silu)).max() > 0.1


def test_scaled_is_exact_for_multiples_of_the_linear_part():
    rng = np.random.default_rng(3)
    ffn = layer_of(rng, 12, 5, bias=True)
    pairs = {7: (2, -3.0), 9: (2, 0.25), 11: (4, 1.0)}
    for j, (i, c) in pairs.items():
        for key in ("kernel", "bias"):
            ffn["gate"][key][..., j] = ffn["gate"][key][..., i]
            ffn["up"][key][..., j] = c * ffn["up"][key][..., i]
    gone, x = np.array(sorted(pairs)), rng.normal(size=(40, 5))
    kernel, report = outgoing_of_survivors("scaled", ffn, gone)
    outputs = forward(without(ffn, gone, kernel), x, silu)
    np.testing.assert_allclose(outputs, forward(ffn, x, silu), atol=1e-12)
    assert report["lambda_max"] == pytest.approx(3) and report["residual"] < 1e-12
    kernel, _ = outgoing_of_survivors("sum", ffn, gone)
    assert np.abs(forward(without(ffn, gone, kernel), x, silu) - forward(ffn, x, silu)).max() > 0.1


def test_scaled_is_exact_for_relu():
    rng = np.random.default_rng(4)
    ffn = layer_of(rng, 12, 5, plain=True, bias=True)
    for key in ("kernel", "bias"):
        ffn["up"][key][..., 6] = 2.5 * ffn["up"][key][..., 1]
        ffn["up"][key][..., 8] = -2 * ffn["up"][key][..., 1]  # no multiple: ReLU has a sign
    x = rng.normal(size=(40, 5))
    kernel, report = outgoing_of_survivors("scaled", ffn, np.array([6]))
    outputs = forward(without(ffn, [6], kernel), x, relu)
    np.testing.assert_allclose(outputs, forward(ffn, x, relu), atol=1e-12)
    _, report = outgoing_of_survivors("scaled", ffn, np.array([8]))
    assert report["residual"] > 0.1


@pytest.mark.parametrize("plain", [False, True])
def test_scaled_takes_the_nearest_multiple(plain):
    rng = np.random.default_rng(5)
    for _ in range(30):
        ffn = layer_of(rng, 20, 3, plain=plain)
        ffn["up"]["kernel"][:, rng.integers(0, 20, 3)] = 0
        survivors, gone = split(20, 8, rng)
        w = ffn["down"]["kernel"].copy()
        total = 0.0
        for j in gone:
            best = (np.inf, 0, 0.0)
            for i in survivors:
                up_i, up_j = ffn["up"]["kernel"][:, i], ffn["up"]["kernel"][:, j]
                c = up_i @ up_j / (up_i @ up_i) if up_i.any() else 0.0
                c = max(c, 0.0) if plain else c
                d = ((up_j - c * up_i) ** 2).sum()
                if not plain:
                    d += ((ffn["gate"]["kernel"][:, i] - ffn["gate"]["kernel"][:, j]) ** 2).sum()
                best = min(best, (d, i, c))
            w[best[1]] += best[2] * w[j]
            total += best[0]
        outgoing, report = outgoing_of_survivors("scaled", ffn, gone)
        np.testing.assert_allclose(outgoing, w[survivors], rtol=1e-10, atol=1e-10)
        residual = np.sqrt(total / (vectors_of(ffn)[gone] ** 2).sum())
        assert report["residual"] == pytest.approx(residual, rel=1e-9)


# ---- least squares

# m, n, removed neurons: 2n below, equal to and above the number of kept ones.
SHAPES = [(40, 6, 10), (16, 6, 4), (40, 30, 10), (300, 60, 100), (300, 150, 100)]


@pytest.fixture(params=["eigenvalues", "Cholesky"])
def factor(request, monkeypatch):
    monkeypatch.setattr(
        least_squares, "DIRECT", {"eigenvalues": 10**9, "Cholesky": 2}[request.param]
    )


@pytest.mark.parametrize(("m", "n", "count"), SHAPES)
def test_least_squares_is_the_minimum_norm_solution(m, n, count, factor):
    rng = np.random.default_rng(6)
    ffn = layer_of(rng, m, n)
    survivors, gone = split(m, count, rng)
    e, w = vectors_of(ffn), ffn["down"]["kernel"]
    factors, *_ = np.linalg.lstsq(e[survivors].T, e[gone].T, rcond=None)
    outgoing, report = outgoing_of_survivors("least_squares", ffn, gone)
    wanted = w[survivors] + factors @ w[gone]
    assert np.abs(outgoing - wanted).max() <= 1e-10 * np.abs(wanted).max()
    left = e[gone].T - e[survivors].T @ factors
    residual = np.linalg.norm(left) / np.linalg.norm(e[gone])
    assert report["residual"] == pytest.approx(residual, abs=1e-9)
    assert (residual < 1e-9) == (2 * n <= len(survivors))
    assert report["lambda_norm"] == pytest.approx(np.linalg.norm(factors))
    assert report["lambda_max"] == pytest.approx(np.abs(factors).max())
    assert report["condition"] == pytest.approx(np.linalg.cond(e[survivors]), rel=1e-4)


@pytest.mark.parametrize("n", [5, 40])
def test_least_squares_with_equal_and_zero_survivors(n, factor):
    rng = np.random.default_rng(7)
    ffn = layer_of(rng, 30, n)
    for name in ("gate", "up"):
        kernel = ffn[name]["kernel"]
        kernel[:, 5], kernel[:, 9], kernel[0] = kernel[:, 4], 0, 0
    gone = np.array([0, 1, 20, 29])
    survivors = np.setdiff1d(np.arange(30), gone)
    e, w = vectors_of(ffn), ffn["down"]["kernel"]
    factors = np.linalg.pinv(e[survivors].T, rcond=1e-8) @ e[gone].T
    outgoing, report = outgoing_of_survivors("least_squares", ffn, gone)
    np.testing.assert_allclose(outgoing, w[survivors] + factors @ w[gone], rtol=1e-9, atol=1e-9)
    assert report["lambda_norm"] == pytest.approx(np.linalg.norm(factors))
    assert report["condition"] < 1e6, "what counts as zero does not count"


@pytest.mark.parametrize(("m", "n", "count"), SHAPES)
def test_ridge(m, n, count, factor):
    rng = np.random.default_rng(8)
    ffn = layer_of(rng, m, n, plain=n == 30, bias=True)
    survivors, gone = split(m, count, rng)
    e, w = vectors_of(ffn), ffn["down"]["kernel"]
    gram = e[survivors] @ e[survivors].T
    mu = 0.1 * gram.diagonal().mean()
    factors = np.linalg.solve(gram + mu * np.eye(len(survivors)), e[survivors] @ e[gone].T)
    outgoing, report = outgoing_of_survivors("ridge", ffn, gone)
    np.testing.assert_allclose(outgoing, w[survivors] + factors @ w[gone], rtol=1e-9, atol=1e-9)
    assert report["lambda_max"] == pytest.approx(np.abs(factors).max())
    assert report["condition"] < np.linalg.cond(e[survivors])


@pytest.mark.parametrize("plain", [False, True])
def test_least_squares_is_exact_where_its_assumption_holds(plain):
    """A linear activation, and a constant gate or none: kept neurons span the removed ones."""
    rng = np.random.default_rng(9)
    ffn = layer_of(rng, 40, 5, plain=plain, bias=plain)
    if not plain:
        ffn["gate"]["kernel"][:] = 0
    gone, x = np.array([2, 3, 17]), rng.normal(size=(30, 5))
    act = (lambda x: x) if plain else (lambda x: np.ones_like(x))
    kernel, _ = outgoing_of_survivors("least_squares", ffn, gone)
    outputs = forward(without(ffn, gone, kernel), x, act)
    np.testing.assert_allclose(outputs, forward(ffn, x, act), atol=1e-11)


def test_one_solve_for_many(monkeypatch):
    """The size of blocks of removed neurons does not matter."""
    rng = np.random.default_rng(10)
    ffn = layer_of(rng, 60, 10)
    _, gone = split(60, 25, rng)
    at_once, report = outgoing_of_survivors("least_squares", ffn, gone)
    monkeypatch.setattr(least_squares, "_GONE", 4)
    monkeypatch.setattr(least_squares, "_BLOCK", 33)
    parts, again = outgoing_of_survivors("least_squares", ffn, gone)
    np.testing.assert_allclose(parts, at_once, rtol=1e-11, atol=1e-11)
    assert again == pytest.approx(report, rel=1e-9, abs=1e-9)


def test_survivors_of_zeros_take_nothing():
    ffn = layer_of(np.random.default_rng(11), 6, 3)
    for name in ("gate", "up"):
        ffn[name]["kernel"][:, 2:] = 0
    for name in ("least_squares", "ridge"):
        outgoing, report = outgoing_of_survivors(name, ffn, np.array([0, 1]))
        np.testing.assert_array_equal(outgoing, ffn["down"]["kernel"][2:])
        assert report == {"lambda_norm": 0, "lambda_max": 0, "residual": 1, "condition": None}


# ---- all of them


@pytest.mark.parametrize("name", sorted(OF_WEIGHTS))
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_compensation(name, dtype):
    rng = np.random.default_rng(12)
    ffn = layer_of(rng, 20, 4, bias=True, dtype=dtype)
    ffn["neuron_scale"] = rng.uniform(0.5, 2, 20).astype(dtype)
    ffn["down"]["mask"] = (rng.random((20, 4)) < 0.7).astype(np.float32)
    ffn["up"]["mask"] = np.ones((4, 20), np.float32)
    before = {k: {n: x.copy() for n, x in v.items()} for k, v in ffn.items() if k != "neuron_scale"}
    plan = RemovalPlan("magnitude", count=5, compensation=name)
    smaller, gone, report = reduce_layer(BIASED, PLACE, ffn, plan, cut=5)
    plain = {"kernel", "bias"}
    wanted = {"gate": plain, "up": plain | {"mask"}, "down": plain}
    assert {n: set(x) for n, x in smaller.items()} == wanted
    assert smaller["down"]["kernel"].shape == (15, 4) and smaller["down"]["kernel"].dtype == dtype
    assert {"lambda_norm", "lambda_max", "residual", "condition"} <= set(report)
    assert all(value is None or np.isfinite(value) for value in report.values())
    json.dumps(report)
    for leaf, leaves in before.items():
        for key, value in leaves.items():
            np.testing.assert_array_equal(ffn[leaf][key], value)
    # Equal to weights that include mask and scale.
    w = ffn["down"]["kernel"].astype(np.float64) * ffn["down"]["mask"]
    w *= ffn["neuron_scale"].astype(np.float64)[:, None]
    folded = {**ffn, "down": {"kernel": w}}
    del folded["neuron_scale"]
    wanted, _ = outgoing_of_survivors(name, folded, gone)
    np.testing.assert_array_equal(smaller["down"]["kernel"], wanted.astype(dtype))
    turned = ffn | {
        name: {k: np.asfortranarray(v) for k, v in ffn[name].items()} for name in ("up", "down")
    }
    again, _, _ = reduce_layer(BIASED, PLACE, turned, plan, cut=5)
    np.testing.assert_array_equal(again["down"]["kernel"], smaller["down"]["kernel"])


def test_weights_that_no_longer_fit_are_refused():
    rng = np.random.default_rng(13)
    ffn = layer_of(rng, 16, 6, dtype=np.float16)
    ffn["down"]["kernel"][:] = 6e4
    plan = RemovalPlan("magnitude", count=4, compensation="sum")
    with pytest.raises(ValueError, match="layer 2: compensation='sum'.*float16.*float32"):
        reduce_layer(BIASED, Place(2, None, "ffn"), ffn, plan, cut=4)


def test_similarity_reversed_removes_what_would_go_last():
    ffn = layer_of(np.random.default_rng(14), 15, 4)
    order = [j for _, j in brute_force(ffn, 14)]
    order += [i for i in range(15) if i not in order]
    for count in (0, 1, 6):
        plan = RemovalPlan("similarity", count=count, reverse=True, compensation="sum")
        _, gone, _ = reduce_layer(BIASED, PLACE, ffn, plan, cut=count)
        assert gone.tolist() == sorted(order[15 - count :])


# ---- whole models


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama whose last 8 neurons of each layer repeat others, with signs."""
    tree = unstack(random_params(LLAMA))
    for layer in tree["layers"]:
        ffn = layer["ffn"]
        ffn["gate"]["kernel"][:, 16:] = ffn["gate"]["kernel"][:, 2:10]
        ffn["up"]["kernel"][:, 16:] = ffn["up"]["kernel"][:, 2:10]
    path = tmp_path_factory.mktemp("model") / "tiny"
    return save_tiny(path, LLAMA, restack(LLAMA, tree))


def test_compress_merges_what_repeats(model, tmp_path):
    changes = {"criterion": "similarity", "compensation": "sum", "count": 8}
    results = compress.run(config_of("prune", model=str(model), **changes), tmp_path)
    assert results["removed"] == [list(range(16, 24))] * 4
    assert results["compensation"] == "sum"
    reports = json.loads((tmp_path / "results.json").read_text())["compensated"]
    assert [row["layer"] for row in reports] == [0, 1, 2, 3]
    assert all(row["residual"] == 0 for row in reports)
    tokens = np.random.default_rng(3).integers(2, 258, (2, 20))
    before, after = load_model(str(model)), load_model(str(tmp_path / "model"))
    assert after.config.ffn_widths == (16,) * 4
    np.testing.assert_allclose(
        our_logits(after.config, after.params, tokens),
        our_logits(before.config, before.params, tokens),
        atol=1e-4,
    )


@pytest.mark.parametrize("name", ["least_squares", "ridge", "scaled"])
def test_compress_compensates(model, tmp_path, name):
    changes = {"criterion": "magnitude", "compensation": name, "layers": "1,2"}
    results = compress.run(config_of("prune", model=str(model), **changes), tmp_path)
    assert [row["layer"] for row in results["compensated"]] == [1, 2]
    tree = unstack(random_params(LLAMA))["layers"][0]["ffn"]
    after = unstack(load_model(str(tmp_path / "model")).params)["layers"]
    np.testing.assert_array_equal(after[0]["ffn"]["down"]["kernel"], tree["down"]["kernel"])
    removed = results["removed"][1]
    dense = unstack(load_model(str(model)).params)["layers"][1]["ffn"]
    wanted, _ = outgoing_of_survivors(name, dense, np.array(removed))
    np.testing.assert_array_equal(after[1]["ffn"]["down"]["kernel"], wanted)
