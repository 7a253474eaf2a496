"""Long texts cut into passages at blank lines, lines or spaces."""

from collections.abc import Iterable, Iterator

PASSAGE_CHARS = 16_384


def passages(text: str, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the passages of at most `size` characters that a text is cut into."""
    start = 0
    while start < len(text):
        end = _passage_end(text, start, size)
        yield start, end
        start = end


def streamed(parts: Iterable[str], size: int) -> Iterator[tuple[str, bool, bool]]:
    """(passage, whether it starts the text, whether it ends it), as `passages` cuts the text that
    the parts are; no more than a part and a passage of it is held."""
    rest, starts = "", True
    for part in parts:
        rest, at = rest + part, 0
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
        found = text.rfind(separator, start + size // 2, end)
        if found >= 0:
            # A space goes with the word after it, as tokenizers have it; line ends stay behind.
            return max(found + (0 if separator == " " else len(separator)), start + 1)
    return end
