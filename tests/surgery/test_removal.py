"""Removal equals masking; choices equal a float64 oracle written from the formula."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import mask_neurons
from tiny_runs import refused

from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery.criteria import CRITERIA, layer_scores
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.surgery.selection import layer_subset, removal_count, select_global

# Nothing here is large.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

OWN = {"family": "gemma2", "vocab_size": 61, "d_model": 24, "n_heads": 4, "n_kv_heads": 2}
OWN |= {"activation": "gelu_tanh", "norm_offset": 1.0, "post_norms": True, "ffn_bias": True}
OWN |= {"attention_softcap": 50.0, "final_softcap": 30.0, "embedding_multiplier": 24**0.5}
CONFIG = ModelConfig(**OWN, head_dim=8, layers=(LayerConfig(40, window=5), LayerConfig(40)) * 3)
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 17))


def random_params(dtype=np.float64) -> dict:
    """A tree with large random leaves, biases included, so that every leaf matters."""
    rng = np.random.default_rng(1)
    shapes = causal_lm.abstract_params(CONFIG)
    return jax.tree.map(lambda s: rng.normal(size=s.shape, scale=0.3).astype(dtype), shapes)


def chosen(params, criterion: str, **plan) -> dict[int, np.ndarray]:
    return reduce_model(CONFIG, params, RemovalPlan(criterion, **plan))[2]


def logits(config, params, dtype) -> np.ndarray:
    options = causal_lm.RunOptions(compute_dtype=dtype)

    @jax.jit
    def compute(params):
        hidden = causal_lm.forward(config, params, {"tokens": TOKENS}, options=options)["hidden"]
        return causal_lm.logits(config, params, hidden)

    return np.asarray(compute(params))


@pytest.mark.parametrize(
    ("criterion", "budget"), [("entropy", "layer"), ("magnitude", "global"), ("random", "layer")]
)
def test_removal_equals_masking_in_float64(criterion, budget):
    with jax.enable_x64(True):
        params = random_params()
        plan = RemovalPlan(criterion, ratio=0.3, budget=budget)
        config, smaller, removed, _ = reduce_model(CONFIG, params, plan)
        pruned = logits(config, restack(config, smaller), jnp.float64)
        masked = logits(CONFIG, restack(CONFIG, mask_neurons(params, removed)), jnp.float64)
        full = logits(CONFIG, params, jnp.float64)
    assert pruned.dtype == np.float64
    assert np.abs(pruned - masked).max() <= 1e-9
    assert np.abs(pruned - full).max() > 1e-3, "removal changed nothing: the test cannot fail"


def test_widths_and_counts():
    params = random_params()
    plan = RemovalPlan("entropy", ratio=0.25, layers="pair:2")
    config, smaller, *_ = reduce_model(CONFIG, params, plan)
    assert config.ffn_widths == (40, 40, 30, 30, 40, 40)
    assert smaller["layers"][2]["ffn"]["down"]["kernel"].shape == (30, 24)
    assert smaller["layers"][2]["ffn"]["up"]["bias"].shape == (30,)
    assert smaller["layers"][2]["ffn"]["down"]["bias"].shape == (24,)
    removed = chosen(params, "magnitude", ratio=0.25, budget="global")
    assert sum(map(len, removed.values())) == 60
    assert removal_count(10, ratio=0.3) == 3, "0.3 * 10 is 2.9999999999999996 in floats"


def oracle_scores(name: str, w: np.ndarray) -> list[float]:
    """Row by row in plain Python floats, from the formulas."""
    scores = []
    for row in w.astype(np.float64):
        z = math.fsum(abs(x) for x in row)
        r = [abs(x) / z for x in row]
        n = len(r)
        if name == "entropy":
            scores.append(-math.fsum(x * math.log(x) for x in r if x > 0))
        elif name == "gini":
            scores.append(1 - math.fsum(x * x for x in r))
        elif name == "mstd":
            scores.append(-math.sqrt(math.fsum((x - 1 / n) ** 2 for x in r) / n))
        elif name == "largest_outgoing":
            scores.append(-max(abs(x) for x in row))
        else:
            scores.append(-math.fsum(x * x for x in row))
    return scores


@pytest.mark.parametrize("name", ["entropy", "gini", "mstd", "magnitude", "largest_outgoing"])
@pytest.mark.parametrize("reverse", [False, True])
def test_choice_equals_the_oracle(name, reverse):
    params = random_params(np.float32)
    removed = chosen(params, name, ratio=0.25, reverse=reverse)
    for layer, tree in enumerate(unstack(params)["layers"]):
        scores = oracle_scores(name, tree["ffn"]["down"]["kernel"])
        order = sorted(range(40), key=lambda i: scores[i] if reverse else -scores[i])
        assert removed[layer].tolist() == sorted(order[:10])


def incoming_scores(name: str, gate: np.ndarray, up: np.ndarray) -> list[float]:
    """OptiPFair's three rules, column by column; the lowest scores are removed."""
    values = []
    for g, u in zip(gate.T.astype(np.float64), up.T.astype(np.float64), strict=True):
        if name == "maw":
            values.append(sum(max(x) + abs(min(x)) for x in (g, u)))
        elif name == "vow":
            means = [math.fsum(x) / len(x) for x in (g, u)]
            pairs = zip((g, u), means, strict=True)
            values.append(sum(math.fsum((y - mean) ** 2 for y in x) / len(x) for x, mean in pairs))
        else:
            values.append(math.prod(math.fsum(abs(y) for y in x) for x in (g, u)))
    return values


