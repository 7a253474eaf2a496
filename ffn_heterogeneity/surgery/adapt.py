"""Surgeries that insert LoRA, DoRA, MacDrop or NF4 into kernels, and that fold adapters away."""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.adapters import FFN_LEAVES, adapter_leaves, dora, lora, macdrop, nf4
from ffn_heterogeneity.io.hf.structure import fold
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.walk import linears, write
from ffn_heterogeneity.surgery.attack import Massive, check_layer, massive_weights
from ffn_heterogeneity.tree import flatten, is_abstract, no_indices
from ffn_heterogeneity.wording import check_numbers, naming, settings_of


@dataclasses.dataclass(frozen=True)
class Quantised:
    """Settings of `quantise`; `targets` is a pattern for kernel paths ("layers/3/ffn/down")."""

    targets: str = "attention/|ffn/"

    def __post_init__(self):
        with naming(f"targets={self.targets!r}", re.error):
            re.compile(self.targets)


# Targets: the kernels of feed-forward blocks, without routers; and MLP Fusion's LoRA (Table VII).
MLPS = "ffn/(gate|up|down)"
LORA_ON_MLPS = {"rank": 8, "alpha": 32.0, "targets": MLPS}


@dataclasses.dataclass(frozen=True)
class Lora(Quantised):
    """Settings of LoRA and DoRA: s = alpha / rank; `dropout` applies to A's input in training."""

    rank: int = 16
    alpha: float = 16.0
    dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_numbers(self, rank="[1, inf)", alpha="(-inf, inf)", dropout="[0, 1)")


# Settings of a surgery without any.
Nothing = dataclasses.make_dataclass("Nothing", (), frozen=True)


def insert_lora(model: Model, settings: Mapping[str, Any] | Lora, data=None, key=None) -> tuple:
    """Add LoRA to every kernel whose path matches `targets`.

    The model computes the same function as before (B = 0). The random A of a kernel depends only on
    the key and the kernel's path. Also runs under `jax.eval_shape`.

    Args:
      settings: those of `Lora`.
      key: random key; None: `jax.random.key(0)`.

    Returns:
      (the model, {"adapted": paths}).

    Raises:
      ValueError: a rank below 1, no matching kernel, or a kernel that already has LoRA's leaves.
    """
    settings = settings_of(Lora, settings)

    def put(path: str, leaves: dict, kernel_key: jax.Array) -> dict:
        shape = jax.eval_shape(effective_kernel, leaves)
        return leaves | lora.init(kernel_key, shape, settings.rank, settings.alpha)

    return inserted(model, settings.targets, put, key, "lora_a")


def insert_dora(model: Model, settings: Mapping[str, Any], data=None, key=None) -> tuple:
    """Add DoRA: `insert_lora` plus the column norms of each adapted kernel as trained weights."""
    adapted, report = insert_lora(model, settings, key=key)
    pattern = "|".join(f"^{re.escape(path)}$" for path in report["adapted"])

    def put(path: str, leaves: dict, kernel_key: jax.Array) -> dict:
        return leaves | dora.init(effective_kernel(leaves))

    return inserted(adapted, pattern, put)


def quantise(model: Model, settings: Mapping[str, Any] | Quantised, data=None, key=None) -> tuple:
    """Quantize every kernel whose path matches `targets` to NF4.

    Args:
      settings: those of `Quantised`.

    Returns:
      (the model, {"adapted": paths, "bytes_a_weight": bytes per weight of those kernels}).

    Raises:
      ValueError: no matching kernel, a kernel whose number of inputs is not a multiple of 64, or
        one with adapters.
    """
    settings = settings_of(Quantised, settings)
    sizes = []

    def put(path: str, leaves: dict, kernel_key: jax.Array) -> dict:
        if set(leaves) - {"kernel", "bias"}:
            raise ValueError(f"{path} has adapters: quantise before they are put in")
        kernel = leaves["kernel"]
        try:
            made = nf4.quantise(kernel)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; leave it out of targets") from None
        sizes.append((sum(leaf.size * leaf.dtype.itemsize for leaf in made.values()), kernel.size))
        return {name: leaf for name, leaf in leaves.items() if name != "kernel"} | made

    model, report = inserted(model, settings.targets, put)
    used, weights = map(sum, zip(*sizes, strict=True))
    return model, report | {"bytes_a_weight": used / weights}


