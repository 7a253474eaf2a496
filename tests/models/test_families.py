"""Families: published sizes, details and shapes, config round trips."""

import dataclasses

import pytest

from ffn_heterogeneity.models import families
from ffn_heterogeneity.models.config import ConfigError

# Millions of parameters by size, as published on the model cards and in the papers.
SIZES = {
    "llama1": "7b 6738.4, 13b 13015.9, 30b 32528.9, 65b 65285.7",
    "llama2": "7b 6738.4, 13b 13015.9, 70b 68976.6",
    "llama3": "8b 8030.3, 70b 70553.7",
    "llama3_1": "8b 8030.3, 70b 70553.7, 405b 405853.4",
    "llama3_2": "1b 1235.8, 3b 3212.7",
    "mistral": "7b 7241.7, 7b_v0_3 7248.0",
    "phi3": "mini 3821.1, medium 13960.2",
    "smollm2": "135m 134.5, 360m 361.8, 1_7b 1711.4",
    "deepseek_llm": "7b 6910.4, 67b 67425.0",
    "deepseek_math": "7b 6910.4",
    "deepseek_coder": "1_3b 1346.5, 6_7b 6740.5, 33b 33343.0, 7b_v1_5 6910.4",
    "deepseek_r1_distill_llama": "8b 8030.3, 70b 70553.7",
    "layerskip_llama2": "7b 6738.4, 13b 13015.9, 70b 68976.6",
    "layerskip_codellama": "7b 6738.5, 34b 33744.0",
    "layerskip_llama3": "8b 8030.3, 2_1b 1235.8",
    "gemma": "2b 2506.2, 7b 8537.7",
    "gemma2": "2b 2614.3, 9b 9241.7, 27b 27227.1",
    "gemma3": "270m 268.1, 1b 999.9",
    "pythia": "70m 70.426624, 160m 162.322944, 410m 405.334016, 1b 1011.781632, "
    "1_4b 1414.647808, 2_8b 2775.208960, 6_9b 6857.302016, 12b 11846.072320",
    # Of its shapes and vocabulary; the model card's 2796.4 agrees with neither.
    "stablecode": "alpha_3b 2769.3, instruct_alpha_3b 2769.3",
    "olmo": "1b 1176.8, 7b 6888.1, 7b_0424 6888.1",
    "qwen2_5": "0_5b 494.032768, 1_5b 1543.714304, 3b 3085.938688, 7b 7615.616512, "
    "14b 14770.033664, 32b 32763.876352, 72b 72706.203648, coder_0_5b_instruct 494.032768",
    "qwen3": "0_6b 596.0, 1_7b 1720.6, 4b 4022.5, 8b 8190.7, 14b 14768.3, 32b 32762.1, "
    "30b_a3b 30532.122624",
    "mixtral": "8x7b 46702.792704, 8x7b_instruct 46702.792704",
}
PUBLISHED = {
    f"{family}_{size}": float(millions)
    for family, sizes in SIZES.items()
    for size, millions in map(str.split, sizes.split(", "))
}
# Millions that a token uses, as published: 12.9 and 3.3 billion.
ACTIVE = {"mixtral_8x7b": 12_900, "mixtral_8x7b_instruct": 12_900, "qwen3_30b_a3b": 3_300}
# Exact: BERT's with its pooler, RoBERTa's without (its files have none). None has a rotary
# embedding or a language-model head.
ENCODERS = {
    "bert_base_uncased": 109_482_240,
    "bert_large_uncased": 335_141_888,
    "minilm_l6": 22_713_216,
    "roberta_base": 124_055_040,
    "distilroberta_base": 81_527_808,
}
# Exact: the embedding counted once, and in 1.1 and Flan the head.
T5 = {"t5_small": 60_506_624, "t5_base": 222_903_552, "t5_large": 737_668_096}
for _size, _count in {
    "small": 76_961_152,
    "base": 247_577_856,
    "large": 783_150_080,
    "xl": 2_849_757_184,
    "xxl": 11_135_332_352,
}.items():
    T5 |= dict.fromkeys((f"t5_v1_1_{_size}", f"flan_t5_{_size}"), _count)
