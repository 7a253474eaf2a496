"""Attacks on massive weights: which neurons, what is set to 0, and that nothing else changes."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import (
    LLAMA,
    our_logits,
    random_params,
    save_tiny,
    tiny_of,
    torch_model,
    with_experts,
)
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.tree import flatten

TOKENS = np.arange(2, 14)[None]


def attacked(model, **settings):
    settings = {"attack": "zero", "k": 3, "layer": None, "token": None, **settings}
    return SURGERIES["attack"](model, settings)


@pytest.fixture(params=["llama", "gemma2", "gpt_neox"])
def model(request):
    config = tiny_of(request.param, 4)
    return Model(config, random_params(config, dtype=np.float32), None, "tiny")


def planted(config, layer=1, neuron=5):
    """Weights with which one neuron of one early layer has a far larger state than all others."""
    tree = unstack(random_params(config))
    ffn = tree["layers"][layer]["ffn"]
    ffn = {name: {"kernel": leaf["kernel"].copy()} for name, leaf in ffn.items()}
    for name in ("gate", "up"):
        ffn[name]["kernel"][:, neuron] *= 60
    tree["layers"][layer] = {**tree["layers"][layer], "ffn": ffn}
    return restack(config, tree)


def test_the_planted_neuron_is_found():
    massive = massive_weights(LLAMA, planted(LLAMA))
    assert (massive.layer, massive.indices[0]) == (1, 5)
    assert massive.magnitudes[0] > 20 * massive.magnitudes[1]
    # The second half of the stack is not searched, unless it is named.
    late = planted(LLAMA, layer=3, neuron=7)
    assert massive_weights(LLAMA, late).layer < 2
    assert massive_weights(LLAMA, late, layer=3).indices[0] == 7
    # Of three layers two are the first half.
    odd = tiny_of("llama", 3)
    assert massive_weights(odd, planted(odd, layer=1)).layer == 1
    assert massive_weights(odd, planted(odd, layer=2)).layer < 2


def test_a_bos_that_is_not_the_massive_token_is_named(caplog):
    """Qwen2.5 is such a model: its training texts do not begin with bos."""
    tree = unstack(planted(LLAMA, layer=0))
    first = tree["layers"][0] = jax.tree.map(np.array, tree["layers"][0])
    first["attention"]["out"]["kernel"][:] = 0  # the FFN reads the embedding
    for name in ("gate", "up"):
        first["ffn"][name]["kernel"][:, 5] = 60 * np.eye(LLAMA.d_model)[0]
    tree["embed"] = jax.tree.map(np.array, tree["embed"])
    tree["embed"]["embedding"][:, 0] = 1
    massive_weights(LLAMA, restack(LLAMA, tree))
    assert caplog.text == ""
    tree["embed"]["embedding"][LLAMA.bos_id, 0] = 0
    quiet = restack(LLAMA, tree)
    massive_weights(LLAMA, quiet)
    assert f"bos (token {LLAMA.bos_id})" in caplog.text and "give token=" in caplog.text.lower()
    caplog.clear()
    assert massive_weights(LLAMA, quiet, token=7).indices[0] == 5
    assert caplog.text == ""


def test_states_are_those_of_transformers(torch, tmp_path):
    """|h| from the inputs of `down_proj`, for a single bos."""
    params = random_params(LLAMA)
    theirs, seen = torch_model(torch, save_tiny(tmp_path / "model", LLAMA, params)), []
    for layer in theirs.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0][0, 0]))
    with torch.no_grad():
        theirs(torch.tensor([[LLAMA.bos_id]]))
    expected = np.abs(torch.stack(seen).numpy())
    massive = massive_weights(LLAMA, params)
    np.testing.assert_allclose(massive.states, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(
        massive.magnitudes, massive.states[massive.layer][massive.indices]
    )


@pytest.mark.parametrize("config", [LLAMA, with_experts()], ids=["dense", "experts"])
@pytest.mark.parametrize("scope", ["massive", "layer", "others"])
def test_whom_macdrop_drops(config, scope):
    """MacDrop drops the k massive neurons of their layer, the whole layer, or all but those k.

    With experts: the massive expert's; the indices of the others are after its last neuron.
    """
    model = Model(config, random_params(config), None, "tiny")
    massive = massive_weights(config, model.params, layer=1)
    order, width = massive.indices, config.layers[1].ffn_width
    rows = np.sort({"massive": order[:3], "layer": order, "others": order[3:]}[scope])
    settings = {"k": 3, "scope": scope, "layer": 1}
    dropping, report = SURGERIES["macdrop"](model, settings)
    assert report == massive.where() | {"indices": order[:3].tolist()}
    dropped = {p: x for p, x in flatten(unstack(dropping.params)).items() if p.endswith("rows")}
    assert set(dropped) == {f"layers/1/ffn/{name}/macdrop_rows" for name in ("gate", "up")}
    if massive.expert is not None:
        assert massive.expert
        rows = [rows if e == massive.expert else width + np.arange(len(rows)) for e in range(4)]
    for leaf in dropped.values():
        np.testing.assert_array_equal(leaf, rows)

    def on_shapes(params):
        return SURGERIES["macdrop"](dataclasses.replace(model, params=params), settings)[0].params

    shapes = (jax.eval_shape(on_shapes, model.params), dropping.params)
    assert len({tuple((p, x.shape) for p, x in flatten(one).items()) for one in shapes}) == 1


def test_named_neurons_are_attacked_instead():
    """They keep their order, with the |h| that they have in this model."""
    model = Model(LLAMA, planted(LLAMA), None, "tiny")
    massive = massive_weights(LLAMA, model.params)
    order = massive.indices[[3, 0, 2]].tolist()
    changed, report = attacked(model, k=2, layer=1, neurons=tuple(order))
    assert report["indices"] == order[:2] and report["layer_index"] == 1
    assert report["magnitudes"] == massive.magnitudes[[3, 0]].tolist()
    up = unstack(changed.params)["layers"][1]["ffn"]["up"]["kernel"]
    assert np.flatnonzero(~up.any(0)).tolist() == sorted(order[:2])
    refused("99; layer 1", attacked, model, layer=1, neurons=(99,))
    refused("3; layer 1", attacked, model, layer=1, neurons=(3, 3))
    refused("k=2: neurons names 1", attacked, model, k=2, layer=1, neurons=(3,))
    refused("say of which layer", attacked, model, neurons=(3,))


@pytest.mark.parametrize("k", [0, 1, 3, 12])
@pytest.mark.parametrize("attack", ["zero", "retain"])
def test_an_attack_silences_those_neurons_and_nothing_else(model, attack, k):
    changed, report = attacked(model, attack=attack, k=k, layer=1)
    width = model.config.layers[1].ffn_width
    order = massive_weights(model.config, model.params, layer=1).indices
    assert report["indices"] == order[:k].tolist() and report["layer"] == 2
    lost = np.isin(np.arange(width), order[:k]) == (attack == "zero")
    before, after = (unstack(one.params)["layers"] for one in (model, changed))
    silent = unstack(model.params)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        for name in ("gate", "up"):
            for leaf in old["ffn"].get(name, {}):
                a, b = old["ffn"][name][leaf], new["ffn"][name][leaf]
                expected = np.where(lost, 0, a) if i == 1 else a
                np.testing.assert_array_equal(b, expected)
        np.testing.assert_array_equal(old["ffn"]["down"]["kernel"], new["ffn"]["down"]["kernel"])
    # h = 0 there is as if the rows of W were 0.
    kernel = np.where(lost[:, None], 0, before[1]["ffn"]["down"]["kernel"])
    down = {**silent["layers"][1]["ffn"]["down"], "kernel": kernel}
    ffn = {**silent["layers"][1]["ffn"], "down": down}
    silent["layers"][1] = {**silent["layers"][1], "ffn": ffn}
    logits = [
        our_logits(model.config, params, TOKENS)
        for params in (changed.params, restack(model.config, silent))
    ]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-6)
    harmless = (attack, k) in (("zero", 0), ("retain", width))
    same = np.array_equal(logits[0], our_logits(model.config, model.params, TOKENS))
    assert same == harmless


@pytest.mark.parametrize("shared", [0, 1])
def test_an_attack_on_one_expert_finds_its_own_neurons(shared):
    """Neurons are those that bos would reach if the router sent it to every expert."""
    config = with_experts(shared=shared)
    model = Model(config, random_params(config), None, "tiny")
    default = attacked(model, layer=1)[1]
    every = dataclasses.replace(config.layers[1], top_k=4 - shared)
    layers = (*config.layers[:1], every, *config.layers[2:])
    wide = dataclasses.replace(config, layers=layers)
    everywhere = massive_weights(wide, restack(wide, unstack(model.params)), 1)
    before = unstack(model.params)["layers"][1]["ffn"]
    for expert in range(shared, 4):
        changed, report = attacked(model, layer=1, expert=expert)
        order = np.argsort(-everywhere.states[1][expert], kind="stable")
        assert report["indices"] == order[:3].tolist() and report["expert_index"] == expert
        size = everywhere.states[1][expert][order[:3]]
        np.testing.assert_allclose(report["magnitudes"], size, rtol=1e-5)
        after = unstack(changed.params)["layers"][1]["ffn"]
        for name in ("gate", "up"):
            expected = before[name]["kernel"].copy()
            expected[expert, :, order[:3]] = 0
            np.testing.assert_array_equal(after[name]["kernel"], expected)
        if expert == default["expert_index"]:
            assert report == default | {"magnitudes": report["magnitudes"]}
    refused("expert=4: layer 1 .* has routed experts", attacked, model, layer=1, expert=4)
    dense = Model(LLAMA, random_params(LLAMA), None, "tiny")
    refused("expert=0: layer 1 .* has no experts", attacked, dense, layer=1, expert=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 13, "layer": 1}, "k=13: layer 1 .* has 12 neurons"),
        ({"k": -1}, "k=-1 must be a number in"),
        ({"layer": 4}, "layer=4: the model has layers 0 to 3"),
        ({"attack": "drop"}, "attack='drop'"),
        ({"token": 29}, "token=29 of 29"),
    ],
)
def test_settings_that_cannot_be(model, settings, message):
    refused(message, attacked, model, **settings)


def test_a_model_without_bos_and_one_that_overflows(model):
    nameless = dataclasses.replace(model, config=dataclasses.replace(model.config, bos_id=None))
    refused("token=None .* its eos", attacked, nameless)
    assert attacked(nameless, token=3)[1]["indices"]
    broken = unstack(random_params(LLAMA))
    broken["layers"][2]["ffn"]["up"]["kernel"][:] = np.nan
    refused("layer 2 .* is not finite", massive_weights, LLAMA, restack(LLAMA, broken))


def test_adapters_are_refused_by_name(model):
    adapted, _ = SURGERIES["lora"](model, {"rank": 2, "alpha": 4, "targets": "ffn/up"})
    refused("ffn/up carries adapters", attacked, adapted)
    folded, _ = SURGERIES["fold"](adapted)
    assert attacked(folded)[1]["k"] == 3
