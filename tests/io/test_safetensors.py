"""Safetensors directories: strict reading, exact writing, every bad input with one clear line."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ffn_heterogeneity.io.assemble import all_finite
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.export import save_pretrained
from ffn_heterogeneity.io.huggingface import download, read_config, read_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models import families
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.paths import unflatten

DOWN = "model.layers.1.mlp.down_proj.weight"


def tiny_config(name="llama3_2_1b", widths=(5, 5, 5), **changes):
    config, _ = families.preset(name)
    sizes = {"vocab_size": 13, "d_model": 8, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4}
    config = dataclasses.replace(config, layers=config.layers[: len(widths)], **sizes | changes)
    if config.norm_offset:
        config = dataclasses.replace(config, embedding_multiplier=8**0.5)
    return config.with_widths(widths)


def random_params(config, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    leaves = {
        path: rng.normal(size=shape).astype(dtype)
        for path, shape in families.expected_shapes(config).items()
    }
    return restack(config, unflatten(leaves))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), a, b)


@pytest.fixture
def saved(tmp_path):
    """(directory, config, params) of a small tied Llama in one file."""
    config = tiny_config()
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "model")
    return tmp_path / "model", config, params


def edit(directory, change):
    """Applies `change` to the dict of tensors in model.safetensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# ---- reading and writing


FAMILIES = [
    "llama3_8b",
    "gemma_2b",
    "gemma2_2b",
    "gemma3_270m",
    "pythia_70m",
    "olmo_1b",
    "qwen3_4b",
]
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


def test_unequal_widths_native(tmp_path):
    config = tiny_config(widths=(5, 3, 7))
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "model", extra={"removed": [[1], [2, 3], []]})
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["intermediate_size"] == 7
    assert values["ffn_heterogeneity"]["ffn_widths"] == [5, 3, 7]
    assert values["ffn_heterogeneity"]["removed"] == [[1], [2, 3], []]
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


# ---- bad input: one clear line each


def refused(directory, *words, **options):
    with pytest.raises(CheckpointError) as caught:
        read_pretrained(directory, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(directory), *words):
        assert word in message, message


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
    found = unstack(read_pretrained(saved[0], check_finite=False)[1])
    kernel = found["layers"][1]["ffn"]["down"]["kernel"]
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
    [("{", "not valid JSON"), ("[]", "malformed"), ('{"model_type": "llama"}', "hidden_size")],
)
def test_damaged_config(saved, text, word):
    (saved[0] / "config.json").write_text(text)
    refused(saved[0], "config.json", word)


def test_native_widths_that_disagree(tmp_path):
    config = tiny_config(widths=(5, 3, 7))
    save_pretrained(config, random_params(config), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    values = json.loads(path.read_text())
    values["ffn_heterogeneity"]["ffn_widths"] = [5, 5, 7]
    path.write_text(json.dumps(values))
    refused(tmp_path / "m", "ffn_widths")


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
    kept = {k: v for k, v in index["weight_map"].items() if k != DOWN}
    path.write_text(json.dumps(index | {"weight_map": kept}))
    refused(directory, DOWN)
    shard = next(iter(kept.values()))
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {"ghost": shard}}))
    refused(directory, "ghost", "in no shard")
    path.write_text(json.dumps(index | {"weight_map": {DOWN: "../m/other.safetensors"}}))
    refused(directory, "../m/other.safetensors")


# ---- refusals of the writer


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
    with pytest.raises(CheckpointError, match="auto, padded, native"):
        save_pretrained(config, tree, tmp_path / "m", export="onnx")
    assert list(tmp_path.iterdir()) == []


# ---- load_model and small parts


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
    assert repr(spec) in message and "gemma2_2b" in message and ".gguf" in message


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
