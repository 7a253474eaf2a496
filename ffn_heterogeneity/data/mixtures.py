"""Sources of rows with several examples, and of mixtures of tasks.

A mixture draws from its members in fixed proportions: in every cycle of sum(weights) draws, a
member gets exactly its weight, evenly spread. So a member with as many examples as its weight is
read once per cycle; a smaller one starts again, in a new order. Draw k is a function of k and the
seed, so a position in the stream is still one number.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.data.record_source import DataError, Source, has_splits, is_saved
from ffn_heterogeneity.data.sources import ListSource, Subset, files_of, named_place, open_source
from ffn_heterogeneity.data.tasks import Fields, MixedTask, Task, get_task
from ffn_heterogeneity.data.tasks.base import Expand

SUFFIXES = (".jsonl", ".parquet")
# Official files call it "val".
SPLIT_FILES = {"validation": ("validation", "val")}

_log = logging.getLogger(__name__)


class ExpandedSource(ListSource):
    """The records of a source whose rows contain several records, in memory.

    `groups`: the row of every record, [len(self)]; with `passage`, a field of records, the first
    row that has its passage. Whole groups are held out, so that no passage is in both parts.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        expand: Expand,
        training: bool = True,
        skip_bad: bool = False,
        passage: str = "",
    ):
        records, places, groups, bad = [], [], [], []
        named: dict[Any, int] = {}
        for row in range(len(source)):
            try:
                with named_place(source, row):
                    made = expand(source[row], training)
            except DataError as error:
                if not skip_bad:
                    raise
                bad.append(error)
                continue
            records += made
            places += [source.where(row)] * len(made)
            groups += [named.setdefault(one[passage], row) if passage else row for one in made]
        if bad:
            _log.warning("%d of %d rows are left out; the first: %s", len(bad), len(source), bad[0])
        if not records:
            raise DataError(
                f"{source.name}: none of its {len(source)} rows is an example of {name}"
            )
        super().__init__(source.name, records, places)
        self.groups = np.asarray(groups)


class Part(NamedTuple):
    """A member of a mixture: its source, and the range of its records in the mixture."""

    task: str
    weight: int
    source: Source
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.source)


class MixedSource(Source):
    """Concatenated sources of the members; record i is `{"member": task, "record": ...}`."""

    def __init__(self, name: str, members: Sequence[tuple[str, int, Source]]):
        self.name, self.parts = name, []
        for task, weight, source in members:
            self.parts.append(Part(task, weight, source, self.parts[-1].stop if self.parts else 0))
        self.in_memory = all(member.source.in_memory for member in self.parts)
        self._starts = [member.start for member in self.parts]

    def __len__(self) -> int:
        return self.parts[-1].stop

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        member = self._part(index)
        return {"member": member.task, "record": member.source[index - member.start]}

    def where(self, index: int) -> str:
        member = self._part(index)
        return member.source.where(index - member.start)

    def shares(self, rows: Sequence[int]) -> list[np.ndarray]:
        """Split `rows` by member."""
        numbers = np.asarray(rows)
        return [
            numbers[(numbers >= member.start) & (numbers < member.stop)] for member in self.parts
        ]

    def _part(self, index: int) -> Part:
        return self.parts[int(np.searchsorted(self._starts, index, side="right")) - 1]


class EvenDraws:
    """Maps draw k to (member, index of the member's draw), exactly in proportion to the weights.

    Draw j of a member of weight w is placed at (j + 1/2) / w in [0, 1); the draws of all members in
    this order are one cycle of sum(weights) draws, which repeats.
    """

    def __init__(self, weights: Sequence[int]):
        self._weights = weights
        members = np.repeat(np.arange(len(weights)), weights)
        turns = np.concatenate([np.arange(weight) for weight in weights])
        places = (turns + 0.5) / np.asarray(weights)[members]
        order = np.argsort(places, kind="stable")
        self._members, self._turns = members[order], turns[order]

    def __len__(self) -> int:
        return 2**62  # infinite: grain counts the remaining records

    def __getitem__(self, index: int) -> tuple[int, int]:
        stretch, place = divmod(index, len(self._members))
        member = int(self._members[place])
        return member, stretch * self._weights[member] + int(self._turns[place])


