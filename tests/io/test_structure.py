"""Structure saved and loaded bit for bit; the same function for other tools, or an error."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import LLAMA, our_logits, random_params, structured
from tiny_runs import refused

from ffn_heterogeneity.adapters import FFN_LEAVES, adapter_leaves
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.read import read_pretrained
from ffn_heterogeneity.io.hf.structure import fold
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.surgery.streaming import compress_directory
from ffn_heterogeneity.tree import flatten

DATA = {k for k, leaf in adapter_leaves().items() if not leaf.trains} | {*FFN_LEAVES}
TOKENS = np.random.default_rng(1).integers(0, 258, (2, 9)).astype(np.int32)


def logits(config, params):
    hidden = causal_lm.forward(config, params, {"tokens": TOKENS})["hidden"]
    return np.asarray(causal_lm.logits(config, params, hidden))


@pytest.fixture
def kept(tmp_path):
    params = structured(LLAMA, random_params(LLAMA))
    save_pretrained(LLAMA, params, tmp_path / "kept", structure="keep")
    return tmp_path / "kept", params


def test_every_leaf_comes_back_bit_for_bit(kept):
    directory, params = kept
    config, loaded = read_pretrained(directory)
    before, after = flatten(params), flatten(loaded)
    assert config == LLAMA and list(before) == list(after)
    for path, leaf in before.items():
        assert leaf.dtype == after[path].dtype and leaf.tobytes() == after[path].tobytes(), path


def test_other_tools_read_the_same_function(kept, torch):
    import transformers

    directory, params = kept
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager"
    ).double()
    with torch.no_grad():
        their_logits = theirs.eval()(torch.tensor(TOKENS)).logits.numpy()
    folded = restack(LLAMA, fold(LLAMA, unstack(params)))
    np.testing.assert_allclose(their_logits, logits(LLAMA, folded), rtol=0, atol=1e-5)


def test_folded_is_the_same_function(kept, tmp_path):
    """Float64: only the rounding of the folded weights remains."""
    _, params = kept
    save_pretrained(LLAMA, params, tmp_path / "folded")
    config, folded = read_pretrained(tmp_path / "folded")
    assert config == LLAMA and not (tmp_path / "folded" / "structure").exists()
    assert not {path.split("/")[-1] for path in flatten(folded)} & {*adapter_leaves(), *FFN_LEAVES}
    with jax.enable_x64(True):
        actual, wanted = (our_logits(LLAMA, tree, TOKENS, np.float64) for tree in (folded, params))
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_a_cast_spares_data(kept, tmp_path):
    directory, params = kept
    save_pretrained(LLAMA, params, tmp_path / "half", structure="keep", dtype="bfloat16")
    halves = read_pretrained(tmp_path / "half"), read_pretrained(directory, dtype="bfloat16")
    for _, tree in halves:
        for path, leaf in flatten(tree).items():
            data = path.split("/")[-1] in DATA
            assert leaf.dtype == (np.float32 if data else jax.numpy.bfloat16), path
            if data:
                np.testing.assert_array_equal(leaf, flatten(params)[path])


def damage(directory, how):
    """Changes a saved directory; digests are updated if the test is about the leaf."""
    file = directory / "structure" / "model.safetensors"
    leaves = load_file(file) if file.exists() else {}
    if how == "missing":
        shutil.rmtree(directory / "structure")
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif how == "altered":
        leaves["layers/0/ffn/neuron_scale"][3] += 1
        save_file(leaves, file, {"format": "pt"})
    elif how == "retrained":
        path = directory / "model.safetensors"
        weights = load_file(path)
        weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
        save_file(weights, path, {"format": "pt"})
    elif how == "again":  # the same weights written in another order are valid
        path = directory / "model.safetensors"
        save_file(load_file(path), path, {"format": "pt"})
    else:
        from ffn_heterogeneity.io.hf import structure

        how(leaves)
        save_file(leaves, file, {"format": "pt"})
        config = json.loads((directory / "config.json").read_text())
        section = config["ffn_heterogeneity"]["structure"]
        section["files"] = structure._digest_of_files(directory / "structure")
        (directory / "config.json").write_text(json.dumps(config))


def wrong_rank(leaves):
    leaves["layers/0/attention/q/lora_b"] = np.zeros((2, 16), np.float32)


def wrong_size(leaves):
    leaves["layers/1/ffn/up/mask"] = np.ones((16, 23), np.float32)


def without_b(leaves):
    del leaves["layers/3/ffn/down/lora_b"]


def unheard_of(leaves):
    leaves["layers/0/ffn/up/magnet"] = np.ones(24, np.float32)


def not_finite(leaves):
    leaves["layers/0/ffn/down/lora_a"][0, 0] = np.nan


def one_axis_less(leaves):
    leaves["layers/0/ffn/down/lora_a"] = leaves["layers/0/ffn/down/lora_a"][:, 0]


def a_stray_number(leaves):
    leaves["layers/0/attention/neuron_scale"] = np.array(2.0, np.float32)


def whole_numbers(leaves):
    leaves["layers/0/ffn/down/lora_b"] = leaves["layers/0/ffn/down/lora_b"].astype(np.int64)


def lengths_alone(leaves):
    for name in ("lora_a", "lora_b", "lora_scale"):
        del leaves[f"layers/0/ffn/down/{name}"]
    leaves["layers/0/ffn/down/dora_m"] = np.ones(16, np.float32)


def rows(*numbers, dtype=np.int32):
    def change(leaves):
        leaves["layers/0/ffn/up/macdrop_rows"] = np.array(numbers, dtype)
        leaves["layers/0/ffn/up/macdrop_keep"] = np.ones((16, len(numbers)), np.float32)

    return change


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (one_axis_less, "no place for 'layers/0/ffn/down/lora_a'"),
        (a_stray_number, "no place for 'layers/0/attention/neuron_scale'"),
        (whole_numbers, "lora_b' is int64, not floating"),
        (lengths_alone, "DoRA's lengths without LoRA's factors"),
        (rows(3, 24), "macdrop_rows' must rise, from 0 to below 24"),
        (rows(-5, 2), "must rise"),
        (rows(2, 2), "must rise"),
        (rows(1, 2, dtype=np.float32), "macdrop_rows' is float32, not int32"),
        ("missing", "structure/ is missing"),
        ("cut", "structure was altered or cut"),
        ("altered", "structure was altered or cut"),
        ("retrained", "not those that structure/ was written with"),
        (wrong_rank, "attention/q: its leaves differ in rank"),
        (wrong_size, r"no place for 'layers/1/ffn/up/mask' \(16, 23\)"),
        (without_b, "layers/3/ffn/down: adapter 'lora' needs"),
        (unheard_of, "no place for 'layers/0/ffn/up/magnet'"),
        (not_finite, "layers/0/ffn/down/lora_a' contains NaN"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_directory_is_refused(kept, how, words):
    directory, _ = kept
    damage(directory, how)
    refused(words, read_pretrained, directory, error=CheckpointError)


def test_what_is_no_file_is_not_waited_for(kept):
    directory, _ = kept
    os.mkfifo(directory / "structure" / "more")
    refused("more is no regular file", read_pretrained, directory, error=CheckpointError)


def test_a_tool_that_changes_nothing_is_no_damage(kept):
    directory, params = kept
    damage(directory, "again")
    np.testing.assert_array_equal(logits(*read_pretrained(directory)), logits(LLAMA, params))


def test_what_cannot_keep_it_says_so(kept, tmp_path):
    directory, params = kept
    with pytest.raises(CheckpointError, match="fold it, or do not pad"):
        save_pretrained(LLAMA, params, tmp_path / "x", export="padded", structure="keep")
    with pytest.raises(CheckpointError, match="structure"):
        save_pretrained(LLAMA, params, tmp_path / "x", structure="keeep")
    with pytest.raises(ValueError, match="structure"):
        compress_directory(directory, tmp_path / "x", RemovalPlan("entropy", 0.25))
    assert not (tmp_path / "x").exists()