def insert_macdrop(
    model: Model, settings: Mapping[str, Any] | macdrop.Macdrop, data=None, key=None
) -> tuple:
    """Add MacDrop's leaves to gate and up of the massive layer; they act only in training.

    In a layer with experts they act on the massive expert alone, and all scopes are of its neurons.
    On shapes alone (a dry run) the massive layer is assumed to be `layer`, by default the first,
    and the massive expert the first.

    Args:
      settings: those of `macdrop.Macdrop`: k; scope: "massive" (the k massive neurons), "layer"
        (all neurons of their layer), "others" (all but the k); layer and token as in
        `attack.massive_weights`.

    Returns:
      (the model, {"layer" (from 1), "layer_index" (from 0), "indices" of the k neurons}), in a
      layer with experts also "expert" (from 1) and "expert_index" (from 0).

    Raises:
      ValueError: settings out of range, or a layer that already has MacDrop.
    """
    settings = settings_of(macdrop.Macdrop, settings)
    if is_abstract(model.params):
        assumed = model.config.layers[check_layer(model.config, settings.layer or 0)]
        indices, expert = np.arange(assumed.ffn_width), None if assumed.experts is None else 0
        massive = Massive(settings.layer or 0, indices, np.zeros(len(indices)), [], expert)
    else:
        massive = massive_weights(model.config, model.params, settings.layer, settings.token)
    k, layer, indices = settings.k, massive.layer, massive.indices
    if k > len(indices):
        raise ValueError(f"k={k}: layer {layer} (from 0) has {len(indices)} neurons")
    rows = {"massive": indices[:k], "layer": indices, "others": indices[k:]}[settings.scope]
    block = Place(layer, massive.expert, "ffn").path

    def put(path: str, leaves: dict, kernel_key: jax.Array) -> dict:
        fan_in, width = jax.eval_shape(effective_kernel, leaves).shape
        ours = path.startswith(f"{block}/")
        chosen = np.sort(rows) if ours else no_indices(width, len(rows))
        return leaves | macdrop.init(fan_in, chosen)

    report = massive.where() | {"indices": indices[:k].tolist()}
    pattern = rf"^layers/{layer}/(experts/\d+/)?ffn/(gate|up)$"
    model, _ = inserted(model, pattern, put, mark=macdrop.KEEP)
    return model, report


def assumed_layer(settings: Mapping[str, Any]) -> str:
    """Note on the layer that `insert_macdrop` assumes without weights; "" if it is set."""
    if settings_of(macdrop.Macdrop, settings).layer is not None:
        return ""
    return (
        "no weights are read: MacDrop's massive layer is taken to be the first "
        "(--config.macdrop.layer, from 0, names another), and so is its massive expert; of equal "
        "layers and experts each needs the same"
    )


def inserted(
    model: Model,
    targets: str,
    put: Callable[[str, dict, jax.Array], dict],
    key: jax.Array | None = None,
    mark: str = "",
) -> tuple[Model, dict]:
    """Replace the leaves of each kernel whose path matches the pattern by `put(path, leaves, key)`.

    The key that `put` gets depends only on `key` and the kernel's path.

    Args:
      key: random key; None: `jax.random.key(0)`.
      mark: name of a leaf that shows that a kernel was already adapted in this way.

    Returns:
      (the model, {"adapted": the paths of those kernels}).

    Raises:
      ValueError: no matching kernel, or one that was already adapted.
    """
    key = jax.random.key(0) if key is None else key
    tree, new, adapted = unstack(model.params), {}, []
    for place, leaves in linears(model.config, tree):
        if re.search(targets, place.path):
            if mark in leaves:
                raise ValueError(f"{place.path} has {mark} already: fold the model first")
            kernel_key = jax.random.fold_in(key, zlib.crc32(place.path.encode()))
            new[place] = put(place.path, leaves, kernel_key)
            adapted.append(place.path)
    if not adapted:
        raise ValueError(
            f"targets={targets!r} is found in no kernel's path, such as layers/0/ffn/down"
        )
    params = restack(model.config, write(model.config, tree, new))
    return dataclasses.replace(model, params=params), {"adapted": adapted}


def fold_all(model: Model, settings=None, data=None, key=None) -> tuple:
    """Fold masks, adapters and P into the kernels: a plain model with the same outputs."""
    settings_of(Nothing, settings)
    tree = fold(model.config, unstack(jax.tree.map(np.asarray, model.params)))
    return dataclasses.replace(model, params=restack(model.config, tree)), {}


def folded(model: Model) -> Model:
    """Return the model with its adapters folded into the kernels; a plain model is unchanged."""
    names = {path.rpartition("/")[2] for path in flatten(model.params)}
    return fold_all(model)[0] if names & {*adapter_leaves(), *FFN_LEAVES} else model
