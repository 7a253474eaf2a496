"""The train step: exact accumulation, frozen leaves, one compilation, donation, non-finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_loop import placed_on
from tiny_runs import refused
from train_toy import L1, NLL, NORM, TOY, V, accumulated, hyper, toy_batch, toy_forward, toy_params

from ffn_heterogeneity.adapters import REFRESHES
from ffn_heterogeneity.losses.terms import LossTerm, TermValue
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.parallel.partition import make_mesh, trainable_mask
from ffn_heterogeneity.train.build import make_refresh
from ffn_heterogeneity.train.evaluation import make_evaluator
from ffn_heterogeneity.train.language import counts
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import abstract_state, create_state, merge_params, split_params
from ffn_heterogeneity.train.step import make_eval_step, make_params_metrics, make_train_step
from ffn_heterogeneity.tree import flatten

# Nothing here is large.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

TERMS = (NLL, NORM, L1)


def build(optimizer="sgd", freeze=(), terms=TERMS, params=None, forward=toy_forward, **options):
    params = toy_params() if params is None else params
    mask = trainable_mask(declared(TOY, params), freeze)
    made = make_optimizer(OptimizerConfig(optimizer), params, mask)
    state = create_state(params, made, mask, seed=3)
    return make_train_step(forward, terms, made, mask, counts=counts, **options), state


def plain_loss(params, batch, values):
    """The complete loss over all rows at once, written explicitly."""
    hidden = toy_forward(params, batch)["hidden"]
    logp = jax.nn.log_softmax(hidden @ params["embed"]["embedding"].T)
    mask, live = batch["loss_mask"], batch["segment_ids"] > 0
    nll = -(jnp.sum(logp * jax.nn.one_hot(batch["targets"], V), -1) * mask).sum() / mask.sum()
    norm = (jnp.sum(hidden**2, -1) * live).sum() / live.sum()
    l1 = jnp.abs(params["stack"]["segment_0"]["slot_0"]["ffn"]["down"]["kernel"]).sum()
    return nll + values["beta"] * norm + values["alpha"] * l1


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_accumulation_is_exact(parts):
    """Micro-batches with unequal counts, two denominators: the gradient of the whole batch."""
    batch, values = toy_batch(8), hyper(learning_rate=1.0)
    assert parts == 1 or len(set(batch["loss_mask"].reshape(parts, -1).sum(1))) > 1
    given = jax.tree.map(jnp.asarray, (toy_params(), batch))
    loss, grads = jax.value_and_grad(plain_loss)(*given, values)
    step, state = build(accumulation=parts, donate=False)
    new, metrics = step(state, accumulated(batch, parts), values)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    for path, grad in flatten(grads).items():
        update = flatten(state.params)[path] - flatten(new.params)[path]
        scale = float(jnp.linalg.norm(grad))
        assert float(jnp.linalg.norm(update - grad)) <= 1e-6 * scale + 1e-7, path
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)
    assert float(metrics["update_norm"]) == pytest.approx(norm, rel=1e-6)
    assert int(metrics["tokens"]) == batch["segment_ids"].sum()
    assert int(metrics["target_tokens"]) == batch["loss_mask"].sum()


def test_denominators_cost_no_forward_pass():
    """The pass that sums the denominators is compiled without a forward pass."""
    batch, values = accumulated(toy_batch(8, length=64), 4), hyper()

    def flops(terms):
        step, state = build(terms=terms, accumulation=4, donate=False)
        return step.lower(state, batch, values).compile().cost_analysis()["flops"]

    def dependent(params, outputs, batch):
        value = NLL.function(params, outputs, batch)
        zero = 0 * jnp.sum(outputs["hidden"])  # makes the denominator need the forward pass
        return value._replace(denominator=value.denominator + zero)

    cheap = flops((NLL,))
    forward_twice = flops((LossTerm("nll", dependent, 1.0),))
    assert forward_twice > 1.15 * cheap, (cheap, forward_twice)


def test_metrics_of_terms():
    batch, values = toy_batch(8), hyper()
    whole_step, state = build(donate=False)
    parts_step, _ = build(accumulation=4, donate=False)
    _, at_once = whole_step(state, accumulated(batch, 1), values)
    _, parts = parts_step(state, accumulated(batch, 4), values)
    assert 0 < float(at_once["nll/accuracy"]) < 1
    for name in ("nll", "norm", "l1", "nll/accuracy"):
        assert float(at_once[name]) == pytest.approx(float(parts[name]), rel=1e-6), name
    kernel = toy_params()["stack"]["segment_0"]["slot_0"]["ffn"]["down"]["kernel"]
    np.testing.assert_allclose(parts["l1/per_layer"], np.abs(kernel).sum((1, 2)), rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor"])
def test_frozen_leaves_never_move(optimizer):
    """Bit-exact, in their storage dtype, without state or gradient; the others are float32."""
    params = toy_params()
    params["embed"]["embedding"] = params["embed"]["embedding"].astype(jnp.bfloat16)
    params["final_norm"]["scale"] = params["final_norm"]["scale"].astype(jnp.bfloat16)
    step, state = build(optimizer, freeze=("^embed/",), params=params, donate=False)
    assert state.params["embed"]["embedding"].dtype == jnp.bfloat16
    assert state.params["final_norm"]["scale"].dtype == jnp.float32
    assert not any("embed" in path for path in flatten(state.opt_state))
    new = state
    for seed in range(3):
        new, metrics = step(new, accumulated(toy_batch(4, seed=seed), 1), hyper())
    assert metrics["gradient_finite"].shape == (4,)
    for path, leaf in flatten(new.params).items():
        before = np.asarray(flatten(state.params)[path])
        same = before.tobytes() == np.asarray(leaf).tobytes()
        assert same == path.startswith("embed/"), path
        assert leaf.dtype == before.dtype


def test_one_compilation_for_any_hyper():
    step, state = build(terms=(NLL, NORM, L1), accumulation=2, dropout=True)
    for seed, rate in enumerate([0.1, 1e-6, 0.0, 3.0]):
        values = hyper(learning_rate=rate, alpha=10.0**seed, beta=seed, dropout=0.1 * seed)
        state, _ = step(state, accumulated(toy_batch(4, seed=seed), 2), values)
    assert step._cache_size() == 1


def test_one_compilation_with_shardings():
    mesh, params = make_mesh(), toy_params()
    mask = trainable_mask(declared(TOY, params))
    optimizer = make_optimizer(OptimizerConfig("adamw"), params, mask)
    state = create_state(params, optimizer, mask)
    placed = placed_on(mesh, state)
    step = make_train_step(toy_forward, TERMS, optimizer, mask, shardings=placed)
    state = jax.device_put(state, placed[0])
    for seed in range(3):
        batch = jax.device_put(accumulated(toy_batch(4, seed=seed), 1), placed[1])
        state, _ = step(state, batch, jax.device_put(hyper(alpha=float(seed)), placed[2]))
    assert step._cache_size() == 1 and int(state.step) == 3


def test_state_is_donated_but_the_callers_arrays_live():
    params = jax.tree.map(jnp.asarray, toy_params())
    step, state = build("adamw", params=params, freeze=("^embed/",))
    new, _ = step(state, accumulated(toy_batch(4), 1), hyper())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, new)))


def _breaks(params, outputs, batch):
    bad = jnp.any(batch["tokens"] == V - 1) & (batch["tokens"][0, 0] == 7)
    total = jnp.sum(params["final_norm"]["scale"])
    return TermValue(jnp.where(bad, jnp.nan, total), jnp.float32(1))


def test_a_non_finite_term_leaves_the_state_alone():
    step, state = build("adamw", terms=(NLL, LossTerm("fragile", _breaks, 1.0)), donate=False)
    batch = toy_batch(4)
    batch["tokens"][0, 0], batch["tokens"][1, 1] = 7, V - 1
    new, metrics = step(state, accumulated(batch, 1), hyper())
    assert not bool(metrics["finite"])
    assert np.isfinite(metrics["nll"]) and not np.isfinite(metrics["fragile"])
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_non_finite_gradient_of_a_finite_loss_is_seen():
    def root(params):
        return TermValue(jnp.sum(jnp.sqrt(params["final_norm"]["scale"] * 0.0)), jnp.float32(1))

    step, state = build(terms=(NLL, LossTerm("root", root, 1.0, on="params")), donate=False)
    new, metrics = step(state, accumulated(toy_batch(4), 1), hyper())
    assert np.isfinite(metrics["loss"]) and not bool(metrics["finite"])
    paths = sorted(flatten(state.params))
    bad = [p for p, ok in zip(paths, metrics["gradient_finite"], strict=True) if not ok]
    assert bad == ["final_norm/scale"]
    assert int(new.step) == 0


def test_dropout_keys_differ_by_step_and_micro_batch_and_repeat():
    step, state = build(terms=(NLL,), dropout=True, accumulation=2, donate=False)
    batch = toy_batch(2)
    twice = {k: np.concatenate([v[:1], v[:1]]) for k, v in batch.items()}
    values = hyper(dropout=0.5, learning_rate=0.0)
    after, first = step(state, accumulated(twice, 2), values)
    _, again = step(state, accumulated(twice, 2), values)
    _, second = step(after, accumulated(twice, 2), values)
    assert float(first["loss"]) == float(again["loss"]) != float(second["loss"])
    _, off = step(state, accumulated(twice, 2), hyper(dropout=0.0))
    without, _ = build(terms=(NLL,), accumulation=2, donate=False)
    _, none = without(state, accumulated(twice, 2), hyper())
    assert float(off["loss"]) == pytest.approx(float(none["loss"]), rel=1e-6)
    # Both micro-batches hold the same row: equal keys would give their mean the value of either.
    single, _ = build(terms=(NLL,), dropout=True, donate=False)
    _, one = single(state, accumulated({k: v[:1] for k, v in twice.items()}, 1), values)
    assert float(one["loss"]) != float(first["loss"])


def test_without_dropout_the_model_gets_none():
    seen = []

    def forward(params, batch, *, probes, dropout):
        seen.append(dropout)
        return toy_forward(params, batch)

    step, state = build(terms=(NLL,), forward=forward)
    step(state, accumulated(toy_batch(2), 1), hyper())
    assert seen and all(dropout is None for dropout in seen)


def test_a_batch_without_targets_adds_nothing():
    step, state = build(terms=(NLL,), donate=False)
    batch = toy_batch(2)
    batch["loss_mask"][:] = False
    new, metrics = step(state, accumulated(batch, 1), hyper())
    assert float(metrics["loss"]) == 0 and int(metrics["target_tokens"]) == 0
    assert bool(metrics["finite"]) and float(metrics["grad_norm"]) == 0


def test_refresh_reads_the_tree_but_is_not_stored():
    def refresh(params, step, key, values, train):
        params = jax.tree.map(lambda x: x, params)
        params["final_norm"]["scale"] = params["final_norm"]["scale"] * values["beta"]
        return params

    step, state = build(terms=(NLL,), refresh=refresh, donate=False)
    plain, _ = build(terms=(NLL,), donate=False)
    batch = accumulated(toy_batch(4), 1)
    new, halved = step(state, batch, hyper(beta=0.5, learning_rate=0.0))
    _, unscaled = plain(state, batch, hyper())
    assert float(halved["loss"]) != float(unscaled["loss"])
    scales = (tree["final_norm"]["scale"] for tree in (new.params, toy_params()))
    np.testing.assert_array_equal(*scales)


def test_a_refresh_draws_once_an_optimiser_step(monkeypatch):
    """A refresh draws at each step, with the same result in all micro-batches of the step."""

    def toy(params, step, key, values, train):
        scale = params["final_norm"]["scale"]
        mask = jax.random.bernoulli(key, 0.5, scale.shape)
        return params | {"final_norm": {"scale": scale * mask}}

    monkeypatch.setitem(REFRESHES, "toy", lambda settings: toy)
    refresh = make_refresh({"toy": {}})
    step, state = build(terms=(NLL,), refresh=refresh, donate=False)
    in_two, _ = build(terms=(NLL,), refresh=refresh, donate=False, accumulation=2)
    batch, still = accumulated(toy_batch(4), 1), hyper(learning_rate=0.0)
    after, first = step(state, batch, still)
    assert abs(float(step(after, batch, still)[1]["loss"]) / float(first["loss"]) - 1) > 1e-3
    _, both = in_two(state, {k: jnp.concatenate([v, v]) for k, v in batch.items()}, still)
    assert float(both["loss"]) == pytest.approx(float(first["loss"]), rel=1e-6)


def test_clear_errors():
    words = "'l1' has no trainable leaf .* all 1 leaves .* frozen"
    refused(words, build, freeze=("down/kernel",))
    lost = LossTerm("x", L1.function, 1.0, on="params", targets=("nowhere",))
    refused("'x' has no trainable leaf .* matches no leaf", build, terms=(NLL, lost))
    refused("two loss terms are named 'nll'", build, terms=(NLL, NLL))
    step, state = build(donate=False)
    batch, rates = toy_batch(2), {"learning_rate": 0.1, "alpha": 1.0}
    words = r"'norm' takes its weight from hyper\['beta'\]"
    refused(words, step, state, accumulated(batch, 1), rates)
    refused("accumulation=1", step, state, accumulated(batch, 2), hyper())
    params = toy_params()
    params["embed"]["counts"] = np.zeros((2, 2), np.int32)
    refused("'embed/counts'", build, params=params)


def test_split_and_merge_are_inverse():
    params = toy_params()
    mask = trainable_mask(declared(TOY, params), freeze=("bias$",))
    train, frozen = split_params(params, mask)
    assert list(frozen) == ["stack/segment_0/slot_0/ffn/down/bias"]
    merged = merge_params(train, frozen)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    pairs = zip(jax.tree.leaves(merged), jax.tree.leaves(params), strict=True)
    assert all(a is b for a, b in pairs)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor"])
def test_abstract_state_describes_the_state(optimizer):
    params = toy_params()
    mask = trainable_mask(declared(TOY, params), freeze=("^embed/",))
    made = make_optimizer(OptimizerConfig(optimizer), params, mask)
    abstract, state = abstract_state(params, made, mask), create_state(params, made, mask)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_evaluation_is_token_exact():
    params = toy_params()
    batches = [toy_batch(rows, seed=rows) for rows in (2, 3, 2)]
    metrics = make_params_metrics(TERMS)
    evaluate = make_evaluator(make_eval_step(toy_forward, TERMS), metrics, lambda: iter(batches))
    results = evaluate(params)
    joined = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    value = NLL.function(params, toy_forward(params, joined), joined)
    nll = float(value.total / value.denominator)
    assert results["validation/nll"] == pytest.approx(nll, rel=1e-6)
    accuracy = float(value.metrics["accuracy"] / value.denominator)
    assert results["validation/nll/accuracy"] == pytest.approx(accuracy)
    assert results["validation/l1/per_layer"].shape == (2,)
    step = make_eval_step(toy_forward, TERMS)
    refused("empty", make_evaluator(step, None, lambda: iter([])), params)
    batches[0]["loss_mask"][:] = False
    untold = make_evaluator(step, None, lambda: iter(batches[:1]))
    refused("no target for the term 'nll'", untold, params)
