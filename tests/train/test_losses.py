"""Losses and monitors as groups of a config: several of one kind, free weights, nothing unknown."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from tiny_models import batch_of, config_of, random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue, probe_term
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.train.build import make_terms
from ffn_heterogeneity.train.evaluation import make_evaluator
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.train.step import make_eval_step, make_train_step
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LLAMA = tiny_of("llama", layers=3)
SMALL = {"batch_size": 2, "seq_len": 8, "dropout": 0.0, "tensorboard": False}
TWO = {
    "spread": {"term": "nucl", "weight": 2.0, "variant": "ent", "targets": ("attention_out",)},
    "nucl": {"weight": 0.5, "variant": "mstd", "targets": ("ffn_out",)},
}


SHAPES = Model(LLAMA, jax.eval_shape(lambda: random_params(LLAMA)), None, "")


def hyper_of(config):
    return read(config).hyper({})(0)


def config_with(losses=None, monitors=None, argument="smollm2_135m,text", **changes):
    config = config_of("nucl_finetune", argument, **SMALL | changes)
    config.optimizer.name, config.optimizer.learning_rate = "sgd", 1.0
    config.optimizer.schedule, config.optimizer.warmup_steps = "constant", 0
    if losses is not None:
        config.losses = ConfigDict({"nll": {"weight": 1.0}, **losses})
    if monitors is not None:
        config.monitors = ConfigDict(monitors)
    return config


def built_of(config):
    mesh = partition.make_mesh(data=1, fsdp=1, tensor=1)
    return plan(read(config), mesh, SHAPES)


def one_step(config):
    """(gradient by path, metrics): SGD at rate 1 moves by minus the gradient."""
    built, params = built_of(config), random_params(LLAMA)
    state = create_state(params, built.optimizer, built.trainable, shardings=built.shardings[0])
    batch = {k: np.asarray(v)[None, :2, :8] for k, v in batch_of(LLAMA.vocab_size).items()}
    hyper = {key: jnp.float32(value) for key, value in hyper_of(config).items()}
    after, metrics = built.train_step(state, batch, hyper)
    before, after = flatten(params), flatten(after.params)
    return {p: np.asarray(before[p], np.float64) - after[p] for p in before}, metrics


def test_two_instances_of_one_term_train_together():
    plain, _ = one_step(config_with({}))
    both, metrics = one_step(config_with(TWO))
    params = random_params(LLAMA)
    entropy = nucl_term(TermContext("spread"), "ent", ("attention_out",))
    terms = ((2.0, entropy), (0.5, nucl_term(TermContext("nucl"), "mstd", ("ffn_out",))))

    def penalty(params):
        return sum(weight * term.function(params).total for weight, term in terms)

    for path, gradient in flatten(jax.grad(penalty)(params)).items():
        added = both[path] - plain[path]
        assert np.abs(added - gradient).max() <= 1e-5 * max(np.abs(both[path]).max(), 1e-3), path
        assert np.any(gradient) == path.endswith(("attention/out/kernel", "ffn/down/kernel"))
    for _, term in terms:
        np.testing.assert_allclose(metrics[term.name], term.function(params).total, rtol=1e-5)


def test_a_monitor_alone_costs_the_step_nothing():
    def flops(config):
        built = built_of(config)
        batch = {k: np.asarray(v)[None, :2, :8] for k, v in batch_of(LLAMA.vocab_size).items()}
        hyper = dict.fromkeys(hyper_of(config), jnp.float32(0))
        compiled = built.train_step.lower(built.state, batch, hyper).compile()
        return compiled.cost_analysis()["flops"], {term.name for term in built.evaluated_terms}

    watched = {"jumps": {"term": "jreg"}, "entropy": {"term": "nucl", "variant": "ent"}}
    without, _ = flops(config_with({}, {}))
    monitored, names = flops(config_with({}, watched))
    trained, _ = flops(config_with({"jumps": {"term": "jreg", "weight": 0.0}}, {}))
    assert monitored == without < trained
    assert names == {"nll", "jumps", "entropy"}


def test_a_probe_is_logged_by_its_name():
    config = config_with({}, {"turns": {"probe": "displacement"}, "jumps": {"term": "jreg"}})
    built, params = built_of(config), random_params(LLAMA)
    batches = [batch_of(LLAMA.vocab_size, seed=seed) for seed in range(2)]
    terms = built.evaluated_terms
    metrics = make_evaluator(built.eval_step, None, lambda: iter(batches), terms=terms)(params)
    names = {key for key in metrics if key.startswith("validation/turns")}
    assert names == {"validation/turns", "validation/turns/all/mean", "validation/turns/last/mean"}
    psi = metrics["validation/jumps/psi"]
    np.testing.assert_allclose(metrics["validation/turns/all/mean"], psi, rtol=1e-6)
    with pytest.raises(ValueError, match="monitors.x: unknown probe 'y'.* displacement"):
        built_of(config_with({}, {"x": {"probe": "y"}}))


def test_weights_are_no_part_of_the_program_but_for_none():
    mesh = partition.make_mesh(data=1, fsdp=1, tensor=1)

    def key(weight):
        return plan(read(config_with(losses__nucl__weight=weight)), mesh, SHAPES).key

    assert key(0.0) == key(1000.0) != key(None)
    config = config_with(losses__nucl__weight=None)
    terms = make_terms(config.losses, LLAMA, mesh)
    monitors = make_terms(config.monitors, LLAMA, mesh, trained=False)
    assert [term.name for term in terms] == ["nll"] and monitors[0].name == "entropy"
    assert "losses.nucl.weight" not in hyper_of(config)


def test_terms_are_summed_in_the_registrys_order():
    losses = {"b": {"term": "jreg", "weight": 1.0}, "a": {"term": "jreg", "weight": 1.0}, **TWO}
    terms = make_terms(config_with(losses).losses, LLAMA, partition.make_mesh())
    assert [term.name for term in terms] == ["nll", "nucl", "spread", "a", "b"]


@pytest.mark.parametrize(
    ("losses", "monitors", "message"),
    [
        ({"x": {"weight": 1.0}}, {}, "losses.x: unknown term 'x'.* nll, class.*, regression, nucl"),
        ({"nucl": {"weight": 1.0, "aplha": 2}}, {}, "losses.nucl: unknown setting 'aplha'"),
        ({"jreg": {"weight": 1.0, "alpha": -1.0}}, {}, "losses.jreg: alpha=-1.0 must be a number"),
        ({"nucl": {"variant": "ent"}}, {}, "losses.nucl.weight is missing"),
        ({"nucl": {"weight": -1.0}}, {}, "losses.nucl.weight=-1.0 must be a number in"),
        (TWO, {"nucl": {}}, "two loss terms are named 'nucl'"),
    ],
)
def test_what_cannot_be_built_is_named(losses, monitors, message):
    refused(message, built_of, config_with(losses, monitors))


# ---- what a term hands to its probes, layer by layer


def weighted_term(context):
    """The layers' mean squares, weighted by a learnt vector: sum_l w_l mean(h_l^2)."""

    def see(seen, batch, w):
        return {"sum": w * jnp.sum(seen.block_output**2), "plain": jnp.sum(seen.block_output**2)}

    probe = Probe("squares", see)

    def function(params, outputs, batch):
        return TermValue(jnp.sum(outputs["probes"]["squares"]["sum"]), jnp.ones(()))

    def per_layer(params, batch, forward):
        return {"squares": params["task_head"]["weights"]}

    return LossTerm(context.name, function, context.weight, probes=(probe,), per_layer=per_layer)


