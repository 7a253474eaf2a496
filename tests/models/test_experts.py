"""Layers with experts against a float64 formula written token by token, in all dispatches."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import LLAMA, batch_of, our_logits, random_params, with_experts
from tiny_runs import refused

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.losses.router import load_balance_term, router_z_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ConfigError
from ffn_heterogeneity.models.dispatch import DISPATCHES, block_size, grouped_product, grouping
from ffn_heterogeneity.models.experts import Experts
from ffn_heterogeneity.models.leaves import count_parameters
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.tree import flatten, unflatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
D = LLAMA.d_model


@pytest.fixture
def wide():
    """Computes in float64, where all implementations agree to the last digits."""
    with jax.enable_x64(True):
        yield


def block_of(experts, m, columns=None, seed=0, router="linear", scale=True, constants=0):
    """Random leaves of one layer's experts."""
    rng, columns = np.random.default_rng(seed), columns or experts
    shapes = {"gate": (experts, D, m), "up": (experts, D, m), "down": (experts, m, D)}
    ffn = {name: {"kernel": rng.normal(size=shape) * 0.3} for name, shape in shapes.items()}
    ffn["router"] = {"kernel": rng.normal(size=(D, columns))}
    if router == "mlp":
        ffn["router"] = {"kernel": rng.normal(size=(columns,) * 2)}
        ffn["router"]["hidden"] = {"kernel": rng.normal(size=(D, columns))}
    if constants:
        ffn["constant"] = rng.normal(size=(constants, D))
    if scale:
        ffn["neuron_scale"] = rng.uniform(0.5, 2, (experts, m))
    return ffn


def formula(layer, ffn, x_btd):
    """y, token by token and expert by expert."""
    y_btd = np.zeros(x_btd.shape)
    expert_of = ffn.get("expert_of", layer.shared + np.arange(layer.columns))
    for b, t in np.ndindex(x_btd.shape[:2]):
        x = x_btd[b, t]
        router = ffn["router"]
        unit = x / np.linalg.norm(x)
        z = np.tanh(unit @ router["hidden"]["kernel"]) if layer.router == "mlp" else x
        z = z @ router["kernel"]
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        chosen = np.argsort(-p, kind="stable")[: layer.top_k]
        g = {"renormalized": p[chosen] / p[chosen].sum(), "softmax": p[chosen]}
        gates = g.get(layer.gates, np.ones(layer.top_k))
        shared = [(e, 1.0) for e in range(layer.shared)]
        for e, factor in [*zip(expert_of[chosen], gates, strict=True), *shared]:
            if e >= layer.experts:
                y_btd[b, t] += factor * ffn["constant"][e - layer.experts]
                continue
            a = x @ ffn["gate"]["kernel"][e]
            h = a / (1 + np.exp(-a)) * (x @ ffn["up"]["kernel"][e]) * ffn["neuron_scale"][e]
            y_btd[b, t] += factor * (h @ ffn["down"]["kernel"][e])
    return y_btd


def run(layer, ffn, x, dispatch="blocks", **options):
    options = RunOptions(compute_dtype=x.dtype, dispatch=dispatch, **options)
    return Experts(LLAMA, layer, options).apply({"params": ffn}, x)[0]


def with_gradients(layer, ffn, x, dispatch, loss=jnp.sin):
    def total(ffn, x):
        y = run(layer, ffn, x, dispatch)
        return jnp.sum(loss(y)), y

    trained = {k: v for k, v in ffn.items() if k != "expert_of"}
    rest = {k: v for k, v in ffn.items() if k == "expert_of"}
    function = jax.value_and_grad(lambda tree, x: total(tree | rest, x), (0, 1), has_aux=True)
    (_, y), gradients = jax.jit(function)(trained, x)
    return y, flatten({"ffn": gradients[0], "x": gradients[1]})


