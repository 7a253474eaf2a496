"""Safetensors directories: strict reading, exact writing."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_tools import DOWN, edit, random_params, refused, same, tiny_config
from safetensors.numpy import load_file
from tiny_models import tiny_of

from ffn_heterogeneity.io.assemble import all_finite
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.read import read_config, read_pretrained
from ffn_heterogeneity.models import families
from ffn_heterogeneity.models.stack import unstack

# ---- reading and writing


FAMILIES = ["llama3_8b", "gemma_2b", "gemma2_2b", "gemma3_270m", "pythia_70m", "olmo_1b"]
FAMILIES += ["qwen3_4b"]
# GPT-NeoX: no grouped queries, heads fill the width, a quarter of each rotates.
NEOX = {"d_model": 16, "n_kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_round_trip_is_exact_in_every_float_type(tmp_path, name, dtype):
    widths = (5,) * min(7, families.preset(name)[0].n_layers)
    config = tiny_config(name, widths, **NEOX if name == "pythia_70m" else {})
    params = random_params(config, dtype)
    save_pretrained(config, params, tmp_path / "model")
    again_config, again = read_pretrained(tmp_path / "model")
    assert again_config == config
    same(again, params)
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["dtype"] == values["torch_dtype"] == np.dtype(dtype).name


def test_what_is_written_is_what_torch_expects(saved):
    directory, config, params = saved
    tensors = load_file(directory / "model.safetensors")
    layer = unstack(params)["layers"][1]
    np.testing.assert_array_equal(tensors[DOWN], layer["ffn"]["down"]["kernel"].T)
    np.testing.assert_array_equal(
        tensors["model.embed_tokens.weight"], params["embed"]["embedding"]
    )
    assert "lm_head.weight" not in tensors
    assert sum(t.size for t in tensors.values()) == families.count_parameters(config)["total"]


def test_leaves_are_writable_contiguous_and_own_their_memory(saved):
    _, params = read_pretrained(saved[0])
    for leaf in jax.tree.leaves(params):
        assert type(leaf) is np.ndarray
        assert leaf.flags.owndata and leaf.flags.writeable and leaf.flags.c_contiguous


@pytest.mark.parametrize("form", ["stacked", "unstacked", "jax"])
def test_any_form_of_params_writes_the_same_bytes(saved, tmp_path, form):
    directory, config, params = saved
    forms = {
        "stacked": lambda: params,
        "unstacked": lambda: unstack(params),
        "jax": lambda: jax.tree.map(jnp.asarray, params),
    }
    save_pretrained(config, forms[form](), tmp_path / "again")
    file = "model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (directory / file).read_bytes()


def test_shards_and_index(tmp_path):
    config = tiny_config(tied=False)
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "model", max_shard_bytes=900)
    files = sorted(p.name for p in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * families.count_parameters(config)["total"]
    for file in files:
        tensors = load_file(tmp_path / "model" / file)
        assert sum(t.nbytes for t in tensors.values()) <= 900 or len(tensors) == 1
    same(read_pretrained(tmp_path / "model")[1], params)


def test_unequal_widths_by_layer(tmp_path):
    config = tiny_config(widths=(5, 3, 7))
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "model", extra={"removed": [[1], [2, 3], []]})
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["intermediate_size"] == 7
    assert values["per_layer_config"]["1"] == {"intermediate_size": 3}
    assert values["ffn_heterogeneity"] == {"removed": [[1], [2, 3], []]}
    again_config, again = read_pretrained(tmp_path / "model")
    assert again_config == config
    same(again, params)


def test_padding_adds_only_zeros(tmp_path):
    config = tiny_config(widths=(5, 3, 7))
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "model", export="padded")
    again_config, again = read_pretrained(tmp_path / "model")
    assert again_config == config.with_widths([7, 7, 7])
    assert "ffn_heterogeneity" not in json.loads((tmp_path / "model/config.json").read_text())
    for old, new in zip(unstack(params)["layers"], unstack(again)["layers"], strict=True):
        width = old["ffn"]["up"]["kernel"].shape[1]
        for name in ("gate", "up"):
            np.testing.assert_array_equal(
                new["ffn"][name]["kernel"][:, :width], old["ffn"][name]["kernel"]
            )
            assert not new["ffn"][name]["kernel"][:, width:].any()
        np.testing.assert_array_equal(
            new["ffn"]["down"]["kernel"][:width], old["ffn"]["down"]["kernel"]
        )
        assert not new["ffn"]["down"]["kernel"][width:].any()


def test_what_the_family_cannot_say_goes_native_or_is_refused(tmp_path):
    config = tiny_config(final_softcap=3.0)
    params = random_params(config)
    with pytest.raises(CheckpointError, match="cannot express"):
        save_pretrained(config, params, tmp_path / "padded", export="padded")
    save_pretrained(config, params, tmp_path / "native")
    assert read_config(tmp_path / "native") == config


def test_dtype_on_the_way_in_and_out(saved, tmp_path):
    directory, config, params = saved
    save_pretrained(config, params, tmp_path / "half", dtype="bfloat16")
    half = jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16), params)
    same(read_pretrained(tmp_path / "half")[1], half)
    same(read_pretrained(directory, dtype="bfloat16")[1], half)
    same(
        read_pretrained(tmp_path / "half", dtype="float32")[1],
        jax.tree.map(lambda leaf: leaf.astype(np.float32), half),
    )


def test_masks_and_scales_are_folded(saved, tmp_path):
    _, config, params = saved
    tree = unstack(params)
    ffn = tree["layers"][1]["ffn"]
    mask = np.arange(5)[:, None] % 2 * np.ones((5, 8), np.float32)
    scale = np.float32([1, 2, 3, 4, 5])
    expected = (ffn["down"]["kernel"] * mask * scale[:, None]).T
    ffn["down"]["mask"], ffn["neuron_scale"] = mask, scale
    save_pretrained(config, tree, tmp_path / "folded")
    np.testing.assert_array_equal(load_file(tmp_path / "folded/model.safetensors")[DOWN], expected)


def test_redundant_tensors_are_tolerated_only_when_they_say_nothing(saved):
    directory, config, params = saved

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)

    edit(directory, add)
    same(read_pretrained(directory)[1], params)
    edit(directory, lambda t: t["lm_head.weight"].__setitem__((0, 0), 9.0))
    with pytest.raises(CheckpointError, match="'lm_head.weight' differs"):
        read_pretrained(directory)


@pytest.mark.parametrize(
    ("family", "tied", "others"),
    [
        ("t5", False, ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")),
        ("t5", False, ("encoder.embed_tokens.weight",)),
        ("t5", True, ("lm_head.weight",)),
        ("llama", True, ("lm_head.weight",)),
    ],
)
def test_an_embedding_under_another_of_its_names(family, tied, others, tmp_path):
    """MADLAD-400's T5 has no "shared.weight"; writers may keep a tied head in its place."""
    config = dataclasses.replace(tiny_of(family, 4), tied=tied)
    if family == "t5":
        scale = config.d_model**-0.5 if tied else 1.0
        config = dataclasses.replace(config, output_multiplier=scale)
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "m")
    own = "shared.weight" if family == "t5" else "model.embed_tokens.weight"
    edit(tmp_path / "m", lambda t: t.update(dict.fromkeys(others, t.pop(own))))
    same(read_pretrained(tmp_path / "m")[1], params)
    edit(tmp_path / "m", lambda t: [t.pop(name) for name in others])
    refused(tmp_path / "m", f"missing tensors: '{own}'")


