"""Surgeries, by name: functions from a model to a new model and a report.

`SURGERIES[name].function(model, settings, data=None, key=None) -> (model, report)` has no side
effects and leaves its arguments unchanged. `settings` is a mapping or the surgery's frozen
dataclass `SURGERIES[name].settings`, which has the names and defaults (configs read them) and the
checks that need no model. scripts/compress.py, stages and sweeps run the surgery that
`config.surgery` names; `abstract` surgeries also run on shapes alone, before training
(`config.prepare`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ffn_heterogeneity.adapters import macdrop
from ffn_heterogeneity.models.options import products
from ffn_heterogeneity.surgery import (
    adapt,
    attack,
    drop_layers,
    experts,
    fuse,
    merge_experts,
    partition,
    reduce,
    rescale,
    sparsity,
    teacher,
    truncate,
    upcycle,
)
from ffn_heterogeneity.wording import settings_from, settings_of


@dataclasses.dataclass(frozen=True)
class Surgery:
    """A named surgery; see this module.

    Attributes:
      abstract: whether it also runs under `jax.eval_shape`.
      assumed: settings -> a description of what such a run assumes about the weights, or "".
    """

    name: str
    function: Callable[..., tuple[Any, dict]]
    settings: type
    abstract: bool = False
    assumed: Callable[[Mapping[str, Any]], str] = lambda settings: ""

    def check(self, given: Mapping[str, Any]) -> Any:
        """Return the given settings; raise ValueError if one is unknown or out of range."""
        return settings_of(self.settings, given)

    def read(self, config: Mapping[str, Any]) -> Any:
        """Return the surgery's settings from a config with more keys; errors as `check`."""
        return settings_from(self.settings, config)

    @products()
    def __call__(self, *given: Any, **options: Any) -> tuple[Any, dict]:
        """Run `function`; raise ValueError if it does not return (model, report)."""
        result = self.function(*given, **options)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise ValueError(
                f"surgery {self.name!r} returned {type(result).__name__}: it must return (model, "
                "report), the report a dict (SURGERIES in surgery/__init__.py)"
            )
        return result


SURGERIES = {
    surgery.name: surgery
    for surgery in (
        Surgery("prune", reduce.prune, reduce.Removal),
        Surgery("fuse", fuse.fuse, fuse.Fusion, True, fuse.assumed_layer),
        Surgery("experts", experts.remove_experts, experts.ExpertRemoval),
        Surgery("lora", adapt.insert_lora, adapt.Lora, abstract=True),
        Surgery("nf4", adapt.quantise, adapt.Quantised, abstract=True),
        Surgery("dora", adapt.insert_dora, adapt.Lora, abstract=True),
        Surgery("macdrop", adapt.insert_macdrop, macdrop.Macdrop, True, adapt.assumed_layer),
        Surgery("scores", sparsity.insert_scores, sparsity.Scores, abstract=True),
        Surgery("score_mask", sparsity.fix_masks, sparsity.ScoreMask, abstract=True),
        Surgery("gates", sparsity.insert_gates, sparsity.Gates, abstract=True),
        Surgery("attack", attack.attack, attack.Attack),
        Surgery("truncate", truncate.truncate, truncate.Truncation, abstract=True),
        Surgery(
            "drop_layers",
            drop_layers.drop_layers,
            drop_layers.Dropping,
            True,
            drop_layers.assumed_layers,
        ),
        Surgery("rescale", rescale.rescale, rescale.Rescaling, abstract=True),
        Surgery("partition", partition.partition, partition.Partition, True, partition.assumed),
        Surgery("upcycle", upcycle.upcycle, upcycle.Upcycling, abstract=True),
        Surgery("teacher", teacher.insert_teacher, teacher.Teacher, abstract=True),
        Surgery("merge_experts", merge_experts.merge_experts, merge_experts.Merging),
        Surgery("fold", adapt.fold_all, adapt.Nothing),
    )
}
