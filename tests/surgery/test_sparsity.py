"""Scores and their masks (GEM-MINER), gated factors and their size (FLOP): against definitions."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusing import apart, logits, model_of
from tiny_models import LLAMA, TEXT, config_of, random_params, save_tiny, with_experts
from tiny_runs import refused, small_run

from ffn_heterogeneity.adapters import gates, kernel_readers
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.peft import save_adapters
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.losses.sparsity_terms import score_norm_term, size_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models.linear import Linear, effective_kernel
from ffn_heterogeneity.models.stack import slots, unstack
from ffn_heterogeneity.models.walk import linears
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.build import made_whole
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
IN, OUT, RANK = 9, 6, 4


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def gated(draw, rank=RANK):
    rng = np.random.default_rng(0)
    sizes = {gates.A: (IN, rank), gates.B: (rank, OUT), gates.LOG_ALPHA: (rank,)}
    leaves = {name: rng.normal(size=size) * 2 for name, size in sizes.items()}
    return leaves | {gates.DRAW: np.asarray(draw, float), gates.MULTIPLIERS: np.zeros(2)}


# ---- definitions


def test_a_score_is_a_mask_and_its_gradient_the_masks():
    """d loss / d score = d loss / d (K mask) * K, except where it would leave [0, 1]."""
    rng = np.random.default_rng(1)
    x, g, kernel = rng.normal(size=(5, IN)), rng.normal(size=(5, OUT)), rng.normal(size=(IN, OUT))
    score = rng.uniform(-0.3, 1.3, (IN, OUT))
    with jax.enable_x64(True):

        def loss(score):
            y = Linear(OUT).apply({"params": {"kernel": kernel, "score": score}}, jnp.asarray(x))
            return jnp.sum(y * g), y

        gradient, y = jax.grad(loss, has_aux=True)(jnp.asarray(score))
    np.testing.assert_allclose(y, x @ np.where(np.clip(score, 0, 1) > 0.5, kernel, 0), rtol=1e-12)
    through = (x.T @ g) * kernel
    outward = ((score < 0) & (through > 0)) | ((score > 1) & (through < 0))
    assert outward.any() and ((score < 0) & (through < 0)).any()
    np.testing.assert_allclose(gradient, np.where(outward, 0, through), rtol=1e-12)


def test_gated_factors_are_their_formula():
    u = np.array([0.1, 0.9, 0.6, 0.3])
    evaluated, drawn = gated(np.zeros(RANK)), gated(u)
    alpha = drawn[gates.LOG_ALPHA]
    gate = np.clip(sigmoid(np.log(u / (1 - u)) + alpha) * 1.2 - 0.1, 0, 1)
    probability = sigmoid(alpha - np.log(0.1 / 1.1))
    soft, closed = sigmoid(0.8 * alpha), round(RANK - probability.sum())
    assert closed > 0 and len(set(gate)) > 1
    rule = np.where(np.isin(np.arange(RANK), np.argsort(soft)[:closed]), 0, soft)
    x = np.random.default_rng(2).normal(size=(5, IN))
    with jax.enable_x64(True):
        for leaves, value in ((drawn, gate), (evaluated, rule)):
            wanted = x @ leaves[gates.A] * value @ leaves[gates.B]
            outputs = Linear(OUT).apply({"params": leaves}, jnp.asarray(x))
            np.testing.assert_allclose(outputs, wanted, rtol=1e-10)
            np.testing.assert_allclose(x @ effective_kernel(leaves), wanted, rtol=1e-10)
        np.testing.assert_allclose(gates.open_probability(alpha), probability, rtol=1e-12)
    assert kernel_readers(drawn) == [], "no whole kernel in the step"


def test_draws_follow_their_law():
    """New draws per step and kernel; gates are open, and fully open, as often as in the formula."""
    alpha = np.repeat(np.float32([[-3], [-1], [0], [2]]), 20_000, 1)
    leaves = {gates.LOG_ALPHA: alpha, gates.DRAW: np.zeros_like(alpha)}
    tree = {"stack": {"ffn": {"up": leaves, "down": leaves}}}
    draw = jax.jit(gates.refresh({}), static_argnums=4)
    one, two = (draw(tree, i, jax.random.key(i), {}, True)["stack"]["ffn"] for i in (0, 1))
    seen = [np.asarray(ffn[name][gates.DRAW]) for ffn in (one, two) for name in ("up", "down")]
    assert len({array.tobytes() for array in seen}) == 4
    value = np.asarray(gates.gate(one["up"]))
    for frequency, p in (
        ((value > 0).mean(1), sigmoid(alpha[:, 0] - np.log(0.1 / 1.1))),
        ((value == 1).mean(1), sigmoid(alpha[:, 0] + np.log(0.1 / 1.1))),
    ):
        assert (np.abs(frequency - p) < 5 * np.sqrt(p * (1 - p) / alpha.shape[1])).all()
    assert gates.refresh({})(tree, 0, None, {}, False) is tree


@pytest.mark.parametrize("name, leaf", [("lora", "lora_a"), ("scores", "score")])
def test_a_kernel_draws_by_the_key_and_its_path_alone(name, leaf):
    def drawn(targets, seed):
        model, _ = SURGERIES[name](model_of(), {"targets": targets}, key=jax.random.key(seed))
        leaves = flatten(unstack(model.params))
        return {path: np.asarray(x) for path, x in leaves.items() if path.endswith(leaf)}

    full, some, other = drawn("ffn/", 0), drawn("layers/1/ffn/down", 0), drawn("ffn/", 1)
    assert len({array.tobytes() for array in [*full.values(), *other.values()]}) == 2 * len(full)
    ((path, alone),) = some.items()
    np.testing.assert_array_equal(alone, full[path])


def test_the_losses_are_their_formulas():
    """Over kernels of different sizes; the multipliers' gradient is reversed."""
    model, _ = SURGERIES["gates"](model_of(), {"targets": "ffn/|attention/k"})
    pair = jnp.float32([0.7, -0.2])
    params = jax.tree.map_with_path(
        lambda path, x: x + pair if gates.MULTIPLIERS in str(path) else x, model.params
    )
    term = size_term(TermContext("size"), target=0.6)
    factors = [leaves for _, leaves in linears(model.config, params) if gates.A in leaves]
    sizes = [leaves[gates.A].shape[0] + leaves[gates.B].shape[1] for leaves in factors]
    ranks = [leaves[gates.LOG_ALPHA].size for leaves in factors]
    open_counts = [sigmoid(leaves[gates.LOG_ALPHA] - np.log(0.1 / 1.1)).sum() for leaves in factors]
    off = np.dot(sizes, open_counts) / np.dot(sizes, ranks) - 0.6
    assert len(set(sizes)) == 2 and len(factors) == 16
    for tree in (params, unstack(params)):
        value, gradient = jax.jit(jax.value_and_grad(lambda x: term.function(x).total))(tree)
        assert float(value) == pytest.approx(0.7 * off - 0.2 * off**2, rel=1e-4)
        slopes = {x: leaf for x, leaf in flatten(gradient).items() if x.endswith(gates.MULTIPLIERS)}
        slopes = [leaf.reshape(-1, 2) for leaf in slopes.values()]
        wanted = np.tile([-off / 16, -(off**2) / 16], (16, 1))
        np.testing.assert_allclose(np.concatenate(slopes), wanted, rtol=1e-4)
    assert made_whole(slots(params), [term]) == []
    scored, _ = SURGERIES["scores"](model_of(), {})
    scores = [np.asarray(x, float) for path, x in flatten(scored.params).items() if "score" in path]
    result = score_norm_term(TermContext("norm")).function(scored.params)
    assert float(result.total) == pytest.approx(sum((x**2).sum() for x in scores), rel=1e-5)
    share = sum((x > 0.5).sum() for x in scores) / sum(x.size for x in scores)
    assert float(result.metrics["kept_share"]) == pytest.approx(share) and 0.4 < share < 0.6


