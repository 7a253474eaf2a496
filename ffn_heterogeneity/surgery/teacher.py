"""A teacher inside a compressed model: its FFNs from before (MLP Fusion, section IV-D)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.io.load import Model, load_config, load_model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import slots, stack_leaves, unstack
from ffn_heterogeneity.tree import TEACHER, flatten, is_abstract, unflatten
from ffn_heterogeneity.wording import settings_of

SHARED = ("layers/", "embed/", "relative/", "encoder_norm/")  # of both: all but heads
# Fields of a layer with experts in which teacher and student must agree.
ROUTING = ("top_k", "gates", "shared", "router", "capacity", "overflow")


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Settings of `insert_teacher`; `model`: as before compression, a directory or a hub id."""

    model: str = ""


def insert_teacher(model: Model, settings: Mapping[str, Any] | Teacher, data=None, key=None):
    """Add, under `teacher/`, the uncompressed model's FFNs of the layers whose FFN differs.

    Teacher and student share all other weights, so the teacher needs memory only for those blocks.
    Also runs under `jax.eval_shape`. Use it after surgeries that change which layers are stacked.

    Returns:
      (the model, {"layers" with a teacher, from 0}).

    Raises:
      ValueError: the models differ in depth, outside their FFNs, or in how tokens are sent to
        experts; all FFNs are equal; or only the teacher's are experts.
    """
    asked = settings_of(Teacher, settings)
    if not asked.model:
        raise ValueError("teacher.model is empty: name the model that was compressed")
    abstract = is_abstract(model.params)
    if abstract:
        config = load_config(asked.model)
        uncompressed = causal_lm.init(config, jax.random.key(0))
    else:
        loaded = load_model(asked.model)
        config, uncompressed = loaded.config, loaded.params
    if config.n_layers != model.config.n_layers:
        depths = f"{config.n_layers} layers, this model {model.config.n_layers}"
        raise ValueError(f"teacher.model={asked.model} has {depths}")
    taught, layers = unstack(uncompressed)["layers"], unstack(model.params)["layers"]
    trees = ({**uncompressed, "layers": taught}, {**model.params, "layers": layers})
    if not abstract and (unlike := _unlike(*trees)):
        raise ValueError(f"teacher.model={asked.model}: its {unlike} is not this model's")
    other = [i for i, (a, b) in enumerate(zip(taught, layers, strict=True)) if not _same(a, b)]
    if not other:
        raise ValueError(f"teacher.model={asked.model} has the same FFNs: nothing to distill")
    sparse = [i for i in other if config.layers[i].experts is not None]
    if dense := [i for i in sparse if model.config.layers[i].experts is None]:
        raise ValueError(
            f"teacher.model={asked.model}: layer {dense[0]} (from 0) has experts, and this model's "
            "is dense: train without it and without the loss layerwise"
        )
    for i in sparse:
        routed = (config.layers[i], model.config.layers[i])
        if unlike := [name for name in ROUTING if len({getattr(x, name) for x in routed}) > 1]:
            values = ", ".join(f"{name}={getattr(routed[0], name)}" for name in unlike)
            raise ValueError(
                f"teacher.model={asked.model}: layer {i} (from 0) has {values}, and this model has "
                "not: a teacher's tokens are sent to experts as the student's"
            )
    leaves = {}
    for slot in slots(model.params):
        if set(slot.layers) & set(other):
            blocks = [taught[layer]["ffn"] for layer in slot.layers]
            for path, leaf in flatten(jax.tree.map(stack_leaves, *blocks)).items():
                leaves[f"{slot.path}/ffn/{path}"] = leaf
    params = {**model.params, TEACHER: unflatten(leaves)}
    return dataclasses.replace(model, params=params), {"layers": other}


def _same(one: dict, other: dict) -> bool:
    """True if two layers have equal FFNs, leaf by leaf; False on shapes alone."""
    a, b = flatten(one["ffn"]), flatten(other["ffn"])
    if {path: leaf.shape for path, leaf in a.items()} != {p: leaf.shape for p, leaf in b.items()}:
        return False
    return not is_abstract([a, b]) and all(np.array_equal(a[path], b[path]) for path in a)


def _unlike(uncompressed: dict, model: dict) -> str | None:
    """Name the first leaf outside FFNs and heads that differs; None if all are equal."""
    leaves = flatten(model)
    for path, leaf in flatten(uncompressed).items():
        ours = path.startswith(SHARED) and "/ffn/" not in path
        if ours and not np.array_equal(leaf, leaves.get(path)):
            return path
    return None
