"""Files of a task -> its rows: the questions, and the examples that may stand before them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from etils import epath

from ffn_heterogeneity.data.sources import DataError, ListSource, read_each, read_jsonl
from ffn_heterogeneity.evaluate.harness_tasks.rows import ROWS

FEWSHOT_FROM = ("auto", "train", "evaluation")
Rows = list[dict[str, Any]]

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Reader:
    """Reads files under `root`, each once.

    Attributes:
      root: directory with a folder for every task.
      fewshot_from: "auto", "train" or "evaluation".
    """

    root: str
    fewshot_from: str = "auto"
    _sources: dict[str, ListSource] = dataclasses.field(default_factory=dict)
    _read: dict[tuple[str, str], Rows] = dataclasses.field(default_factory=dict)
    _warned: set[str] = dataclasses.field(default_factory=set)

    def evaluation(self, local: Mapping[str, Any]) -> tuple[Rows, str]:
        """The questions, and the file they are in."""
        path = self._first(local, "evaluation")
        return self._rows(path, local), path

    def fewshot(self, local: Mapping[str, Any], count: int) -> tuple[Rows | None, str]:
        """The examples and their file; None: they are to come from the evaluation rows."""
        if self.fewshot_from == "evaluation":
            return None, ""
        path = self._first(local, "fewshot", required=self.fewshot_from == "train")
        # Another form altogether is no mistake; a file that cannot be read, or a bad row further
        # down, is one.
        other = self._other_form(path, local) if path else "no training file"
        if other and self.fewshot_from == "auto":
            self._warn(local, other)
            return None, ""
        rows = self._rows(path, local)
        if "first_shots" in local:
            rows = _put_first(rows, path, **local["first_shots"])
        if len(rows) < count:
            raise DataError(f"{path}: {count} examples asked for, but only {len(rows)} rows")
        return rows, path

    def _first(self, local: Mapping[str, Any], part: str, required: bool = True) -> str:
        folder = epath.Path(self.root) / local["folder"]
        paths = [folder / f"{name}.jsonl" for name in local[part]]
        for path in paths:
            if path.exists():
                return str(path)
        if required:
            raise DataError(f"no such file: {' or '.join(map(str, paths))}")
        return ""

    def _other_form(self, path: str, local: Mapping[str, Any]) -> str:
        """Why the first row is none of the forms that the task knows; "" if it is one."""
        source = self._source(path)
        try:
            ROWS[local["rows"]](source[0])
        except DataError as error:
            return f"{source.where(0)}: {error}"
        return ""

    def _source(self, path: str) -> ListSource:
        if path not in self._sources:
            self._sources[path] = read_jsonl([path])
        return self._sources[path]

    def _rows(self, path: str, local: Mapping[str, Any]) -> Rows:
        key = (path, local["rows"])
        if key not in self._read:
            rows = read_each(self._source(path), ROWS[local["rows"]])
            self._read[key] = [dict(row) for row in rows if row is not None]
        rows, only = self._read[key], local.get("only")
        if only:
            rows = [row for row in rows if row[only["field"]] == only["value"]]
        if not rows:
            wanted = f" with {only['field']} {only['value']!r}" if only else ""
            raise DataError(f"{path}: no question{wanted} in it for this task")
        return rows

    def _warn(self, local: Mapping[str, Any], why: str) -> None:
        folder = local["folder"]
        if folder not in self._warned:
            self._warned.add(folder)
            _log.warning(
                "%s: few-shot examples come from the evaluation file, without the question being "
                "asked (%s)",
                folder,
                why,
            )


def _put_first(rows: Rows, path: str, field: str, values: list[Any]) -> Rows:
    found = {row[field]: row for row in rows}
    missing = [value for value in values if value not in found]
    if missing:
        raise DataError(f"{path}: no row with {field} {missing[0]}, which is an example")
    return [found[value] for value in values] + [row for row in rows if row[field] not in values]