CASES = {
    "idle": {"experts": 5},
    "one": {"experts": 3, "top_k": 1},
    "all": {"experts": 3, "top_k": 3},
    "single": {"experts": 1, "top_k": 1},
    "wide": {"experts": 4, "ffn_width": 200, "gates": "softmax"},
    "plain_sum": {"experts": 4, "ffn_width": 192, "gates": "none"},
    "shared": {"experts": 4, "shared": 1},
    "merged": {"experts": 3, "routes": 6, "top_k": 3},
    "constants": {"experts": 3, "shared": 1, "constants": 2, "gates": "softmax"},
    "mlp": {"experts": 4, "router": "mlp"},
    "token": {"experts": 4},
}


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("case", CASES)
def test_every_dispatch_is_the_formula(case):
    layer = dataclasses.replace(LLAMA.layers[0], **CASES[case])
    more = {"router": layer.router, "constants": layer.constants}
    ffn = block_of(layer.experts, layer.ffn_width, layer.columns, **more)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 1, D) if case == "token" else (3, 7, D))
    if case == "idle":  # no token goes to expert 2, all go to expert 0
        x[..., 0], ffn["router"]["kernel"][0] = 1, [90, 0, -90, 0, 0]
    if case == "merged":
        ffn["expert_of"] = np.array([0, 2, 1, 0, 2, 2], np.int32)
    wanted = formula(layer, ffn, x)
    results = {name: with_gradients(layer, ffn, x, name) for name in DISPATCHES}
    for name, (y, gradients) in results.items():
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())
        for path, reference in results["dense"][1].items():
            atol = 1e-12 * max(np.abs(reference).max(), 1e-3)
            np.testing.assert_allclose(gradients[path], reference, rtol=0, atol=atol, err_msg=name)
    if case == "idle":
        assert not np.any(results["blocks"][1]["ffn/up/kernel"][2])


@pytest.mark.usefixtures("wide")
def test_gradients_are_finite_differences():
    layer = dataclasses.replace(LLAMA.layers[0], experts=4)
    ffn, rng = block_of(4, 24), np.random.default_rng(1)
    x = rng.normal(size=(2, 5, D))
    _, gradients = with_gradients(layer, ffn, x, "blocks")
    leaves = {f"ffn/{path}": leaf for path, leaf in flatten(ffn).items()} | {"x": x}
    for path in ("x", "ffn/router/kernel", "ffn/up/kernel", "ffn/down/kernel", "ffn/neuron_scale"):
        direction = rng.normal(size=leaves[path].shape)

        def at(step, path=path, direction=direction):
            tree = unflatten({**leaves, path: leaves[path] + step * direction})
            return float(jnp.sum(jnp.sin(run(layer, tree["ffn"], tree["x"]))))

        slope = (at(1e-6) - at(-1e-6)) / 2e-6
        np.testing.assert_allclose(np.sum(gradients[path] * direction), slope, rtol=1e-7)


def test_nan_in_one_expert_reaches_only_its_tokens():
    layer = dataclasses.replace(LLAMA.layers[0], experts=4)
    ffn = jax.tree.map(np.float32, block_of(4, 24))
    x = np.random.default_rng(1).normal(size=(4, 8, D)).astype(np.float32)
    module = Experts(LLAMA, layer, RunOptions(dispatch="blocks"))
    routing = module.apply({"params": ffn}, x)[1]
    hit = np.any(np.asarray(routing.columns) == 2, axis=-1)
    assert 0 < hit.sum() < hit.size
    ffn["up"]["kernel"][2, 3, 3] = np.nan
    for dispatch in ("blocks", "batched"):
        y, gradients = with_gradients(layer, ffn, x, dispatch, lambda y: 2 * y)
        assert np.array_equal(np.isnan(y).any(-1), hit)
        assert np.array_equal(np.isnan(gradients["x"]).any(-1), hit)
        bad = np.isnan(gradients["ffn/down/kernel"]).any((1, 2))
        assert bad.tolist() == [False, False, True, False]
    for dispatch in ("dense", "ragged"):
        assert not np.isfinite(np.asarray(run(layer, ffn, x, dispatch))).all()


def test_rows_that_belong_to_no_expert_are_zero():
    """A mesh gives a device some of the experts."""
    rng = np.random.default_rng(0)
    expert_r = np.array([5, 1, 5, 0, 1, 5, 5, 1])
    x = rng.normal(size=(8, 4)).astype(np.float32)
    kernel = rng.normal(size=(3, 4, 2)).astype(np.float32)
    wanted = [x[i] @ kernel[e] if e < 3 else np.zeros(2) for i, e in enumerate(expert_r)]
    for dispatch in DISPATCHES:
        groups = grouping(jnp.asarray(expert_r), 3, dispatch)
        y = grouped_product(x[groups.order], kernel, groups, dispatch)[groups.inverse]
        np.testing.assert_allclose(y, wanted, atol=1e-6)


