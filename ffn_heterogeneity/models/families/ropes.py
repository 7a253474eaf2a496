"""Rotary embeddings: of a config.json, as transformers 4 and 5 write them; of GGUF metadata."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import ConfigError, RopeConfig


def rope_from_hf(
    values: Mapping[str, Any], theta: float, max_position: int, fraction: float = 1.0
) -> RopeConfig:
    """Convert `rope_scaling` (classic) or one `rope_parameters` dict (transformers 5).

    Families that rotate a part of each head pass `fraction` instead of the key.

    Raises:
      ConfigError: another rope type, or a dict per kind of layer instead of one.
    """
    theta = float(values.get("rope_theta") or theta)
    kinds = {values[key] for key in ("rope_type", "type") if values.get(key)} or {"default"}
    nested = [key for key, value in values.items() if isinstance(value, Mapping)]
    if nested or len(kinds) > 1:
        what = f"one rope per kind of layer ({', '.join(nested)})" if nested else sorted(kinds)
        raise ConfigError(f"rope_parameters: got {what}; expected one rope of one type")
    kind = kinds.pop()
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial rotary embeddings (partial_rotary_factor) are not supported")
    if kind == "default":
        return RopeConfig(theta, fraction=fraction)
    if kind == "linear":
        return RopeConfig(theta, linear_factor=float(values["factor"]), fraction=fraction)
    if kind == "llama3":
        old = int(values.get("original_max_position_embeddings") or max_position)
        scaling = (values["factor"], values["low_freq_factor"], values["high_freq_factor"])
        return RopeConfig(theta, llama3=(*map(float, scaling), old), fraction=fraction)
    raise ConfigError(f"rope type {kind!r} is not known: default, linear, llama3")


def shared_rope_from_hf(
    values: Mapping[str, Any], max_position: int, fraction: float | None = None
) -> RopeConfig:
    """Read the rope of a config.json whose layers share one.

    As in transformers 5, `rope_scaling` replaces `rope_parameters`; transformers 4 and vLLM read
    only `rope_scaling`.

    Args:
      fraction: default for families that rotate a part of each head.

    Raises:
      ConfigError: as `rope_from_hf`, or `rope_scaling` drops the theta of `rope_parameters`.
    """
    parameters, scaling = (values.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    theta = values.get("rope_theta") or 10_000.0
    lost = parameters.get("rope_theta") or theta
    if scaling and not (values.get("rope_theta") or scaling.get("rope_theta")) and lost != theta:
        raise ConfigError(
            f"rope_scaling replaces rope_parameters and its rope_theta={lost}: write rope_theta "
            "into rope_scaling too"
        )
    scaling = dict(scaling or parameters)
    if fraction is not None:
        fraction = scaling.pop("partial_rotary_factor", None) or fraction
    return rope_from_hf(scaling, theta, max_position, float(fraction or 1.0))


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """`RopeConfig` -> one `rope_parameters` dict, theta included."""
    if rope.llama3 is not None:
        factor, low, high, old = rope.llama3
        return {
            "rope_type": "llama3",
            "rope_theta": rope.theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": old,
        }
    if rope.linear_factor != 1.0:
        return {"rope_type": "linear", "rope_theta": rope.theta, "factor": rope.linear_factor}
    return {"rope_type": "default", "rope_theta": rope.theta}


def rope_from_gguf(
    meta: Mapping[str, Any], theta: float = 10_000.0, fraction: float = 1.0, divisors: bool = False
) -> RopeConfig:
    """Read the rope of GGUF metadata; as in llama.cpp, a factor without a type is linear.

    Args:
      theta: the default of `rope.freq_base`.
      divisors: whether the caller reads the tensor `rope_freqs`, divisors of the frequencies.

    Raises:
      ConfigError: another scaling than linear, or a tensor `rope_freqs` that nothing reads.
    """
    kind = meta.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ConfigError(f"GGUF rope.scaling.type={kind!r} is not known: none, linear")
    if "rope_freqs" in meta and not divisors:
        raise ConfigError("GGUF tensor rope_freqs.weight is not supported for this architecture")
    factor = meta.get("rope.scaling.factor") or meta.get("rope.scale_linear") or 1.0
    return RopeConfig(
        short_float(meta.get("rope.freq_base", theta)),
        linear_factor=1.0 if kind == "none" else short_float(factor),
        fraction=fraction,
    )


def short_float(value: float) -> float:
    """Shortest decimal that rounds to this float32: 9.99999975e-06 in the file means 1e-05."""
    return float(str(np.float32(value)))


def classic_scaling(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` value that transformers 4 and vLLM read; None without scaling."""
    if parameters["rope_type"] == "default":
        return None
    return {key: value for key, value in parameters.items() if key != "rope_theta"}


def rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """Keys of a config.json whose layers share the rope, for all its readers."""
    parameters = rope_to_hf(rope)
    return {
        "rope_theta": rope.theta,
        "rope_scaling": classic_scaling(parameters),
        "rope_parameters": parameters,
    }
