"""Optimisers against torch, optax and the formulas; schedules against their values."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_runs import refused

from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer, make_schedule
from ffn_heterogeneity.tree import Leaf, unflatten

SHAPES = {
    "embed/embedding": (9, 5),
    "stack/segment_0/slot_0/ffn/down/kernel": (3, 8, 6),
    "stack/segment_0/slot_0/ffn/down/bias": (3, 6),
    "stack/segment_0/slot_0/ffn_norm/scale": (3, 6),
}
DECAYED = [path for path in SHAPES if path.endswith(("kernel", "embedding"))]


def leaves(seed):
    rng = np.random.default_rng(seed)
    return {p: rng.standard_normal(s).astype(np.float32) for p, s in SHAPES.items()}


def run(config, rates, params, optimizer=None, first_grad=100):
    params = {p: jnp.asarray(x) for p, x in params.items()}
    declared = {p: Leaf(("own",) * x.ndim, decays=p in DECAYED) for p, x in params.items()}
    trains = dict.fromkeys(SHAPES, True)
    optimizer = optimizer or make_optimizer(config, unflatten(params), trains, declared)
    state = optimizer.init(params)
    for i, rate in enumerate(rates):
        grads = {p: jnp.asarray(x) for p, x in leaves(first_grad + i).items()}
        updates, state = optimizer.update(grads, state, params, learning_rate=jnp.float32(rate))
        params = {p: params[p] + updates[p] for p in params}
    return {p: np.asarray(x) for p, x in params.items()}


def assert_close(actual, expected, tolerance=1e-6):
    for path in expected:
        scale = np.abs(expected[path]).max()
        np.testing.assert_allclose(actual[path], expected[path], rtol=0, atol=tolerance * scale)


def test_adamw_equals_torch(torch):
    rates = [1e-2, 3e-3, 2e-2, 5e-3]
    start = leaves(0)
    tensors = {p: torch.nn.Parameter(torch.tensor(x)) for p, x in start.items()}
    groups = [
        {"params": [tensors[p] for p in DECAYED], "weight_decay": 0.1},
        {"params": [tensors[p] for p in SHAPES if p not in DECAYED], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.97), eps=1e-6)
    for i, rate in enumerate(rates):
        for group in theirs.param_groups:
            group["lr"] = rate
        for path, grad in leaves(100 + i).items():
            tensors[path].grad = torch.tensor(grad)
        theirs.step()
    ours = run(OptimizerConfig("adamw", b1=0.8, b2=0.97, eps=1e-6, weight_decay=0.1), rates, start)
    assert_close(ours, {p: t.detach().numpy() for p, t in tensors.items()})


def test_adamw_equals_its_formula_in_float64():
    b1, b2, eps, decay, rates = 0.9, 0.99, 1e-8, 0.2, [1e-2, 2e-2]
    expected = {p: x.astype(np.float64) for p, x in leaves(0).items()}
    for path, p in expected.items():
        m = v = 0.0
        for i, rate in enumerate(rates):
            g = leaves(100 + i)[path].astype(np.float64)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            hat = m / (1 - b1 ** (i + 1)) / (np.sqrt(v / (1 - b2 ** (i + 1))) + eps)
            p = p - rate * hat - rate * decay * p * (path in DECAYED)
        expected[path] = p
    config = OptimizerConfig("adamw", b1=b1, b2=b2, eps=eps, weight_decay=decay)
    assert_close(run(config, rates, leaves(0)), expected)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("factor_from", [2, 128])
def test_adafactor_on_a_stack_equals_the_loop_over_layers(scale, factor_from):
    options = {"multiply_by_parameter_scale": scale, "min_dim_size_to_factor": factor_from}
    ours = run(OptimizerConfig("adafactor", **options), [0.1, 0.02, 0.03], leaves(0))
    optax_one = optax.adafactor(None, **options)
    for path, start in leaves(0).items():
        stacked = path.startswith("stack/")
        expected = []
        for i in range(start.shape[0]) if stacked else [None]:
            pick = (lambda x, i=i: x[i]) if stacked else (lambda x: x)
            p = jnp.asarray(pick(start))
            state = optax_one.init(p)
            for step, rate in enumerate([0.1, 0.02, 0.03]):
                gradient = jnp.asarray(pick(leaves(100 + step)[path]))
                update, state = optax_one.update(gradient, state, p)
                p = p + rate * update
            expected.append(np.asarray(p))
        assert_close({path: ours[path]}, {path: np.stack(expected) if stacked else expected[0]})


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_torch(torch, nesterov):
    rates, start = [0.1, 0.1, 0.1], leaves(0)
    tensors = {p: torch.nn.Parameter(torch.tensor(x)) for p, x in start.items()}
    theirs = torch.optim.SGD(tensors.values(), lr=0.1, momentum=0.9, nesterov=nesterov)
    for i in range(3):
        for path, grad in leaves(100 + i).items():
            tensors[path].grad = torch.tensor(grad)
        theirs.step()
    ours = run(OptimizerConfig("sgd", momentum=0.9, nesterov=nesterov), rates, start)
    assert_close(ours, {p: t.detach().numpy() for p, t in tensors.items()})


def test_clipping_by_global_norm():
    grads = {p: x.astype(np.float64) for p, x in leaves(100).items()}
    norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
    assert norm > 1.5
    ours = run(OptimizerConfig("sgd", clip_norm=1.5), [1.0], leaves(0))
    assert_close(ours, {p: leaves(0)[p] - 1.5 / norm * g for p, g in grads.items()})
    loose = run(OptimizerConfig("sgd", clip_norm=norm * 2), [1.0], leaves(0))
    assert_close(loose, {p: leaves(0)[p] - g for p, g in grads.items()})


@pytest.mark.parametrize("largest", [1.5, 1e4])
def test_clipping_by_a_known_norm_has_the_bits_of_optax(largest):
    grads = {p: jnp.asarray(x) for p, x in leaves(100).items()}
    theirs, _ = optax.clip_by_global_norm(largest).update(grads, optax.EmptyState())
    config = OptimizerConfig("sgd", clip_norm=largest)
    ours = make_optimizer(config, unflatten(grads), dict.fromkeys(grads, True))
    for known in ({}, {"grad_norm": optax.global_norm(grads)}):
        step, _ = ours.update(grads, ours.init(grads), grads, learning_rate=jnp.float32(1), **known)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(-a, b), step, theirs)


def test_bad_options_are_named():
    decays = OptimizerConfig(weight_decay=0.1)
    refused("weight_decay=0.1 needs leaves=", make_optimizer, decays, {}, {})
    refused("optimizer='adam': choose one of", OptimizerConfig, "adam")
    refused("optimizer.b2=1.0", OptimizerConfig, b2=1.0)
    refused("clip_norm=0", OptimizerConfig, clip_norm=0)
    refused("schedule='cosin'", make_schedule, "cosin", 1.0)
    late = {"warmup_steps": 10, "total_steps": 10}
    refused("total_steps > warmup_steps", make_schedule, "linear", 1.0, **late)
    refused("learning_rate=nan", make_schedule, "constant", float("nan"))


def test_schedule_values():
    constant = make_schedule("constant", 1e-6, warmup_steps=100)
    assert constant(0) == pytest.approx(1e-8)
    assert constant(49) == pytest.approx(5e-7)
    assert constant(99) == constant(100) == constant(10_000) == 1e-6
    linear = make_schedule("linear", 2.0, warmup_steps=2, total_steps=12, final_fraction=0.5)
    assert [linear(s) for s in (0, 1, 2, 7, 12, 99)] == [1.0, 2.0, 2.0, 1.5, 1.0, 1.0]
    cosine = make_schedule("cosine", 1.0, total_steps=8, final_fraction=0.1)
    assert cosine(0) == 1.0
    assert cosine(4) == pytest.approx(0.55)
    assert cosine(2) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert cosine(8) == pytest.approx(0.1)
