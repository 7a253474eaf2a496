"""Removal of neurons or experts from checkpoint to checkpoint, one layer in memory at a time.

`reduce.reduce_blocks` or `experts.without_experts` processes each layer; the family
(`models/families`) maps tensors to layers.
The result has the same bytes as the model reduced in memory and written by `save_pretrained`.
Unchanged tensors are copied.
"""

import dataclasses
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from ffn_heterogeneity.io import tokenizer_files
from ffn_heterogeneity.io.assemble import Stored, checked, is_index
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.hf import read as huggingface
from ffn_heterogeneity.io.hf.card import published
from ffn_heterogeneity.io.hf.export import (
    MAX_SHARD_BYTES,
    choose_form,
    local_directory,
    pad,
    write_configs,
)
from ffn_heterogeneity.io.pieces import Pieces, Spec, open_pieces
from ffn_heterogeneity.io.read_ahead import read_ahead
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import Family, Rule, expected_shapes
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.walk import blocks_of, joined
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.surgery.experts import ExpertCut, ExpertRemoval
from ffn_heterogeneity.surgery.reduce import only_block, reduce_blocks, results_of
from ffn_heterogeneity.surgery.removal_plan import Cut, RemovalPlan
from ffn_heterogeneity.tree import flatten, unflatten


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A directory of safetensors; opening it checks names, shapes and dtypes, reading the values.

    Attributes:
      by_layer: the family's rules for the tensors of each layer's FFN.
    """

    directory: Path
    config: ModelConfig
    family: Family
    by_layer: dict[int, list[Rule]]
    tensors: dict[str, Stored]

    def read(self, name: str) -> np.ndarray:
        """Read a tensor in its file's layout.

        Raises:
          CheckpointError: NaN or infinity.
        """
        return checked(name, self.tensors[name], True)

    def place(self, name: str) -> tuple[str, int, int]:
        """(file, first byte, end) of the tensor."""
        stored = self.tensors[name]
        end = stored.start + math.prod(stored.shape) * stored.dtype.itemsize
        return stored.file, stored.start, end

    def leaves(self, layer: int) -> dict[str, np.ndarray]:
        """{path: leaf} of all rules that involve the layer's FFN."""
        leaves = {}
        for rule in self.by_layer[layer]:
            leaves |= zip(rule.paths, rule.load([self.read(n) for n in rule.names]), strict=True)
        return leaves

    def blocks(self, layer: int) -> dict[Place, dict]:
        """Leaves of the layer's blocks."""
        return dict(blocks_of(self.config, layer, _ffn_of(self.leaves(layer), layer)))


def open_checkpoint(directory: str | os.PathLike) -> Checkpoint:
    """Open a directory without reading values, except those of a head next to tied embeddings.

    Raises:
      CheckpointError: as `huggingface.open_pretrained`.
    """
    directory = Path(directory)
    config, family, rules, tensors = huggingface.open_pretrained(directory)
    return Checkpoint(directory, config, family, _by_layer(rules), tensors)


def _by_layer(rules: Sequence[Rule]) -> dict[int, list[Rule]]:
    """The rules of each layer's FFN."""
    by_layer: dict[int, list[Rule]] = {}
    for rule in rules:
        for layer in {int(m[1]) for p in rule.paths if (m := re.match(r"layers/(\d+)/ffn/", p))}:
            by_layer.setdefault(layer, []).append(rule)
    return by_layer


class Neurons:
    """A removal of neurons, layer by layer; `config`: afterwards, `changed`: the layers."""

    def __init__(self, plan: RemovalPlan, checkpoint: Checkpoint):
        self.plan, self.before = plan, checkpoint.config
        widths = self.before.ffn_widths
        self.cuts = plan.cuts(self.before, lambda i: only_block(checkpoint.blocks(i), i))
        self.changed = {layer for layer, cut in self.cuts.items() if _size(cut)}
        left = [width - _size(self.cuts.get(i, 0)) for i, width in enumerate(widths)]
        self.config = self.before.with_widths(left)
        self.removed = {layer: np.zeros(0, np.int64) for layer in self.cuts}
        self.reports: dict[int, list[dict]] = {}

    def apply(self, layer: int, ffn: dict) -> dict:
        """The leaves of the layer's FFN without the neurons that go."""
        blocks = dict(blocks_of(self.before, layer, ffn))
        new, self.removed[layer], self.reports[layer] = reduce_blocks(
            self.before, blocks, self.plan, cut=self.cuts[layer]
        )
        return joined(self.before, Place(layer, None, "ffn"), ffn, new)

    def results(self) -> dict:
        """The contents of `results.json`."""
        reports = [report for layer in sorted(self.reports) for report in self.reports[layer]]
        return results_of(self.plan, (self.before, self.config), self.removed, reports)


def check_streamed(plan: RemovalPlan | ExpertRemoval) -> None:
    """Raise ValueError if the plan needs the dense model in memory, as activations do."""
    looks = plan.looks if isinstance(plan, RemovalPlan) else plan.needs_text or plan.protect
    if looks:
        raise ValueError(
            "streaming=True never loads the whole model, which this criterion, protection or "
            "compensation needs: leave it out"
        )


