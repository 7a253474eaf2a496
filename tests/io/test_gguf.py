"""Reading GGUF: files written by the gguf package in the way of llama.cpp's converter."""

import dataclasses
import functools
import struct

import checkpoint_tools
import numpy as np
import pytest

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.gguf.file import open_gguf
from ffn_heterogeneity.io.gguf.read import read_gguf
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models import families
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.tree import flatten

# part of a layer -> name after "blk.<i>."
NAMES = {
    **{f"attention/{part}": f"attn_{part}" for part in ("q", "k", "v", "q_norm", "k_norm")},
    **{f"ffn/{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
    "ffn/router": "ffn_gate_inp",
    **{"attention_norm": "attn_norm", "attention/out": "attn_output", "ffn_norm": "ffn_norm"},
    **{"post_attention_norm": "post_attention_norm", "post_ffn_norm": "post_ffw_norm"},
}
KINDS = {"kernel": "weight", "scale": "weight", "bias": "bias"}
TOP = {
    "embed/embedding": "token_embd.weight",
    "final_norm/scale": "output_norm.weight",
    "final_norm/bias": "output_norm.bias",
    "head/kernel": "output.weight",
}


def tiny_config(preset="llama2_7b", layers=3, **changes):
    config, _ = families.preset(preset)
    changes = {
        "vocab_size": 64,
        "d_model": 32,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "layers": config.layers[:layers],
        **changes,
    }
    if config.norm_offset:
        changes["embedding_multiplier"] = 32**0.5
    if config.query_scale:
        changes["query_scale"] = 8**-0.5
    if config.layers[0].experts:
        few = {"experts": 3, "top_k": 2}
        changes["layers"] = tuple(dataclasses.replace(x, **few) for x in changes["layers"])
    return dataclasses.replace(config, **changes).with_widths([64] * layers)


def random_leaves(config, seed=0):
    rng = np.random.default_rng(seed)
    shapes = families.expected_shapes(config)
    return {p: rng.normal(size=shape).astype(np.float32) for p, shape in shapes.items()}


def converted(config, path, leaf):
    """(name, tensor) of a leaf, as in llama.cpp's convert_hf_to_gguf.py."""
    if path in TOP:
        name = TOP[path]
    else:
        _, layer, *part, kind = path.split("/")
        experts = "_exps" if leaf.ndim == 3 else ""
        name = f"blk.{layer}.{NAMES['/'.join(part)]}{experts}.{KINDS[kind]}"
    tensor = leaf.swapaxes(-1, -2) if path.endswith("kernel") else leaf
    if config.family in ("llama", "olmo", "mixtral") and name.endswith(
        ("attn_q.weight", "attn_k.weight")
    ):
        heads = config.n_heads if "attn_q" in name else config.n_kv_heads
        rows = tensor.shape[0]
        tensor = tensor.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(rows, -1)
    if config.family.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + np.float32(1)
    return name, np.ascontiguousarray(tensor)


def converted_tree(config, leaves):
    """{name: tensor} of all leaves."""
    tensors = {}
    if config.family == "gpt_neox":
        # [heads, 3, head_dim, in] of the checkpoint is reordered: all queries, all keys, all
        # values.
        leaves = dict(leaves)
        for i in range(config.n_layers):
            for leaf, name in (("kernel", "weight"), ("bias", "bias")):
                parts = [
                    leaves.pop(f"layers/{i}/attention/{projection}/{leaf}").T
                    for projection in "qkv"
                ]
                tensors[f"blk.{i}.attn_qkv.{name}"] = np.concatenate(parts)
    return tensors | dict(converted(config, path, leaf) for path, leaf in leaves.items())


def write(path, config, leaves, *, quantise=(), drop=(), add=None, meta=None, architecture=None):
    """A GGUF file of `leaves`; `quantise` maps a tensor's name to a type."""
    from gguf import GGUFWriter
    from gguf.quants import quantize

    quantise = dict(quantise)
    names = {"gpt_neox": "gptneox", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
    writer = GGUFWriter(path, architecture or names.get(config.family, config.family))
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.d_model)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    if config.norm_kind == "rms":
        writer.add_key_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    if config.family == "gpt_neox":
        writer.add_rope_dimension_count(config.layers[0].rope.rotated(config.head_dim))
        writer.add_parallel_residual(config.parallel_residual)
    if experts := config.layers[0].experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.layers[0].top_k)
    if config.family == "qwen3_moe":
        writer.add_feed_forward_length(6144)  # of dense layers, which it does not have
        writer.add_expert_feed_forward_length(config.layers[0].ffn_width)
    else:
        writer.add_feed_forward_length(config.layers[0].ffn_width)
    if config.qkv_clip:
        writer.add_clamp_kqv(config.qkv_clip)
    writer.add_bos_token_id(config.bos_id)
    writer.add_eos_token_id(config.eos_id)
    if config.pad_id is not None:
        writer.add_pad_token_id(config.pad_id)
    writer.add_rope_freq_base(config.layers[-1].rope.theta)
    windows = [layer.window for layer in config.layers if layer.window]
    if windows:
        writer.add_sliding_window(windows[0])
    for key, value in (meta or {}).items():
        add_value = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add_value[type(value)](key, value)
    tensors = converted_tree(config, leaves) | (add or {})
    for name, tensor in tensors.items():
        if name in drop:
            continue
        if name in quantise:
            data = quantize(tensor, quantise[name])
            writer.add_tensor(name, data, raw_dtype=quantise[name])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def found_leaves(params):
    return flatten(unstack(params))