@pytest.mark.parametrize("name", ["maw", "vow", "pon"])
def test_rules_of_incoming_weights_equal_the_oracle(name):
    params = random_params(np.float32)
    removed = chosen(params, name, ratio=0.25)
    for layer, tree in enumerate(unstack(params)["layers"]):
        kernels = (tree["ffn"][kernel]["kernel"] for kernel in ("gate", "up"))
        order = np.argsort(incoming_scores(name, *kernels))
        assert removed[layer].tolist() == sorted(order[:10].tolist())


def test_random_is_a_permutation_that_depends_on_seed_and_layer_only():
    params = random_params()
    everywhere, alone, other = (
        chosen(params, "random", ratio=0.25, **more) for more in ({}, {"layers": [3]}, {"seed": 1})
    )
    assert everywhere[3].tolist() == alone[3].tolist()
    assert everywhere[3].tolist() != everywhere[4].tolist()
    assert everywhere[3].tolist() != other[3].tolist()


@pytest.mark.parametrize("name", sorted(set(CRITERIA) - {"random"}))
def test_dead_and_tiny_rows(name):
    w = np.random.default_rng(0).normal(size=(8, 6))
    w[3] = 0
    w[5] *= 1e-200
    up = np.random.default_rng(1).normal(size=(6, 8))
    seen = dict.fromkeys(("bos", "mean", "norm", "signed"), np.arange(1.0, 9)) | {"tokens": 0.5}
    ffn = {"down": {"kernel": w}, "up": {"kernel": up}}
    scores = layer_scores(name, ffn, layer=0, activations=seen)
    assert scores.argmax() == 3, "a neuron that does nothing goes first"
    assert np.isfinite(np.delete(scores, 3)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_are_refused_by_layer(value):
    params = unstack(random_params())
    params["layers"][4]["ffn"]["down"]["kernel"][7, 2] = value
    refused("layer 4.*row 7, column 2", chosen, params, "entropy", ratio=0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 1.0}, r"ratio=1.0 must be a number in \[0, 1\)"),
        ({"ratio": -0.1}, "ratio=-0.1 must be a number in"),
        ({"ratio": float("nan")}, "ratio=nan must be a number in"),
        ({"count": 40}, "count=40 must be a number in"),
        ({}, "exactly one of ratio and count"),
        ({"ratio": 0.1, "count": 1}, "exactly one of ratio and count"),
        ({"ratio": 0.1, "layers": "6"}, "layer 6 is out of range.*0 to 5"),
        ({"ratio": 0.1, "layers": [0, -1]}, "layer -1 is out of range"),
        ({"ratio": 0.1, "layers": "1,1"}, "names a layer twice"),
        ({"ratio": 0.1, "layers": "middle"}, "not understood"),
        ({"ratio": 0.1, "budget": "total"}, "budget='total'"),
        (
            {"ratio": 0.1, "criterion": "entropi"},
            "unknown criterion 'entropi', did you mean 'entropy'",
        ),
        ({"count": 235, "budget": "global"}, "would empty a layer"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    refused(message, chosen, random_params(), **{"criterion": "entropy", **arguments})


def test_layer_subsets():
    assert layer_subset("top", 5) == (2, 3, 4)
    assert layer_subset("bottom", 5) == (0, 1)
    assert layer_subset("even", 5) == (0, 2, 4)
    assert layer_subset("odd", 5) == (1, 3)
    assert layer_subset("1-3,0", 5) == (0, 1, 2, 3)
    assert layer_subset("pair:3", 5) == (3, 4)
    assert layer_subset("last2", 5) == (3, 4)
    groups = {"encoder": range(4), "decoder": range(4, 10), "sparse": (1, 3, 5, 7, 9)}
    assert layer_subset("encoder:all", 10, groups) == (0, 1, 2, 3)
    assert layer_subset("decoder:top", 10, groups) == (7, 8, 9)
    assert layer_subset("decoder:0,5", 10, groups) == (4, 9)
    assert layer_subset("decoder:sparse:last2", 10, groups) == (7, 9)
    assert layer_subset("sparse:even", 10, groups) == (1, 5, 9)
    assert layer_subset("decoder:sparse:last1+encoder:0", 10, groups) == (0, 9)
    for spec, words in (
        ("encoder:0+sparse:0+1", "names layer 1 twice"),
        ("encoder:4", "layer 4 is out of range, the model has layers 0 to 3 there"),
        ("last6", "out of range"),
        ("encoder:decoder:all", "names no layer"),
        ("middle:all", "not understood"),
    ):
        refused(words, layer_subset, spec, 10 if spec != "last6" else 5, groups)
    refused("not understood", layer_subset, "encoder:all", 5)
    for spec in ("bottom", "odd"):
        refused(f"layers='{spec}' names no layer of the model's 1", layer_subset, spec, 1)
    refused(r"layers=1: give a name or indices: \[1\]", layer_subset, 1, 4)


def test_a_global_budget_never_empties_a_layer():
    scores = {0: np.full(4, 9.0), 1: np.arange(4.0), 2: np.arange(4.0) - 9}
    removed = select_global(scores, count=9)
    assert [len(removed[i]) for i in range(3)] == [3, 3, 3]
    assert removed[1].tolist() == [1, 2, 3]
    # Rows of zeros score -inf under reverse: the kept row must not be confused with them.
    dead = {0: np.array([-np.inf, 5.0]), 1: np.array([-np.inf, -np.inf, 1.0])}
    removed = select_global(dead, count=3)
    assert {layer: indices.tolist() for layer, indices in removed.items()} == {0: [1], 1: [0, 2]}


def test_unknown_adapter_leaves_are_refused():
    with pytest.raises(ValueError, match="ffn/up/unheard_of"):
        leaves = {"up": {"unheard_of": np.zeros((24, 2))}}
        take_neurons(CONFIG, Place(0, None, "ffn"), leaves, np.arange(8))
