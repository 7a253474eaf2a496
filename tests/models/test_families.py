"""Families: published sizes, config round trips, name rules, GGUF transforms."""

import dataclasses
import json
import math

import numpy as np
import pytest

from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.config import ConfigError, config_from_dict, config_to_dict
from ffn_heterogeneity.models.families import common, gpt_neox, llama
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
    "deepseek_math_7b": 6910.4,
    "deepseek_coder_1_3b": 1346.5,
    "deepseek_coder_6_7b": 6740.5,
    "deepseek_coder_33b": 33343.0,
    "deepseek_coder_7b_v1_5": 6910.4,
    "deepseek_r1_distill_llama_8b": 8030.3,
    "deepseek_r1_distill_llama_70b": 70553.7,
    "layerskip_llama2_7b": 6738.4,
    "layerskip_llama2_13b": 13015.9,
    "layerskip_llama2_70b": 68976.6,
    "layerskip_codellama_7b": 6738.5,
    "layerskip_codellama_34b": 33744.0,
    "layerskip_llama3_8b": 8030.3,
    "layerskip_llama3_2_1b": 1235.8,
    "gemma_2b": 2506.2,
    "gemma_7b": 8537.7,
    "gemma2_2b": 2614.3,
    "gemma2_9b": 9241.7,
    "gemma2_27b": 27227.1,
    "gemma3_270m": 268.1,
    "gemma3_1b": 999.9,
    "pythia_70m": 70.426624,
    "pythia_160m": 162.322944,
    "pythia_410m": 405.334016,
    "pythia_1b": 1011.781632,
    "pythia_1_4b": 1414.647808,
    "pythia_2_8b": 2775.208960,
    "pythia_6_9b": 6857.302016,
    "pythia_12b": 11846.072320,
    # Of its shapes and vocabulary; the model card's 2796.4 agrees with neither.
    "stablecode_alpha_3b": 2769.3,
    "olmo_1b": 1176.8,
    "olmo_7b": 6888.1,
    "olmo_7b_0424": 6888.1,
    "qwen3_0_6b": 596.0,
    "qwen3_1_7b": 1720.6,
    "qwen3_4b": 4022.5,
    "qwen3_8b": 8190.7,
    "qwen3_14b": 14768.3,
    "qwen3_32b": 32762.1,
}
# Pythia's paper, Table 1: parameters outside the two embeddings, exact.
PYTHIA_REST = {
    "70m": 18_915_328, "160m": 85_056_000, "410m": 302_311_424, "1b": 805_736_448,
    "1_4b": 1_208_602_624, "2_8b": 2_517_652_480, "6_9b": 6_444_163_072, "12b": 11_327_027_200,
}  # fmt: skip
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
    "deepseek_math": (1e4, 1e-6, False, 4096),
    "deepseek_coder_1_3b": (1e5, 1e-6, False, 16_384),
    "deepseek_coder_6_7b": (1e5, 1e-6, False, 16_384),
    "deepseek_coder_33b": (1e5, 1e-6, False, 16_384),
    "deepseek_coder_7b_v1_5": (1e4, 1e-6, False, 4096),
    "deepseek_r1_distill_llama": (5e5, 1e-5, False, 131_072),
    "layerskip_llama2": (1e4, 1e-5, False, 4096),
    "layerskip_codellama": (1e6, 1e-5, False, 16_384),
    "layerskip_llama3_8b": (5e5, 1e-5, False, 8192),
    "layerskip_llama3_2_1b": (5e5, 1e-5, True, 131_072),
    "gemma_": (1e4, 1e-6, True, 8192),
    "gemma2": (1e4, 1e-6, True, 8192),
    "gemma3": (1e4, 1e-6, True, 32_768),
    "pythia": (1e4, 1e-5, False, 2048),
    "stablecode": (1e4, 1e-5, False, 16_384),
    "olmo_1b": (1e4, 1e-5, True, 2048),
    "olmo_7b": (1e4, 1e-5, False, 2048),
    "olmo_7b_0424": (1e4, 1e-5, False, 4096),
    "qwen3_0_6b": (1e6, 1e-6, True, 40_960),
    "qwen3_1_7b": (1e6, 1e-6, True, 40_960),
    "qwen3_4b": (1e6, 1e-6, True, 40_960),
    "qwen3_8b": (1e6, 1e-6, False, 40_960),
    "qwen3_14b": (1e6, 1e-6, False, 40_960),
    "qwen3_32b": (1e6, 1e-6, False, 40_960),
}
LLAMA31, LLAMA32 = (8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192)
# Presets whose names begin so -> Llama 3.1's scaling.
SCALING = {
    "llama3_1": LLAMA31,
    "llama3_2": LLAMA32,
    "layerskip_llama3_2": LLAMA32,
    "deepseek_r1_distill_llama": LLAMA31,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_details_that_no_shape_shows(name):
    config, _ = families.preset(name)
    ours = (config.layers[0].rope.theta, config.norm_eps, config.tied, config.max_position)
    assert ours == DETAILS[max((p for p in DETAILS if name.startswith(p)), key=len)]
    scaling = [value for prefix, value in SCALING.items() if name.startswith(prefix)]
    assert [config.layers[-1].rope.llama3] == (scaling or [None])
    coder = name.startswith("deepseek_coder") and not name.endswith("v1_5")
    assert config.layers[0].rope.linear_factor == (4.0 if coder else 1.0)
    gemma, neox = name.startswith("gemma"), config.family == "gpt_neox"
    assert config.activation == ("gelu_tanh" if gemma else "gelu" if neox else "silu")
    assert config.parallel_residual == config.ffn_bias == config.attention_bias == neox
    assert config.layers[0].rope.fraction == (0.25 if neox else 1.0)
    kinds = {"gpt_neox": "layer", "olmo": "layer_without_parameters"}
    assert config.norm_kind == kinds.get(config.family, "rms")
    assert config.qkv_clip == (8.0 if name == "olmo_7b_0424" else None)
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
    if config.family == "gpt_neox":
        d, widths = config.d_model, config.ffn_widths
        assert counts["ffn"] == sum(2 * d * m + m + d for m in widths)
    else:
        assert counts["ffn"] == 3 * config.d_model * sum(config.ffn_widths)


@pytest.mark.parametrize("size", PYTHIA_REST)
def test_pythia_agrees_with_its_paper_to_the_last_parameter(size):
    counts = families.count_parameters(families.preset(f"pythia_{size}")[0])
    assert counts["total"] - counts["embedding"] - counts["head"] == PYTHIA_REST[size]
    assert counts["total"] / 1e6 == PUBLISHED[f"pythia_{size}"]


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
    modern = ("rope_theta", "rope_scaling", "rope_local_base_freq", "rotary_pct", "rotary_emb_base")
    assert families.config_from_hf({k: v for k, v in values.items() if k not in modern}) == config


def tiny(name, **changes):
    """The preset's config with few small layers."""
    config, _ = families.preset(name)
    layers = tuple(dataclasses.replace(layer, ffn_width=10) for layer in config.layers[:7])
    sizes = {"vocab_size": 11, "d_model": 6, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
    return dataclasses.replace(config, layers=layers, **sizes | changes)


TINY = {
    "llama3_8b": {},
    "llama3_2_1b": {"attention_bias": True, "attention_out_bias": True, "ffn_bias": True},
    "gemma_2b": {},
    "gemma2_2b": {},
    "gemma3_1b": {},
    "pythia_70m": {"n_kv_heads": 4, "head_dim": 8},
    "stablecode_alpha_3b": {"n_kv_heads": 4, "head_dim": 8, "attention_bias": False, "tied": True},
    "olmo_1b": {},
    "qwen3_8b": {},
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


@pytest.mark.parametrize("leaf", ["kernel", "bias"])
def test_gpt_neox_interleaves_queries_keys_and_values_by_head(leaf):
    """Row (head * 3 + part) * h + i of the tensor is row i of that head of that part."""
    config = tiny("pythia_70m", n_kv_heads=4, head_dim=8)
    name = {"kernel": "weight", "bias": "bias"}[leaf]
    family = families.family_by_name("gpt_neox")
    stored = f"gpt_neox.layers.2.attention.query_key_value.{name}"
    rule = next(r for r in family.rules(config) if r.names == (stored,))
    assert rule.paths == tuple(f"layers/2/attention/{part}/{leaf}" for part in "qkv")
    shape = (96, 6) if leaf == "kernel" else (96,)
    assert rule.stored_shapes(families.expected_shapes(config)) == [shape]
    tensor = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for part, found in enumerate(rule.load([tensor])):
        for head in range(4):
            for i in range(8):
                row = tensor[(head * 3 + part) * 8 + i]
                np.testing.assert_array_equal(found[..., head * 8 + i], row)
    stored = f"blk.2.attn_qkv.{name}"
    rule = next(r for r in family.gguf_rules(config) if r.names == (stored,))
    for part, found in enumerate(rule.load([tensor])):
        np.testing.assert_array_equal(found.T, tensor[32 * part : 32 * (part + 1)])


def test_gpt_neox_has_no_grouped_queries():
    config = tiny("pythia_70m", head_dim=8)
    for rules in (families.family_by_name("gpt_neox").rules, gpt_neox.FAMILY.gguf_rules):
        with pytest.raises(ConfigError, match="n_kv_heads=2, n_heads=4"):
            rules(config)


def test_qwen3_windows_begin_where_config_json_says():
    config = tiny("qwen3_8b")
    values = families.family_by_name("qwen3").to_hf(config)
    values |= {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 5}
    listed = families.config_from_hf(values | {"layer_types": None})
    assert [layer.window for layer in listed.layers] == [None] * 5 + [9] * 2
    values = families.family_by_name("qwen3").to_hf(listed)
    assert families.config_from_hf(values) == listed


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_kind": "batch"}, "norm_kind='batch': choose one of"),
        ({"qkv_clip": 0.0}, "qkv_clip=0.0 must be positive"),
        ({"head_dim": 4}, "rope.fraction=0.25 rotates 1 of head_dim=4 dimensions"),
    ],
)
def test_configs_that_describe_no_model_are_refused(changes, words):
    config, _ = families.preset("pythia_70m")
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(config, **changes)


@pytest.mark.parametrize("name", ["pythia_70m", "olmo_7b_0424", "qwen3_8b"])
def test_config_dict_round_trip(name):
    config, _ = families.preset(name)
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_configs_written_before_a_field_was_added_are_read():
    values = config_to_dict(families.preset("llama2_7b")[0])
    for key in ("norm_kind", "qkv_clip", "parallel_residual"):
        del values[key]
    for layer in values["layers"]:
        del layer["rope"]["fraction"]
    assert config_from_dict(values) == families.preset("llama2_7b")[0]


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
