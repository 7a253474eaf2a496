"""Surgeries on what stands beside kernels: LoRA, DoRA, MacDrop, NF4 put in, all folded away."""

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
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.walk import linears, write
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.tree import flatten, is_abstract
from ffn_heterogeneity.wording import check_numbers, naming, settings_of


@dataclasses.dataclass(frozen=True)
class Quantised:
    """Settings of `quantise`; `targets` is found in the paths of kernels ("layers/3/ffn/down")."""

    targets: str = "attention/|ffn/"

    def __post_init__(self):
        with naming(f"targets={self.targets!r}", re.error):
            re.compile(self.targets)


@dataclasses.dataclass(frozen=True)
class Lora(Quantised):
    """Settings of LoRA and DoRA: s = alpha / rank; `dropout` is of what A reads, in training."""

    rank: int = 16
    alpha: float = 16.0
    dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_numbers(self, rank="[1, inf)", alpha="(-inf, inf)", dropout="[0, 1)")


# The settings of a surgery that has none.
Nothing = dataclasses.make_dataclass("Nothing", (), frozen=True)


def insert_lora(model: Model, settings: Mapping[str, Any] | Lora, data=None, key=None) -> tuple:
    """LoRA beside every kernel in whose path `targets` is found.

    The function of the model is unchanged (B = 0). A kernel's draw depends on the key and its path
    alone. Runs under `jax.eval_shape` too.

    Args:
      settings: of `Lora`.
      key: of the draws; None: `jax.random.key(0)`.

    Returns:
      (the model, {"adapted": paths}).

    Raises:
      ValueError: a rank below 1, no such kernel, or one that has LoRA's leaves already.
    """
    settings = settings_of(Lora, settings)

    def put(path: str, leaves: dict, own: jax.Array) -> dict:
        shape = jax.eval_shape(effective_kernel, leaves)
        return leaves | lora.init(own, shape, settings.rank, settings.alpha)

    return inserted(model, settings.targets, put, key, "lora_a")


def insert_dora(model: Model, settings: Mapping[str, Any], data=None, key=None) -> tuple:
    """`insert_lora`, and beside each adapted kernel the lengths of its columns, which train."""
    adapted, report = insert_lora(model, settings, key=key)
    pattern = "|".join(f"^{re.escape(path)}$" for path in report["adapted"])

    def put(path: str, leaves: dict, own: jax.Array) -> dict:
        return leaves | dora.init(effective_kernel(leaves))

    return inserted(adapted, pattern, put)


def quantise(model: Model, settings: Mapping[str, Any] | Quantised, data=None, key=None) -> tuple:
    """NF4 in the place of every kernel in whose path `targets` is found.

    Args:
      settings: of `Quantised`.

    Returns:
      (the model, {"adapted": paths, "bytes_a_weight": of those kernels}).

    Raises:
      ValueError: no such kernel, one whose inputs are no multiple of 64, or one that has adapters.
    """
    settings = settings_of(Quantised, settings)
    sizes = []

    def put(path: str, leaves: dict, own: jax.Array) -> dict:
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
    """MacDrop's leaves beside gate and up of the massive layer; without training they do nothing.

    Of shapes alone (a dry run) the layer is `layer` or, unset, the first.

    Args:
      settings: of `macdrop.Macdrop`: k; scope: "massive" (the k massive neurons), "layer" (all of
        their layer), "others" (all but the k); layer and token as in `attack.massive_weights`.

    Returns:
      (the model, {"layer" (from 1), "layer_index" (from 0), "indices" of the k}).

    Raises:
      ValueError: settings out of range, a layer with experts, or one that has MacDrop already.
    """
    settings = settings_of(macdrop.Macdrop, settings)
    if is_abstract(model.params):
        layer = settings.layer or 0
        indices = np.arange(model.config.ffn_widths[layer])
    else:
        found = massive_weights(model.config, model.params, settings.layer, settings.token)
        layer, indices = found.layer, found.indices
    k = settings.k
    if k > len(indices):
        raise ValueError(f"k={k}: layer {layer} (from 0) has {len(indices)} neurons")
    rows = {"massive": indices[:k], "layer": indices, "others": indices[k:]}[settings.scope]

    def put(path: str, leaves: dict, own: jax.Array) -> dict:
        fan_in = jax.eval_shape(effective_kernel, leaves).shape[0]
        return leaves | macdrop.init(fan_in, np.sort(rows))

    report = {"layer": layer + 1, "layer_index": layer, "indices": indices[:k].tolist()}
    pattern = rf"^layers/{layer}/ffn/(gate|up)$"
    model, _ = inserted(model, pattern, put, mark=macdrop.KEEP)
    return model, report


def assumed_layer(settings: Mapping[str, Any]) -> str:
    """The layer that `insert_macdrop` takes of shapes alone; "" where the settings name it."""
    if settings_of(macdrop.Macdrop, settings).layer is not None:
        return ""
    return (
        "no weights are read: MacDrop's massive layer is taken to be the first "
        "(--config.macdrop.layer, from 0, names another); of equal layers each needs the same"
    )


def inserted(
    model: Model,
    targets: str,
    put: Callable[[str, dict, jax.Array], dict],
    key: jax.Array | None = None,
    mark: str = "",
) -> tuple[Model, dict]:
    """(the model with the leaves `put(path, leaves, own key)` of each kernel where the pattern is
    found, {"adapted": their paths}).

    A kernel's own key depends on `key` and its path alone.

    Args:
      key: of the draws; None: `jax.random.key(0)`.
      mark: a leaf by which a kernel that has such leaves already is known.

    Raises:
      ValueError: no such kernel, or one that has them already.
    """
    key = jax.random.key(0) if key is None else key
    tree, new, adapted = unstack(model.params), {}, []
    for place, leaves in linears(model.config, tree):
        if re.search(targets, place.path):
            if mark in leaves:
                raise ValueError(f"{place.path} has {mark} already: fold the model first")
            own = jax.random.fold_in(key, zlib.crc32(place.path.encode()))
            new[place] = put(place.path, leaves, own)
            adapted.append(place.path)
    if not adapted:
        raise ValueError(
            f"targets={targets!r} is found in no kernel's path, such as layers/0/ffn/down"
        )
    params = restack(model.config, write(model.config, tree, new))
    return dataclasses.replace(model, params=params), {"adapted": adapted}


def fold_all(model: Model, settings=None, data=None, key=None) -> tuple:
    """Masks, adapters and P into the kernels: a plain model of the same function."""
    settings_of(Nothing, settings)
    tree = fold(model.config, unstack(jax.tree.map(np.asarray, model.params)))
    return dataclasses.replace(model, params=restack(model.config, tree)), {}


def folded(model: Model) -> Model:
    """Return the model with its adapters in the kernels; a plain model is returned as it is."""
    names = {path.rpartition("/")[2] for path in flatten(model.params)}
    return fold_all(model)[0] if names & {*adapter_leaves(), *FFN_LEAVES} else model
