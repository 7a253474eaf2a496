"""Criteria that use activations, and protected neurons."""

import dataclasses

import numpy as np
import pytest
from tiny_models import (
    LLAMA,
    TEXT,
    byte_tokenizer,
    config_of,
    random_params,
    save_tiny,
    save_tiny_reader,
    torch_model,
)
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.launch import compress
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.calibration import calibration_rows
from ffn_heterogeneity.surgery.criteria import CRITERIA, ON_TEXT, layer_scores
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.surgery.seen import seen_states

WIDTH = 24
ROWS = np.concatenate([np.zeros((3, 1), int), np.random.default_rng(0).integers(2, 258, (3, 9))], 1)


@pytest.fixture(scope="module")
def params():
    return random_params(LLAMA)


@pytest.fixture(scope="module")
def seen(params):
    return seen_states(LLAMA, params, ROWS)


def test_states_equal_those_of_transformers(torch, params, seen, tmp_path):
    theirs, states = torch_model(torch, save_tiny(tmp_path / "model", LLAMA, params)), []
    for layer in theirs.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, x: states.append(x[0]))
    with torch.no_grad():
        theirs(torch.tensor(ROWS))
        theirs(torch.tensor([[LLAMA.bos_id]]))
    states = [h.double().numpy() for h in states]
    for layer, (text, bos) in enumerate(zip(states[:4], states[4:], strict=True)):
        h = text[:, 1:].reshape(-1, WIDTH)
        np.testing.assert_allclose(seen[layer]["mean"], np.abs(h).mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            seen[layer]["norm"], np.sqrt((h**2).sum(0)), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(seen[layer]["bos"], np.abs(bos[0, 0]), rtol=1e-5, atol=1e-6)
    largest = [np.abs(bos).max() for bos in states[4:6]]
    assert [one["massive"] for one in seen].index(True) == int(np.argmax(largest))


def test_without_a_bos_the_rows_first_token_stands_alone(params, seen):
    nameless = dataclasses.replace(LLAMA, bos_id=None)
    for one, other in zip(seen_states(nameless, params, ROWS), seen, strict=True):
        np.testing.assert_array_equal(one["bos"], other["bos"])
    refused("needs one that stands first", seen_states, nameless, params)
    refused("needs one that stands first", seen_states, nameless, params, ROWS[:, 1:])


def removed(params, seen, criterion, ratio=0.25, **more):
    return reduce_model(LLAMA, params, RemovalPlan(criterion, ratio=ratio, **more), seen)[2]


def test_scores_of_activations(params, seen):
    """The lowest scores are removed; OptiPFair's scores equal its formula."""
    by = {name: removed(params, seen, name) for name in ("bos", "mean_state", "optipfair")}
    for layer, tree in enumerate(unstack(params)["layers"]):
        kernels = [tree["ffn"][name]["kernel"].astype(float) for name in ("gate", "up")]
        kernels = [*kernels, tree["ffn"]["down"]["kernel"].astype(float).T]
        spreads = [kernel.max(0) - kernel.min(0) for kernel in kernels]
        shares = sum(spread / spread.max() for spread in spreads)
        stats = seen[layer]
        values = {
            "bos": stats["bos"],
            "mean_state": stats["mean"],
            "optipfair": shares * stats["norm"],
        }
        for name, value in values.items():
            assert by[name][layer].tolist() == sorted(np.argsort(value)[:6].tolist()), name


@pytest.mark.parametrize("protect", ["bos:5", "massive:5", "entropy:0.2"])
@pytest.mark.parametrize("budget", ["layer", "global"])
def test_who_is_spared_goes_last(params, seen, protect, budget):
    layers = unstack(params)["layers"]

    def spared(layer):
        if protect == "entropy:0.2":
            ffn = layers[layer]["ffn"]
            return set(np.argsort(layer_scores("entropy", ffn, layer=layer))[:5].tolist())
        if protect == "massive:5" and not seen[layer]["massive"]:
            return set()
        return set(np.argsort(-seen[layer]["bos"])[:5].tolist())

    for seed in range(4):
        more = {"protect": protect, "budget": budget, "seed": seed}
        gone = removed(params, seen, "random", ratio=0.5, **more)
        assert all(not spared(layer) & set(neurons.tolist()) for layer, neurons in gone.items())
        assert sum(map(len, gone.values())) == 4 * WIDTH // 2
        # If there are too few others, protected neurons are removed, too.
        most = removed(params, seen, "random", ratio=0.9, **more)
        assert sum(map(len, most.values())) == (84 if budget == "layer" else 86)
    plain = removed(params, seen, "random", ratio=0.5)
    assert any(spared(layer) & set(neurons.tolist()) for layer, neurons in plain.items())


@pytest.mark.parametrize("lose", ["bos:3", "massive:2", "entropy:0.1", "random:3", "random:0.1"])
def test_who_is_lost_goes_in_the_place_of_the_last(params, seen, lose):
    """The count stays; `lose` neurons are removed first, then those of the criterion."""
    plain = removed(params, seen, "entropy")
    kind, _, size = lose.partition(":")
    draws = [removed(params, seen, "entropy", lose=lose, seed=seed) for seed in (0, 0, 1)]
    for layer, tree in enumerate(unstack(params)["layers"]):
        order = np.argsort(-layer_scores("entropy", tree["ffn"], layer=layer)).tolist()
        loudest = np.argsort(-seen[layer]["bos"]).tolist()
        first, again, other = (draw[layer].tolist() for draw in draws)
        assert first == again and len(first) == len(plain[layer]) == 6
        if kind == "random":
            count = 3  # ceil(2.4) too
            assert plain[layer].tolist() == sorted(order[:6])
            assert set(order[: 6 - count]) < set(first) and set(first) != set(order[:6])
            assert len(set(first) & set(order[:6])) == 6 - count
        else:
            massive = loudest[: int(size)] * seen[layer]["massive"] if kind == "massive" else []
            lost = {"bos": loudest[:3], "massive": massive, "entropy": order[-3:]}[kind]
            rest = [i for i in order if i not in lost][: 6 - len(lost)]
            assert first == other == sorted([*lost, *rest])
    same = [np.array_equal(draws[0][i], draws[2][i]) for i in range(4)]
    assert all(same) == (kind != "random")


def test_through_the_surgery(params, tmp_path):
    model = Model(LLAMA, params, byte_tokenizer(), "tiny")
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh " * 300)
    settings = {"criterion": "mean_state", "ratio": 0.25, "calibration": str(text)}
    smaller, report = SURGERIES["prune"](model, settings)
    rows = calibration_rows(model, str(text))
    assert np.shape(rows) == (4, 513) and {row[0] for row in rows} == {LLAMA.bos_id}
    expected = removed(params, seen_states(LLAMA, params, rows), "mean_state")
    assert report["removed"] == [expected[i].tolist() for i in range(4)]
    assert set(smaller.config.ffn_widths) == {18}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"criterion": "mean_state"}, "give --config.calibration"),
        ({"criterion": "mean_state", "calibration": "short"}, "of 512 tokens, 4 are needed"),
        ({"protect": "bos"}, "protect='bos'"),
        ({"protect": "bos:1.5"}, "protect='bos:1.5'"),
        ({"protect": "entropy:2"}, "protect='entropy:2'"),
        ({"protect": "entropy:0.1", "criterion": "similarity"}, "has no scores"),
        ({"criterion": "bos", "streaming": True}, "never loads the whole model"),
        ({"lose": "massive:2", "streaming": True}, "never loads the whole model"),
        ({"protect": "random:5"}, "protect='random:5'"),
        ({"lose": "loud:5"}, "lose='loud:5'.*random:5"),
        ({"lose": "bos:5", "criterion": "similarity"}, "has no scores"),
        ({"lose": "bos:5", "budget": "global"}, "use budget='layer'"),
        ({"lose": "bos:7"}, "7 of layer 0's 24 neurons, of which 6 go and 18 stay"),
    ],
)
def test_what_cannot_be(changes, message, tmp_path, model):
    if "calibration" in changes:
        (tmp_path / "short").write_text("abc " * 300)
        changes = {**changes, "calibration": str(tmp_path / "short")}
    config = config_of("prune", model=str(model), **changes)
    refused(message, compress.run, config, tmp_path / "run")