# ---- surgeries


def test_open_gates_are_the_kernel_of_that_rank():
    """Gates replace a kernel; existing factors keep their rank."""
    few, _ = SURGERIES["fuse"](model_of(), {"method": "svd", "ratio": 0.5})
    for model in (model_of(), few):
        opened, _ = SURGERIES["gates"](model, {"start": 30.0})
        for (place, before), (_, leaves) in zip(
            linears(model.config, model.params), linears(opened.config, opened.params), strict=True
        ):
            if gates.A in leaves:
                kernel = np.asarray(effective_kernel(before), np.float64)
                n, k = kernel.shape
                rank = before["low_rank_a"].shape[1] if model is few else n * k // (n + k)
                u, s, v = np.linalg.svd(kernel, full_matrices=False)
                assert leaves[gates.A].shape == (n, rank) and place.name.startswith("ffn/")
                closest = u[:, :rank] * s[:rank] @ v[:rank]
                np.testing.assert_allclose(effective_kernel(leaves), closest, atol=1e-5)


def test_masks_of_scores_nest_and_keep_the_highest():
    """Masks over all kernels together; each round removes the lowest active scores."""
    scored, _ = SURGERIES["scores"](model_of(), {"targets": "ffn/"})
    before, out = scored, None
    for ratio, last in ((0.25, False), (0.5, False), (0.75, True)):
        after, report = SURGERIES["score_mask"](before, {"ratio": ratio, "keep_scores": not last})
        pairs = list(
            zip(
                linears(scored.config, scored.params),
                linears(after.config, after.params),
                strict=True,
            )
        )
        both = [(one["score"], two["mask"]) for (_, one), (_, two) in pairs if "score" in one]
        score, mask = np.concatenate([[np.ravel(x) for x in pair] for pair in both], axis=1)
        assert mask.mean() == 1 - ratio == report["kept_share"]
        assert score[mask == 1].min() > score[mask == 0].max()
        assert out is None or (mask <= out).all()
        before, out = after, mask
    assert not any("score" in path for path in flatten(after.params))
    again, _ = SURGERIES["scores"](after, {}, key=jax.random.key(5))
    other, _ = SURGERIES["score_mask"](again, {"ratio": 0.5})
    one, two = (flatten(model.params) for model in (after, other))
    assert all(np.array_equal(leaf, two[path]) for path, leaf in one.items()), "out for good"


