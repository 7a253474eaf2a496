"""Names, splits and orders of tensors in families, and their errors."""

import dataclasses
import math

import numpy as np
import pytest
from tiny_runs import refused

from ffn_heterogeneity.models import families
from ffn_heterogeneity.models.config import ConfigError
from ffn_heterogeneity.models.families import common, gpt_neox, llama


def tiny(name, **changes):
    """The preset's config with few small layers."""
    config, _ = families.preset(name)
    layers = tuple(dataclasses.replace(layer, ffn_width=10) for layer in config.layers[:7])
    sizes = {"vocab_size": 11, "d_model": 6, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
    return dataclasses.replace(config, layers=layers, **sizes | changes)


LLAMA = families.config_to_hf(families.preset("llama3_8b")[0])
TINY = {
    "llama3_8b": {},
    "llama3_2_1b": {"attention_bias": True, "attention_out_bias": True, "ffn_bias": True},
    "gemma_2b": {},
    "gemma2_2b": {},
    "gemma3_1b": {},
    "gpt2": {"n_kv_heads": 4},
    "pythia_70m": {"n_kv_heads": 4, "head_dim": 8},
    "stablecode_alpha_3b": {"n_kv_heads": 4, "head_dim": 8, "attention_bias": False, "tied": True},
    "olmo_1b": {},
    "qwen2_5_7b": {},
    "qwen3_8b": {},
}


@pytest.mark.parametrize("name", TINY)
def test_rules_name_every_leaf_once_and_invert_exactly(name):
    config = tiny(name, **TINY[name])
    family = families.family_by_name(config.family)
    shapes = families.expected_shapes(config)
    has_gguf = family.from_gguf is not common.no_gguf
    for rules in (family.rules(config), *([family.gguf_rules(config)] if has_gguf else ())):
        assert sorted(p for rule in rules for p in rule.paths) == sorted(shapes)
        names = [n for rule in rules for n in rule.names]
        assert len(set(names)) == len(names)
        rng = np.random.default_rng(0)
        for rule in rules:
            leaves = [rng.normal(size=shapes[p]).astype(np.float32) for p in rule.paths]
            stored = rule.save(leaves)
            assert [a.shape for a in stored] == rule.stored_shapes(shapes)
            for leaf, back in zip(leaves, rule.load(stored), strict=True):
                np.testing.assert_array_equal(leaf, back)


@pytest.mark.parametrize("leaf", ["kernel", "bias"])
def test_gpt_neox_interleaves_queries_keys_and_values_by_head(leaf):
    """Row (head * 3 + part) * h + i of the tensor is row i of that head of that part."""
    config = tiny("pythia_70m", n_kv_heads=4, head_dim=8)
    name = {"kernel": "weight", "bias": "bias"}[leaf]
    family = families.family_by_name("gpt_neox")
    stored = f"gpt_neox.layers.2.attention.query_key_value.{name}"
    rule = next(r for r in family.rules(config) if r.names == (stored,))
    assert rule.paths == tuple(f"layers/2/attention/{projection}/{leaf}" for projection in "qkv")
    shape = (96, 6) if leaf == "kernel" else (96,)
    assert rule.stored_shapes(families.expected_shapes(config)) == [shape]
    tensor = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for projection, loaded in enumerate(rule.load([tensor])):
        for head in range(4):
            for i in range(8):
                row = tensor[(head * 3 + projection) * 8 + i]
                np.testing.assert_array_equal(loaded[..., head * 8 + i], row)
    stored = f"blk.2.attn_qkv.{name}"
    rule = next(r for r in family.gguf_rules(config) if r.names == (stored,))
    for projection, loaded in enumerate(rule.load([tensor])):
        np.testing.assert_array_equal(loaded.T, tensor[32 * projection : 32 * (projection + 1)])


def test_gpt_neox_has_no_grouped_queries():
    config = tiny("pythia_70m", head_dim=8)
    for rules in (families.family_by_name("gpt_neox").rules, gpt_neox.FAMILY.gguf_rules):
        refused("n_kv_heads=2, n_heads=4", rules, config, error=ConfigError)


@pytest.mark.parametrize("name", ["qwen2_5_0_5b", "qwen3_8b"])
def test_qwen_windows_begin_where_config_json_says(name):
    config = tiny(name)
    to_hf = families.family_by_name(config.family).to_hf
    values = to_hf(config) | {"use_sliding_window": True, "max_window_layers": 5}
    for window, windows in ((9, [9] * 2), (None, [None] * 2)):
        values |= {"sliding_window": window, "layer_types": None}
        listed = families.config_from_hf(values)
        assert [layer.window for layer in listed.layers] == [None] * 5 + windows
        for layer_types in (to_hf(listed)["layer_types"], None):  # transformers 4 has none
            assert families.config_from_hf(to_hf(listed) | {"layer_types": layer_types}) == listed
    values["layer_types"] = ["full_attention"] * 6 + ["sliding_attention"]
    with pytest.raises(ConfigError, match="without a window; set use_sliding_window=true"):
        families.config_from_hf(values)
    del values["num_key_value_heads"], values["layer_types"]
    values["num_attention_heads"] = 64
    assert families.config_from_hf(values).n_kv_heads == 32


def test_kernels_are_stored_output_first():
    rules = families.family_by_name("llama").rules(tiny("llama3_8b"))
    down = next(r for r in rules if r.names == ("model.layers.3.mlp.down_proj.weight",))
    assert down.paths == ("layers/3/ffn/down/kernel",)
    assert down.stored_shapes({down.paths[0]: (10, 6)}) == [(6, 10)]


GGUF_META = {
    "embedding_length": 6,
    "feed_forward_length": 10,
    "block_count": 2,
    "attention.head_count": 3,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "rope.freq_base": 500_000.0,
    "rope.dimension_count": 64,
    "vocab_size": 11,
    "tied": True,
}


def test_llama31_scaling_is_recovered_from_gguf_factors():
    factor, low, high, old = 32.0, 1.0, 4.0, 8192
    factors = []
    for i in range(32):
        wavelength = 2 * math.pi * 500_000.0 ** (2 * i / 64)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    factors = np.array(factors, np.float32)
    config = llama.from_gguf(GGUF_META | {"rope_freqs": factors})
    assert config.layers[0].rope.llama3 == (factor, low, high, old)
    assert config.norm_eps == 1e-5
    with pytest.raises(ConfigError, match="rope_freqs"):
        llama.from_gguf(GGUF_META | {"rope_freqs": factors * np.linspace(1, 2, 32)})


GGUF_ROTARY = [f for f in families.FAMILIES.values() if f.from_gguf is not common.no_gguf]
GGUF_ROTARY = [f for f in GGUF_ROTARY if next(iter(f.presets.values()))[0].positions == "rotary"]


@pytest.mark.parametrize("family", GGUF_ROTARY, ids=lambda family: family.name)
def test_scaled_ropes_of_gguf_files_are_read_or_refused(family):
    """A factor without a type is linear, as in llama.cpp; nothing is dropped silently."""
    norm = "attention.layer_norm_epsilon"
    meta = GGUF_META | {norm: 1e-5, "attention.head_count": 2, "rope.dimension_count": 4}
    meta["attention.key_length"] = 4
    meta["block_count"] = 6
    for key in ("rope.scale_linear", "rope.scaling.factor"):
        read = family.from_gguf(meta | {key: 4.0})
        # Gemma 3's local layers are not scaled.
        scaled = [x for x in read.layers if family.name != "gemma3" or x.window is None]
        assert scaled and {layer.rope.linear_factor for layer in scaled} == {4.0}
    none = family.from_gguf(meta | {"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
    assert {layer.rope.linear_factor for layer in none.layers} == {1.0}
    yarn = meta | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    refused("'yarn' is not known", family.from_gguf, yarn, error=ConfigError)
    strange = meta | {"rope_freqs": np.full(2, 2.0)}
    refused("rope_freqs", family.from_gguf, strange, error=ConfigError)


@pytest.mark.parametrize("scaling", [(0, 1, 4, 64), (8, 0, 4, 64), (8, 4, 4, 64)])
def test_llama3_scaling_that_divides_by_zero_is_refused(scaling):
    config, _ = families.preset("llama3_8b")
    rope = dataclasses.replace(config.layers[0].rope, llama3=tuple(map(float, scaling)))
    layers = [dataclasses.replace(layer, rope=rope) for layer in config.layers]
    with pytest.raises(ConfigError, match="rope llama3"):
        dataclasses.replace(config, layers=tuple(layers))


@pytest.mark.parametrize("change", [{"qkv_clip": 0.2}, {"positions": "learned"}, {"qk_norm": True}])
def test_cross_attention_has_no_clip_norm_or_learned_positions(change):
    """Generation would not follow the forward pass."""
    with pytest.raises(ConfigError, match="cross-attention works with none of"):
        dataclasses.replace(families.preset("t5_v1_1_small")[0], **change)


@pytest.mark.parametrize(("name", "heads"), [("gemma", 16), ("gemma2", 4), ("gemma3_text", 4)])
def test_omitted_key_heads_are_those_of_transformers_class(name, heads):
    values = {"model_type": name, "num_attention_heads": 16, "hidden_size": 32, "vocab_size": 9}
    values |= {"num_hidden_layers": 2, "intermediate_size": 8}
    assert families.config_from_hf(values).n_kv_heads == heads


@pytest.mark.parametrize(
    ("call", "value", "known"),
    [
        (families.family_by_name, "mamba", "gemma2"),
        (families.preset, "gemma2_3b", "gemma2_27b"),
        (families.family_from_gguf, "mamba", "gemma3"),
        (families.config_from_hf, {"model_type": "mamba"}, "gemma3_text"),
        (families.config_from_hf, {"model_type": "llama", "quantization_config": {"a": 1}}, "GGUF"),
        (families.config_from_hf, {"model_type": "llama", "vocab_size": 3}, "hidden_size"),
        (families.config_from_hf, LLAMA | {"hidden_act": "mish"}, "mish"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(call, value, known):
    refused(known, call, value, error=ConfigError)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_kind": "batch"}, "norm_kind='batch': choose one of"),
        ({"qkv_clip": 0.0}, "qkv_clip=0.0 must be a number in"),
        ({"head_dim": 4}, "rope.fraction=0.25 rotates 1 of head_dim=4 dimensions"),
        ({"bos_id": "x"}, "bos_id='x' must be an integer"),
        ({"bos_id": (1, 2)}, r"bos_id=\(1, 2\) must be an integer"),
        ({"eos_id": (1, -3)}, "eos_id=-3 must be an integer from 0 on"),
        ({"eos_id": (1, None)}, "eos_id=None must be an integer"),
        ({"eos_id": ()}, r"eos_id=\(\) must be an integer"),
        ({"eos_id": True}, "eos_id=True must be an integer"),
        ({"pad_id": 10**12}, "pad_id=1000000000000 must be an integer"),
    ],
)
def test_configs_that_describe_no_model_are_refused(changes, words):
    config, _ = families.preset("pythia_70m")
    refused(words, dataclasses.replace, config, error=ConfigError, **changes)


def test_no_token_is_written_as_minus_one_in_llamas_files():
    config, _ = families.preset("llama3_8b")
    values = llama.to_hf(config) | {"pad_token_id": -1, "eos_token_id": [7, 9]}
    read = families.config_from_hf(values)
    assert read.pad_id is None and read.eos_id == (7, 9) and read.bos_id == config.bos_id
    assert common.token_id(2**32 - 1) is None  # and in GGUF, whose ids have no sign


def test_layer_types_decide_the_windows():
    config = tiny("gemma3_1b")
    values = families.family_by_name("gemma3").to_hf(config)
    values["layer_types"] = ["full_attention"] * 2 + ["sliding_attention"] * 5
    parsed = families.config_from_hf(values)
    assert [layer.window for layer in parsed.layers] == [None] * 2 + [512] * 5
    assert [layer.rope.theta for layer in parsed.layers] == [1e6] * 2 + [1e4] * 5
    values["layer_types"][0] = "chunked_attention"
    refused("layer_types", families.config_from_hf, values, error=ConfigError)