CASES = [
    ("llama2_7b", 3, {}),
    ("smollm2_135m", 2, {"bos_id": 1, "eos_id": 2}),
    ("gemma_2b", 2, {}),
    ("gemma2_2b", 4, {}),
    ("gemma3_1b", 12, {}),
    ("pythia_70m", 3, {"n_kv_heads": 4}),
    ("pythia_70m", 2, {"n_kv_heads": 4, "parallel_residual": False, "tied": True}),
    ("olmo_1b", 2, {"bos_id": 1}),
    ("olmo_7b_0424", 2, {"bos_id": 1, "n_kv_heads": 4}),
    ("qwen2_5_0_5b", 2, {}),
    ("qwen2_5_7b", 3, {}),
    ("qwen3_0_6b", 3, {}),
    ("mixtral_8x7b", 2, {}),
    ("qwen3_30b_a3b", 3, {}),
]


@pytest.mark.parametrize(("preset", "layers", "changes"), CASES)
def test_every_family_is_read_back_exactly(tmp_path, preset, layers, changes):
    config = tiny_config(preset, layers, **changes)
    leaves = random_leaves(config)
    path = write(tmp_path / "m.gguf", config, leaves)
    found_config, params = read_gguf(path)
    assert found_config == config
    read_leaves = found_leaves(params)
    assert set(read_leaves) == set(leaves)
    for name, leaf in leaves.items():
        if name.endswith("scale") and config.family.startswith("gemma"):
            # The file has float32(1 + scale): it loses one rounding, we lose none.
            leaf = (leaf + np.float32(1)) - np.float32(1)
        np.testing.assert_array_equal(read_leaves[name], leaf, err_msg=name)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_are_dequantised(tmp_path, kind):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    config = tiny_config()
    leaves = random_leaves(config)
    name, path = "blk.1.ffn_down.weight", "layers/1/ffn/down/kernel"
    qtype = GGMLQuantizationType[kind]
    file = write(tmp_path / "m.gguf", config, leaves, quantise={name: qtype})
    _, params = read_gguf(file)
    read_leaves = found_leaves(params)
    expected = dequantize(quantize(np.ascontiguousarray(leaves[path].T), qtype), qtype).T
    np.testing.assert_array_equal(read_leaves[path], expected)
    # The steps between levels of a 4-bit block are an eighth of its largest weight.
    assert 0 < np.abs(read_leaves[path] - leaves[path]).max() < 0.5
    np.testing.assert_array_equal(
        read_leaves["layers/0/ffn/down/kernel"], leaves["layers/0/ffn/down/kernel"]
    )


def test_dtype_pattern_and_local_theta(tmp_path):
    import ml_dtypes

    config = tiny_config("gemma3_1b", 4)
    meta = {
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.rope.freq_base_swa": 5e3,
        "gemma3.rope.scaling.factor": 8.0,
    }
    path = write(tmp_path / "m.gguf", config, random_leaves(config), meta=meta)
    loaded, params = read_gguf(path, dtype="bfloat16")
    assert [layer.window for layer in loaded.layers] == [512, None, 512, None]
    assert [layer.rope.theta for layer in loaded.layers[:2]] == [5e3, config.layers[-1].rope.theta]
    assert [layer.rope.linear_factor for layer in loaded.layers[:2]] == [1.0, 8.0]
    assert all(leaf.dtype == ml_dtypes.bfloat16 for leaf in found_leaves(params).values())


