"""The interface of task heads."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ffn_heterogeneity.tree import Leaf

ROOT = "task_head"


@dataclasses.dataclass(frozen=True)
class Head:
    """A task head.

    Attributes:
      leaves: path under `params["task_head"]` -> its declaration.
      apply: (params, outputs, batch, drop) -> `outputs["predictions"]`, which losses and
        predictions read. `params` is the whole tree; `drop(x)` applies the run's dropout in
        training and returns x otherwise.
      says: leaves -> facts about them for results.json.
      probes: probes that it reads from `outputs["probes"]`.
      sizes: sizes of the head's dimensions in the declarations.
    """

    leaves: Mapping[str, Leaf]
    apply: Callable[[dict, dict, Mapping[str, jax.Array], Callable], Any]
    says: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda leaves: {}
    probes: tuple = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
