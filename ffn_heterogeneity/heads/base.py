"""The class of all heads."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ffn_heterogeneity.tree import Leaf

ROOT = "task_head"


@dataclasses.dataclass(frozen=True)
class Head:
    """One head.

    Attributes:
      leaves: path under `params["task_head"]` -> its declaration.
      apply: (params, outputs, batch, drop) -> what losses and predictions read as
        `outputs["predictions"]`. It is handed the whole tree; `drop(x)` is x under the run's
        dropout in training, x itself elsewhere.
      says: its leaves -> what results.json tells of them.
      probes: what it reads of the layers, in `outputs["probes"]`.
      sizes: of the head's own dimensions that the declarations name.
    """

    leaves: Mapping[str, Leaf]
    apply: Callable[[dict, dict, Mapping[str, jax.Array], Callable], Any]
    says: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda leaves: {}
    probes: tuple = ()
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
