"""Progress bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def bar(label: str | None, items: Iterable | None = None, logs: bool = False, **more: Any) -> Any:
    """A bar of `tqdm` over `items`, or one that is updated; none without a label.

    Args:
      logs: written where stderr is no terminal, too.
      more: as `tqdm` has them: total, initial, unit.
    """
    from tqdm import tqdm

    hidden = (False if logs else None) if label else True
    return tqdm(items, desc=label, disable=hidden, file=sys.stderr, **more)


def say_above(line: str) -> None:
    """A line on stderr, above a bar where there is one."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
