"""Models of fewer blocks: the first ones (P-32, Tables 3, 4 and 7), or any others."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import require_one_stack
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.wording import check_numbers, settings_of


@dataclasses.dataclass(frozen=True)
class Truncation:
    """Settings of `truncate`; `blocks`: number of blocks to keep, 0: all."""

    blocks: int = 0

    def __post_init__(self):
        check_numbers(self, blocks="[0, inf), 0 for all")


def truncate(model: Model, settings: Mapping[str, Any] | Truncation, data=None, key=None) -> tuple:
    """Keep the first blocks, the embeddings, the final norm and the head.

    Also runs under `jax.eval_shape`.

    Returns:
      (the model, {"blocks", "blocks_before"}).

    Raises:
      ValueError: more blocks than the model has, or a task's head.
    """
    asked = settings_of(Truncation, settings).blocks
    config = model.config
    blocks = asked or config.n_layers
    if asked:
        require_one_stack(config, "truncation to the first blocks")
    if blocks > config.n_layers:
        raise ValueError(f"blocks={blocks}: the model has {config.n_layers}")
    if config.head is not None and blocks < config.n_layers:
        raise ValueError("the model has a task's head: truncate it before the head is trained")
    report = {"blocks": blocks, "blocks_before": config.n_layers}
    return with_blocks(model, range(blocks)), report


def with_blocks(model: Model, kept: Sequence[int]) -> Model:
    """Return the model with these blocks alone; the others pass the residual stream on."""
    config, tree = model.config, unstack(model.params)
    shorter = dataclasses.replace(config, layers=tuple(config.layers[i] for i in kept))
    params = restack(shorter, {**tree, "layers": [tree["layers"][i] for i in kept]})
    return dataclasses.replace(model, config=shorter, params=params)
