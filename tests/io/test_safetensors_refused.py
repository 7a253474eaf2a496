"""Checkpoints that are damaged, incomplete, dangerous or missing: one clear line each."""

import json

import jax
import numpy as np
import pytest
from checkpoint_tools import DOWN, edit, random_params, refused, same, tiny_config

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.read import download, read_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.stack import unstack


def test_missing_tensor(saved):
    edit(saved[0], lambda tensors: tensors.pop(DOWN))
    refused(saved[0], "missing", DOWN, "model.safetensors")


def test_extra_tensor(saved):
    edit(saved[0], lambda tensors: tensors.update(surprise=np.zeros(3, np.float32)))
    refused(saved[0], "no place", "surprise", "model.safetensors")


def test_wrong_shape(saved):
    edit(saved[0], lambda tensors: tensors.update({DOWN: np.zeros((8, 6), np.float32)}))
    refused(saved[0], DOWN, "(8, 6)", "(8, 5)")


def test_wrong_type(saved):
    edit(saved[0], lambda tensors: tensors.update({DOWN: np.zeros((8, 5), np.int32)}))
    refused(saved[0], DOWN, "int32")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weights(saved, value):
    edit(saved[0], lambda tensors: tensors[DOWN].__setitem__((3, 2), value))
    refused(saved[0], DOWN, "NaN or infinity")
    tree = unstack(read_pretrained(saved[0], check_finite=False)[1])
    kernel = tree["layers"][1]["ffn"]["down"]["kernel"]
    np.testing.assert_equal(kernel[2, 3], np.float32(value))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(saved, keep):
    path = saved[0] / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refused(saved[0], "model.safetensors", "safetensors file")


def test_pickles_are_never_opened(saved):
    (saved[0] / "model.safetensors").rename(saved[0] / "pytorch_model.bin")
    refused(saved[0], "pytorch_model.bin", "run code", "safetensors")


def test_no_weights_at_all(saved):
    (saved[0] / "model.safetensors").unlink()
    refused(saved[0], "neither")


def test_unknown_architecture(saved):
    path = saved[0] / "config.json"
    values = json.loads(path.read_text()) | {"model_type": "mamba", "architectures": ["Mamba"]}
    path.write_text(json.dumps(values))
    refused(saved[0], "'mamba'", "llama, gemma, gemma2, gemma3_text")


@pytest.mark.parametrize(
    ("text", "word"),
    [("{", "not JSON"), ("[]", "malformed"), ('{"model_type": "llama"}', "hidden_size")],
)
def test_damaged_config(saved, text, word):
    (saved[0] / "config.json").write_text(text)
    refused(saved[0], "config.json", word)


def test_native_widths_that_disagree(tmp_path):
    config = tiny_config(widths=(5, 3, 7))
    save_pretrained(config, random_params(config), tmp_path / "m", export="native")
    path = tmp_path / "m" / "config.json"
    values = json.loads(path.read_text())
    values["ffn_heterogeneity"]["ffn_widths"] = [5, 5, 7]
    path.write_text(json.dumps(values))
    refused(tmp_path / "m", "ffn_widths")


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"3": {"intermediate_size": 5}}, "layer 3: the model has 3"),
        ({"-1": {"intermediate_size": 5}}, "layer -1"),
        ({"0": {"skip": ["mlp"]}}, "sets skip"),
        ({"0": {"intermediate_size": 0}}, "ffn_width=0"),
        ({"0": {"intermediate_size": "5; rm"}}, "malformed"),
        ({"one": {}}, "malformed"),
        ([5, 3, 7], "malformed"),
        ({"0": 7}, "malformed"),
    ],
)
def test_widths_by_layer_that_cannot_be(tmp_path, layers, words):
    config = tiny_config(widths=(5, 3, 7))
    save_pretrained(config, random_params(config), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"per_layer_config": layers}))
    refused(tmp_path / "m", "config.json", words)


def sharded(tmp_path):
    config = tiny_config()
    save_pretrained(config, random_params(config), tmp_path / "m", max_shard_bytes=900)
    return tmp_path / "m"


def test_missing_shard(tmp_path):
    directory = sharded(tmp_path)
    next(directory.glob("model-00002*")).unlink()
    refused(directory, "model-00002", "no such file")


