"""NVIDIA's `block_configs`: written for its readers, read back, rejected if it is inconsistent."""

import dataclasses
import json

import numpy as np
import pytest
from checkpoint_tools import random_params, refused, same, tiny_config
from tiny_models import our_logits, run_script

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import loads_in, save_pretrained
from ffn_heterogeneity.io.hf.read import read_pretrained
from ffn_heterogeneity.models.config import ConfigError, RopeConfig

WIDTHS = (512, 256, 1024)


def width(factor: float, hidden: int) -> int:
    """The width as readers compute it: mlx-lm rounds the factor first."""
    size = int(2 * round(factor, 6) * hidden / 3)
    return size if size % 256 == 0 else size + 256 - size % 256


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    config = tiny_config(widths=WIDTHS)
    params, directory = random_params(config), tmp_path_factory.mktemp("deci") / "model"
    save_pretrained(config, params, directory, export="deci")
    return config, params, directory


def test_what_is_written_and_read_back(written, tmp_path):
    config, params, directory = written
    values = json.loads((directory / "config.json").read_text())
    assert values["architectures"] == ["DeciLMForCausalLM"]
    assert values["model_type"] == "nemotron-nas"
    assert not {"auto_map", "per_layer_config", "ffn_heterogeneity"} & values.keys()
    assert not list(directory.glob("*.py"))
    assert values["intermediate_size"] is values["num_key_value_heads"] is None
    assert [width(b["ffn"]["ffn_mult"], 8) for b in values["block_configs"]] == list(WIDTHS)
    assert all(isinstance(block["ffn"]["ffn_mult"], float) for block in values["block_configs"])
    attention = {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False}
    assert [block["attention"] for block in values["block_configs"]] == [attention] * 3
    again_config, again = read_pretrained(directory)
    assert again_config == config
    same(again, params)
    tokens = np.arange(12)[None]
    same(our_logits(config, params, tokens), our_logits(again_config, again, tokens))
    assert "mlx-lm" in loads_in(directory)
    # From there to any other form, by the command.
    plain = tmp_path / "plain"
    run = (f"--model={directory}", f"--output={plain}", "--notokenizer")
    assert run_script("convert", *run).code == 0
    assert read_pretrained(plain)[0] == config
    weights = "model.safetensors"
    assert (plain / weights).read_bytes() == (directory / weights).read_bytes()


@pytest.mark.parametrize("hidden", [64, 576, 2048, 8192, 16384])
def test_every_width_that_there_can_be(hidden):
    from ffn_heterogeneity.models.families.deci import to_deci

    widths = tuple(range(256, 65_536 + 1, 256))
    config = tiny_config(widths=(1,) * 3, d_model=hidden, head_dim=hidden // 2)
    config = dataclasses.replace(config, layers=config.layers[:1] * len(widths))
    blocks = to_deci(config.with_widths(widths), {})["block_configs"]
    assert [width(block["ffn"]["ffn_mult"], hidden) for block in blocks] == list(widths)


def test_what_cannot_be_said(tmp_path):
    linear, other = RopeConfig(linear_factor=2.0), RopeConfig(llama3=(8.0, 1.0, 4.0, 4096))
    cases = [
        (tiny_config("gemma_2b", WIDTHS), "the family gemma"),
        (tiny_config(widths=(512, 300, 1024)), r"\[300\] neurons \(only multiples of 256"),
        (tiny_config(widths=WIDTHS, activation="relu"), "the activation relu"),
        (tiny_config(widths=WIDTHS, head_dim=6), "heads of 6"),
        (tiny_config(widths=WIDTHS, final_softcap=3.0), "cannot express"),
    ]
    for rope, words in ((linear, "linear rope"), (other, "8192")):
        config = tiny_config(widths=WIDTHS)
        layers = tuple(dataclasses.replace(layer, rope=rope) for layer in config.layers)
        cases += [(dataclasses.replace(config, layers=layers), words)]
    for config, words in cases:
        with pytest.raises((ConfigError, CheckpointError), match=words) as caught:
            save_pretrained(config, random_params(config), tmp_path / "m", export="deci")
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_command_that_cannot_ends_in_one_line(model, tmp_path):
    done = run_script("convert", f"--model={model}", f"--output={tmp_path}/x", "--export=deci")
    assert "block_configs cannot express FFNs of [24, 24, 24] neurons" in done.error


def test_widths_told_directly_and_nvidia_s_other_keys(written, tmp_path):
    config, params, _ = written
    save_pretrained(config, params, tmp_path / "m", export="deci")
    path = tmp_path / "m" / "config.json"
    values = json.loads(path.read_text())
    for block, size in zip(values["block_configs"], WIDTHS, strict=True):
        block["ffn"] |= {"ffn_mult": None, "intermediate_size": size, "hidden_act": "silu"}
        block["attention"] |= {"sparsify": None, "window_length": None, "unshifted_sink": False}
    path.write_text(json.dumps(values))
    assert read_pretrained(tmp_path / "m")[0] == config


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("attention", {"no_op": True}, "layer 1 sets no_op"),
        ("ffn", {"replace_with_linear": True}, "layer 1 sets replace_with_linear"),
        ("attention", {"window_length": 8192}, "layer 1 sets window_length"),
        ("attention", {"n_heads_in_group": 1}, "with one n_heads_in_group"),
        ("attention", {"n_heads_in_group": None}, "got 3 with"),
        ("ffn", {"ffn_mult": 1e300}, "not a positive whole number"),
        ("ffn", {"ffn_mult": -9.0}, "ffn_width=0"),
        ("ffn", {"ffn_mult": "9"}, "malformed"),
        ("ffn", {"ffn_mult": 0}, "malformed"),
        ("ffn", [], "malformed"),
        (None, [], "got 0 with"),
        (None, 7, "malformed"),
        (None, [{}] * 3, "malformed"),
    ],
)
def test_blocks_that_cannot_be(written, tmp_path, part, change, words):
    (tmp_path / "model.safetensors").symlink_to(written[2] / "model.safetensors")
    values = json.loads((written[2] / "config.json").read_text())
    if part is None:
        values["block_configs"] = change
    elif isinstance(change, dict):
        values["block_configs"][1][part] |= change
    else:
        values["block_configs"][1][part] = change
    (tmp_path / "config.json").write_text(json.dumps(values))
    refused(tmp_path, "config.json", words)