def test_what_is_wrong_is_refused(tmp_path):
    model = model_of()
    scored, _ = SURGERIES["scores"](model, {})
    opened, _ = SURGERIES["gates"](model, {})
    for call, message in (
        (lambda: SURGERIES["scores"](scored, {}), "layers/0/ffn/down has score already"),
        (lambda: SURGERIES["gates"](opened, {}), "layers/0/ffn/down has gates_a already"),
        (lambda: SURGERIES["gates"](model, {"rank": 17}), "rank=17 of a kernel 24 x 16"),
        (lambda: SURGERIES["score_mask"](model, {}), "no kernel has scores"),
        (lambda: size_term(TermContext("size"), target=1.0), "target=1.0"),
        (lambda: size_term(TermContext("size")).function(model.params), "no kernel has a leaf"),
        (lambda: save_adapters(model.config, scored.params, tmp_path / "a", base=""), "score"),
    ):
        refused(message, call, error=(ValueError, CheckpointError))


# ---- trained, saved, read


def trained(root, argument, model=None, **changes):
    (root / "text.txt").write_text(TEXT)
    small = small_run(root / "text.txt", steps=4, optimizer__learning_rate=5e-2)
    small |= {"losses__nucl__weight": None}
    model, rates = model or save_tiny(root / "tiny"), changes.pop("rates", ())
    config = config_of("nucl_finetune", f"{model},text,{argument}", **(small | changes))
    with config.unlocked():
        config.optimizer.rates = rates
    training.run(config, root / argument)
    return load_model(root / argument / "model"), root / argument


def same_when_folded(model, path):
    save_pretrained(model.config, model.params, path)
    folded = load_model(path)
    left = {name.split("/")[-1] for name in flatten(folded.params)}
    assert left <= {"kernel", "embedding", "scale"}
    assert apart(logits(model), logits(folded)) < 1e-5


def test_gates_close_to_their_target(tmp_path):
    """The multipliers rise while too much is kept, for all pairs; then the share is stable."""
    changes = {"train_only": (r"/gates_(log_alpha|multipliers)$",), "eval__every": 500}
    rates = ((r"multipliers$", 4.0),)
    model, run = trained(tmp_path, "gates,size", steps=500, rates=rates, **changes)
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rows = [row for row in rows if "train/size/kept_share" in row]
    shares = [row["train/size/kept_share"] for row in rows]
    first = [row["train/size/multipliers"][0] for row in rows]
    assert shares[0] > 0.9 and abs(np.mean(shares[-50:]) - 0.25) < 0.03
    assert first[0] == 0 and first[20] > 2 and max(first) > first[-1]
    pairs = [
        leaves[gates.MULTIPLIERS]
        for _, leaves in linears(model.config, model.params)
        if gates.A in leaves
    ]
    np.testing.assert_allclose(pairs, np.broadcast_to(pairs[0], (len(pairs), 2)), rtol=1e-4)
    assert not any(
        np.any(leaves.get(gates.DRAW, 0)) for _, leaves in linears(model.config, model.params)
    )
    gated = [leaves for _, leaves in linears(model.config, model.params) if gates.A in leaves]
    assert 0.6 < np.mean([np.mean(gates.gate(leaves) == 0) for leaves in gated]) < 0.9
    same_when_folded(model, tmp_path / "folded")


def test_scores_train_alone_and_weights_train_under_their_masks(tmp_path):
    scored, run = trained(tmp_path, "scores,score_norm")
    before, after = (flatten(unstack(x.params)) for x in (load_model(tmp_path / "tiny"), scored))
    assert {path.split("/")[-1] for path in set(after) - set(before)} == {"score"}
    assert all(np.array_equal(leaf, after[path]) for path, leaf in before.items())
    same_when_folded(scored, tmp_path / "folded")
    changes = {"score_mask__ratio": 0.5, "steps": 1}
    model, _ = trained(tmp_path, "score_mask", run / "model", **changes)
    masked, _ = SURGERIES["score_mask"](scored, {"ratio": 0.5})
    start, end = (flatten(unstack(x.params)) for x in (masked, model))
    assert set(start) == set(end)
    still = {path.split("/")[-1] for path in end if np.array_equal(start[path], end[path])}
    assert still == {"mask"}


@pytest.mark.parametrize("name", ["scores", "gates"])
def test_routers_are_left_alone_by_default(name):
    config = with_experts(LLAMA, 4, top_k=2)
    model = Model(config, random_params(config), None, "experts")
    _, report = SURGERIES[name](model, {}, key=jax.random.key(0))
    names = {path.rpartition("/")[2] for path in report["adapted"]}
    assert names == {"gate", "up", "down"}
