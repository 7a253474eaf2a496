"""Files of a task -> its rows: the questions, and the examples that may stand before them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from etils import epath

from ffn_heterogeneity.data.sources import DataError, read_each, read_jsonl
from ffn_heterogeneity.evaluate.harness_tasks.questions import ROWS

FEWSHOT_FROM = ("auto", "train", "evaluation")
Rows = list[dict[str, Any]]

_log = logging.getLogger(__name__)


class Reader:
    """Reads files, each once.

    Args:
      root: directory with a folder for every task.
      fewshot_from: "auto", "train" or "evaluation".
    """

    def __init__(self, root: str, fewshot_from: str = "auto"):
        self.root, self.fewshot_from = root, fewshot_from
        self._source = functools.cache(lambda path: read_jsonl([path]))
        self._all_rows = functools.cache(self._read)
        self._warned: set[str] = set()

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

    def _read(self, path: str, form: str) -> Rows:
        """The rows of a file that are part of the task, in one of the forms of rows.py."""
        return [dict(row) for row in read_each(self._source(path), ROWS[form]) if row is not None]

    def _rows(self, path: str, local: Mapping[str, Any]) -> Rows:
        rows, only = self._all_rows(path, local["rows"]), local.get("only")
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
            what = (
                "few-shot examples come from the evaluation file, without the question being asked"
            )
            _log.warning("%s: %s (%s)", folder, what, why)


def _put_first(rows: Rows, path: str, field: str, values: list[Any]) -> Rows:
    found = {row[field]: row for row in rows}
    missing = [value for value in values if value not in found]
    if missing:
        raise DataError(f"{path}: no row with {field} {missing[0]}, which is an example")
    return [found[value] for value in values] + [row for row in rows if row[field] not in values]
