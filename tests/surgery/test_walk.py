"""Feed-forward blocks are found and written back, per layer or per expert; named surgeries."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_models
from tiny_models import LLAMA, WIDE, config_of, random_params, save_tiny, structured

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import compress
from ffn_heterogeneity.launch.commands import COMMANDS
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.walk import ffn_blocks, linears, write
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.tree import flatten


def with_experts(layer: int = 1, experts: int = 3) -> dict:
    """An unstacked tree of which one layer has experts and a router; no family reads it yet."""
    tree = unstack(structured(LLAMA, random_params(LLAMA)))
    rng, ffn = np.random.default_rng(0), tree["layers"][layer]["ffn"]
    blocks = jax.tree.map(lambda x: rng.normal(size=(experts, *x.shape)).astype(x.dtype), ffn)
    tree["layers"][layer]["ffn"] = blocks | {"router": {"kernel": rng.normal(size=(16, experts))}}
    return tree


def sparse(config: ModelConfig = LLAMA, layer: int = 1, experts: int = 3) -> ModelConfig:
    """The config with this number of experts in one layer."""
    layers = list(config.layers)
    layers[layer] = dataclasses.replace(layers[layer], experts=experts)
    return dataclasses.replace(config, layers=tuple(layers))


@pytest.mark.parametrize("stacked", [True, False])
def test_the_blocks_of_a_plain_model(stacked):
    params = structured(LLAMA, random_params(LLAMA))
    blocks = dict(ffn_blocks(LLAMA, params if stacked else unstack(params)))
    assert list(blocks) == [(i, None, "ffn") for i in range(4)]
    for (layer, _, _), block in blocks.items():
        for path, leaf in flatten(unstack(params)["layers"][layer]["ffn"]).items():
            np.testing.assert_array_equal(leaf, flatten(block)[path])
    same = restack(LLAMA, write(LLAMA, params, blocks))
    assert all(np.array_equal(x, flatten(same)[p]) for p, x in flatten(params).items())


def test_the_linears_of_experts():
    """Kernels of layers and of experts are matrices; writing them back gives the same tree."""
    tree = with_experts()
    places = dict(linears(sparse(), tree))
    assert all(leaves["kernel"].ndim == 2 for leaves in places.values())
    ffn_places = [place for place in places if place.layer == 1 and place.name.startswith("ffn")]
    assert len(ffn_places) == 3 * 3 + 1 and Place(1, None, "ffn/router") in ffn_places
    assert places[1, 2, "ffn/up"]["mask"].shape == (16, 24)
    assert Place(2, None, "attention/out").path == "layers/2/attention/out"
    same = flatten(write(sparse(), tree, places))
    assert all(np.array_equal(leaf, same[path]) for path, leaf in flatten(tree).items())


def test_the_blocks_of_experts():
    tree = with_experts()
    blocks = dict(ffn_blocks(sparse(), tree))
    places = [Place(1, e, "ffn") for e in range(3)]
    assert [place for place in blocks if place.layer == 1] == places
    assert blocks[places[2]]["up"]["kernel"].shape == (16, 24)
    assert "router" not in blocks[places[2]]
    survivors = np.arange(0, 24, 2)
    new = {place: take_neurons(sparse(), place, blocks[place], survivors) for place in places}
    before = tree["layers"][1]["ffn"]
    after = write(sparse(), tree, new)["layers"][1]["ffn"]
    assert after["router"] is before["router"]
    np.testing.assert_array_equal(after["down"]["kernel"], before["down"]["kernel"][:, survivors])
    np.testing.assert_array_equal(after["up"]["mask"], before["up"]["mask"][..., survivors])
    np.testing.assert_array_equal(after["down"]["lora_a"], before["down"]["lora_a"][:, survivors])
    np.testing.assert_array_equal(after["down"]["lora_b"], before["down"]["lora_b"])
    with pytest.raises(ValueError, match="layer 1: only some of its 3 experts"):
        write(sparse(), tree, {places[0]: new[places[0]]})
    with pytest.raises(ValueError, match="layer 1: experts of unlike shapes"):
        write(sparse(), tree, new | {places[2]: blocks[places[2]]})


def test_a_removal_works_expert_by_expert():
    """Each expert loses the same number of neurons, as if it were a layer's only block."""
    tree = with_experts()
    config, smaller, removed, _ = reduce_model(sparse(), tree, RemovalPlan("magnitude", count=5))
    assert config.ffn_widths == (19,) * 4 and removed[1].shape == (3, 5)
    assert len({tuple(row) for row in removed[1]}) > 1, "not the same neurons of every expert"
    for expert in range(3):
        alone = unstack(random_params(LLAMA))
        alone["layers"][1]["ffn"] = dict(ffn_blocks(sparse(), tree))[1, expert, "ffn"]
        _, one, gone, _ = reduce_model(LLAMA, alone, RemovalPlan("magnitude", count=5))
        np.testing.assert_array_equal(gone[1], removed[1][expert])
        for path, leaf in flatten(one["layers"][1]["ffn"]).items():
            np.testing.assert_array_equal(leaf, flatten(smaller["layers"][1]["ffn"])[path][expert])


