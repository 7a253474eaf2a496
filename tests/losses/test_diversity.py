"""Inter-neuron diversity against explicit pairs in float64; rows that break norms; the term."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nucl_oracle import gap
from tiny_models import LLAMA, batch_of, config_of, random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.diversity import diversity_term, similarity
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models.stack import layer_leaves, restack, unstack
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.tree import flatten

GEMMA = tiny_of("gemma2", layers=4)

CONTEXT = TermContext("diversity", "diversity_weight")


@jax.jit
def value_and_gradient(w):
    return jax.value_and_grad(lambda w: jnp.sum(similarity(w)))(w)


def oracle(w):
    """Mean cosine of |rows| over every pair of rows that are not zero, pair by pair."""
    a = np.abs(np.asarray(w, np.float64))
    live = [row / row.max() for row in a if row.max() > 0]
    pairs = list(itertools.combinations(live, 2))
    cosines = [p @ q / np.sqrt((p @ p) * (q @ q)) for p, q in pairs]
    return np.mean(cosines) if pairs else 0.0


def differences(w, step=1e-6):
    """Central differences of the oracle; each weight changes by a fraction of itself."""
    w = np.asarray(w, np.float64)
    slopes = np.zeros_like(w)
    for place in np.ndindex(w.shape):
        h = step * abs(w[place])
        if h:
            up, down = w.copy(), w.copy()
            up[place] += h
            down[place] -= h
            slopes[place] = (oracle(up) - oracle(down)) / (2 * h)
    return slopes


@pytest.mark.parametrize("shape", [(2, 3), (7, 5), (40, 12), (3, 1), (64, 100)])
@pytest.mark.parametrize("heavy", [False, True])
def test_value_is_the_mean_over_explicit_pairs(shape, heavy):
    rng = np.random.default_rng(0)
    w = (rng.standard_t(2, shape) if heavy else 0.02 * rng.normal(size=shape)).astype(np.float32)
    value = similarity(w)
    assert value.dtype == jnp.float32 and value.shape == ()
    np.testing.assert_allclose(value, oracle(w), rtol=2e-6)


@pytest.mark.parametrize("shape", [(2, 3), (6, 5), (9, 4)])
def test_gradient_is_that_of_finite_differences(shape):
    w = (0.02 * np.random.default_rng(1).normal(size=shape)).astype(np.float32)
    w[1, 2] = 0
    _, slopes = value_and_gradient(w)
    expected = differences(w)
    assert gap(slopes, expected) < 1e-5
    assert slopes[1, 2] == 0, "a removed weight stays removed"


def test_float64():
    with jax.enable_x64(True):
        w = np.random.default_rng(2).normal(size=(5, 4))
        value, slopes = value_and_gradient(w)
        assert value.dtype == slopes.dtype == np.float64
        np.testing.assert_allclose(value, oracle(w), rtol=1e-13)
        assert gap(slopes, differences(w)) < 1e-8


def test_its_ends_and_its_scale():
    same = np.tile([[0.3, -0.1, 0.2]], (6, 1)) * np.arange(1, 7)[:, None]
    np.testing.assert_allclose(similarity(same.astype(np.float32)), 1, rtol=1e-6)
    assert abs(float(similarity(jnp.eye(5)))) < 1e-6
    gaussian = np.random.default_rng(3).normal(size=(512, 2048)).astype(np.float32)
    assert abs(float(similarity(gaussian)) - 2 / np.pi) < 2e-3
    scales = np.float32(2.0) ** np.random.default_rng(4).integers(-30, 30, (512, 1))
    np.testing.assert_allclose(similarity(gaussian * scales), similarity(gaussian), rtol=1e-6)


def test_rows_that_break_norms():
    ordinary = np.random.default_rng(5).normal(size=(4, 8))
    odd = [ordinary[0] * 1e-24, ordinary[1] * 1e-29, ordinary[2] * 1e24, np.full(8, 1e38)]
    odd += [np.linspace(1e38, 3.4e38, 8), np.full(8, -0.1), np.eye(8)[3]]
    matrix = np.concatenate([0.02 * ordinary, odd]).astype(np.float32)
    value, slopes = value_and_gradient(matrix)
    np.testing.assert_allclose(value, oracle(matrix), rtol=2e-6)
    assert np.isfinite(slopes).all()
    assert gap(slopes[:4], differences(matrix)[:4]) < 1e-5
    # Rows of zeros (removed or padded neurons) are not counted.
    padded = np.concatenate([matrix, np.zeros((3, 8), np.float32), -np.zeros((1, 8), np.float32)])
    more, wider = value_and_gradient(padded)
    np.testing.assert_allclose(more, value, rtol=1e-6)
    assert (wider[len(matrix) :] == 0).all()
    np.testing.assert_allclose(wider[:4], slopes[:4], rtol=1e-5)
    for few in (np.zeros((5, 8)), matrix[:1], np.zeros((0, 8)), np.eye(3, 8)[[0]] * 1e-35):
        value, slopes = value_and_gradient(np.asarray(few, np.float32))
        assert value == 0 and (slopes == 0).all()
    assert np.isnan(similarity(np.array([[np.nan, 1], [1, 2]], np.float32))), "no NaN is hidden"


def test_bfloat16_is_summed_in_float32():
    w = jnp.asarray(np.random.default_rng(6).normal(size=(30, 64)), jnp.bfloat16)
    value, slopes = value_and_gradient(w)
    np.testing.assert_allclose(value, oracle(np.asarray(w, np.float64)), rtol=2e-6)
    assert value.dtype == jnp.float32 and slopes.dtype == jnp.bfloat16


def test_what_it_cannot_take():
    refused(r"\(3,\)", similarity, jnp.ones(3))
    refused(r"\(3, 0\)", similarity, jnp.ones((3, 0)))
    refused("int32", similarity, jnp.ones((3, 2), jnp.int32), error=TypeError)


def test_pairs_are_never_formed():
    """Time and memory are O(m n): [m, m] would be 64 times the weights."""
    w = jax.ShapeDtypeStruct((2, 2048, 32), jnp.float32)
    compiled = value_and_gradient.lower(w).compile()
    size = 2 * 2048 * 32
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * size
    assert compiled.cost_analysis()["flops"] < 40 * size


# ---- the term: whole programs, compiled quickly


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("stacked", [True, False])
def test_term_is_the_sum_over_layers(stacked):
    config = GEMMA.with_widths([12, 9, 12, 12])
    params = random_params(config)
    tree = params if stacked else unstack(params)
    term = diversity_term(CONTEXT)
    value = jax.jit(term.function)(tree)
    exact = [oracle(leaves["kernel"]) for _, leaves in layer_leaves(params, "ffn/down")]
    np.testing.assert_allclose(value.total, sum(exact), rtol=1e-5)
    np.testing.assert_allclose(value.metrics["layer_mean"], exact, rtol=1e-5)
    np.testing.assert_allclose(value.metrics["mean"], np.mean(exact), rtol=1e-5)
    slopes = flatten(jax.jit(jax.grad(lambda p: term.function(p).total))(tree))
    moved = {path for path, leaf in slopes.items() if np.any(leaf)}
    assert moved == {path for path in slopes if path.endswith("ffn/down/kernel")}
    assert moved == {path for path in slopes if re.search(term.targets[0], path)}
    assert term.weight == "diversity_weight" and value.denominator == 1


@pytest.mark.usefixtures("compiled_quickly")
def test_masks_are_seen():
    params = unstack(random_params(LLAMA))
    rng = np.random.default_rng(0)
    for layer in params["layers"]:
        down = layer["ffn"]["down"]
        down["mask"] = (rng.random(down["kernel"].shape) < 0.6).astype(np.float32)
    value = jax.jit(diversity_term(CONTEXT).function)(restack(LLAMA, params))
    downs = (layer["ffn"]["down"] for layer in params["layers"])
    exact = [oracle(down["kernel"] * down["mask"]) for down in downs]
    np.testing.assert_allclose(value.metrics["layer_mean"], exact, rtol=1e-5)


@pytest.mark.usefixtures("compiled_quickly")
def test_a_config_key_builds_it():
    mesh = partition.make_mesh(data=1, fsdp=1, tensor=1)
    params = random_params(LLAMA)

    def small(alpha):
        settings = {"batch_size": 3, "seq_len": 10, "dropout": 0.0, "optimizer__name": "sgd"}
        settings |= {"losses__diversity__weight": alpha}
        return config_of("nucl_finetune", "x,text,diversity", **settings)

    for bad in (-1.0, float("nan"), float("inf")):
        refused(f"losses.diversity.weight={bad} must be a number in", read, small(bad))
    built = plan(read(small(5.0)), mesh, Model(LLAMA, params, None, ""))
    state = create_state(params, built.optimizer, built.trainable, shardings=built.shardings[0])
    batch = {name: leaf[None] for name, leaf in batch_of(258).items()}
    hyper = read(small(5.0)).hyper(built.objective.terms)(0)
    hyper = {name: jnp.float32(x) for name, x in hyper.items()}
    weights = {"losses.nucl.weight": 0.0, "learning_rate": 0.0}
    _, metrics = built.train_step(
        state, batch, hyper | {k: jnp.float32(v) for k, v in weights.items()}
    )
    exact = np.sum([oracle(x["kernel"]) for _, x in layer_leaves(params, "ffn/down")])
    np.testing.assert_allclose(metrics["diversity"], exact, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], metrics["nll"] + 5 * exact, rtol=1e-5)
