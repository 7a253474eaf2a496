"""Families: published sizes, config round trips, name rules, GGUF transforms."""

import dataclasses
import math

import numpy as np
import pytest

from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.config import ConfigError
from ffn_heterogeneity.models.families import common, llama
from ffn_heterogeneity.models.stack import tree_segments
from ffn_heterogeneity.paths import flatten

# Millions of parameters, as published on the model cards and in the papers.
PUBLISHED = {
    "llama1_7b": 6738.4,
    "llama1_13b": 13015.9,
    "llama1_30b": 32528.9,
    "llama1_65b": 65285.7,
    "llama2_7b": 6738.4,
    "llama2_13b": 13015.9,
    "llama2_70b": 68976.6,
    "llama3_8b": 8030.3,
    "llama3_70b": 70553.7,
    "llama3_1_8b": 8030.3,
    "llama3_1_70b": 70553.7,
    "llama3_1_405b": 405853.4,
    "llama3_2_1b": 1235.8,
    "llama3_2_3b": 3212.7,
    "smollm2_135m": 134.5,
    "smollm2_360m": 361.8,
    "smollm2_1_7b": 1711.4,
    "deepseek_llm_7b": 6910.4,
    "deepseek_llm_67b": 67425.0,
    "gemma_2b": 2506.2,
    "gemma_7b": 8537.7,
    "gemma2_2b": 2614.3,
    "gemma2_9b": 9241.7,
    "gemma2_27b": 27227.1,
    "gemma3_270m": 268.1,
    "gemma3_1b": 999.9,
}
# NUCL, Table 6: billions, total and embedding.
TABLE_6 = {
    "gemma2_2b": (2.614, 0.590),
    "gemma2_9b": (9.242, 0.918),
    "gemma2_27b": (27.227, 1.180),
}


