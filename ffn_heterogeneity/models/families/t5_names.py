"""Tensor names of T5 and Switch: two prefixes, and numbers for the parts of a block."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import rules
from ffn_heterogeneity.models.leaves import required

_ATTENTION = {"q": "q", "k": "k", "v": "v", "out": "o"}
# Family -> its name of a feed-forward block, and of the parts of one with experts ("{e}"), if any.
_FFN: dict[str, tuple[str, dict[str, str]]] = {
    "t5": ("DenseReluDense", {}),
    "switch": (
        "mlp",
        {
            "router": "router.classifier",
            "up": "experts.expert_{e}.wi",
            "down": "experts.expert_{e}.wo",
        },
    ),
}
# Of transformers' T5ForSequenceClassification.
CLASSIFIER = {
    f"{module}/{ours}": f"classification_head.{stored}.{theirs}"
    for module, stored in (("dense", "dense"), ("out", "out_proj"))
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
}
# The embedding under the stacks' names; files of MADLAD-400 have no "shared.weight".
TABLES = ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
_TOP = {"embed/embedding": "shared", "head/kernel": "lm_head"}


def names(config: ModelConfig) -> dict[str, str]:
    """{path of a leaf: name of its tensor, with "{e}" where each expert has one}."""
    found, (module, of_experts) = {}, _FFN[config.family]
    for path, _, layer in required(config):
        if layer is None:
            found[path] = _outer_name(config, path)
            continue
        _, number, *inner = path.split("/")
        stack, ffn = ("decoder", 2) if layer.causal else ("encoder", 1)
        prefix = f"{stack}.block.{int(number) - config.stacks[stack][0]}.layer."
        if layer.experts is None or inner[0] != "ffn":
            name = _inner_name(inner, ffn, layer.ffn_kind == "gated", module)
            found[path] = f"{prefix}{name}.weight"
        elif inner[1] in of_experts and inner[2:] == ["kernel"]:
            found[path] = f"{prefix}{ffn}.{module}.{of_experts[inner[1]]}.weight"
        else:
            found[path] = rules.OWN + path.replace("/", ".")
    return found


def _outer_name(config: ModelConfig, path: str) -> str:
    if path in _TOP:
        return f"{_TOP[path]}.weight"
    place, _, stack = path.partition("/")
    if place == "relative":
        table = "layer.0.SelfAttention.relative_attention_bias.weight"
        return f"{stack}.block.0.{table}"
    last = "encoder" if place == "encoder_norm" or config.kind == "encoder" else "decoder"
    return f"{last}.final_layer_norm.weight"


def _inner_name(inner: list[str], ffn: int, gated: bool, ffn_module: str) -> str:
    """Name of a tensor inside a layer's block, without its ending."""
    module, *rest = inner
    numbers = {"attention_norm": 0, "cross_norm": 1, "ffn_norm": ffn}
    if module in numbers:
        return f"{numbers[module]}.layer_norm"
    if module == "attention":
        return f"0.SelfAttention.{_ATTENTION[rest[0]]}"
    if module == "cross_attention":
        return f"1.EncDecAttention.{_ATTENTION[rest[0]]}"
    theirs = {"gate": "wi_0", "up": "wi_1" if gated else "wi", "down": "wo"}
    return f"{ffn}.{ffn_module}.{theirs[rest[0]]}"


def tensor_rules(config: ModelConfig) -> list[rules.Rule]:
    """Rules of one tensor per leaf, or per expert."""
    made = []
    for path, name in names(config).items():
        if "{e}" in name:
            experts = config.layers[int(path.split("/")[1])].experts or 0
            each = [name.replace("{e}", str(e)) for e in range(experts)]
            made.append(rules.by_expert(path, each))
        else:
            made.append(rules.one_tensor(path, name))
    return made


def own_name(name: str) -> str:
    """A tensor's name without the prefix of some files."""
    return re.sub(r"^(transformer|text_model|t5)\.", "", name)


def by_tensors(
    config: ModelConfig, values: Mapping[str, Any], found: Collection[str]
) -> ModelConfig:
    """The config without an untied head, or without a decoder, if the file has none."""
    if config.kind == "encoder":
        return config
    if any(name.startswith("decoder.") for name in found):
        tied = config.tied or "lm_head.weight" not in found
        return dataclasses.replace(config, tied=tied)
    return config.encoder()
