"""Registry of model families: by name, config.json, GGUF architecture or preset.

To add a family, write a module with a `FAMILY` and add an entry to `_MODULES`.
"""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ConfigError, ModelConfig
from ffn_heterogeneity.models.families import (
    bert,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    mixtral,
    olmo,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    roberta,
    switch,
    t5,
)
from ffn_heterogeneity.models.families.common import Family, no_gguf
from ffn_heterogeneity.models.families.deci import MODEL_TYPE, from_deci
from ffn_heterogeneity.models.families.deci import to_deci as to_deci
from ffn_heterogeneity.models.families.rules import Rule as Rule
from ffn_heterogeneity.models.leaves import count_parameters as count_parameters
from ffn_heterogeneity.models.leaves import expected_shapes as expected_shapes
from ffn_heterogeneity.wording import check_choice

_DECODERS = (llama, gemma, gemma2, gemma3, gpt2, gpt_neox, mistral, olmo, phi3, qwen2, qwen3)
_MODULES = (*_DECODERS, mixtral, qwen3_moe, bert, roberta, t5, switch)
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in _MODULES}
PRESETS: dict[str, tuple[ModelConfig, str]] = {
    name: entry for family in FAMILIES.values() for name, entry in family.presets.items()
}


def family_by_name(name: str) -> Family:
    """Return the family of that name.

    Raises:
      ConfigError: unknown; the message lists the known ones.
    """
    check_choice("family", name, FAMILIES, ConfigError)
    return FAMILIES[name]


def preset(name: str) -> tuple[ModelConfig, str]:
    """Return `(config, hub id)` of a preset such as "gemma2_2b".

    Raises:
      ConfigError: unknown; the message lists the known ones.
    """
    check_choice("preset", name, PRESETS, ConfigError)
    return PRESETS[name]


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json; unequal FFN widths are in `per_layer_config`, as in transformers 5.15."""
    family = family_by_name(config.family)
    values = family.to_hf(config)
    if config.ffn_widths != config.widest:
        values["per_layer_config"] = {
            str(i): {family.width_key_of(layer): layer.ffn_width}
            for i, layer in enumerate(config.layers)
        }
    return values


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Return the `ModelConfig` of config.json, by `model_type`, else by `architectures`.

    Only widths are read from `per_layer_config` and `block_configs`.

    Raises:
      ConfigError: unknown kind of model (the message lists the known ones), or settings that the
        family cannot express.
    """
    if values.get("quantization_config"):
        raise ConfigError(
            "quantized checkpoints (quantization_config) are not supported: use the "
            "original weights or a GGUF file"
        )
    values = from_deci(values) if values.get("model_type") == MODEL_TYPE else values
    kind, architectures = values.get("model_type"), values.get("architectures") or []
    for family in FAMILIES.values():
        if kind == (family.model_type or family.name) or (
            kind is None and family.architecture in architectures
        ):
            layers = values.get("per_layer_config") or {}
            return _with_layers(family.from_hf(values), layers, family)
    known = [family.model_type or family.name for family in FAMILIES.values()]
    raise ConfigError(
        f"model_type {kind!r} (architectures {architectures}) is not known: {', '.join(known)}"
    )


def _with_layers(
    config: ModelConfig, layers: Mapping[str, Mapping[str, Any]], family: Family
) -> ModelConfig:
    """Return the config with the widths of `per_layer_config`."""
    widths = list(config.ffn_widths)
    keys = [family.width_key_of(layer) for layer in config.layers]
    for name, settings in layers.items():
        i = int(name)
        key = keys[i] if 0 <= i < len(keys) else ""
        others = set(settings) - {key}
        if not key or others:
            what = f"sets {', '.join(sorted(others))}" if key else f"the model has {len(widths)}"
            raise ConfigError(f"per_layer_config of layer {name}: {what}; only widths are read")
        widths[i] = settings.get(key, widths[i])
    return config.with_widths(widths) if layers else config


def family_from_gguf(architecture: str) -> Family:
    """Return the family of a GGUF `general.architecture`.

    Raises:
      ConfigError: unknown; the message lists the known ones.
    """
    families = [family for family in FAMILIES.values() if family.from_gguf is not no_gguf]
    for family in families:
        if architecture in (family.gguf_architecture or family.name, family.gguf_uneven or None):
            return family
    known = [family.gguf_architecture or family.name for family in families]
    raise ConfigError(f"GGUF architecture {architecture!r} is not known: {', '.join(known)}")
