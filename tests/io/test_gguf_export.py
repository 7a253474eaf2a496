"""Writing GGUF: the tensors of llama.cpp's converter, and the same model when read back."""

import dataclasses
import json

import numpy as np
import pytest
from test_gguf import CASES, converted_tree, found_leaves, random_leaves, tiny_config
from test_gguf_tokenizer import TEXTS, byte_level_file, random_texts
from tiny_models import byte_tokenizer, random_params, run_script
from tiny_runs import refused

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.gguf.export import save_gguf
from ffn_heterogeneity.io.gguf.file import open_gguf
from ffn_heterogeneity.io.gguf.read import read_gguf
from ffn_heterogeneity.io.load import load_config, load_model, load_tokenizer
from ffn_heterogeneity.models.config import RopeConfig
from ffn_heterogeneity.tree import flatten, unflatten


def model_of(preset, layers, changes, widths=None):
    config = tiny_config(preset, layers, **changes)
    config = config.with_widths(widths) if widths else config
    leaves = random_leaves(config)
    return config, leaves, unflatten(leaves)


SCALED = ("llama3_2_1b", 2, {"bos_id": 1, "eos_id": 2})  # its rotation goes to a tensor


@pytest.mark.parametrize(("preset", "layers", "changes"), [*CASES, SCALED])
def test_the_same_tensors_and_the_same_model(tmp_path, preset, layers, changes):
    config, leaves, params = model_of(preset, layers, changes)
    path = save_gguf(config, params, tmp_path / "model.gguf", type="f32")
    tensors = {n: t.dequantize() for n, t in open_gguf(path).tensors.items()}
    expected = converted_tree(config, leaves)
    assert tensors.keys() - {"rope_freqs.weight"} == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[name], tensor)
    back, read = read_gguf(path)
    assert back == config
    for name, leaf in found_leaves(read).items():
        # Gemma's files have 1 + scale: the last bit of a scale may be lost.
        np.testing.assert_allclose(leaf, leaves[name], rtol=0, atol=3e-7 * config.norm_offset)


def test_a_mistral_is_read_as_a_llama(tmp_path):
    """llama.cpp has one architecture for both; a window it could not express."""
    config, leaves, params = model_of("mistral_7b_v0_3", 2, {})
    back, read = read_gguf(save_gguf(config, params, tmp_path / "model.gguf", type="f32"))
    assert back == dataclasses.replace(config, family="llama")
    assert all((leaf == leaves[name]).all() for name, leaf in found_leaves(read).items())
    config, _, params = model_of("mistral_7b", 2, {})
    with pytest.raises(CheckpointError, match="layers would be read as something else"):
        save_gguf(config, params, tmp_path / "windows.gguf")


def test_unequal_widths(tmp_path):
    config, leaves, params = model_of("llama2_7b", 3, {}, widths=[64, 24, 37])
    path = save_gguf(config, params, tmp_path / "model.gguf", type="f32")
    assert open_gguf(path).fields["general.architecture"] == "deci"
    assert open_gguf(path).fields["deci.feed_forward_length"] == [64, 24, 37]
    back, read = read_gguf(path)
    assert back == config
    assert all((leaf == leaves[name]).all() for name, leaf in found_leaves(read).items())
    config, _, params = model_of("gemma_2b", 2, {}, widths=[64, 32])
    with pytest.raises(CheckpointError, match="one width.*padded"):
        save_gguf(config, params, tmp_path / "gemma.gguf")