def test_few_rows_are_not_padded_to_many():
    """8 tokens of 2 experts each: at most 16 rows and one block more, in every buffer."""
    assert block_size(16, 8) == 1 and block_size(4096, 8) == 128 and block_size(16384, 128) == 64
    layer = dataclasses.replace(LLAMA.layers[0], experts=8)
    x = jax.ShapeDtypeStruct((8, 1, D), jnp.float32)
    ffn = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), block_of(8, 24))
    text = jax.jit(lambda ffn, x: run(layer, ffn, x)).lower(ffn, x).as_text()
    tokens = {int(shape.split("x")[0]) for shape in re.findall(r"tensor<(\d+x24)xf32", text)}
    assert max(tokens) <= 17, tokens


def test_no_buffer_of_all_experts_and_tokens():
    layer = dataclasses.replace(LLAMA.layers[0], experts=7)
    x = jax.ShapeDtypeStruct((2, 151, D), jnp.float32)
    ffn = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), block_of(7, 24))
    loss = jax.value_and_grad(lambda ffn, x: jnp.sum(run(layer, ffn, x)), (0, 1))
    text = jax.jit(loss).lower(ffn, x).as_text()
    rows = ("302", "604", "604", str(604 + block_size(604, 7)))
    wrong = [f"7x{n}x{w}x" for n, w in itertools.product(rows, (D, 24))]
    assert not [shape for shape in wrong if shape in text]


def copied(config, params):
    """A model of 8 equal experts under random routers."""
    rng, tree = np.random.default_rng(3), unstack(jax.tree.map(np.asarray, params))
    for layer in tree["layers"]:
        layer["ffn"] = jax.tree.map(lambda x: np.repeat(x[None], 8, axis=0), layer["ffn"])
        router = rng.normal(size=(config.d_model, 8)).astype(np.float32)
        layer["ffn"]["router"] = {"kernel": router}
    return restack(with_experts(config, 8), tree)


def test_equal_experts_are_the_dense_model():
    params, batch = random_params(LLAMA), batch_of(LLAMA.vocab_size)
    one = causal_lm.forward(LLAMA, params, batch)["hidden"]
    config, other = with_experts(LLAMA, 8), copied(LLAMA, params)
    np.testing.assert_allclose(causal_lm.forward(config, other, batch)["hidden"], one, atol=1e-5)


@pytest.mark.slow
def test_smollm2_of_equal_experts_is_smollm2(smollm2_gguf):
    model = load_model(smollm2_gguf)
    tokens = np.random.default_rng(0).integers(3, 49_000, (2, 24))
    config, params = with_experts(model.config, 8), copied(model.config, model.params)
    with jax.enable_x64(True):  # in float32 the largest difference is 1e-5 of the logit
        wanted = our_logits(model.config, model.params, tokens, np.float64)
        got = our_logits(config, params, tokens, np.float64)
    np.testing.assert_allclose(got, wanted, atol=1e-9)


# ---- losses of routers


INPUTS = Probe("inputs", lambda seen, batch, _: seen.ffn_input, kind="example")


def routers(config, params, batch):
    """(inputs [L, N, D], probabilities [L, N, R], choices [L, N, k]) of real tokens, float64."""
    inputs = causal_lm.forward(config, params, batch, probes=(INPUTS,))["probes"]["inputs"]
    x = np.asarray(inputs, np.float64)[:, batch["segment_ids"] > 0]
    kernels = [layer["ffn"]["router"]["kernel"] for layer in unstack(params)["layers"]]
    z = x @ np.asarray(kernels, np.float64)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    return x, p, np.argsort(-z, axis=-1)[..., : config.layers[0].top_k]


def value_and_gradient(term, config, params, batch):
    """(the term's value, d / d router of layer 0, the value's parts)."""

    def loss(params):
        value = term.function(
            params, causal_lm.forward(config, params, batch, probes=term.probes), batch
        )
        return value.total / value.denominator, value

    (value, parts), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return value, unstack(gradient)["layers"][0]["ffn"]["router"]["kernel"], parts


