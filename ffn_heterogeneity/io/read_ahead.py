"""Read-ahead: a thread brings bytes of files into the page cache before they are needed."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

_PIECE = 1 << 22


@contextlib.contextmanager
def read_ahead(
    places: Sequence[tuple[str, int, int]], ahead: int = 1 << 28
) -> Iterator[Callable[[int], None]]:
    """Read `places` = (file, start, stop) in order while the block runs.

    A mapped file is read page by page on access, during which the program waits. The thread
    overlaps disk reads with computation; it affects only the time.

    Args:
      ahead: number of bytes that the thread may be ahead of the block.

    Yields:
      A function that the block calls with i when it reaches places[i].
    """
    starts = [0]
    for _, start, stop in places:
        starts.append(starts[-1] + stop - start)
    turn = threading.Condition()
    state = {"reached": 0, "over": False}

    def reach(i: int) -> None:
        with turn:
            state["reached"] = starts[i]
            turn.notify()

    def may_read(position: int) -> bool:
        with turn:
            turn.wait_for(lambda: state["over"] or position < state["reached"] + ahead)
            return not state["over"]

    thread = threading.Thread(target=_read, args=(places, starts, may_read), daemon=True)
    thread.start()
    try:
        yield reach
    finally:
        with turn:
            state["over"] = True
            turn.notify()
        thread.join()


def _read(places, starts, may_read: Callable[[int], bool]) -> None:
    buffer = memoryview(bytearray(_PIECE))
    # Errors are ignored here: the code that needs the bytes reports them.
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        files = {}
        for (name, start, stop), position in zip(places, starts, strict=False):
            if name not in files:
                files[name] = stack.enter_context(open(name, "rb", buffering=0))
            files[name].seek(start)
            for offset in range(start, stop, _PIECE):
                if not may_read(position + offset - start):
                    return
                files[name].readinto(buffer[: min(_PIECE, stop - offset)])