# Published config.json: prefix of presets -> rope theta, norm epsilon, tied, positions.
DETAILS = {
    "llama1": (1e4, 1e-6, False, 2048),
    "llama2": (1e4, 1e-5, False, 4096),
    "llama3_8b": (5e5, 1e-5, False, 8192),
    "llama3_70b": (5e5, 1e-5, False, 8192),
    "llama3_1": (5e5, 1e-5, False, 131_072),
    "llama3_2": (5e5, 1e-5, True, 131_072),
    "smollm2_135m": (1e5, 1e-5, True, 8192),
    "smollm2_360m": (1e5, 1e-5, True, 8192),
    "smollm2_1_7b": (1.3e5, 1e-5, True, 8192),
    "deepseek_llm": (1e4, 1e-6, False, 4096),
    "gemma_": (1e4, 1e-6, True, 8192),
    "gemma2": (1e4, 1e-6, True, 8192),
    "gemma3": (1e4, 1e-6, True, 32_768),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_details_that_no_shape_shows(name):
    config, _ = families.preset(name)
    ours = (config.layers[0].rope.theta, config.norm_eps, config.tied, config.max_position)
    assert [ours] == [d for prefix, d in DETAILS.items() if name.startswith(prefix)]
    scaling = {"llama3_1": (8.0, 1.0, 4.0, 8192), "llama3_2": (32.0, 1.0, 4.0, 8192)}
    assert config.layers[-1].rope.llama3 == scaling.get(name[:8])
    gemma = name.startswith("gemma")
    assert config.activation == ("gelu_tanh" if gemma else "silu")
    assert config.embedding_multiplier == (config.d_model**0.5 if gemma else 1.0)
    assert config.norm_offset == (1.0 if gemma else 0.0)


def test_gemma2_and_gemma3_attention_patterns():
    config, _ = families.preset("gemma2_27b")
    assert [layer.window for layer in config.layers[:4]] == [4096, None, 4096, None]
    assert (config.attention_softcap, config.final_softcap) == (50.0, 30.0)
    assert config.scale == 144**-0.5 and families.preset("gemma2_9b")[0].scale == 1 / 16
    config, _ = families.preset("gemma3_1b")
    assert [i for i, layer in enumerate(config.layers) if layer.window is None] == [5, 11, 17, 23]
    assert {(layer.window, layer.rope.theta) for layer in config.layers} == {
        (512, 1e4),
        (None, 1e6),
    }


def test_every_preset_has_a_published_size():
    assert set(PUBLISHED) == set(families.PRESETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    config, _ = families.preset(name)
    counts = families.count_parameters(config)
    assert abs(counts["total"] / 1e6 - PUBLISHED[name]) < 0.06
    assert counts["total"] == sum(v for k, v in counts.items() if k != "total")
    assert counts["ffn"] == 3 * config.d_model * sum(config.ffn_widths)


@pytest.mark.parametrize("name", TABLE_6)
def test_gemma2_agrees_with_table_6_of_nucl(name):
    counts = families.count_parameters(families.preset(name)[0])
    total, embedding = TABLE_6[name]
    assert abs(counts["total"] / 1e9 - total) < 0.001
    assert abs(counts["embedding"] / 1e9 - embedding) < 0.001


@pytest.mark.parametrize("name", PUBLISHED)
def test_expected_shapes_are_those_of_the_model(name):
    config, _ = families.preset(name)
    abstract = causal_lm.abstract_params(config)
    found = {}
    for i, segment in enumerate(tree_segments(abstract["stack"])):
        for slot, tree in abstract["stack"][f"segment_{i}"].items():
            for path, leaf in flatten(tree).items():
                for repeat in range(segment.repeats):
                    layer = segment.layer(int(slot.removeprefix("slot_")), repeat)
                    found[f"layers/{layer}/{path}"] = leaf.shape[1:]
    rest = {key: tree for key, tree in abstract.items() if key != "stack"}
    found |= {path: leaf.shape for path, leaf in flatten(rest).items()}
    assert found == families.expected_shapes(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_json_round_trip_also_through_transformers(name):
    import transformers

    config, hub_id = families.preset(name)
    assert hub_id.count("/") == 1
    values = families.family_by_name(config.family).to_hf(config)
    assert families.config_from_hf(values) == config
    theirs = transformers.AutoConfig.for_model(**values)
    assert families.config_from_hf(theirs.to_dict()) == config
    classic = {k: v for k, v in values.items() if k not in ("rope_parameters", "layer_types")}
    assert families.config_from_hf(classic) == config, "keys of transformers 4 must be enough"
    modern = ("rope_theta", "rope_scaling", "rope_local_base_freq")
    assert families.config_from_hf({k: v for k, v in values.items() if k not in modern}) == config


def tiny(name, **changes):
    """The preset's config with few small layers."""
    config, _ = families.preset(name)
    layers = tuple(dataclasses.replace(layer, ffn_width=10) for layer in config.layers[:7])
    sizes = {"vocab_size": 11, "d_model": 6, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
    return dataclasses.replace(config, layers=layers, **sizes, **changes)


TINY = {
    "llama3_8b": {},
    "llama3_2_1b": {"attention_bias": True, "attention_out_bias": True, "ffn_bias": True},
    "gemma_2b": {},
    "gemma2_2b": {},
    "gemma3_1b": {},
}


@pytest.mark.parametrize("name", TINY)
def test_rules_name_every_leaf_once_and_invert_exactly(name):
    config = tiny(name, **TINY[name])
    family = families.family_by_name(config.family)
    shapes = families.expected_shapes(config)
    for rules in (family.rules(config), family.gguf_rules(config)):
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


def test_kernels_are_stored_output_first():
    rules = families.family_by_name("llama").rules(tiny("llama3_8b"))
    down = next(r for r in rules if r.names == ("model.layers.3.mlp.down_proj.weight",))
    assert down.paths == ("layers/3/ffn/down/kernel",)
    assert down.stored_shapes({down.paths[0]: (10, 6)}) == [(6, 10)]


@pytest.mark.parametrize("kind", ["q", "k"])
def test_llama_gguf_reordering_is_undone(kind):
    config = tiny("llama3_8b")
    heads = {"q": config.n_heads, "k": config.n_kv_heads}[kind]
    weight = np.arange(heads * config.head_dim * config.d_model, dtype=np.float32)
    weight = weight.reshape(heads * config.head_dim, config.d_model)  # torch's [out, in]
    # llama.cpp's converter: rows of a head go from halves to interleaved pairs.
    written = weight.reshape(heads, 2, config.head_dim // 2, config.d_model)
    written = written.swapaxes(1, 2).reshape(weight.shape)
    assert not np.array_equal(written, weight)
    found = llama.gguf_transform(config, f"layers/0/attention/{kind}/kernel", written.T)
    np.testing.assert_array_equal(found, weight.T)


def test_gemma_gguf_norms_lose_their_one_and_kernels_do_not():
    config, scale = tiny("gemma2_2b"), np.float32([1.5, 0.25])
    np.testing.assert_array_equal(
        common.subtract_one(config, "layers/0/ffn_norm/scale", scale), np.float32([0.5, -0.75])
    )
    kernel = np.ones((2, 2), np.float32)
    assert common.subtract_one(config, "layers/0/ffn/up/kernel", kernel) is kernel


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


def test_gguf_widths_may_differ_per_layer():
    config = llama.from_gguf(GGUF_META | {"feed_forward_length": [10, 4]})
    assert config.ffn_widths == (10, 4)


@pytest.mark.parametrize(
    ("call", "value", "known"),
    [
        (families.family_by_name, "mamba", "gemma2"),
        (families.preset, "gemma2_3b", "gemma2_27b"),
        (families.family_from_gguf, "mamba", "gemma3"),
        (families.config_from_hf, {"model_type": "mamba"}, "gemma3_text"),
        (families.config_from_hf, {"model_type": "llama", "quantization_config": {"a": 1}}, "GGUF"),
        (families.config_from_hf, {"model_type": "llama", "vocab_size": 3}, "hidden_size"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(call, value, known):
    with pytest.raises(ConfigError, match=known):
        call(value)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"hidden_act": "mish"},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_settings_that_change_the_function_are_refused(change):
    config, _ = families.preset("llama3_8b")
    values = llama.to_hf(config) | {"rope_parameters": None} | change
    with pytest.raises(ConfigError):
        families.config_from_hf(values)


def test_layer_types_decide_the_windows():
    config = tiny("gemma3_1b")
    values = families.family_by_name("gemma3").to_hf(config)
    values["layer_types"] = ["full_attention"] * 2 + ["sliding_attention"] * 5
    found = families.config_from_hf(values)
    assert [layer.window for layer in found.layers] == [None] * 2 + [512] * 5
    assert [layer.rope.theta for layer in found.layers] == [1e6] * 2 + [1e4] * 5
    values["layer_types"][0] = "chunked_attention"
    with pytest.raises(ConfigError, match="layer_types"):
        families.config_from_hf(values)
