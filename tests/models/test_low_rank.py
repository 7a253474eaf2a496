"""Training with an adapter of this test that replaces a kernel by two factors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import LLAMA, random_params

import ffn_heterogeneity.adapters as adapters
import ffn_heterogeneity.models.linear as linear
from ffn_heterogeneity.adapters import Adapter, dora, kernel_readers, lora
from ffn_heterogeneity.io.hf.structure import fold
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.linear import Linear, effective_kernel
from ffn_heterogeneity.models.stack import restack, slots, unstack
from ffn_heterogeneity.train.build import made_whole
from ffn_heterogeneity.tree import weights

SIZE, RANK, ROWS = 1024, 64, 256
THIN = Adapter(
    "thin",
    {"thin_a": weights("in", "rank"), "thin_b": weights("rank", "out")},
    base=lambda leaves: leaves["thin_a"] @ leaves["thin_b"],
    product=lambda y, x, leaves, kernel, dot, drop: dot(dot(x, leaves["thin_a"]), leaves["thin_b"]),
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    table = {"thin": THIN, **adapters.ADAPTERS}
    monkeypatch.setattr(adapters, "ADAPTERS", table)
    monkeypatch.setattr(linear, "ADAPTERS", table)


def factors(fan_in=SIZE, fan_out=SIZE, rank=RANK):
    rng = np.random.default_rng(0)
    return {
        "thin_a": (rng.normal(size=(fan_in, rank)) / fan_in**0.5).astype(np.float32),
        "thin_b": (rng.normal(size=(rank, fan_out)) / rank**0.5).astype(np.float32),
    }


def beside(leaves, name):
    """The leaves of LoRA, of DoRA over it, or of a mask, in addition to the factors."""
    shape = jax.eval_shape(effective_kernel, leaves)
    if name == "mask":
        return leaves | {"mask": np.ones(shape.shape, np.float32)}
    thin = lora.init(jax.random.key(1), shape, 4, 4.0)
    thin["lora_b"] = jax.random.normal(jax.random.key(2), thin["lora_b"].shape)
    leaves = leaves | thin
    return leaves | dora.init(effective_kernel(leaves)) if name == "dora" else leaves


def compiled(leaves):
    def loss(leaves, x):
        return jnp.sum(Linear(SIZE).apply({"params": leaves}, x) ** 2)

    x = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.float32)
    return jax.jit(jax.grad(loss, (0, 1), allow_int=True)).lower(leaves, x).compile()


def test_a_step_costs_what_the_factors_cost():
    """Two thin products forward, four backward, within 5%; no [1024, 1024] is computed."""
    step = compiled(factors())
    products = 3 * 2 * ROWS * RANK * (SIZE + SIZE)
    assert step.cost_analysis()["flops"] == pytest.approx(products, rel=0.05)
    assert f"{SIZE},{SIZE}" not in step.as_text()
    assert f"{SIZE},{SIZE}" not in compiled(beside(factors(), "lora")).as_text()
    for name in ("mask", "dora"):
        assert f"{SIZE},{SIZE}" in compiled(beside(factors(), name)).as_text()


@pytest.mark.parametrize("name", [None, "lora", "mask", "dora"])
def test_it_is_the_function_of_its_effective_kernel(name):
    leaves = factors(12, 8, 3)
    leaves = beside(leaves, name) if name else leaves
    assert kernel_readers(leaves) == ([] if name in (None, "lora") else [name])
    x = np.random.default_rng(3).normal(size=(5, 12)).astype(np.float32)
    y = Linear(8).apply({"params": leaves}, x)
    np.testing.assert_allclose(y, x @ effective_kernel(leaves), atol=2e-6)
    tree = {"layers": [{"ffn": {"up": jax.tree.map(np.asarray, leaves)}}]}
    folded = fold(LLAMA, tree)["layers"][0]["ffn"]["up"]
    assert set(folded) == {"kernel"}
    np.testing.assert_allclose(x @ folded["kernel"], y, atol=2e-6)


def thin_model():
    tree = unstack(random_params(LLAMA))
    for layer in tree["layers"]:
        kernel = layer["ffn"]["down"]["kernel"]
        layer["ffn"]["down"] = factors(*kernel.shape, 3)
    return restack(LLAMA, tree)


def test_nucl_over_it_by_finite_differences():
    """The term reads the product of the factors; both get its gradient, and this is reported."""
    term = nucl_term(TermContext("nucl", "losses.nucl.weight", LLAMA, None), variant="gini")
    rng, step = np.random.default_rng(4), 1e-6
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), thin_model())
        way = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)

        def total(at):
            return term.function(jax.tree.map(lambda p, w: p + at * w, params, way)).total

        slope = jax.jit(jax.grad(total))(0.0)
        assert float(total(step) - total(-step)) / (2 * step) == pytest.approx(
            float(slope), rel=1e-5
        )
        gradient = jax.jit(jax.grad(lambda p: term.function(p).total))(params)
    down = gradient["stack"]["segment_0"]["slot_0"]["ffn"]["down"]
    assert all(np.abs(down[name]).max() > 0 for name in THIN.leaves)
    assert made_whole(slots(params), [term]) == ["'stack/segment_0/slot_0/ffn/down' whole for nucl"]
    assert made_whole(slots(params), []) == []


def test_a_model_of_factors_is_the_folded_one():
    params = thin_model()
    tokens = {"tokens": np.arange(10, dtype=np.int32)[None]}
    folded = restack(LLAMA, fold(LLAMA, jax.tree.map(np.asarray, unstack(params))))
    for remat in ("none", "full"):
        options = dataclasses.replace(causal_lm.RunOptions(), remat=remat)
        thin = causal_lm.forward(LLAMA, params, tokens, options=options)["hidden"]
        np.testing.assert_allclose(
            thin, causal_lm.forward(LLAMA, folded, tokens)["hidden"], atol=2e-5
        )