# Settings other than the defaults; surgeries that are not listed are tested with defaults.
SETTINGS = {
    "lora": {"rank": 2, "alpha": 2.0, "targets": "attention/"},
    "dora": {"rank": 2, "alpha": 2.0, "targets": "ffn/"},
    "nf4": {"targets": "ffn/"},
    "macdrop": {"k": 2, "scope": "massive", "layer": 1, "token": None},
    "attack": {"attack": "retain", "k": 2, "layer": None, "token": None},
    "truncate": {"blocks": 2},
    "rescale": {"factors": ((r"layers/1/\w+_norm/", 0.5), ("embed", 2.0))},
    "drop_layers": {"layers": "1"},
    "teacher": {"model": "whole"},
    "scores": {"targets": "ffn/(up|down)"},
    "score_mask": {"ratio": 0.3},
    "gates": {"rank": 0, "start": 1.0},
    "merge_experts": {"calibration_tokens": 512},
}
MIXTRAL = tiny_models.with_experts(dataclasses.replace(LLAMA, family="mixtral"))
MODELS = {"nf4": WIDE, "merge_experts": MIXTRAL, "experts": MIXTRAL}


@pytest.mark.parametrize("name", SURGERIES)
def test_a_surgery_changes_nothing_it_is_given(name, tmp_path, monkeypatch):
    """It returns a new model that runs; an abstract surgery also works on shapes only."""
    model = load_model(save_tiny(tmp_path / "model", MODELS.get(name, LLAMA)))
    monkeypatch.chdir(tmp_path)
    teacher = unstack(random_params(LLAMA))
    for layer in teacher["layers"]:
        layer["ffn"]["down"]["kernel"] = layer["ffn"]["down"]["kernel"] + 1
    save_tiny(tmp_path / "whole", LLAMA, restack(LLAMA, teacher))
    if name == "score_mask":
        model, _ = SURGERIES["scores"](model, {})
    before = jax.tree.map(np.array, model.params)
    settings = SETTINGS.get(name, {})
    SURGERIES[name].check(settings)
    changed, report = SURGERIES[name].function(model, settings, key=jax.random.key(0))
    assert isinstance(report, dict) and changed is not model
    assert all(np.array_equal(x, flatten(before)[p]) for p, x in flatten(model.params).items())
    compress.check_leaves(changed.config, changed.params, exempt="teacher")
    if SURGERIES[name].abstract:

        def on_shapes(params):
            given = dataclasses.replace(model, params=params)
            return SURGERIES[name].function(given, settings, key=jax.random.key(0))[0].params

        shapes = jax.eval_shape(on_shapes, model.params)
        assert {p: x.shape for p, x in flatten(shapes).items()} == {
            p: x.shape for p, x in flatten(changed.params).items()}  # fmt: skip


def test_a_script_puts_lora_in_and_folds_it_away(tmp_path):
    model = save_tiny(tmp_path / "model")
    config = config_of("adapt", "lora", model=str(model), rank=2, targets="ffn/down")
    report = COMMANDS["surgery"].run(config, tmp_path / "in", None)
    assert report["adapted"] == [f"layers/{i}/ffn/down" for i in range(4)]
    adapted = load_model(tmp_path / "in" / "model")
    assert "stack/segment_0/slot_0/ffn/down/lora_a" in flatten(adapted.params)
    config = config_of("adapt", "fold", model=str(tmp_path / "in" / "model"))
    COMMANDS["surgery"].run(config, tmp_path / "out", None)
    plain, start = load_model(tmp_path / "out" / "model"), load_model(model)
    for path, leaf in flatten(start.params).items():  # B is 0
        np.testing.assert_array_equal(leaf, flatten(plain.params)[path])
    with pytest.raises(ValueError, match="surgery='graft': choose one of"):
        with config.unlocked():
            config.surgery = "graft"
        compress.check_config(config)
