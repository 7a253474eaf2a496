"""The parts of a plan (train/plan.py): objective, loss, refreshes, options, trainable leaves."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from ffn_heterogeneity.adapters import REFRESHES, adapter_leaves, is_linear, kernel_readers
from ffn_heterogeneity.losses import term_of
from ffn_heterogeneity.losses.terms import (
    LossTerm,
    TermContext,
    key_of_weight,
    weights_of,
)
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.options import choose_dtype
from ffn_heterogeneity.models.stack import Slot, layer_names, slots
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.train.labels import labels
from ffn_heterogeneity.train.language import language
from ffn_heterogeneity.train.objectives import LANGUAGE, Objective, ObjectiveSettings
from ffn_heterogeneity.train.text_to_text import span_corruption, text_to_text
from ffn_heterogeneity.tree import TEACHER, Leaf, nodes, subtree
from ffn_heterogeneity.wording import naming, some

# remat="auto" is the first of these that fits (train/fit.py). If the products' outputs are saved,
# 3% of the operations are recomputed; saving everything needs three times the memory for them. GPUs
# wait for memory more than for products: there "none" comes first (9% faster on an H100).
AUTO_REMAT = ("dots", "attention_output", "full")
# Value of `train_only` for the blocks that have a teacher.
TAUGHT = "@taught"
# name in configs -> (its part of the config, the model's config) -> objective
OBJECTIVES: dict[str, Callable[[ObjectiveSettings, ModelConfig], Objective]] = {
    LANGUAGE: language,
    "labels": labels,
    "span_corruption": span_corruption,
    "text_to_text": text_to_text,
}


def auto_remat(platform: str | None) -> tuple[str, ...]:
    """The choices of remat="auto" on a platform, in the order of trial."""
    return ("none", *AUTO_REMAT) if platform == "gpu" else AUTO_REMAT


def objective_of(task: ObjectiveSettings, model: ModelConfig) -> Objective:
    """Make the objective that the config names, for a model.

    Raises:
      ValueError: invalid settings.
    """
    return OBJECTIVES[task.objective](task, model)


def made_whole(layers: Sequence[Slot], terms: Sequence[LossTerm]) -> list[str]:
    """List the kernels that the step materializes although their factors have a product.

    Each line also names their readers.

    Args:
      layers: `models.stack.slots` of the tree.
    """
    readers: dict[tuple[str, ...], list[str]] = {}
    for slot in layers:
        for name, leaves in nodes(slot.tree, is_linear):
            reader_names = kernel_readers(leaves)
            if reader_names is None:
                continue
            paths = [f"{slot.path}/{name}/{leaf}" for leaf in leaves if leaf != "bias"]
            for term in terms:
                # Terms that read the effective kernel name all of its leaves; others single leaves.
                if any(all(re.search(target, path) for path in paths) for target in term.targets):
                    reader_names.append(term.name)
            readers.setdefault(tuple(reader_names), []).append(f"{slot.path}/{name}")
    return [f"{some(paths)} whole for {', '.join(why)}" for why, paths in readers.items() if why]


def what_trains(
    params: dict,
    leaves: Mapping[str, Leaf],
    freeze: Sequence[str],
    train_only: Sequence[str],
    prepare: Sequence[str] = (),
) -> dict[str, Any]:
    """Return `partition.trainable_mask` for a config's patterns.

    `TAUGHT` among `train_only` means the blocks that have a teacher.

    Raises:
      RuleError: as there; without patterns a quantized model without adapters, or a loaded model
        with adapters (`prepare` adds none).
      ValueError: no block has a teacher.
    """
    names, by_layer = {path.rpartition("/")[2]: path for path in leaves}, layer_names(params)
    learned = {name for name, leaf in adapter_leaves().items() if leaf.trains}
    if "nf4_codes" in names and not train_only and not learned & set(names):
        raise partition.RuleError(
            f"{names['nf4_codes']}: the base is quantized, its kernels cannot train: add lora or "
            "dora to the config's argument, name trainable leaves (train_only), or fold it "
            "(configs/adapt.py:fold)"
        )
    beside = f"{names.get('lora_a', '').rpartition('/')[0]}/kernel" in leaves
    if beside and not (train_only or {"lora", "dora"} & {*prepare}):
        raise partition.RuleError(
            f"{names['lora_a']}: the model has adapters already, and its kernels would train too: "
            "give train_only=('/(lora_[ab]|dora_m)$',) for adapters alone, train_only=('.',) for "
            "all, or fold them first (configs/adapt.py:fold)"
        )
    if TAUGHT in train_only:
        taught = [slot for slot in slots(params) if subtree(params.get(TEACHER, {}), slot.path)]
        if not taught:
            raise ValueError(f"train_only={TAUGHT!r}: no block has a teacher (config.prepare)")
        layers = "|".join(str(layer) for slot in taught for layer in slot.layers)
        pattern = rf"^layers/({layers})/ffn/(gate|up|down)/"
        train_only = [pattern if regex == TAUGHT else regex for regex in train_only]
    return partition.trainable_mask(leaves, freeze, train_only, by_layer)


def make_refresh(groups: Mapping[str, Mapping[str, Any]]) -> Callable[..., Any] | None:
    """Compose functions of `adapters.REFRESHES`; None without any.

    Args:
      groups: name -> settings.
    """
    functions = [REFRESHES[name](settings) for name, settings in groups.items()]

    def refresh(params, step, key, hyper, train):
        for i, function in enumerate(functions):
            subkey = None if key is None else jax.random.fold_in(key, i)
            params = function(params, step, subkey, hyper, train)
        return params

    return refresh if functions else None


def make_terms(
    groups: Mapping[str, Mapping[str, Any]],
    model: ModelConfig,
    mesh: Mesh | AbstractMesh,
    trained: bool = True,
) -> tuple[LossTerm, ...]:
    """Make the terms of the loss or, if not `trained`, the monitors of validation.

    A group is one term: `term` (default: the group's name) is its name in `losses.TERMS`, `weight`
    its factor (None: it is not built; 0 is built, so that a sweep over the weight is one program),
    and the rest are the term's settings. Monitors have the same form without weights, or name a
    probe (of `probes.PROBES`) to average. Terms are summed in the order of `TERMS`, then by name,
    because configs do not preserve order.

    Raises:
      ValueError: an unknown term or setting.
    """
    built = weights_of(groups) if trained else {}
    kind, made = "losses" if trained else "monitors", {}
    for name, group in groups.items():
        weight = key_of_weight(name) if trained else 0.0
        if trained and weight not in built:
            continue
        with naming(f"{kind}.{name}"):
            place, term = term_of(TermContext(name, weight, model, mesh), group, not trained)
        made[place, name] = term
    return tuple(made[key] for key in sorted(made))


def run_options(
    compute_dtype: str,
    remat: str,
    unroll: int,
    mesh: Mesh | AbstractMesh,
    packed: bool,
    adapter_dropout: float,
) -> causal_lm.RunOptions:
    """A run's options, with "auto" resolved for the mesh's platform, and shardings."""
    platform = causal_lm.platform_of(mesh)
    on_mesh = partition.run_shardings(mesh) if mesh.size > 1 else {}
    unrolled: int | bool = unroll or True
    if unroll < 0:
        unrolled = True if platform == "gpu" and mesh.size == 1 else 1
    return causal_lm.RunOptions(
        compute_dtype=choose_dtype(compute_dtype, platform),
        remat=auto_remat(platform)[0] if remat == "auto" else remat,
        unroll=unrolled,
        packed=packed,
        adapter_dropout=adapter_dropout,
        platform=platform,
        **on_mesh,
    )