def compress_directory(
    source: str | os.PathLike,
    target: str | os.PathLike,
    plan: RemovalPlan | ExpertRemoval,
    *,
    export: str = "auto",
    dtype: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> dict:
    """Write the smaller model of `source` to `target` atomically.

    Weights and config.json are identical to those of the removal in memory; generation_config.json
    and the tokenizer's files are copied. An existing `target` is replaced.

    Args:
      export, dtype, max_shard_bytes: as in `save_pretrained`.

    Returns:
      The contents of `results.json`; of neurons also written to `target`/removed_neurons.json.

    Raises:
      ValueError, CheckpointError: as `compress.run`.
    """
    check_streamed(plan)
    checkpoint = open_checkpoint(source)
    of_neurons = isinstance(plan, RemovalPlan)
    change = Neurons(plan, checkpoint) if of_neurons else ExpertCut(plan, checkpoint.config)
    smaller = change.config
    form = choose_form(smaller, export)
    merged = any(layer.routes for layer in smaller.layers)
    if merged and (form.config != smaller or not of_neurons):
        what = "with export='padded'" if of_neurons else "of which some go"
        raise ValueError(f"merged experts {what}: leave streaming=true out")
    shapes = expected_shapes(form.config)
    specs = _specs(checkpoint, form.config, shapes, dtype)
    with local_directory(epath.Path(target)) as temporary:
        with open_pieces(temporary, specs, max_shard_bytes) as pieces:
            _write(checkpoint, form.config, change, pieces)
        write_configs(temporary, form, {spec.dtype for spec in specs.values()})
        for pattern in ("generation_config.json", *tokenizer_files.FILES):
            for file in filter(Path.is_file, checkpoint.directory.glob(pattern)):
                shutil.copyfile(file, temporary / file.name)
        results = change.results()
        if of_neurons:
            write_json(temporary / "removed_neurons.json", published(results))
    return results


def _specs(
    checkpoint: Checkpoint, written: ModelConfig, shapes: Mapping[str, tuple], dtype: Any
) -> dict[str, Spec]:
    specs = {}
    for rule in checkpoint.family.rules(written):
        for name, shape in zip(rule.names, rule.stored_shapes(shapes), strict=True):
            stored = checkpoint.tensors[name].dtype
            kept = dtype is None or is_index(stored)
            specs[name] = Spec(shape, np.dtype(stored if kept else dtype))
    return specs


def _write(
    checkpoint: Checkpoint,
    written: ModelConfig,
    change: Neurons | ExpertCut,
    pieces: Pieces,
) -> None:
    """Write all tensors, file by file.

    Args:
      written: config of the written leaves.
    """
    shapes, by_layer = expected_shapes(written), _by_layer(checkpoint.family.rules(written))
    both = zip(written.ffn_widths, checkpoint.config.ffn_widths, strict=True)
    rewritten = {*change.changed} | {layer for layer, (new, old) in enumerate(both) if new != old}
    turns = _turns(checkpoint, rewritten, pieces.order)
    order = [name for _, names in turns for name in names]
    places = [checkpoint.place(name) for name in order]
    shown, reached = bar("writing", total=len(order), unit="tensor"), 0
    with shown, read_ahead(places) as reach:
        for layer, names in turns:
            reach(reached)
            reached += len(names)
            shown.update(len(names))
            if layer is None:
                array = checkpoint.read(names[0])
                pieces.write(names[0], array)
                continue
            leaves = checkpoint.leaves(layer)
            ffn = _ffn_of(leaves, layer)
            if layer in change.changed:
                ffn = change.apply(layer, ffn)
            for path, leaf in flatten(ffn).items():
                path = f"layers/{layer}/ffn/{path}"
                leaves[path] = pad(leaf, shapes[path])
            for rule in by_layer[layer]:
                saved = rule.save([leaves[path] for path in rule.paths])
                for name, array in zip(rule.names, saved, strict=True):
                    pieces.write(name, array)


def _turns(
    checkpoint: Checkpoint, rewritten: set[int], order: Sequence[str]
) -> list[tuple[int | None, list[str]]]:
    """List the steps in order: (None, [a tensor to copy]) or (layer, all its tensors)."""
    owners = {
        name: layer
        for layer in rewritten
        for rule in checkpoint.by_layer[layer]
        for name in rule.names
    }
    turns: list[tuple[int | None, list[str]]] = []
    begun = set()
    for name in order:
        layer = owners.get(name)
        if layer is None:
            turns.append((None, [name]))
        elif layer not in begun:
            begun.add(layer)
            turns.append((layer, [name for name in owners if owners[name] == layer]))
    return turns


def _size(cut: Cut) -> int:
    return cut if isinstance(cut, int) else len(cut)


def _ffn_of(leaves: dict[str, np.ndarray], layer: int) -> dict:
    prefix = f"layers/{layer}/ffn/"
    return unflatten({p.removeprefix(prefix): x for p, x in leaves.items() if p.startswith(prefix)})
