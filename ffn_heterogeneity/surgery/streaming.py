"""Neuron removal from checkpoint to checkpoint with only one layer in memory at a time.

`reduce.reduce_blocks` processes each layer; the family (`models/families`) maps tensors to layers.
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

from ffn_heterogeneity.io import safetensors, tokenizer_files
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
    _bytes: dict[str, tuple[int, int]]

    def read(self, name: str) -> np.ndarray:
        """Read a tensor in its file's layout.

        Raises:
          CheckpointError: NaN or infinity.
        """
        return checked(name, self.tensors[name], True)

    def place(self, name: str) -> tuple[str, int, int]:
        """(file, first byte, end) of the tensor."""
        stored = self.tensors[name]
        first = self._bytes[stored.name][0] + stored.start
        return stored.file, first, first + math.prod(stored.shape) * stored.dtype.itemsize

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
    by_layer: dict[int, list[Rule]] = {}
    for rule in rules:
        for layer in {int(m[1]) for p in rule.paths if (m := re.match(r"layers/(\d+)/ffn/", p))}:
            by_layer.setdefault(layer, []).append(rule)
    places: dict[str, tuple[int, int]] = {}
    for file in {stored.file for stored in tensors.values()}:
        places |= safetensors.places(file)
    return Checkpoint(directory, config, family, by_layer, tensors, places)


def check_streamed(plan: RemovalPlan) -> None:
    """Raise ValueError if the plan needs the dense model in memory, as activations do."""
    if plan.looks:
        raise ValueError(
            "streaming=True never loads the whole model, which this criterion, protection or "
            "compensation needs: leave it out"
        )


def compress_directory(
    source: str | os.PathLike,
    target: str | os.PathLike,
    plan: RemovalPlan,
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
      The contents of `results.json`; also written to `target`/removed_neurons.json.

    Raises:
      ValueError, CheckpointError: as `compress.run`.
    """
    check_streamed(plan)
    checkpoint = open_checkpoint(source)
    cuts = plan.cuts(
        checkpoint.config.ffn_widths, lambda layer: only_block(checkpoint.blocks(layer), layer)
    )
    widths = enumerate(checkpoint.config.ffn_widths)
    smaller = checkpoint.config.with_widths([w - _size(cuts.get(i, 0)) for i, w in widths])
    form = choose_form(smaller, export)
    if any(layer.routes for layer in smaller.layers) and form.config != smaller:
        raise ValueError("merged experts with export='padded': leave streaming=true out")
    shapes = expected_shapes(form.config)
    specs = _specs(checkpoint, form.config, shapes, dtype)
    with local_directory(epath.Path(target)) as temporary:
        with open_pieces(temporary, specs, max_shard_bytes) as pieces:
            removed, reports = _write(
                checkpoint, shapes, form.config.ffn_widths, plan, cuts, pieces
            )
        write_configs(temporary, form, {spec.dtype for spec in specs.values()})
        for pattern in ("generation_config.json", *tokenizer_files.FILES):
            for file in filter(Path.is_file, checkpoint.directory.glob(pattern)):
                shutil.copyfile(file, temporary / file.name)
        results = results_of(plan, (checkpoint.config, smaller), removed, reports)
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
    shapes: Mapping[str, tuple[int, ...]],
    widths: Sequence[int],
    plan: RemovalPlan,
    cuts: Mapping[int, Cut],
    pieces: Pieces,
) -> tuple[dict[int, np.ndarray], list[dict]]:
    """Write all tensors, file by file; return (removed neurons by layer, compensation reports).

    Args:
      shapes, widths: shapes of the written leaves, and widths of their FFNs.
    """
    removed = {layer: np.zeros(0, np.int64) for layer in cuts}
    reports = {}
    changed = {layer for layer, cut in cuts.items() if _size(cut)}
    both = zip(widths, checkpoint.config.ffn_widths, strict=True)
    rewritten = changed | {layer for layer, (new, old) in enumerate(both) if new != old}
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
            if layer in changed:
                config, place = checkpoint.config, Place(layer, None, "ffn")
                blocks = dict(blocks_of(config, layer, ffn))
                new, removed[layer], reports[layer] = reduce_blocks(
                    config, blocks, plan, cut=cuts[layer]
                )
                ffn = joined(config, place, ffn, new)
            for path, leaf in flatten(ffn).items():
                path = f"layers/{layer}/ffn/{path}"
                leaves[path] = pad(leaf, shapes[path])
            for rule in checkpoint.by_layer[layer]:
                saved = rule.save([leaves[path] for path in rule.paths])
                for name, array in zip(rule.names, saved, strict=True):
                    pieces.write(name, array)
    return removed, [report for layer in sorted(reports) for report in reports[layer]]


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
