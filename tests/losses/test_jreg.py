"""JREG: the penalty against its formula, inside the scan and outside, with other terms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jreg_oracle as oracle
import numpy as np
import pytest
from tiny_models import LLAMA, batch_of, random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.jreg import jreg_term, layer_weights
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.block_cosine import cosine
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.displacement import jump_rates
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.evaluation import make_evaluator
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import abstract_state, create_state
from ffn_heterogeneity.train.step import make_eval_step, make_train_step
from ffn_heterogeneity.tree import flatten, unflatten

GEMMA = tiny_of("gemma2", layers=3)
SMALL = dataclasses.replace(LLAMA, layers=LLAMA.layers[:2])
STATES = Probe("states", lambda seen, batch, _: (seen.block_input, seen.block_output))
quickly = pytest.mark.usefixtures("compiled_quickly")

CONTEXT = TermContext("jreg", "jreg_weight")


def hidden_states(config, params, batch, final_norm):
    """h_0 .. h_L, stacked outside the scan."""
    outputs = causal_lm.forward(config, params, batch, probes=(STATES,))
    before, after = outputs["probes"]["states"]
    last = outputs["hidden"] if final_norm else after[-1]
    return [before[0], *after[:-1], last]


def last_tokens(segments: np.ndarray) -> np.ndarray:
    mask = np.zeros(segments.shape, bool)
    for i, row in enumerate(segments):
        for document in set(row.tolist()) - {0}:
            mask[i, np.flatnonzero(row == document)[-1]] = True
    return mask


@quickly
@pytest.mark.parametrize(
    ("config", "final_norm", "positions"), [(LLAMA, False, "all"), (GEMMA, True, "last")]
)
def test_value_is_the_formula(config, final_norm, positions):
    """Two documents and padding in a row; zeta from the averages, in a step of two micro-batches
    of unequal counts."""
    params, batch = random_params(config), batch_of(config.vocab_size, rows=4)
    batch["segment_ids"][2:, 5:] = 0
    counted = batch["segment_ids"] > 0
    if positions == "last":
        counted = last_tokens(batch["segment_ids"])
    states = jax.jit(lambda p: hidden_states(config, p, batch, final_norm))(params)
    psi = oracle.displacement(states, counted)
    term = jreg_term(TermContext("jreg"), alpha=0.5, final_norm=final_norm, positions=positions)
    trainable = dict.fromkeys(flatten(params), True)
    optimizer = make_optimizer(OptimizerConfig("sgd"), params, trainable)

    def forward(params, batch, *, probes, dropout):
        return causal_lm.forward(config, params, batch, probes=probes)

    step = make_train_step(forward, (term,), optimizer, trainable, accumulation=2)
    halves = {name: leaf.reshape(2, 2, *leaf.shape[1:]) for name, leaf in batch.items()}
    hyper = {"learning_rate": jnp.float32(0), "jreg_weight": jnp.float32(1)}
    _, metrics = step(create_state(params, optimizer, trainable), halves, hyper)
    assert metrics["jreg"] == pytest.approx(oracle.penalty(psi, 0.5), rel=1e-5)
    np.testing.assert_allclose(metrics["jreg/psi"], psi, rtol=2e-5)
    for back, name in enumerate(("zeta_L", "zeta_L-1")):
        expected = oracle.jump_rate(psi, len(psi) - back)
        assert float(metrics[f"jreg/{name}"]) == pytest.approx(expected, abs=2e-3), name
    assert config is LLAMA or metrics["jreg/zeta_L-1"] > 0.1, "there is something to measure"
    # Validation reports the same for the same rows in batches; a monitor has the other reading.
    other = jreg_term(TermContext("other"), final_norm=not final_norm, positions=positions)
    terms, each = (term, other), lambda: ({k: v[i] for k, v in halves.items()} for i in range(2))
    again = make_evaluator(make_eval_step(forward, terms), None, each, terms=terms)(params)
    for name in ("jreg", "jreg/zeta_L", "jreg/zeta_L-1"):
        assert float(again[f"validation/{name}"]) == pytest.approx(float(metrics[name]), rel=1e-4)
    states = jax.jit(lambda p: hidden_states(config, p, batch, not final_norm))(params)
    psi = oracle.displacement(states, counted)
    np.testing.assert_allclose(again["validation/other/psi"], psi, rtol=2e-5)
    assert abs(psi[-1] - metrics["jreg/psi"][-1]) > 1e-3, "they differ"
    expected = oracle.jump_rate(psi, len(psi))
    assert float(again["validation/other/zeta_L"]) == pytest.approx(expected, abs=2e-3)


def test_weights_are_a_softmax_of_depth():
    assert layer_weights(4, 0.0).tolist() == [0.25] * 4
    for alpha in (0.1, 1.0, 3.0):
        exact = np.exp(alpha * np.arange(1, 13))
        np.testing.assert_allclose(layer_weights(12, alpha), exact / exact.sum(), rtol=1e-12)
    assert layer_weights(80, 100.0)[-1] == 1.0, "only the last layer in the limit, and no overflow"
    for bad in (-1.0, float("nan"), float("inf")):
        refused(r"alpha=.* must be a number in", jreg_term, CONTEXT, alpha=bad)
    refused("positions='some'", jreg_term, CONTEXT, positions="some")


def test_layers_of_two_stacks_count_their_own_tokens():
    psi, counts = np.array([0.1, 0.2, 0.3, 0.4]), np.array([100.0, 100, 10, 10])
    seen = {"all": {"sum": jnp.asarray(psi * counts), "count": jnp.asarray(counts)}}
    for alpha in (0.0, 1.0):
        term = jreg_term(TermContext("jreg"), alpha=alpha)
        total, count, metrics = term({}, {"probes": {"displacement": seen}}, {})
        weights = np.exp(alpha * np.arange(4))
        assert total / count == pytest.approx(weights @ psi / weights.sum(), rel=1e-6)
        np.testing.assert_allclose(metrics["psi"] / count, psi, rtol=1e-6)


def test_jump_rates_of_known_curves():
    falling = jump_rates(np.array([0.3, 0.2, 0.1, 0.1]))
    assert {k: float(x) for k, x in falling.items()} == {f"zeta_L{x}": 0 for x in ("", "-1", "-2")}
    rates = jump_rates(np.array([0.5, 0.1, 0.3, 0.2, 0.25]))
    assert [round(float(x), 4) for x in rates.values()] == [5, 5, 25]
    assert list(jump_rates(np.array([0.1, 0.3]))) == ["zeta_L"], "l >= 2"
    assert jump_rates(np.array([0.1])) == {}


@quickly
@pytest.mark.parametrize("final_norm", [False, True])
def test_in_the_scan_as_from_stacked_states(final_norm):
    """Value and gradients agree to 1e-6, under full rematerialisation, at training widths."""
    config, batch = GEMMA, batch_of(GEMMA.vocab_size)
    params = random_params(config)
    counted = jnp.asarray(batch["segment_ids"] > 0)
    weights = jnp.asarray(layer_weights(3, 1.0))
    term = jreg_term(CONTEXT, final_norm=final_norm)

    def inside(params):
        options = causal_lm.RunOptions(remat="full")
        outputs = causal_lm.forward(config, params, batch, probes=term.probes, options=options)
        value = term.function(params, outputs, batch)
        return value.total / value.denominator

    def outside(params):
        states = hidden_states(config, params, batch, final_norm)
        psi = [
            jnp.sum(jnp.where(counted, (1 - cosine(a, b)) / 2, 0)) / jnp.sum(counted)
            for a, b in zip(states[:-1], states[1:], strict=True)
        ]
        return jnp.sum(weights * jnp.stack(psi))

    value, slopes = jax.jit(jax.value_and_grad(inside))(params)
    expected, reference = jax.jit(jax.value_and_grad(outside))(params)
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    reference = flatten(reference)
    scale = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in reference.values()))
    for path, leaf in flatten(slopes).items():
        assert np.linalg.norm(leaf - reference[path]) <= 1e-6 * scale, path


def with_dora(params):
    """Parameters with DoRA on the FFN's kernels, and B not 0."""
    model = Model(SMALL, params, None, "tiny")
    settings = {"rank": 2, "alpha": 2.0, "targets": "ffn/"}
    leaves, rng = flatten(SURGERIES["dora"](model, settings)[0].params), np.random.default_rng(5)
    for path, leaf in leaves.items():
        if path.endswith("lora_b"):
            leaves[path] = rng.normal(size=leaf.shape).astype(np.float32)
    return unflatten(leaves)


