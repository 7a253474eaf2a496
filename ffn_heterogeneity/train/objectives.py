"""Objectives: the task of a training run, with everything specific to it.

The trainer has no code for batch leaves, heads, metrics or texts: they are defined by the
objective. Language modeling (`train/language.py`) is one of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from ffn_heterogeneity.heads import Head, make_head
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.block import dropout as drop_out
from ffn_heterogeneity.models.config import HeadConfig, ModelConfig
from ffn_heterogeneity.wording import check_number

LANGUAGE = "language_model"  # the default objective
Batch = dict[str, np.ndarray]
# The head's part of a step's dropout key; the layers split the key itself.
_HEAD_KEY = 0x4EAD


class Batches(Protocol):
    """Training batches: dicts of numpy arrays [B, ...], and a JSON-able state."""

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class ObjectiveSettings:
    """The part of a run's config that an objective gets, named as in `settings.TrainConfig`."""

    model: str
    objective: str
    data: Mapping[str, Any]
    own: Mapping[str, Any]
    batch_size: int
    accumulation: int
    seq_len: int
    seed: int
    max_batches: int | None


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run; a process reads the rows of its devices.

    Attributes:
      batches: training batches. Each has one of the objective's lengths, the same in every process:
        it depends on the seed and the step, so that a resumed run is the same.
      held_out: name of a set -> () -> one pass over its batches, always the same; the last one is
        padded with rows that do not count.
      says: (results) -> facts about this data for results.json and the model card.
      at_end: sets like `held_out`, evaluated once, with the exported weights.
    """

    batches: Batches
    held_out: Mapping[str, Callable[[], Iterator[Batch]]] = dataclasses.field(default_factory=dict)
    says: Callable[[Mapping[str, Any]], dict] = lambda results: {}
    at_end: Mapping[str, Callable[[], Iterator[Batch]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Objective:
    """A kind of task.

    Attributes:
      name: its name in configs.
      batch: leaf -> (its axes, its dtype). "B" is the rows of a batch; other axes belong to the
        objective ("T" for tokens, "S" for a second side, ...).
      lengths: {axis: size} of all axes except B, with one training program each. All are compiled
        before the first step; the largest decides about rematerialization and memory.
      data: (tokenizer or None, rows of the global batch that this process feeds) -> Data.
      head: the head on top of the model; None: the language-model head, or none.
      terms: default losses, as groups of `config.losses`. Without any, and without losses in the
        config, a model can be evaluated but not trained.
      probes: always computed; their results are in `outputs["probes"]`.
      counts: batch -> {name: number} reported at every step; "tokens" is used for the speed,
        "target_tokens" is the number of targets (a step without any causes a warning).
      predictions: (params, outputs, batch) -> {name: array [B, ...]}, one row per example of a
        held-out set, including references; rows where "valid" [B] is False do not count.
      metrics: {name: numpy array of all valid rows, of every process} -> {name: number}, on the
        host, for metrics that are not sums over batches (F1, Matthews, Spearman).
      evaluate: (params, batches) -> {name: number}, instead of both (decoded answers).
      best: "min:" or "max:" and the metric that selects the best checkpoint. One held-out set:
        "validation/<metric>"; several: "validation/<set>/<metric>".
      rates: (regex, peak learning rate) of leaves with a separate learning rate.
      together: n successive rows of a batch are packed into one row of the model, [B / n, n T],
        with "segment_ids" per example, so that short examples fill the space left by long ones.
    """

    name: str
    batch: Mapping[str, tuple[tuple[str, ...], Any]]
    lengths: tuple[Mapping[str, int], ...]
    data: Callable[..., Data]
    head: HeadConfig | None = None
    terms: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    probes: tuple = ()
    counts: Callable[[Mapping[str, jax.Array]], dict] = lambda batch: {}
    predictions: Callable[..., dict] | None = None
    metrics: Callable[[Mapping[str, np.ndarray]], Mapping[str, float]] | None = None
    evaluate: Callable[..., Mapping[str, float]] | None = None
    best: str = "min:validation/nll"
    rates: tuple[tuple[str, float], ...] = ()
    together: int = 1

    def __post_init__(self):
        axes = {axis for names, _ in self.batch.values() for axis in names} - {"B"}
        for length in self.lengths:
            for axis, size in length.items():
                name = "seq_len" if axis == "T" else f"length of axis {axis!r}"
                check_number(name, size, f"[1, {2**31})")
            if set(length) != axes:
                raise ValueError(
                    f"objective {self.name!r}: length {dict(length)} names other axes "
                    f"than its batch has besides B, {sorted(axes)}"
                )
        if not self.lengths or any(names[:1] != ("B",) for names, _ in self.batch.values()):
            raise ValueError(f"objective {self.name!r} needs a length, and B first in every leaf")

    def joined(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The batch for the model: leaves of tokens with `together` rows packed into one."""
        rows = {name for name, (axes, _) in self.batch.items() if axes == ("B", "T")}
        return {
            name: leaf.reshape(-1, self.together * leaf.shape[1]) if name in rows else leaf
            for name, leaf in batch.items()
        }

    @property
    def longest(self) -> Mapping[str, int]:
        """The length with the most positions."""
        return max(self.lengths, key=lambda length: sum(length.values()))

    @property
    def positions(self) -> int:
        """Positions of the longest row, over all axes."""
        return sum(self.longest.values())

    def shapes(self, rows: int, length: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a batch of `rows` rows of that length."""
        sizes = {"B": rows, **length}
        return {
            name: jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in axes), np.dtype(dtype))
            for name, (axes, dtype) in self.batch.items()
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """`forward(params, batch)` -> outputs of the model, with the objective's head applied."""

    objective: Objective
    model: ModelConfig
    options: causal_lm.RunOptions
    head: Head | None

    def __call__(self, params, batch, *, probes=(), dropout=None, per_layer=None) -> dict:
        """The keyword arguments are those of `causal_lm.forward`."""
        run = functools.partial(causal_lm.forward, dropout=dropout, per_layer=per_layer)
        return self._outputs(run, params, batch, probes, dropout)

    def nudged(self, params: dict, batch: Mapping[str, Any], nudges_lbtd: jax.Array) -> dict:
        """Run with `nudges_lbtd` added to the outputs of the FFNs (`causal_lm.nudged`)."""
        return self._outputs(
            functools.partial(causal_lm.nudged, nudges_lbtd=nudges_lbtd), params, batch
        )

    def of(self, model: ModelConfig) -> Forward:
        """The forward pass of a model with other widths, such as a teacher."""
        return dataclasses.replace(self, model=model)

    def _outputs(self, run, params, batch, probes=(), dropout=None) -> dict:
        objective, head = self.objective, self.head
        read = head.probes if head else ()
        probes = tuple(dict.fromkeys((*objective.probes, *read, *probes)))
        rows, batch = len(batch["tokens"]), objective.joined(batch)
        outputs = run(self.model, params, batch, options=self.options, probes=probes)

        draws = itertools.count()

        def drop(x: jax.Array) -> jax.Array:
            if dropout is None or dropout[1] is None:
                return x
            key, draw = jax.random.fold_in(dropout[0], _HEAD_KEY), next(draws)
            return drop_out(x, jax.random.fold_in(key, draw) if draw else key, dropout[1])

        if head is not None:
            outputs["predictions"] = head.apply(params, outputs, batch, drop)
        if objective.together > 1:
            hidden = outputs["hidden"]
            outputs["hidden"] = hidden.reshape(rows, -1, hidden.shape[-1])
        return outputs


def make_forward(
    objective: Objective, model: ModelConfig, options: causal_lm.RunOptions
) -> Forward:
    """Make the forward pass of `model` with the objective's head.

    Raises:
      ValueError: the model or `heads.HEADS` does not have the head.
    """
    head = make_head(model, objective.head) if objective.head else None
    if objective.head and model.head != objective.head:
        raise ValueError(
            f"objective {objective.name!r} needs a model with the head {objective.head.name!r}, "
            f"{objective.head.text}; this one has {model.head or 'none'}: train it first"
        )
    return Forward(objective, model, options, head)
