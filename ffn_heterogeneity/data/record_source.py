"""The interface of a source of records, its error, and the folders that `datasets` saved."""

from collections.abc import Mapping
from typing import Any

from etils import epath


class DataError(ValueError):
    """Data that cannot be used; the message names file and row, the value seen and the way out."""


class Source:
    """Random access to records.

    `in_memory`: reading every record is cheap. `running_text`: neighbouring records continue each
    other, so a held-out part must be one stretch of them, not a scattering. `class_names`: of each
    column that holds numbers of classes, their names in order (ClassLabel of `datasets`);
    `by_name`: records have these in place of the numbers.
    """

    name: str
    class_names: Mapping[str, tuple[str, ...]] = {}
    in_memory = running_text = by_name = False

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The place of a record, for errors."""
        return f"{self.name}, row {index + 1}"

    def named(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record as it was stored, with names of classes where `by_name`."""
        for field, names in self.class_names.items() if self.by_name else ():
            if record[field] in range(len(names)):  # neither null nor -1, which is not published
                place = record[field]
                record[field] = ClassName(names[place])
                record[field].place = place
        return record


class ClassName(str):
    """The name of a class; `place`: its number."""

    place: int


def is_saved(path: str) -> bool:
    """True of a directory that `datasets` wrote by `save_to_disk`."""
    return any((epath.Path(path) / name).exists() for name in ("state.json", "dataset_dict.json"))
