"""Surgeries on what stands beside kernels: LoRA put in, everything folded away."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.adapters import lora
from ffn_heterogeneity.io.export import fold
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.stack import restack, unstack


def insert_lora(model: Model, settings: Mapping[str, Any], data=None, key=None) -> tuple:
    """LoRA beside every kernel whose path ("layers/3/ffn/down") `settings["targets"]` is found in.

    The function of the model is unchanged (B = 0). A kernel's draw depends on the key and its path
    alone. Runs under `jax.eval_shape` too.

    Args:
      settings: "rank", "alpha" (s = alpha / rank), "targets" (a regular expression).
      key: of the draws; None: `jax.random.key(0)`.

    Returns:
      (the model, {"adapted": paths}).

    Raises:
      ValueError: a rank below 1, no such kernel, or one that has LoRA's leaves already.
    """
    check_lora(settings)
    key, tree = jax.random.key(0) if key is None else key, unstack(model.params)
    layers, adapted = [], []
    for i, layer in enumerate(tree["layers"]):
        layer = jax.tree.map(lambda leaf: leaf, layer)  # its dicts are new
        for path, leaves in _linears(layer, f"layers/{i}"):
            if not re.search(settings["targets"], path):
                continue
            if "lora_a" in leaves:
                raise ValueError(f"{path} has LoRA's leaves already: fold the model first")
            own = jax.random.fold_in(key, zlib.crc32(path.encode()))
            leaves |= lora.init(own, leaves["kernel"], settings["rank"], settings["alpha"])
            adapted.append(path)
        layers.append(layer)
    if not adapted:
        raise ValueError(f"targets={settings['targets']!r} is found in no kernel's path, such as "
                         "layers/0/ffn/down")  # fmt: skip
    params = restack(model.config, {**tree, "layers": layers})
    return dataclasses.replace(model, params=params), {"adapted": adapted}


def check_lora(settings: Mapping[str, Any]) -> None:
    """Refuses settings that are wrong whatever the model; errors as `insert_lora`."""
    if settings["rank"] < 1 or not np.isfinite(settings["alpha"]):
        raise ValueError(f"rank={settings['rank']} must be at least 1, alpha={settings['alpha']} "
                         "finite")  # fmt: skip
    try:
        re.compile(settings["targets"])
    except re.error as error:
        raise ValueError(f"targets={settings['targets']!r}: {error}") from None


def fold_all(model: Model, settings=None, data=None, key=None) -> tuple:
    """Masks, adapters and P into the kernels: a plain model of the same function."""
    tree = fold(unstack(jax.tree.map(np.asarray, model.params)))
    return dataclasses.replace(model, params=restack(model.config, tree)), {}


def _linears(node: Any, path: str) -> Iterator[tuple[str, dict]]:
    """(path, leaves) of every module with a kernel; the dicts are the tree's own."""
    if "kernel" in node:
        yield path, node
        return
    for name, child in node.items():
        if isinstance(child, dict):
            yield from _linears(child, f"{path}/{name}")