# T5 base with experts, and a router, in 6 layers of each stack.
SWITCH = {
    f"switch_base_{e}": T5["t5_base"] + 12 * ((e - 1) * 2 * 768 * 3072 + 768 * e)
    for e in (8, 16, 32, 64, 128, 256)
}
# Exact: the tied embedding counted once.
GPT2 = {"gpt2": 124_439_808}
# Pythia's paper, Table 1: parameters outside the two embeddings, exact.
PYTHIA_REST = {"70m": 18_915_328, "160m": 85_056_000, "410m": 302_311_424, "1b": 805_736_448}
PYTHIA_REST |= {"1_4b": 1_208_602_624, "2_8b": 2_517_652_480, "6_9b": 6_444_163_072}
PYTHIA_REST |= {"12b": 11_327_027_200}


# Published config.json: rope theta, norm epsilon, tied, positions -> prefixes of presets.
DETAILS = {
    (1e4, 1e-6, False, 2048): "llama1",
    (1e4, 1e-5, False, 4096): "llama2 layerskip_llama2 stablecode_instruct olmo_7b_0424 phi3",
    (5e5, 1e-5, False, 8192): "llama3_8b llama3_70b layerskip_llama3_8b",
    (5e5, 1e-5, False, 131_072): "llama3_1 deepseek_r1_distill_llama",
    (5e5, 1e-5, True, 131_072): "llama3_2 layerskip_llama3_2_1b",
    (1e5, 1e-5, True, 8192): "smollm2_135m smollm2_360m",
    (1.3e5, 1e-5, True, 8192): "smollm2_1_7b",
    (1e4, 1e-6, False, 4096): "deepseek_llm deepseek_math deepseek_coder_7b_v1_5",
    (1e5, 1e-6, False, 16_384): "deepseek_coder_1_3b deepseek_coder_6_7b deepseek_coder_33b",
    (1e6, 1e-5, False, 16_384): "layerskip_codellama",
    (1e4, 1e-6, True, 8192): "gemma_ gemma2",
    (1e4, 1e-6, True, 32_768): "gemma3",
    (1e4, 1e-5, False, 2048): "pythia olmo_7b",
    (1e4, 1e-5, False, 16_384): "stablecode",
    (1e4, 1e-5, True, 2048): "olmo_1b",
    (1e4, 1e-5, False, 32_768): "mistral_7b",
    (1e6, 1e-5, False, 32_768): "mistral_7b_v0_3 mixtral",
    (1e6, 1e-6, True, 32_768): "qwen2_5_0_5b qwen2_5_3b qwen2_5_coder",
    (1e6, 1e-6, True, 131_072): "qwen2_5_1_5b",
    (1e6, 1e-6, False, 131_072): "qwen2_5_7b",
    (1e6, 1e-5, False, 131_072): "qwen2_5",
    (1e6, 1e-6, True, 40_960): "qwen3_0_6b qwen3_1_7b qwen3_4b",
    (1e6, 1e-6, False, 40_960): "qwen3_8b qwen3_14b qwen3_32b qwen3_30b",
}
DETAILS = {prefix: values for values, names in DETAILS.items() for prefix in names.split()}
LLAMA31, LLAMA32 = (8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192)
# Presets whose names begin so -> Llama 3.1's scaling.
SCALING = {"llama3_1": LLAMA31, "llama3_2": LLAMA32, "layerskip_llama3_2": LLAMA32}
SCALING |= {"deepseek_r1_distill_llama": LLAMA31}


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
    assert config.parallel_residual == config.ffn_bias == config.attention_out_bias == neox
    assert config.attention_bias == (neox or config.family == "qwen2")
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
    assert {*PUBLISHED, *ENCODERS, *GPT2, *T5, *SWITCH} == set(families.PRESETS)


@pytest.mark.parametrize("name", SWITCH)
def test_switch_is_t5_base_with_experts(name):
    counts = families.count_parameters(families.preset(name)[0])
    assert counts["total"] == SWITCH[name]
    routers = 12 * 768 * int(name.rpartition("_")[2])
    assert counts["active"] == T5["t5_base"] + routers


