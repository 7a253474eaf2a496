"""Progress bars on stderr."""

import sys
from collections.abc import Iterable
from typing import Any


def bar(label: str | None, items: Iterable | None = None, **more: Any) -> Any:
    """A bar of `tqdm` over `items`, or one that is updated; none without a label. Where stderr is
    no terminal, a line every half a minute, from then on.

    Args:
      more: as `tqdm` has them: total, initial, unit.
    """
    from tqdm import tqdm

    if not sys.stderr.isatty():
        more = {"file": _Lines(), "delay": 30, "mininterval": 30} | more
    return tqdm(items, desc=label, disable=not label, **more)


class _Lines:
    """stderr, with a line for each state of a bar."""

    def write(self, text: str) -> None:
        if said := text.strip():
            print(said, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def say_above(line: str) -> None:
    """A line on stderr, above a bar where there is one."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
