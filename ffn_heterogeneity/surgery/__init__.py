"""Surgeries: functions from a model to a model, by name.

`SURGERIES[name].function(model, settings, data=None, key=None) -> (model, report)` changes neither
the model that it is given nor anything outside; `check(settings)` refuses what is wrong whatever
the model. scripts/compress.py, stages and sweeps run them by `config.surgery`; those that are
`abstract` also run on shapes alone, before a training (`config.prepare`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ffn_heterogeneity.surgery import adapt, attack, reduce


@dataclasses.dataclass(frozen=True)
class Surgery:
    """See this module; `abstract`: it also runs under `jax.eval_shape`, and `assumed(settings)`
    says what it then takes for what only weights would tell ("" for nothing)."""

    name: str
    function: Callable[..., tuple[Any, dict]]
    check: Callable[[Mapping[str, Any]], None]
    abstract: bool = False
    assumed: Callable[[Mapping[str, Any]], str] = lambda settings: ""

    def __call__(self, *given: Any, **options: Any) -> tuple[Any, dict]:
        """What `function` returns; ValueError where that is no model with its report."""
        found = self.function(*given, **options)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            raise ValueError(
                f"surgery {self.name!r} returned {type(found).__name__}: it must return (model, "
                "report), the report a dict (SURGERIES in surgery/__init__.py)"
            )
        return found


SURGERIES = {
    surgery.name: surgery
    for surgery in (
        Surgery("prune", reduce.prune, reduce.check),
        Surgery("lora", adapt.insert_lora, adapt.check_lora, abstract=True),
        Surgery("nf4", adapt.quantise, adapt.check_targets, abstract=True),
        Surgery("dora", adapt.insert_dora, adapt.check_lora, abstract=True),
        Surgery("macdrop", adapt.insert_macdrop, adapt.check_macdrop, True, adapt.assumed_layer),
        Surgery("attack", attack.attack, attack.check_attack),
        Surgery("fold", adapt.fold_all, lambda settings: None),
    )
}