def test_buffers_of_old_gpt_neox_files_are_ignored_and_a_tied_head_too(tmp_path):
    """Pythia's files hold each layer's causal mask; a tied model's may repeat the embedding."""
    config = tiny_config("pythia_70m", **NEOX, tied=True)
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "m")

    def add(tensors):
        at = "gpt_neox.layers.1.attention."
        tensors[at + "bias"] = np.tril(np.ones((1, 1, 8, 8), np.bool_))
        tensors[at + "masked_bias"] = np.array(-1e9, np.float32)
        tensors[at + "rotary_emb.inv_freq"] = np.ones(1, np.float32)
        tensors["embed_out.weight"] = tensors["gpt_neox.embed_in.weight"].copy()

    edit(tmp_path / "m", add)
    same(read_pretrained(tmp_path / "m")[1], params)
    edit(tmp_path / "m", lambda t: t["embed_out.weight"].__setitem__((0, 0), 9.0))
    refused(tmp_path / "m", "'embed_out.weight' differs from 'gpt_neox.embed_in.weight'")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_all_finite(dtype):
    array = np.linspace(-1, 1, 1000).astype(dtype).reshape(10, 100)
    array[0, 0] = np.finfo(np.float32).max if dtype != np.float16 else 65504
    if dtype == ml_dtypes.bfloat16:
        array[0, 0] = ml_dtypes.finfo(dtype).max
    assert all_finite(array, chunk=64)
    for bad in (np.nan, np.inf, -np.inf):
        broken = array.copy()
        broken[9, 99] = bad
        assert not all_finite(broken, chunk=64)


def test_safetensors_and_gguf_readers_import_no_torch(saved):
    import subprocess
    import sys

    code = (
        "import sys; from ffn_heterogeneity.io.load import load_model; "
        f"load_model({str(saved[0])!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