def test_index_that_disagrees_with_its_shards(tmp_path):
    directory = sharded(tmp_path)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = {**index["weight_map"], DOWN: "model-00001-of-00001.safetensors"}
    path.write_text(json.dumps(index | {"weight_map": moved}))
    refused(directory, "model-00001-of-00001.safetensors")
    remaining = {k: v for k, v in index["weight_map"].items() if k != DOWN}
    path.write_text(json.dumps(index | {"weight_map": remaining}))
    refused(directory, DOWN)
    shard = next(iter(remaining.values()))
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"ghost": shard}}))
    refused(directory, "ghost", "in no shard")
    path.write_text(json.dumps(index | {"weight_map": {DOWN: "../m/other.safetensors"}}))
    refused(directory, "../m/other.safetensors")


def test_an_existing_directory_is_kept(saved):
    directory, config, params = saved
    before = (directory / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="not empty"):
        save_pretrained(config, params, directory)
    other = random_params(config, seed=1)
    save_pretrained(config, other, directory, overwrite=True)
    assert (directory / "model.safetensors").read_bytes() != before
    same(read_pretrained(directory)[1], other)


def test_an_interrupted_write_leaves_nothing(tmp_path):
    class Broken:
        def save_pretrained(self, directory):
            raise KeyboardInterrupt

    config = tiny_config()
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(config, random_params(config), tmp_path / "m", tokenizer=Broken())
    assert list(tmp_path.iterdir()) == []


def test_trees_that_do_not_fit_the_config_are_not_written(tmp_path):
    config = tiny_config()
    tree = unstack(random_params(config))
    cases = {
        "lora_z": lambda layer: layer["ffn"]["down"].update(lora_z=np.zeros(3)),
        "ffn_norm": lambda layer: layer.pop("ffn_norm"),
        "shape": lambda layer: layer["ffn"]["up"].update(kernel=np.zeros((8, 9), np.float32)),
    }
    for word, change in cases.items():
        layers = [jax.tree.map(lambda leaf: leaf, layer) for layer in tree["layers"]]
        change(layers[2])
        with pytest.raises(CheckpointError, match=word):
            save_pretrained(config, {**tree, "layers": layers}, tmp_path / "m")
    with pytest.raises(CheckpointError, match="'auto', 'padded', 'native'"):
        save_pretrained(config, tree, tmp_path / "m", export="onnx")
    assert list(tmp_path.iterdir()) == []


def test_load_model_reads_a_directory(saved):
    directory, config, params = saved
    model = load_model(str(directory))
    assert model.config == config and model.tokenizer is None and model.source == str(directory)
    same(model.params, params)
    with pytest.raises(CheckpointError, match="revision"):
        load_model(directory, revision="main")


@pytest.mark.parametrize("spec", ["no-such-model", "./no/such", "gemma2_3b", "a/b/c", ""])
def test_unknown_spec_lists_the_possibilities(spec):
    with pytest.raises(CheckpointError) as caught:
        load_model(spec)
    message = str(caught.value)
    assert repr(spec) in message and ".gguf" in message
    assert ("gemma2_2b" in message) == ("/" not in spec), "of presets, where it may be one"


@pytest.mark.parametrize("spec", ["gemma2_2b", "google/gemma-2-2b"])
def test_a_hub_id_without_network_is_one_clear_line(monkeypatch, spec, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        load_model(spec, revision="abc")
    message = str(caught.value)
    assert "google/gemma-2-2b" in message and "'abc'" in message and "\n" not in message


def test_hub_download_asks_for_no_pickles(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo_id, **options: asked.update(options, repo_id=repo_id) or str(tmp_path),
    )
    assert download("google/gemma-2-2b", "main") == tmp_path
    assert asked["repo_id"] == "google/gemma-2-2b" and asked["revision"] == "main"
    patterns = asked["allow_patterns"]
    import fnmatch

    for name in ("pytorch_model.bin", "original/consolidated.00.pth", "model.pkl", "train.py"):
        assert not any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name
    for name in ("config.json", "model-00001-of-00003.safetensors", "tokenizer.json"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


@pytest.mark.parametrize(
    ("make", "spec", "words"),
    [
        (["run/model/config.json", "run/config.json"], "run", "its model is .*run/model"),
        (["lora/adapter_config.json"], "lora", "lora/adapter_config.json"),
        (["pruned/config.json"], "prunned", "mean .*/pruned"),
    ],
)
def test_a_path_that_is_nearly_right_names_the_way_out(tmp_path, make, spec, words):
    for name in make:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path / spec)


def test_a_hub_id_that_is_nearly_a_path_here(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "pruned").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"'runs/prunned'.*\(runs/pruned is here\)"):
        load_model("runs/prunned")