def test_a_learnt_weight_a_layer_reaches_the_probe_and_its_gradient_comes_back():
    params = random_params(LLAMA)
    weights = np.float32([0.5, -1.0, 2.0])
    params["task_head"] = {"weights": weights}
    term, mask = weighted_term(TermContext("w")), dict.fromkeys(flatten(params), True)
    optimizer = make_optimizer(OptimizerConfig("sgd"), params, mask)
    forward = functools.partial(causal_lm.forward, LLAMA)
    step = make_train_step(forward, (term,), optimizer, mask, accumulation=2)
    batch = {k: np.asarray(v)[:2] for k, v in batch_of(LLAMA.vocab_size).items()}
    per_layer = term.per_layer(params, batch, forward)
    seen = forward(params, batch, probes=term.probes, per_layer=per_layer)
    squares = np.asarray(seen["probes"]["squares"]["plain"], np.float64)
    state = create_state(params, optimizer, mask)
    cut = {k: v[:, None] for k, v in batch.items()}
    after, metrics = step(state, cut, {"learning_rate": jnp.float32(1e-3)})
    # Two micro-batches: denominators add up to 2.
    assert float(metrics["w"]) == pytest.approx((weights * squares).sum() / 2, rel=1e-5)
    moved = weights - np.asarray(after.params["task_head"]["weights"], np.float64)
    np.testing.assert_allclose(moved, 1e-3 * squares / 2, rtol=1e-4)
    evaluated = make_eval_step(forward, (term,))(params, batch)[0]["w"].total
    assert float(evaluated) == pytest.approx((weights * squares).sum(), rel=1e-5)


def test_a_probe_of_examples_has_no_average():
    probe = Probe("pooled", lambda seen, batch, extra: seen.block_output[:, -1], kind="example")
    refused("'pooled' returns one row per example", probe_term, TermContext("x"), probe)

    def with_probe(*given, probes, **options):
        return causal_lm.forward(*given, probes=(probe,))

    def predictions(params, outputs, batch):
        return {"h": outputs["probes"]["pooled"].swapaxes(0, 1)}

    step = make_eval_step(functools.partial(with_probe, LLAMA), (), None, predictions)
    rows = step(random_params(LLAMA), batch_of(LLAMA.vocab_size))[1]["h"]
    assert rows.shape == (3, LLAMA.n_layers, LLAMA.d_model), "one row an example"
