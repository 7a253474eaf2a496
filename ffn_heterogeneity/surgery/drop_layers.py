"""Removal of whole blocks, those that move the residual stream least.

A block's score is the mean over tokens of

    1 - cos(x, x + block(x)) = 2 Psi

(JREG's displacement; "block influence" in ShortGPT, arXiv 2403.03853) on the full model, once. The
lowest go, and the residual stream passes where they were. The depth-wise rival of removing neurons.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ffn_heterogeneity.heads import make_head
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import require_one_stack
from ffn_heterogeneity.probes.displacement import DISPLACEMENT
from ffn_heterogeneity.probes.observe import observe, token_batches
from ffn_heterogeneity.surgery.calibration import calibration_rows, check_text, written
from ffn_heterogeneity.surgery.own_text import OWN
from ffn_heterogeneity.surgery.reduce import sizes_of
from ffn_heterogeneity.surgery.selection import layer_subset
from ffn_heterogeneity.surgery.truncate import with_blocks
from ffn_heterogeneity.tree import is_abstract
from ffn_heterogeneity.wording import check_numbers, settings_of

BATCH = 4  # rows per batch


@dataclasses.dataclass(frozen=True)
class Dropping:
    """Settings of `drop_layers`.

    Attributes:
      blocks: how many go.
      layers: which ones instead, as in `selection.layer_subset`: "3,5"; "": by their scores.
      calibration, calibration_tokens, seed: the text of the scores, as in
        `calibration.calibration_rows`.
    """

    blocks: int = 1
    layers: str = ""
    calibration: str = OWN
    calibration_tokens: int | None = None
    seed: int = 0

    def __post_init__(self):
        check_numbers(self, blocks="[1, inf)")
        who = "" if self.layers else "drop_layers without the names of layers"
        check_text(who, self.calibration, self.calibration_tokens)


def drop_layers(model: Model, settings: Mapping[str, Any] | Dropping, data=None, key=None) -> tuple:
    """Return the model without these blocks, and a report.

    Also runs under `jax.eval_shape`, where blocks without names are taken to be the last.

    Returns:
      (the model, {"dropped": ascending, "psi": of every block, None if they are named, the numbers
      of parameters, "own_rows" of self-generated text}).

    Raises:
      ValueError: no block would stay, two stacks, or a task's head that reads every block.
    """
    asked, config, psi, rows = settings_of(Dropping, settings), model.config, None, None
    require_one_stack(config, "removal of whole blocks")
    if config.head is not None and make_head(config, config.head).probes:
        raise ValueError(
            f"the head {config.head.name!r} reads every block: drop blocks before it is trained, "
            "or train it with pooling=last"
        )
    if asked.layers:
        dropped = layer_subset(asked.layers, config.n_layers, config.groups)
    elif is_abstract(model.params):
        dropped = tuple(range(config.n_layers)[-asked.blocks :])
    else:
        rows = calibration_rows(model, asked.calibration, asked.calibration_tokens, asked.seed)
        seen = observe(config, model.params, token_batches(rows, BATCH), DISPLACEMENT)
        sums = seen[DISPLACEMENT.name]["all"]
        psi = sums["sum"] / sums["count"]
        if not np.isfinite(psi).all():
            raise ValueError("the displacements are not finite: check the checkpoint")
        dropped = tuple(sorted(np.argsort(psi, kind="stable")[: asked.blocks].tolist()))
    if len(dropped) >= config.n_layers:
        raise ValueError(f"{len(dropped)} of {config.n_layers} blocks would go: name fewer")
    shorter = with_blocks(model, [i for i in range(config.n_layers) if i not in dropped])
    report = dataclasses.asdict(asked) | sizes_of(config, shorter.config)
    report |= {"dropped": list(dropped), "psi": None if psi is None else psi.tolist()}
    return shorter, report | written(asked.calibration, rows)


def assumed_layers(settings: Mapping[str, Any]) -> str:
    """Note on the blocks that `drop_layers` assumes to go without weights."""
    if settings_of(Dropping, settings).layers:
        return ""
    return "no weights are read: the blocks that go are taken to be the last"
