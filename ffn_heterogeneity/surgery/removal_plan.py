"""Removal plans (criterion, amount, layers), and the choice of neurons by them."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.surgery import criteria, states
from ffn_heterogeneity.surgery.compensation import COMPENSATIONS
from ffn_heterogeneity.surgery.selection import (
    highest,
    layer_subset,
    removal_count,
    rounded_count,
    select_global,
)
from ffn_heterogeneity.surgery.similarity import merges
from ffn_heterogeneity.wording import check_choice, check_known, check_numbers, naming

# The number of neurons that a layer loses or, with a global budget, their indices.
Cut = int | np.ndarray


@dataclasses.dataclass(frozen=True)
class RemovalPlan:
    """Settings of one removal of neurons.

    Attributes:
      criterion, reverse, seed: as in `criteria.layer_scores`, or criterion "similarity".
      ratio, count: exactly one of them, as in `selection.removal_count`.
      layers: as in `selection.layer_subset`.
      budget: "layer" (each chosen layer loses its share) or "global" (one budget over them all).
      compensation: how the remaining neurons are adjusted (`compensation.COMPENSATIONS`).
      protect: neurons that are removed last, whatever their score: "bos:5" (the 5 neurons of every
        layer with the largest |h| on bos), "massive:5" (in the massive layer only), "entropy:0.01"
        (the lowest-entropy 1% of every layer), or "" (none).
      multiple: the number of neurons that stay in a layer is rounded to a multiple of it, as in
        `selection.rounded_count`; 1: any number.
      lose: neurons that are removed first, whatever their score, instead of the last ones that the
        criterion would take: as `protect`, or "random:5", "random:0.01": this number, or share, of
        every layer's neurons that would stay, drawn with the seed. Takes priority over `protect`.
    """

    criterion: str
    ratio: float | None = None
    count: int | None = None
    layers: str | Sequence[int] = "all"
    budget: str = "layer"
    reverse: bool = False
    seed: int = 0
    compensation: str = "none"
    protect: str = ""
    lose: str = ""
    multiple: int = 1

    @property
    def looks(self) -> str:
        """The activations that the removal needs: "" (none), "bos" or "text"."""
        reads = self.compensation in states.METHODS or self.criterion in criteria.PUBLISHED
        return "text" if reads else self.chooses_by

    @property
    def chooses_by(self) -> str:
        """The activations that the choice of neurons needs, as `looks`."""
        if self.criterion in criteria.ON_TEXT:
            return "text"
        named_on_bos = any(x.startswith(("bos:", "massive:")) for x in (self.protect, self.lose))
        return "bos" if named_on_bos or self.criterion in criteria.ON_BOS else ""

    def __post_init__(self) -> None:
        known = sorted((*criteria.CRITERIA, criteria.SIMILARITY, *criteria.PUBLISHED))
        check_known([self.criterion], known, "criterion")
        check_choice("budget", self.budget, ("layer", "global"))
        if self.criterion in criteria.PUBLISHED:
            self._check_published()
        elif self.budget == "global":
            criteria.scoring(self.criterion)
        check_choice("compensation", self.compensation, COMPENSATIONS)
        for setting, spec in (("protect", self.protect), ("lose", self.lose)):
            if spec:
                criteria.check_named(setting, spec)
            if spec and self.criterion == criteria.SIMILARITY:
                raise ValueError(f"{setting}={spec!r}: criterion {self.criterion!r} has no scores")
        if self.lose and self.budget == "global":
            raise ValueError(f"lose={self.lose!r} is of each layer: use budget='layer'")
        if self.count is None:
            removal_count(1, ratio=self.ratio)
        check_numbers(self, multiple="[1, inf)")

    def _check_published(self) -> None:
        budget = criteria.PUBLISHED[self.criterion]
        if self.budget != budget:
            raise ValueError(f"criterion={self.criterion!r} is one with budget={budget!r}")
        for name in ("reverse", "protect", "lose"):
            if value := getattr(self, name):
                raise ValueError(f"{name}={value!r}: criterion {self.criterion!r} has no such form")

    def count_of(self, width: int) -> int:
        """Number of neurons that a layer of this width loses."""
        count = removal_count(width, ratio=self.ratio, count=self.count)
        return rounded_count(width, count, self.multiple)

    def global_cuts(self, scores: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Return {layer: the neurons that go} by scores [m] of each layer and one budget."""
        cuts = select_global(scores, ratio=self.ratio, count=self.count)
        if self.multiple == 1:
            return cuts
        counts = {i: (len(scores[i]), len(gone), self.multiple) for i, gone in cuts.items()}
        return {i: highest(scores[i], rounded_count(*each)) for i, each in counts.items()}

    def cuts(
        self, config: ModelConfig, leaves: Callable[[int], dict], seen: Sequence[Any] = ()
    ) -> Mapping[int, Cut]:
        """Return {layer: number of neurons to remove, or their indices} of the chosen layers.

        Args:
          config: the model's.
          leaves: layer -> its FFN leaves; called only for a global budget.
          seen: from `seen_states`, if `looks`.

        Raises:
          ValueError: an argument is out of its range; the message names it and the value.
        """
        widths = config.ffn_widths
        chosen = layer_subset(self.layers, config.n_layers, config.groups)
        if self.budget == "layer":
            return {layer: self.count_of(widths[layer]) for layer in chosen}
        # Sizes are checked before any score is computed.
        self.global_cuts({i: np.zeros(widths[i]) for i in chosen})
        options = {"seed": self.seed, "reverse": self.reverse, "protect": self.protect}
        scores = {}
        for i in chosen:
            layer_options = {"layer": i, "activations": seen[i] if seen else None}
            scores[i] = criteria.layer_scores(self.criterion, leaves(i), **layer_options, **options)
        return self.global_cuts(scores)

    def _with_lost(
        self, scores: np.ndarray, place: Place, cut: int, named: np.ndarray | None
    ) -> np.ndarray:
        """Choose the neurons to remove by their scores, those of `lose` first.

        Args:
          named: the neurons that `lose` names; None if they are drawn at random.

        Raises:
          ValueError: `lose` names more neurons than are removed, or than would stay.
        """
        gone = highest(scores, cut)
        if not self.lose:
            return gone
        if named is None:
            size = float(self.lose.partition(":")[2])
            seed_suffix = [1] if place.expert is None else [1, place.expert]
            rng = np.random.default_rng([self.seed, place.layer, *seed_suffix])
            stay = np.setdiff1d(np.arange(len(scores)), gone)
            count = int(size) if size >= 1 else math.ceil(size * len(scores))
            lost = rng.permutation(stay)[:count]
        else:
            lost, count = named, len(named)
        if not len(lost) == count <= cut:
            raise ValueError(
                f"lose={self.lose!r}: {count} of layer {place.layer}'s {len(scores)} neurons, of "
                f"which {cut} go and {len(scores) - cut} stay: name fewer"
            )
        others = np.setdiff1d(np.arange(len(scores)), lost)
        return np.union1d(lost, others[highest(scores[others], cut - count)])

    def choose(
        self, ffn: dict, place: Place, cut: Cut, seen: criteria.Seen = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return (the removed neurons of one block, ascending; the merges or None).

        The merges are those of `similarity.merges`. With `reverse`, it removes the neurons that
        would go last, including the very last [ours], and merges nothing.

        Raises:
          ValueError: non-finite weights; the message names the layer.
        """
        if not isinstance(cut, int):
            return np.sort(cut), None
        if self.criterion != criteria.SIMILARITY:
            options = {"seed": self.seed, "reverse": self.reverse, "protect": self.protect}
            options |= {"layer": place.layer, "expert": place.expert, "activations": seen}
            scores, named = criteria.layer_scores(self.criterion, ffn, **options), None
            if self.lose and not self.lose.startswith("random:"):
                with naming(f"layer {place.layer}"):
                    named = criteria.named(*criteria.check_named("lose", self.lose), ffn, seen)
            return self._with_lost(scores, place, cut, named), None
        width = ffn["down"]["kernel"].shape[0]
        with naming(f"layer {place.layer}"):
            steps = merges(ffn, width - 1 if self.reverse else cut)
        if not self.reverse:
            return np.sort(steps[:, 1]), steps
        last = np.setdiff1d(np.arange(width), steps[:, 1])
        return np.sort(np.append(steps[:, 1], last)[width - cut :]), None
