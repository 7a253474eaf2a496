"""Reading ahead stays within its limits, ends with its block, and hides no error."""

import threading
import time

import pytest

from ffn_heterogeneity.io import read_ahead as module
from ffn_heterogeneity.io.read_ahead import read_ahead


@pytest.fixture
def reads(monkeypatch):
    """Bytes read so far, by (file, position)."""
    seen = []
    opened = open

    class Watched:
        def __init__(self, name, *arguments, **options):
            self.name, self.file = name, opened(name, *arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def seek(self, place):
            self.file.seek(place)

        def readinto(self, buffer):
            seen.append((self.name, self.file.tell(), self.file.readinto(buffer)))

    monkeypatch.setattr(module, "open", Watched, raising=False)
    monkeypatch.setattr(module, "_PIECE", 10)
    return seen


def wait_for(condition):
    deadline = time.time() + 10
    while not condition() and time.time() < deadline:
        time.sleep(0.001)
    assert condition()


def test_order_and_bounds(tmp_path, reads):
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(100))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    places = [(a, 40, 65), (b, 0, 20), (a, 0, 40)]
    before = threading.active_count()
    with read_ahead(places, ahead=30) as reach:
        wait_for(lambda: len(reads) >= 4)
        time.sleep(0.05)
        assert reads == [(a, 40, 10), (a, 50, 10), (a, 60, 5), (b, 0, 10)]
        reach(1)
        wait_for(lambda: len(reads) >= 6)
        reach(2)
        wait_for(lambda: len(reads) == 8)
    assert [(name, at) for name, at, _ in reads[4:]] == [(b, 10), (a, 0), (a, 10), (a, 20)]
    assert threading.active_count() == before, "what was left is not read"


def test_errors_are_those_of_the_block(tmp_path):
    with read_ahead([(str(tmp_path / "nowhere"), 0, 10)]) as reach:
        reach(0)
    with pytest.raises(KeyError), read_ahead([]):
        raise KeyError("its own")
