"""Reading of a task's files: the questions and the few-shot examples."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

from etils import epath

from ffn_heterogeneity.data.sources import DataError, read_each, read_jsonl
from ffn_heterogeneity.evaluate.harness_tasks.forms import LocalTask

FEWSHOT_FROM = ("auto", "train", "evaluation")
MBPP_SHOTS = (2, 3, 4)  # task ids of its first examples
Rows = list[dict[str, Any]]

_log = logging.getLogger(__name__)


class Reader:
    """Reader of files, each once.

    Args:
      root: directory with a folder for every task.
      fewshot_from: "auto", "train" or "evaluation".
    """

    def __init__(self, root: str, fewshot_from: str = "auto"):
        self.root, self.fewshot_from = root, fewshot_from
        self._source = functools.cache(lambda path: read_jsonl([path]))
        self._all_rows = functools.cache(self._read)
        self._warned: set[str] = set()

    def evaluation(self, local: LocalTask, split: str, subject: str = "") -> tuple[Rows, str]:
        """Return the questions, and their file."""
        path = self._first(local.folder, (split, *local.also))
        return self._rows(path, local, subject), path

    def fewshot(
        self, local: LocalTask, split: str, count: int, subject: str = ""
    ) -> tuple[Rows | None, str]:
        """Return the examples and their file; None: use the evaluation rows."""
        if self.fewshot_from == "evaluation":
            return None, ""
        path = self._first(local.folder, (split,), required=self.fewshot_from == "train")
        # Another form of the first row is not an error; an unreadable file or a bad row later is.
        other = self._other_form(path, local) if path else "no training file"
        if other and self.fewshot_from == "auto":
            if local.folder not in self._warned:
                self._warned.add(local.folder)
                _log.warning(
                    "%s: few-shot examples come from the evaluation file, without the question "
                    "being asked (%s)",
                    local.folder,
                    other,
                )
            return None, ""
        rows = self._rows(path, local, subject)
        if local.folder == "mbpp":
            first = [row for number in MBPP_SHOTS for row in rows if row["task_id"] == number]
            if len(first) < len(MBPP_SHOTS):
                raise DataError(f"{path}: its examples are the rows of task_id {MBPP_SHOTS}")
            rows = first + [row for row in rows if row not in first]
        if len(rows) < count:
            raise DataError(f"{path}: {count} examples asked for, but only {len(rows)} rows")
        return rows, path

    def _first(self, folder: str, names: Sequence[str], required: bool = True) -> str:
        paths = [epath.Path(self.root) / folder / f"{name}.jsonl" for name in names]
        for path in paths:
            if path.exists():
                return str(path)
        if required:
            raise DataError(f"no such file: {' or '.join(map(str, paths))}")
        return ""

    def _other_form(self, path: str, local: LocalTask) -> str:
        """Describe why the first row has none of the task's forms; "" if it has one."""
        source = self._source(path)
        try:
            local.form(source[0])
        except DataError as error:
            return f"{source.where(0)}: {error}"
        return ""

    def _read(self, path: str, local: LocalTask) -> Rows:
        rows = read_each(self._source(path), local.form)
        return [dict(row) for row in rows if row is not None]

    def _rows(self, path: str, local: LocalTask, subject: str) -> Rows:
        """Rows of a file that belong to the task (for MMLU, to one subject)."""
        rows = self._all_rows(path, local)
        if subject:
            rows = [row for row in rows if row["subject"] == subject]
        if not rows:
            wanted = f" with subject {subject!r}" if subject else ""
            raise DataError(f"{path}: no question{wanted} for this task")
        return rows