@quickly
@pytest.mark.parametrize("thin", [False, True], ids=["all leaves", "DoRA"])
def test_the_gradient_of_three_terms_is_the_sum_of_their_gradients(thin):
    config, params = SMALL, random_params(SMALL)
    params = with_dora(params) if thin else params
    trains = ("lora_a", "lora_b", "dora_m") if thin else ("",)
    trainable = {path: path.endswith(trains) for path in flatten(params)}
    optimizer = make_optimizer(OptimizerConfig("sgd"), params, trainable)
    batch = batch_of(config.vocab_size)
    terms = (
        nll_term(TermContext("nll", model=config)),
        jreg_term(CONTEXT),
        nucl_term(TermContext("nucl", "alpha")),
    )
    weights = (1.0, 0.7, 0.3)

    def forward(params, batch, *, probes, dropout):
        return causal_lm.forward(config, params, batch, probes=probes)

    def value(params, term, weight):
        seen = (params,)
        if term.on == "outputs":
            seen += forward(params, batch, probes=term.probes, dropout=None), batch
        result = term.function(*seen)
        return weight * result.total / result.denominator

    @jax.jit
    def one_by_one(params):
        return [jax.grad(value)(params, *each) for each in zip(terms, weights, strict=True)]

    # SGD's step at rate 1 is minus the gradient.
    step = make_train_step(forward, terms, optimizer, trainable)
    hyper = {"learning_rate": 1.0, "jreg_weight": 0.7, "alpha": 0.3}
    hyper = {name: jnp.float32(number) for name, number in hyper.items()}
    batches = {name: leaf[None] for name, leaf in batch.items()}
    state, _ = step(create_state(params, optimizer, trainable), batches, hyper)
    moved = flatten(jax.device_get(state.params))
    together = {path: leaf - moved[path] for path, leaf in flatten(params).items()}
    apart = [flatten(slopes) for slopes in one_by_one(params)]
    for path, leaf in together.items():
        if not trainable[path]:
            np.testing.assert_array_equal(leaf, 0)
            continue
        total = sum(each[path] for each in apart)
        assert np.linalg.norm(leaf - total) <= 2e-6 * max(np.linalg.norm(total), 1), path
        if "ffn/down" in path:
            assert all(np.any(each[path]) for each in apart)