@pytest.mark.parametrize("pooled", [False, True])
def test_the_balance_loss_is_the_formula(pooled):
    config = with_experts(LLAMA, 4)
    params, batch = random_params(config), batch_of(LLAMA.vocab_size)
    _, p, chosen = routers(config, params, batch)
    f = np.stack([[np.sum(one == r) / len(one) for r in range(4)] for one in chosen])
    both = (f.mean(0), p.mean((0, 1))) if pooled else (f, p.mean(1))
    term = load_balance_term(TermContext("load_balance", model=config), pooled=pooled)
    value, _, parts = value_and_gradient(term, config, params, batch)
    np.testing.assert_allclose(value, 4 * np.sum(both[0] * both[1], -1).mean(), rtol=1e-5)
    assert parts.denominator == np.sum(batch["segment_ids"] > 0)
    metrics = term.derived({k: v / parts.denominator for k, v in parts.metrics.items()})
    np.testing.assert_allclose(metrics["load"], f / 2, rtol=1e-5)
    np.testing.assert_allclose(metrics["max_load"], 2 * f.max(-1), rtol=1e-5)
    np.testing.assert_allclose(metrics["unused"], np.mean(f == 0, -1))
    np.testing.assert_allclose(metrics["entropy"], -np.sum(p * np.log(p), -1).mean(1), rtol=1e-4)


def test_the_gradients_of_the_routers_losses():
    """One layer: R sum_r f_r P_r with f fixed, and the squared logarithm."""
    config = with_experts(dataclasses.replace(LLAMA, layers=LLAMA.layers[:1]), 4)
    params, batch = random_params(config), batch_of(LLAMA.vocab_size)
    (x,), (p,), (chosen,) = routers(config, params, batch)
    f = np.array([np.mean(np.any(chosen == r, -1)) for r in range(4)])
    kernel = np.asarray(unstack(params)["layers"][0]["ffn"]["router"]["kernel"], np.float64)
    logs = np.log(np.exp(x @ kernel).sum(-1))
    for term, value, slope in (
        (load_balance_term, 4 * f @ p.mean(0), 4 * p * (f - (p @ f)[:, None])),
        (router_z_term, np.mean(logs**2), 2 * logs[:, None] * p),
    ):
        made = term(TermContext("router", model=config))
        got, gradient, _ = value_and_gradient(made, config, params, batch)
        np.testing.assert_allclose(got, value, rtol=1e-5)
        wanted = x.T @ slope / len(x)
        np.testing.assert_allclose(gradient, wanted, atol=1e-5 * np.abs(wanted).max())


def test_errors_name_the_setting():
    refused(
        r"layer 0: top_k=5 is more than the router's 4 columns",
        with_experts,
        top_k=5,
        error=ConfigError,
    )
    refused("layer 0: gates='top'.*renormalized", with_experts, gates="top", error=ConfigError)
    refused("layer 0: experts=0", with_experts, experts=0, error=ConfigError)
    refused(
        "'load_balance' needs a model with experts",
        load_balance_term,
        TermContext("load_balance", model=LLAMA),
    )
    config = with_experts(LLAMA, 3, routes=6)
    params = random_params(config)
    del params["stack"]["segment_0"]["slot_0"]["ffn"]["expert_of"]
    refused(
        "missing parameter ffn/expert_of of shape .6,",
        causal_lm.forward,
        config,
        params,
        batch_of(258),
    )
    counts = count_parameters(with_experts(LLAMA, 4))
    assert counts["ffn"] > 4 * count_parameters(LLAMA)["ffn"]


def test_the_pooled_balance_loss_is_transformers(torch):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = with_experts(LLAMA, 4)
    params, batch = random_params(config), batch_of(LLAMA.vocab_size)
    logits = Probe("logits", lambda seen, batch, _: seen.routing.logits, kind="example")
    seen = causal_lm.forward(config, params, batch, probes=(logits,))["probes"]["logits"]
    each = tuple(torch.tensor(np.array(one)).reshape(-1, 4) for one in seen)
    real = torch.tensor(batch["segment_ids"] > 0)
    theirs = load_balancing_loss_func(each, 4, 2, real.float())
    term = load_balance_term(TermContext("load_balance", model=config), pooled=True)
    ours, _, _ = value_and_gradient(term, config, params, batch)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)
