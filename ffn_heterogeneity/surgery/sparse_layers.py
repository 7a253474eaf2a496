"""The step from dense layers to layers with experts, which `partition` and `upcycle` share."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import ConfigError, LayerConfig, ModelConfig
from ffn_heterogeneity.models.families import config_from_hf, config_to_hf, count_parameters
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.models.walk import ffn_blocks, write
from ffn_heterogeneity.surgery import neurons
from ffn_heterogeneity.surgery.selection import layer_subset
from ffn_heterogeneity.tree import is_abstract

# Families of experts in transformers, by the dense family with the same attention and norms.
FAMILIES_OF_EXPERTS = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}


def check_top_k(top_k: int, routed: int) -> None:
    if not 1 <= top_k <= routed:
        raise ValueError(f"top_k={top_k}: expected 1 to {routed}, the number of routed experts")


def dense_blocks(model: Model, layers: str, experts: int = 1) -> dict[int, dict]:
    """{layer: its block}, numpy unless abstract, of plain dense layers that `experts` divides."""
    config, params = model.config, model.params
    chosen = layer_subset(layers, config.n_layers, config.groups)
    for layer in chosen:
        if (count := config.layers[layer].experts) is not None:
            raise ValueError(f"layer {layer} already has {count} experts: choose dense layers")
        width = config.layers[layer].ffn_width
        if width % experts:
            raise ValueError(
                f"layer {layer}: experts={experts} does not divide the {width} neurons; choose a "
                f"divisor, such as {' or '.join(map(str, _near_divisors(width, experts)))}"
            )
    params = params if is_abstract(params) else jax.tree.map(np.asarray, params)
    blocks = {
        place.layer: ffn for place, ffn in ffn_blocks(config, params) if place.layer in chosen
    }
    return {layer: neurons.plain(ffn, layer) for layer, ffn in blocks.items()}


def _near_divisors(width: int, experts: int) -> list[int]:
    """The next lower and higher divisors of the width."""
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    lower, higher = [n for n in divisors if n < experts], [n for n in divisors if n > experts]
    return [*lower[-1:], *higher[:1]]


def zero_router(ffn: dict, columns: int, kind: str) -> dict:
    kernel = ffn["up"]["kernel"]
    if kind == "linear":
        return {"kernel": np.zeros((kernel.shape[0], columns), kernel.dtype)}
    hidden = {"kernel": np.zeros((kernel.shape[0], columns), kernel.dtype)}
    return {"hidden": hidden, "kernel": np.zeros((columns, columns), kernel.dtype)}


def with_experts(
    model: Model, new: Mapping[int, dict], fields: dict, asked: dict, report: dict
) -> tuple[Model, dict]:
    """The model with those FFNs [E, ...] and fields of `LayerConfig`, and the full report."""
    config = model.config

    def changed(i: int, layer: LayerConfig) -> LayerConfig:
        if i not in new:
            return layer
        return dataclasses.replace(layer, ffn_width=new[i]["down"]["kernel"].shape[1], **fields)

    layers = tuple(changed(i, layer) for i, layer in enumerate(config.layers))
    after = family_of_experts(dataclasses.replace(config, layers=layers))
    places = {Place(layer, None, "ffn"): leaves for layer, leaves in new.items()}
    params = restack(after, write(config, model.params, places))
    counts = count_parameters(after)
    report = {name: asked[name] for name in ("router", "layers", "noise") if name in asked} | {
        "experts": fields["experts"],
        "top_k": fields["top_k"],
        "shared": fields["shared"],
        "family": after.family,
        "ffn_widths_before": list(config.ffn_widths),
        "ffn_widths_after": list(after.ffn_widths),
        "parameters_before": count_parameters(config)["total"],
        "parameters_after": counts["total"],
        "active_parameters": counts["active"],
        **report,
    }
    return dataclasses.replace(model, config=after, params=params), report


def family_of_experts(config: ModelConfig) -> ModelConfig:
    """The config in a family of transformers that has its experts, if there is one.

    Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE. Other models keep their family, and
    are written in the native form (io/hf/export.py).
    """
    family = FAMILIES_OF_EXPERTS.get(config.family)
    biases = config.ffn_bias or config.attention_bias or config.attention_out_bias
    if family is None or family == "mixtral" and biases:
        return config
    other = dataclasses.replace(config, family=family)
    stated = dataclasses.replace(other, generation="", head=None)
    try:
        return other if config_from_hf(config_to_hf(stated)) == stated else config
    except ConfigError:
        return config
