"""GPT-2: a decoder with learned positions, LayerNorms, biases everywhere and plain FFNs.

Files store kernels like OpenAI's Conv1D, [in, out] as here, with queries, keys and values in one.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import ConfigError, LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import common, names, rules
from ffn_heterogeneity.models.leaves import expected_shapes

# Keys of config.json -> their names in the other families.
_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 50_256,
    "eos_token_id": 50_256,
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
}
_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
_FIXED["add_cross_attention"] = False
# Keys of `common.base_to_hf` that its class does not have.
_NOT_THEIRS = {"num_key_value_heads", "head_dim", "attention_bias", "attention_dropout"}


def _config(widths, fields: Mapping[str, Any], **more: Any) -> ModelConfig:
    layers = tuple(LayerConfig(width, ffn_kind="plain", rope=None) for width in widths)
    fixed = dict.fromkeys(("attention_bias", "attention_out_bias", "ffn_bias"), True)
    fixed |= {"norm_kind": "layer", "positions": "learned"}
    return ModelConfig("gpt2", layers=layers, **{**fields, **fixed, **more})


_SIZES = {"vocab_size": 50_257, "d_model": 768, "n_heads": 12, "n_kv_heads": 12, "head_dim": 64}
_SIZES |= {"max_position": 1024, "activation": "gelu_tanh", "attention_dropout": True}
_SMALL = _config([3072] * 12, _SIZES, bos_id=50_256, eos_id=50_256)
PRESETS = {"gpt2": (_SMALL, "openai-community/gpt2")}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a GPT2LMHeadModel or GPT2Model; ConfigError for another form of attention."""
    # Its class reads only `n_inner`.
    renamed = {_KEYS.get(key, key): v for key, v in values.items() if key != "intermediate_size"}
    sizes = {"max_position_embeddings": values.get("n_ctx") or 1024}
    sizes["intermediate_size"] = 4 * (renamed.get("hidden_size") or 0)
    values = common.with_defaults(renamed, _DEFAULTS | _FIXED | sizes)
    for key, value in _FIXED.items():
        if bool(values[key]) != value:
            raise ConfigError(f"{key}={values[key]!r}: gpt2 is supported only with {value}")
    return _config(
        [values["intermediate_size"]] * values["num_hidden_layers"],
        common.base_from_hf(values | {"num_key_value_heads": None, "head_dim": None}, {}),
        activation=common.activation_from_hf(values["activation_function"]),
        attention_dropout=values["attn_pdrop"] > 0,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that transformers 4 and 5 and vLLM read."""
    theirs = {ours: key for key, ours in _KEYS.items()}
    values = common.base_to_hf(config, "gpt2", "GPT2LMHeadModel")
    act = values.pop("hidden_act")
    values = {theirs.get(k, k): v for k, v in values.items() if k not in _NOT_THEIRS}
    return values | {
        **_FIXED,
        "n_ctx": config.max_position,
        "activation_function": act.replace("gelu_pytorch_tanh", "gelu_new"),
        "attn_pdrop": 0.1 if config.attention_dropout else 0.0,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
    }


_NAMES = names.name_table(
    {
        "embed/embedding": "transformer.wte.weight",
        "embed/position": "transformer.wpe.weight",
        "final_norm/scale": "transformer.ln_f.weight",
        "final_norm/bias": "transformer.ln_f.bias",
        "head/kernel": "lm_head.weight",
    },
    "transformer.h.{i}.",
    {"attention_norm": "ln_1", "ffn_norm": "ln_2"},
)
_CONV1D = {
    "attn.c_attn": ("attention/q", "attention/k", "attention/v"),
    "attn.c_proj": ("attention/out",),
    "mlp.c_fc": ("ffn/up",),
    "mlp.c_proj": ("ffn/down",),
}


def _conv1d(paths: list[str], name: str, shapes: Mapping[str, tuple[int, ...]]) -> rules.Rule:
    """Kernels [in, out_i] or biases [out_i] that are concatenated in one tensor."""
    ends = np.cumsum([shapes[path][-1] for path in paths])
    return rules.Rule(
        tuple(paths),
        (name,),
        lambda arrays: np.split(arrays[0], ends[:-1], axis=-1),
        lambda leaves: [np.concatenate(leaves, axis=-1)],
        lambda leaf_shapes: [(*leaf_shapes[0][:-1], sum(shape[-1] for shape in leaf_shapes))],
    )


def _rules(config: ModelConfig) -> list[rules.Rule]:
    shapes = expected_shapes(config)
    all_rules = rules.one_to_one(config, _NAMES, but=r"/(attention|ffn)/(q|k|v|out|up|down)/")
    for i, layer in enumerate(config.layers):
        for module, places in _CONV1D.items():
            if layer.experts is not None and module.startswith("mlp"):
                continue  # named by `one_to_one`
            for leaf, tensor in (("kernel", "weight"), ("bias", "bias")):
                paths = [f"layers/{i}/{place}/{leaf}" for place in places]
                if paths[0] in shapes:
                    all_rules.append(_conv1d(paths, f"transformer.h.{i}.{module}.{tensor}", shapes))
    return all_rules


def own_name(name: str) -> str:
    """A tensor's name with the prefix, which files of GPT2Model and of the hub omit."""
    return re.sub(r"^(?=(wte|wpe|h|ln_f)\.)", "transformer.", name)


FAMILY = common.Family(
    "gpt2",
    "GPT2LMHeadModel",
    PRESETS,
    from_hf,
    to_hf,
    common.no_gguf,
    rules=_rules,
    redundant=(r".*\.attn\.(masked_)?bias",),
    own_name=own_name,
    width_key="n_inner",
    conv1d=True,
    classifier_stem="GPT2",
    torch_final_norm="model.ln_f",
)
