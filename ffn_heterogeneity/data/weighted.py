"""Weighted mixtures of any data: rows drawn from several pipelines, each with its own task.

Every row of a global batch comes from one member, whole. Row k goes to the member that is furthest
behind its share, so that after any number of rows each has its share to within one row; the draw
is a function of k and the weights alone. A member that ends begins its next pass.
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
    """Member of each row; `counts`, of rows drawn so far, is kept up to date.

    The member i with the largest w_i (n + 1) - c_i, n rows drawn before; of equals the first.
    """
    shares = np.asarray(weights, np.float64) / sum(weights)
    while True:
        member = int(np.argmax(shares * (sum(counts) + 1) - np.asarray(counts)))
        counts[member] += 1
        yield member


class WeightedPipeline(Feed):
    """Training and validation batches of several pipelines; made by `pipeline.make_pipeline`.

    Attributes:
      members: (name, weight, pipeline of one row a batch).
      held_out: of the members that hold some data out, None where none does.
    """

    def __init__(self, members: Sequence[tuple[str, float, Any]], *feed: Any):
        super().__init__(*feed)
        self.members = tuple(members)
        held = [pipeline for _, _, pipeline in members if pipeline.held_out is not None]
        self.held_out = held or None

    def train_iterator(self, epochs: None = None) -> WeightedIterator:
        """This process's rows of batches without end."""
        if epochs is not None:
            raise DataError(f"epochs={epochs}: a mixture has no end; count its steps")
        return WeightedIterator(self)

    def validation_iterator(self, max_batches: int | None = None) -> Iterator[Batch]:
        """One pass over what the members hold out, drawn by their weights while they last; the
        last batch padded; always the same.

        Raises:
          DataError: no member holds anything out.
        """
        if self.held_out is None:
            raise DataError("no validation data: set validation_fraction")
        left = [(w, p.validation_iterator()) for _, w, p in self.members if p.held_out is not None]
        rows = _until_all_end(left)
        for _ in itertools.count() if max_batches is None else range(max_batches):
            found = list(itertools.islice(rows, self.batch_size))
            if not found:
                return
            empty = {key: np.zeros_like(value) for key, value in found[0].items()}
            found += [empty] * (self.batch_size - len(found))
            yield take_rows(_stacked(found), self.rows)


class WeightedIterator:
    """A `batches.BatchIterator` over members; the state holds every member's own.

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
        # All rows are drawn in every process: a place is then the same in each of them.
        chosen = list(itertools.islice(self._draws, self._pipeline.batch_size))
        rows = [next(self._iterators[member]) for member in chosen]
        return take_rows(_stacked(rows), self._pipeline.rows)

    @property
    def shares(self) -> dict[str, float]:
        """Part of all rows so far that came from each member."""
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
        """Goes to a saved place.

        Raises:
          DataError: of another mixture, or a member's own complaint.
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
        """Stops the members' threads."""
        with contextlib.ExitStack() as stack:
            for iterator in self._iterators:
                stack.callback(iterator.close)


def _stacked(rows: Sequence[Batch]) -> Batch:
    return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}


def _until_all_end(left: list[tuple[float, Iterator[Batch]]]) -> Iterator[Batch]:
    """Rows by weight; a member that ends leaves its share to the others."""
    while left:
        for member in draws([weight for weight, _ in left], [0] * len(left)):
            row = next(left[member][1], None)
            if row is None:
                del left[member]
                break
            yield row


def parse_mixture(mixture: Any) -> list[tuple[str, str, float]]:
    """Checked (task, path, weight) of ((task, path, weight), ...).

    Raises:
      DataError: an entry of another form, a weight that is not positive, fewer than two members.
    """
    if not isinstance(mixture, Sequence):
        raise DataError(f"mixture={mixture!r} is not a list of (task, path, weight)")
    found = []
    for entry in mixture:
        try:
            task, path, weight = entry
            found.append((str(task), str(path), float(weight)))
        except (TypeError, ValueError, OverflowError):  # an integer that no float is
            raise DataError(f"mixture: {entry!r:.99} is not (task, path, weight)") from None
        if not 0 < found[-1][2] < float("inf"):
            raise DataError(f"mixture: {entry!r} has a weight that is not positive and finite")
    if not sum(weight for *_, weight in found) < float("inf"):
        raise DataError("mixture: its weights sum up to more than a float holds")
    names = [entry[:2] for entry in found]
    if len({*names}) < len(names):
        raise DataError("mixture: a member stands there twice; add up its weights")
    if len(found) < 2:
        raise DataError("mixture needs two members or more; of one give task and path")
    return found