@pytest.mark.parametrize("name", T5)
def test_t5_has_the_published_number_of_parameters(name):
    config, _ = families.preset(name)
    counts = families.count_parameters(config)
    total, active = counts.pop("total"), counts.pop("active")
    assert total == active == T5[name] == sum(counts.values())
    first = name in ("t5_small", "t5_base", "t5_large")
    assert config.kind == "encoder_decoder" and config.tied == first
    assert config.output_multiplier == (config.d_model**-0.5 if first else 1.0)
    assert [layer.cross_attention for layer in config.layers].index(True) * 2 == config.n_layers


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_the_published_number_of_parameters(name):
    config, _ = families.preset(name)
    counts = families.count_parameters(config)
    total, active = counts.pop("total"), counts.pop("active")
    assert total == active == ENCODERS[name] == sum(counts.values())
    assert config.is_encoder and not config.lm_head and config.activation == "gelu"
    roberta = config.family == "roberta"
    details = (config.norm_eps, config.position_rows, config.first_position, config.token_types)
    assert details == ((1e-5, 514, 2, 1) if roberta else (1e-12, 512, 0, 2))
    assert (config.bos_id, config.eos_id, config.pad_id) == (
        (0, 2, 1) if roberta else (None, None, 0)
    )
    assert config.pooler != roberta


def test_gpt2_is_the_published_one():
    config, _ = families.preset("gpt2")
    assert families.count_parameters(config)["total"] == GPT2["gpt2"]
    assert (config.max_position, config.first_position, config.norm_eps) == (1024, 0, 1e-5)
    assert (config.activation, config.tied, config.eos_id) == ("gelu_tanh", True, 50_256)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    config, _ = families.preset(name)
    counts = families.count_parameters(config)
    total, active = counts.pop("total"), counts.pop("active")
    assert abs(total / 1e6 - PUBLISHED[name]) < 0.06 and total == sum(counts.values())
    assert abs(active / 1e6 - ACTIVE[name]) < 60 if name in ACTIVE else active == total
    if config.family == "gpt_neox":
        d, widths = config.d_model, config.ffn_widths
        assert counts["ffn"] == sum(2 * d * m + m + d for m in widths)
    else:
        blocks = [(each.experts or 1) * each.ffn_width * 3 + each.columns for each in config.layers]
        assert counts["ffn"] == config.d_model * sum(blocks)


@pytest.mark.parametrize("size", PYTHIA_REST)
def test_pythia_agrees_with_its_paper_to_the_last_parameter(size):
    counts = families.count_parameters(families.preset(f"pythia_{size}")[0])
    assert counts["total"] - counts["embedding"] - counts["head"] == PYTHIA_REST[size]
    assert counts["total"] / 1e6 == PUBLISHED[f"pythia_{size}"]


@pytest.mark.parametrize("name", [*PUBLISHED, *ENCODERS, *GPT2])
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


def test_keys_whose_null_or_truth_is_not_the_default():
    def values_of(name):
        config, _ = families.preset(name)
        return families.family_by_name(config.family).to_hf(config)

    values = values_of("mistral_7b")
    heads = values["num_attention_heads"]
    assert families.config_from_hf(values | {"num_key_value_heads": None}).n_kv_heads == heads
    for name in ("gemma_2b", "gemma2_2b", "gemma3_1b"):
        with pytest.raises(ConfigError, match="use_bidirectional_attention=true"):
            families.config_from_hf(values_of(name) | {"use_bidirectional_attention": True})


@pytest.mark.parametrize("name", [*PUBLISHED, *ENCODERS, *GPT2])
def test_a_null_says_that_there_is_no_such_token(name):
    """bos_token_id: null does not mean the class's default, a real token of another model."""
    config, _ = families.preset(name)
    config = dataclasses.replace(config, bos_id=None, pad_id=None)
    values = families.family_by_name(config.family).to_hf(config)
    assert values["bos_token_id"] is None and families.config_from_hf(values) == config