def test_container_agrees_with_the_gguf_package(tmp_path):
    from gguf import GGMLQuantizationType, GGUFReader

    config = tiny_config()
    meta = {"a.strings": ["one", "zwei", "三"], "a.floats": [0.5, -1.25], "a.numbers": [1, -2, 3]}
    quantise = {"blk.0.ffn_up.weight": GGMLQuantizationType.Q4_0}
    path = write(tmp_path / "m.gguf", config, random_leaves(config), quantise=quantise, meta=meta)
    reader, ours = GGUFReader(path), open_gguf(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert ours.fields == theirs
    assert ours.fields["a.strings"] == ["one", "zwei", "三"]
    assert set(ours.tensors) == {t.name for t in reader.tensors}
    for tensor in reader.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.type == tensor.tensor_type
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert mine.data.tobytes() == tensor.data.tobytes()


# ---- bad input


refused = functools.partial(checkpoint_tools.refused, read=read_gguf)


@pytest.fixture
def whole(tmp_path):
    config = tiny_config()
    return write(tmp_path / "m.gguf", config, random_leaves(config))


def test_truncation_anywhere_is_named(whole, tmp_path):
    data = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for keep in [5, 20, 24, 40, 200, 700, 1500, len(data) // 2, len(data) - 40]:
        cut.write_bytes(data[:keep])
        refused(cut, "truncated")


def test_not_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    refused(path, "not a GGUF file")
    path.write_bytes(b"")
    refused(path, "not a GGUF file")
    refused(tmp_path / "none.gguf", "no such file")


def test_damaged_headers(whole, tmp_path):
    data = bytearray(whole.read_bytes())
    path = tmp_path / "bad.gguf"
    path.write_bytes(data[:4] + struct.pack(">I", 3) + data[8:])
    refused(path, "version")
    path.write_bytes(data[:16] + struct.pack("<Q", 1 << 60) + data[24:])
    refused(path)


def test_unknown_architecture(tmp_path):
    config = tiny_config()
    path = write(tmp_path / "m.gguf", config, random_leaves(config), architecture="mamba")
    refused(path, "'mamba'", "llama, gemma, gemma2, gemma3")


def test_missing_extra_and_misshapen_tensors(tmp_path):
    config, path = tiny_config(), tmp_path / "m.gguf"
    leaves = random_leaves(config)
    write(path, config, leaves, drop=["blk.2.ffn_down.weight"])
    refused(path, "missing", "blk.2.ffn_down.weight")
    write(path, config, leaves, drop=["token_embd.weight"])
    refused(path, "token_embd.weight")
    write(path, config, leaves, add={"blk.0.extra.weight": np.zeros((2, 2), np.float32)})
    refused(path, "no place", "blk.0.extra.weight")
    write(path, config, leaves, add={"blk.0.ffn_up.weight": np.zeros((32, 32), np.float32)})
    refused(path, "blk.0.ffn_up.weight", "(32, 32)", "(64, 32)")


def test_integer_tensors_are_refused(tmp_path):
    config, path = tiny_config(), tmp_path / "m.gguf"
    write(path, config, random_leaves(config), add={"output_norm.weight": np.zeros(32, np.int32)})
    refused(path, "output_norm.weight", "I32")


def test_nan_weights(tmp_path):
    config, path = tiny_config(), tmp_path / "m.gguf"
    leaves = random_leaves(config)
    leaves["layers/1/ffn/up/kernel"][3, 4] = np.nan
    write(path, config, leaves)
    refused(path, "blk.1.ffn_up.weight", "NaN")
    _, params = read_gguf(path, check_finite=False)
    assert np.isnan(found_leaves(params)["layers/1/ffn/up/kernel"][3, 4])


def test_missing_metadata(tmp_path):
    from gguf import GGUFWriter

    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, "embedding_length", "attention.head_count")


def test_a_file_without_tokenizer_cannot_be_loaded_as_a_model(whole):
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_model(whole)


@pytest.mark.slow
def test_smollm2_and_gemma3_files(smollm2_gguf, gemma3_gguf):
    """Published shapes, and weights of the magnitude of a trained model."""
    for path, preset in ((smollm2_gguf, "smollm2_135m"), (gemma3_gguf, "gemma3_270m")):
        config, params = read_gguf(path)
        expected, _ = families.preset(preset)
        special = {"bos_id": config.bos_id, "eos_id": config.eos_id, "pad_id": config.pad_id}
        assert config == dataclasses.replace(expected, **special)
        assert 0.01 < params["embed"]["embedding"].std() < 1.0
