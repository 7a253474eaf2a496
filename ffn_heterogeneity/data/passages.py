"""Long texts cut into passages at blank lines, lines or spaces."""

from collections.abc import Iterable, Iterator

PASSAGE_CHARS = 16_384


def passages(text: str, size: int) -> Iterator[tuple[int, int]]:
    """Cut a text into passages of at most `size` characters: their (start, end)."""
    start = 0
    while start < len(text):
        end = _passage_end(text, start, size)
        yield start, end
        start = end


def streamed(parts: Iterable[str], size: int) -> Iterator[tuple[str, bool, bool]]:
    """Cut a text given in parts as `passages` does: (passage, is first, is last).

    Memory holds at most one part and one passage.
    """
    rest, starts = "", True
    for piece in parts:
        rest, at = rest + piece, 0
        while len(rest) - at > size:
            end = _passage_end(rest, at, size)
            yield rest[at:end], starts, False
            at, starts = end, False
        rest = rest[at:]
    yield rest, starts, True


def _passage_end(text: str, start: int, size: int) -> int:
    """The end of the passage from `start`: the last good break in its second half."""
    end = start + size
    if end >= len(text):
        return len(text)
    for separator in ("\n\n", "\n", " "):
        break_at = text.rfind(separator, start + size // 2, end)
        if break_at >= 0:
            # A space belongs to the word after it, as in tokenizers; line ends to the text before.
            return max(break_at + (0 if separator == " " else len(separator)), start + 1)
    return end
