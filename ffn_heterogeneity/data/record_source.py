"""The interface of a source of records, its error, and the folders that `datasets` saved."""

from collections.abc import Mapping
from typing import Any

from etils import epath


class DataError(ValueError):
    """Invalid data; the message names file and row, the value found and a solution."""


class Source:
    """Random access to records.

    Attributes:
      in_memory: whether reading every record is cheap.
      running_text: whether neighboring records continue each other, so that the held-out part must
        be contiguous.
      class_names: names of the classes of each column of class numbers, in order (ClassLabel of
        `datasets`).
      by_name: whether records have these names instead of the numbers.
    """

    name: str
    class_names: Mapping[str, tuple[str, ...]] = {}
    in_memory = running_text = by_name = False

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        raise NotImplementedError

    def where(self, index: int) -> str:
        """Place of a record, for error messages."""
        return f"{self.name}, row {index + 1}"

    def named(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a stored record, with class names if `by_name`."""
        for field, names in self.class_names.items() if self.by_name else ():
            if record[field] in range(len(names)):  # neither null nor -1 (not published)
                place = record[field]
                record[field] = ClassName(names[place])
                record[field].place = place
        return record


class ClassName(str):
    """Name of a class; `place`: its number."""

    place: int


def has_splits(path: str) -> bool:
    """True for a saved folder of several splits."""
    return (epath.Path(path).expanduser() / "dataset_dict.json").exists()


def is_saved(path: str) -> bool:
    """True for a directory that `datasets` wrote with `save_to_disk`."""
    folder = epath.Path(path).expanduser()
    return any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))