def open_task(
    task: Task,
    path: str | Sequence[str],
    split: str,
    *,
    left_out: Sequence[str] = (),
    skip_bad: bool = False,
    **opened: Any,
) -> Source:
    """Open the records of a task, one example each.

    Args:
      task, path, split: as in `DataConfig`. For a mixture `path` is the root that has a folder for
        every member with `<split>.jsonl` or `.parquet`; "" takes the members from the hub.
      left_out: options whose members are excluded ("with_dpr").
      skip_bad: rows with several examples that are no such rows are left out.
      opened: further arguments of `open_source`.

    Raises:
      DataError: as `open_source`; a member without a file: the message names the searched paths,
        and the option that excludes the member, if there is one.
    """
    if task.members:
        members = [member for member in task.members if member.option not in left_out]
        sources = []
        for member in members:
            file = member_file(path, member, split) if path else ""
            own = get_task(member.task)
            sources.append(open_task(own, file, split, skip_bad=skip_bad, **opened))
        weights = [member.weight for member in members]
        names = [member.task for member in members]
        name = f"{task.name} in {path}" if path else task.name
        return MixedSource(name, list(zip(names, weights, sources, strict=True)))
    source = open_source(place_of(task, path), split=split, **opened)
    if not task.expand:
        return source
    more = {"skip_bad": skip_bad, "passage": task.passage}
    return ExpandedSource(source, task.name, task.expand, **more)


def read_twice(task: Task, *read: tuple[str | Sequence[str], str]) -> str:
    """A file, or a data set with its split, that two (path, split) have in common; "": nothing.

    Files have no split, except those of a mixture, which are named after it.
    """
    (one, split), (other, other_split) = read
    if not task.members and (files := files_of(one) & files_of(other)):
        return min(files)
    named = not isinstance(one, str) or not is_saved(one) or has_splits(one)
    same = one == other and (split == other_split or not named)
    return f"{one or task.name} ({split})" if same else ""


def place_of(task: Task, path: str) -> str:
    """Return the path, by default the task's hub data set ("" for a mixture's members).

    Raises:
      DataError: neither exists.
    """
    if not (path or task.hub or task.members):
        raise DataError(f"task {task.name!r} needs a path: --config.data.path=<file or hub name>")
    return path or task.hub


def mixed_records(source: MixedSource, subset: Subset, seeds: Sequence[int] | None) -> Any:
    """An infinite grain `MapDataset` that draws from the members' parts of `subset`.

    Args:
      seeds: seeds of the members' orders, which are new in each pass; None keeps the files' order.
    """
    import grain

    shares = []
    for number, rows in enumerate(source.shares(subset.rows)):
        share = grain.MapDataset.source(Subset(source, rows))
        shares.append((share if seeds is None else share.shuffle(seed=seeds[number])).repeat())
    draws = EvenDraws([member.weight for member in source.parts])
    return grain.MapDataset.select_from_datasets(shares, draws)


@dataclasses.dataclass(frozen=True)
class TaskQuestion:
    """A question to a model, the answer to compare with, and its place in the data."""

    prompt: str
    reference: Any
    where: str


def questions(task: Task, source: Source) -> list[TaskQuestion]:
    """List every question of a file, once, for the task's metrics.

    Args:
      source: source of the file's raw rows (`open_source`).

    Raises:
      DataError: an unreadable row, or a mixture (use its members one by one).
    """
    if task.members:
        names = ", ".join(member.task for member in task.members)
        raise DataError(f"{task.name} is a mixture: evaluate its tasks one by one: {names}")
    if task.expand:
        source = ExpandedSource(source, task.name, task.expand, training=False)
    asked = []
    for row in range(len(source)):
        with named_place(source, row):
            example = task.example(source[row], Fields())
            reference = task.reference(source[row]) if task.reference else example.target.strip()
        asked.append(TaskQuestion(example.prompt, reference, source.where(row)))
    return asked


def member_file(root: str | Sequence[str], member: MixedTask, split: str) -> str:
    """Find the file of a split in the task's folder under `root`, under any of their known names.

    Raises:
      DataError: `root` is not a directory, or no such file; the message names the searched paths.
    """
    if not isinstance(root, str) or not epath.Path(root).is_dir():
        raise DataError(f"{root}: a mixture's path is a directory with a folder for every task")
    names = SPLIT_FILES.get(split, (split,))
    tried = [
        epath.Path(root) / folder / f"{name}{suffix}"
        for folder in member.folders
        for name in names
        for suffix in SUFFIXES
    ]
    for file in tried:
        if file.exists():
            return str(file)
    option = f"; or leave it out: {member.option}=False" if member.option else ""
    places = ", ".join(member.folders)
    raise DataError(f"{member.task}: no {tried[0]} (nor in one of {places}){option}")


def report_sizes(source: MixedSource) -> None:
    """Log which members repeat or are not read completely, because the weights are fixed."""
    other = [member for member in source.parts if len(member.source) != member.weight]
    if other:
        sizes = ", ".join(
            f"{member.task} {len(member.source)} of {member.weight}" for member in other
        )
        _log.warning("%s: examples found, of the number that is the weight: %s", source.name, sizes)