@pytest.mark.parametrize(("type", "error"), [("f16", 2e-3), ("q8_0", 2e-2)])
def test_narrow_types(tmp_path, type, error):
    config, leaves, params = model_of("llama2_7b", 2, {}, widths=[64, 40])
    path = save_gguf(config, params, tmp_path / "model.gguf", type=type)
    kinds = {name: t.type.name for name, t in open_gguf(path).tensors.items()}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.ffn_down.weight"] == type.upper()
    assert kinds["blk.1.ffn_down.weight"] == "F16"  # rows of 40: no whole blocks of 32
    for name, leaf in found_leaves(read_gguf(path)[1]).items():
        assert np.abs(leaf - leaves[name]).max() < error * np.abs(leaves[name]).max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ffn_bias": True}, "ffn"),
        ({"activation": "relu"}, "activation"),
        ({"layers": "llama3"}, "rope"),
        ({"query_scale": 0.3}, "query_scale"),
        ({"preset": "mixtral_8x7b", "gates": "softmax"}, "layers would be read"),
    ],
)
def test_what_the_format_cannot_say_is_refused(tmp_path, changes, words):
    config = tiny_config(changes.get("preset", "llama2_7b"), 2)
    if "gates" in changes:
        changes = {
            "layers": (config.layers[0], dataclasses.replace(config.layers[1], gates="softmax"))
        }
    if changes.get("layers") == "llama3":
        rope = RopeConfig(llama3=(8.0, 1.0, 2.0, 512))
        changes = {"layers": tuple(dataclasses.replace(each, rope=rope) for each in config.layers)}
    config = dataclasses.replace(config, **changes)
    with pytest.raises(CheckpointError, match=words):
        save_gguf(config, unflatten(random_leaves(config)), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_hostile_trees_and_existing_files(tmp_path):
    config, leaves, params = model_of("llama2_7b", 2, {})
    for broken in (
        {name: leaf for name, leaf in leaves.items() if "layers/1/ffn/up" not in name},
        leaves | {"layers/1/ffn/up/kernel": np.zeros((3, 3), np.float32)},
        leaves | {"layers/1/ffn/magnet": np.zeros(3, np.float32)},
    ):
        with pytest.raises(CheckpointError, match="layers/1/ffn"):
            save_gguf(config, unflatten(broken), tmp_path / "x.gguf")
    for value in (7e4, np.nan):
        leaves["layers/1/ffn/up/kernel"][0, 0] = value
        with pytest.raises(CheckpointError, match="blk.1.ffn_up.weight.*float16"):
            save_gguf(config, unflatten(leaves), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir()), "nothing half-written"
    (tmp_path / "x.gguf").write_text("mine")
    refused("exists", save_gguf, config, params, tmp_path / "x.gguf", error=CheckpointError)
    refused("to a local disk", save_gguf, config, params, "gs://b/x.gguf", error=CheckpointError)
    with pytest.raises(CheckpointError, match="type"):
        save_gguf(config, params, tmp_path / "y.gguf", type="q4_k")
    assert (tmp_path / "x.gguf").read_text() == "mine"


@pytest.mark.parametrize(
    "file", ["smollm2_gguf", pytest.param("gemma3_gguf", marks=pytest.mark.slow)]
)
def test_real_tokenizers_come_back(request, tmp_path, file):
    """Byte-level BPE and SentencePiece come back with equal state, in a tiny model."""
    real, tokenizer = (
        load(request.getfixturevalue(file)) for load in (load_config, load_tokenizer)
    )
    ids = {name: getattr(real, name) for name in ("vocab_size", "bos_id", "eos_id", "pad_id")}
    config, _, params = model_of("llama2_7b", 1, ids)
    path = save_gguf(config, params, tmp_path / "x.gguf", tokenizer=tokenizer)
    back = load_tokenizer(path)
    states = [json.loads(t.backend_tokenizer.to_str()) for t in (tokenizer, back)]
    assert states[0] == states[1]
    assert back.chat_template == tokenizer.chat_template


def test_transformers_own_qwen2_tokenizer(tmp_path):
    """Its class over a small vocabulary: the same ids from the file, text outside NFC included."""
    from transformers import Qwen2Tokenizer

    tokens, merges = (byte_level_file().fields[f"tokenizer.ggml.{x}"] for x in ("tokens", "merges"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    ids = {"bos_id": 0, "eos_id": 0}
    config, _, params = model_of("qwen2_5_7b", 1, {"vocab_size": len(tokens), **ids})
    ours = load_tokenizer(save_gguf(config, params, tmp_path / "x.gguf", tokenizer=theirs))
    for text in [*TEXTS, *random_texts(300), "cafe\u0301 A\u030a", "x<|endoftext|>y"]:
        assert ours.encode(text) == theirs.encode(text), repr(text)


def test_tokenizers_without_a_form(tmp_path):
    from tokenizers import normalizers, pre_tokenizers

    config, _, params = model_of("llama2_7b", 1, {"vocab_size": 300})
    tokenizer = byte_tokenizer()
    with pytest.raises(CheckpointError, match="pre-tokenizer is none of gpt-2"):
        save_gguf(config, params, tmp_path / "x.gguf", tokenizer=tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = save_gguf(config, params, tmp_path / "x.gguf", tokenizer=tokenizer)
    back = load_model(path).tokenizer
    text = "caf\u00e9 12 \t\U0001f600"
    assert back(text)["input_ids"] == tokenizer(text)["input_ids"]
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(CheckpointError, match="WORLD.* would be"):
        save_gguf(config, params, tmp_path / "z.gguf", tokenizer=tokenizer)
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    spare = dataclasses.replace(config, vocab_size=tokenizer.convert_tokens_to_ids("<image>"))
    tree = random_params(spare)
    back = load_model(save_gguf(spare, tree, tmp_path / "s.gguf", tokenizer=tokenizer)).tokenizer
    assert back(text)["input_ids"] == tokenizer(text)["input_ids"]
    config, _, params = model_of("llama2_7b", 1, {"vocab_size": 64})
    with pytest.raises(CheckpointError, match="beyond the vocabulary"):
        save_gguf(config, params, tmp_path / "y.gguf", tokenizer=tokenizer)


def test_the_script(tmp_path, model):
    flags = (f"--model={model}", f"--output={tmp_path}/x.gguf", "--notokenizer")
    wrong = run_script("convert", f"--model={model}", f"--output={tmp_path}/x", "--type=q8_0")
    assert wrong.code == 2 and "is for output as gguf, this is directory" in wrong.error
    done = run_script("convert", *flags, "--type=f32")
    assert done.code == 0 and "llama.cpp" in done.out, done
    first, second = load_model(model), read_gguf(tmp_path / "x.gguf")
    same = flatten(second[1])
    assert all((leaf == same[name]).all() for name, leaf in flatten(first.params).items())
    assert "exists" in run_script("convert", *flags).error
