"""Weighted mixtures of any data: rows drawn from several pipelines, each with its task.

Every row of a global batch comes from one member. Row k comes from the member that is furthest
behind its share, so after any number of rows each member has its share to within one row. The draw
depends only on k and the weights. A member that ends starts its next pass.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.batches import STATE_VERSION, Batch, Feed, take_rows
from ffn_heterogeneity.data.sources import DataError


def draws(weights: Sequence[float], counts: list[int]) -> Iterator[int]:
    """Iterate over the member of each row; updates `counts`, the numbers of drawn rows.

    It is the (first) member i with the largest w_i (n + 1) - c_i after n rows.
    """
    shares = np.asarray(weights, np.float64) / sum(weights)
    while True:
        member = int(np.argmax(shares * (sum(counts) + 1) - np.asarray(counts)))
        counts[member] += 1
        yield member


class WeightedPipeline(Feed):
    """Training and validation batches of several pipelines; made by `pipeline.make_pipeline`.

    Attributes:
      members: (name, weight, pipeline with one row per batch).
      held_out: the members with held-out data, or None.
    """

    def __init__(self, members: Sequence[tuple[str, float, Any]], *feed: Any):
        super().__init__(*feed)
        self.members = tuple(members)
        held = [pipeline for _, _, pipeline in members if pipeline.held_out is not None]
        self.held_out = held or None

    def train_iterator(self, epochs: None = None) -> WeightedIterator:
        """Iterate forever over this process's rows of batches."""
        if epochs is not None:
            raise DataError(f"epochs={epochs}: a mixture has no end; give steps instead")
        return WeightedIterator(self)

    def validation_iterator(self, max_batches: int | None = None) -> Iterator[Batch]:
        """Iterate once over the members' held-out rows, drawn by weight, the last batch padded.

        Raises:
          DataError: no member has held-out data.
        """
        if self.held_out is None:
            raise DataError("no validation data: set validation_fraction")
        left = [(w, p.validation_iterator()) for _, w, p in self.members if p.held_out is not None]
        rows = _until_all_end(left)
        for _ in itertools.count() if max_batches is None else range(max_batches):
            drawn = list(itertools.islice(rows, self.batch_size))
            if not drawn:
                return
            empty = {key: np.zeros_like(value) for key, value in drawn[0].items()}
            drawn += [empty] * (self.batch_size - len(drawn))
            yield take_rows(_stacked(drawn), self.rows)


class WeightedIterator:
    """A `batches.BatchIterator` over members; its state includes those of the members.

    Attributes:
      counts: rows drawn of each member.
    """

    def __init__(self, pipeline: WeightedPipeline):
        self._pipeline = pipeline
        self._names = [name for name, _, _ in pipeline.members]
        self._weights = [weight for _, weight, _ in pipeline.members]
        self._iterators = [member.train_iterator() for _, _, member in pipeline.members]
        self.counts = [0] * len(self._names)
        self._draws = draws(self._weights, self.counts)

    def __iter__(self) -> WeightedIterator:
        return self

    def __next__(self) -> Batch:
        # Every process draws all rows, so that a position is the same in all processes.
        chosen = list(itertools.islice(self._draws, self._pipeline.batch_size))
        rows = [next(self._iterators[member]) for member in chosen]
        return take_rows(_stacked(rows), self._pipeline.rows)

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of all rows so far that came from each member."""
        total = max(sum(self.counts), 1)
        return {name: n / total for name, n in zip(self._names, self.counts, strict=True)}

    def get_state(self) -> dict[str, Any]:
        members = [iterator.get_state() for iterator in self._iterators]
        return {
            "version": STATE_VERSION,
            "mixture": self._identity(),
            "counts": [*self.counts],
            "members": members,
        }

    def _identity(self) -> dict[str, float]:
        return dict(zip(self._names, self._weights, strict=True))

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position.

        Raises:
          DataError: a state of another mixture, or an error of a member.
        """
        if state.get("mixture") != self._identity():
            raise DataError(
                f"cannot resume: the data state is of the mixture {state.get('mixture')}, this one "
                f"is {self._identity()}; use that one, or start a new run"
            )
        for iterator, place in zip(self._iterators, state["members"], strict=True):
            iterator.set_state(place)
        self.counts[:] = state["counts"]

    def close(self) -> None:
        """Stop the members' threads."""
        with contextlib.ExitStack() as stack:
            for iterator in self._iterators:
                stack.callback(iterator.close)


def _stacked(rows: Sequence[Batch]) -> Batch:
    return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}


def _until_all_end(left: list[tuple[float, Iterator[Batch]]]) -> Iterator[Batch]:
    """Iterate over rows by weight; when a member ends, the others get its share."""
    while left:
        for member in draws([weight for weight, _ in left], [0] * len(left)):
            row = next(left[member][1], None)
            if row is None:
                del left[member]
                break
            yield row


def parse_mixture(mixture: Any) -> list[tuple[str, str, float]]:
    """Check a mixture ((task, path, weight), ...) and return its entries.

    Raises:
      DataError: an entry of another form, a weight that is not positive, fewer than two members.
    """
    if not isinstance(mixture, Sequence):
        raise DataError(f"mixture={mixture!r} is not a list of (task, path, weight)")
    members = []
    for entry in mixture:
        try:
            task, path, weight = entry
            members.append((str(task), str(path), float(weight)))
        except (TypeError, ValueError, OverflowError):  # an integer too large for a float
            raise DataError(f"mixture: {entry!r:.99} is not (task, path, weight)") from None
        if not 0 < members[-1][2] < float("inf"):
            raise DataError(f"mixture: {entry!r} has a weight that is not positive and finite")
    if not sum(weight for *_, weight in members) < float("inf"):
        raise DataError("mixture: its weights sum up to more than a float holds")
    names = [entry[:2] for entry in members]
    if len({*names}) < len(names):
        raise DataError("mixture: a member is listed twice; add up its weights")
    if len(members) < 2:
        raise DataError("mixture needs two members or more; for one give task and path")
    return members
