"""The interface of a probe."""

import dataclasses
from collections.abc import Callable
from typing import Any

NEEDS = frozenset({"attention_weights", "block_cosine", "sink_weights"})


@dataclasses.dataclass(frozen=True)
class Probe:
    """A pure function evaluated inside the (rematerialised) layer scan.

    Attributes:
      name: key of its results in `outputs["probes"]`.
      function: (seen: models.block.LayerIO, batch, per_layer slice or None) -> small tree. The
        results of all layers come back stacked, [L, ...].
      kind: "sum": its leaves are SUMS and COUNTS, so that results add up over batches and devices;
        "example": one row an example, [B, ...], which an objective's predictions may gather.
      needs: what costs extra and must be asked for statically: `NEEDS`.
    """

    name: str
    function: Callable[[Any, dict, Any], Any]
    needs: frozenset[str] = frozenset()
    kind: str = "sum"
