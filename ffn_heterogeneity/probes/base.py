"""The interface of a probe."""

import dataclasses
from collections.abc import Callable
from typing import Any

NEEDS = frozenset({"attention_weights", "block_cosine", "sink_weights"})


@dataclasses.dataclass(frozen=True)
class Probe:
    """A pure function evaluated inside the (rematerialized) layer scan.

    Attributes:
      name: key of its results in `outputs["probes"]`.
      function: (seen: models.block.LayerIO, batch, per_layer slice or None) -> small tree. The
        results of all layers are stacked, [L, ...].
      kind: "sum": its leaves are SUMS and COUNTS, so that results add up over batches and devices;
        "example": one row per example, [B, ...], which an objective's predictions may gather.
      needs: tensors that cost extra and must be requested statically: names of `NEEDS`.
    """

    name: str
    function: Callable[[Any, dict, Any], Any]
    needs: frozenset[str] = frozenset()
    kind: str = "sum"