@pytest.mark.parametrize("setting", ["protect", "lose"])
def test_massive_neurons_of_layers_that_are_left_out(params, seen, setting):
    named = {"protect": "bos:5", setting: "massive:2"}
    named["layers"] = [i for i in range(4) if not seen[i]["massive"]]
    with pytest.raises(ValueError, match="leaves out the massive layer, .* 'massive:2' names"):
        removed(params, seen, "entropy", **named)


def test_a_criterion_of_ones_own_is_given_activations(params, monkeypatch):
    """A criterion with two arguments works as before."""
    monkeypatch.setitem(CRITERIA, "quiet", lambda ffn, rng, activations=None: -activations["mean"])
    monkeypatch.setitem(CRITERIA, "short", lambda ffn, rng: -np.abs(ffn["down"]["kernel"]).sum(1))
    ON_TEXT.append("quiet")
    looks = [RemovalPlan(name, count=6).looks for name in ("quiet", "short")]
    ON_TEXT.remove("quiet")
    assert looks == ["text", ""]
    ffn, statistics = unstack(params)["layers"][0]["ffn"], {"mean": np.arange(WIDTH, 0, -1.0)}
    scores = layer_scores("quiet", ffn, layer=0, activations=statistics)
    assert np.argmax(scores) == WIDTH - 1
    assert layer_scores("short", ffn, layer=0, activations=statistics).shape == (WIDTH,)


def test_an_activation_that_was_not_taken(params):
    ffn = unstack(params)["layers"][0]["ffn"]
    refused("layer 0: this criterion needs activations", layer_scores, "bos", ffn, layer=0)


def test_an_encoders_calibration_rows(tmp_path):
    model = load_model(save_tiny_reader(tmp_path / "bert"))
    (tmp_path / "text.txt").write_text(TEXT)
    rows = calibration_rows(model, str(tmp_path / "text.txt"), 600)
    assert [len(row) for row in rows] == [64] * 9 + [44]
    assert {(row[0], row[-1]) for row in rows} == {(0, 1)}
    refused(
        "tokens, 900,000 are needed", calibration_rows, model, str(tmp_path / "text.txt"), 900_000
    )