@quickly
@pytest.mark.slow
def test_gradients_through_vmap():
    """grad of vmap, over rows and over parameters: the link must be batched as the states are."""
    term, plain = jreg_term(CONTEXT), Probe("plain", _plain_cosine)
    batch = {name: leaf[:, None] for name, leaf in batch_of(SMALL.vocab_size).items()}
    trees = [random_params(SMALL, seed=seed) for seed in range(3)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def value(probe, params, batch):
        outputs = causal_lm.forward(SMALL, params, batch, probes=(probe,))
        statistics = outputs["probes"][probe.name]["all"]
        return jnp.sum(statistics["sum"]) / statistics["count"][0]

    def slopes(probe, axes, params):
        def total(params):
            one = functools.partial(value, probe)
            return jax.vmap(one, axes)(params, batch).sum()

        return flatten(jax.jit(jax.grad(total))(params))

    for axes, tree in (((None, 0), trees[0]), ((0, 0), params)):
        ours, theirs = (slopes(probe, axes, tree) for probe in (term.probes[0], plain))
        for path, leaf in ours.items():
            np.testing.assert_allclose(leaf, theirs[path], rtol=1e-4, atol=1e-7)


def _plain_cosine(seen, batch, _):
    psi = (1 - cosine(seen.block_input, seen.block_output)) / 2
    counted = batch["segment_ids"] > 0
    total, count = jnp.sum(jnp.where(counted, psi, 0)), jnp.sum(counted, dtype=psi.dtype)
    return {"all": {"sum": total, "count": count}}


@quickly
def test_zero_and_extreme_states_are_safe():
    """cos 0 and gradient 0 for a zero vector; no overflow where the squares of two norms do."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(4, 8)).astype(np.float32)
    b = rng.normal(size=(4, 8)).astype(np.float32)
    a[0], b[1], a[2], b[2], a[3] = 0, 0, a[2] * 1e15, b[2] * 1e15, a[3] * 1e-15
    value, (da, db) = jax.value_and_grad(lambda a, b: cosine(a, b).sum(), argnums=(0, 1))(a, b)
    assert np.isfinite(value) and np.isfinite(da).all() and np.isfinite(db).all()
    assert not np.any(da[:2]) and not np.any(db[:2])
    wide = [x.astype(np.float64) for x in (a, b)]
    norms = [np.linalg.norm(x, axis=-1)[2:] for x in wide]
    exact = (wide[0] * wide[1]).sum(-1)[2:] / norms[0] / norms[1]
    np.testing.assert_allclose(cosine(a, b)[2:], exact, rtol=1e-5)
    half = cosine(jnp.asarray(a[2:], jnp.bfloat16), jnp.asarray(b[2:], jnp.bfloat16))
    assert half.dtype == jnp.float32


def compiled_step(layers: int, with_jreg: bool, rows: int, length: int, vocab: int, **options):
    """The train step of a model as wide as the paper's smallest, compiled for abstract arrays."""
    dimensions = {"d_model": 768, "n_heads": 12, "n_kv_heads": 12, "head_dim": 64, "tied": False}
    config = ModelConfig("llama", vocab, layers=(LayerConfig(2048),) * layers, **dimensions)
    chosen = causal_lm.RunOptions(remat="full", **options)

    def forward(params, batch, *, probes, dropout):
        return causal_lm.forward(config, params, batch, probes=probes, options=chosen)

    params = causal_lm.abstract_params(config)
    trainable = dict.fromkeys(flatten(params), True)
    optimizer = make_optimizer(OptimizerConfig("adamw"), params, trainable)
    terms = (nll_term(TermContext("nll", model=config)), jreg_term(CONTEXT))[: 1 + with_jreg]
    step = make_train_step(forward, terms, optimizer, trainable)
    state = abstract_state(params, optimizer, trainable)
    batch = {
        name: jax.ShapeDtypeStruct((1, rows, length), leaf.dtype)
        for name, leaf in batch_of(vocab).items()
    }
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return step.lower(state, batch, {"learning_rate": scalar, "jreg_weight": scalar}).compile()


def test_nothing_is_computed_again_for_it():
    """Under full rematerialisation: operations and bytes 1.02 x. Without the link, the last product
    of every block is computed twice, 1.05 x. Unrolled, because a loop is counted once."""
    size = {"rows": 4, "length": 512, "vocab": 1024, "unroll": True}
    costs = [compiled_step(1, on, **size).cost_analysis() for on in (False, True)]
    for name in ("flops", "bytes accessed"):
        assert costs[1][name] <= 1.02 * costs[0][name], (name, [cost[name] for cost in costs])


@pytest.mark.slow
def test_it_takes_no_memory():
    """The paper's smallest model with rows of 1,024: temporary memory at most 1.05 x."""
    size = {"rows": 8, "length": 1024, "vocab": 32_000}
    memory = [compiled_step(12, on, **size).memory_analysis() for on in (False, True)]
    sizes = [analysis.temp_size_in_bytes for analysis in memory]
    assert sizes[1] <= 1.05 * sizes[0], sizes
