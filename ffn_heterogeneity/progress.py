"""Progress bars on stderr."""

import sys
from collections.abc import Iterable
from typing import Any


def bar(label: str | None, items: Iterable | None = None, **more: Any) -> Any:
    """A `tqdm` bar over `items`, or one to be updated; no bar without a label.

    If stderr is not a terminal, it prints a line every 30 seconds, starting after 30 seconds.

    Args:
      more: arguments of `tqdm`: total, initial, unit.
    """
    from tqdm import tqdm

    if not sys.stderr.isatty():
        more = {"file": _Lines(), "delay": 30, "mininterval": 30} | more
    return tqdm(items, desc=label, disable=not label, **more)


class _Lines:
    """stderr wrapper that prints each state of a bar on a line."""

    def write(self, text: str) -> None:
        if said := text.strip():
            print(said, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def say_above(line: str) -> None:
    """Print a line on stderr, above the bar if there is one."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
