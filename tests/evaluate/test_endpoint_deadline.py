"""Endpoints that drip, flood or lie: a call ends by its deadline, as the failure of one answer."""

import contextlib
import itertools
import socket
import threading
import time

import pytest

from ffn_heterogeneity.evaluate.chat.endpoint import Endpoint, EndpointError

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
DRIPS = {  # what comes at once, and then again and again
    "nothing": (b"", b""),
    "a status line": (b"HTTP/1.1 2", b"0"),
    "a header": (OK + b"X-Long: ", b"a"),
    "headers": (OK, b"X: y\r\n"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "the size of a chunk": (CHUNKED, b"0"),
    "an extension of a chunk": (CHUNKED + b"5;", b"x"),
    "chunks": (CHUNKED, b"1\r\na\r\n"),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"X: y\r\n"),
    "a body of some length": (OK + b"Content-Length: 100000\r\n\r\n", b" "),
    "a body without a length": (OK + b"\r\n", b" "),
    "an error's body": (b"HTTP/1.1 400 Bad\r\nContent-Length: 100000\r\n\r\n", b" "),
}


@contextlib.contextmanager
def serving(first: bytes, again: bytes = b"", pause: float = 0.02):
    """The address of a server with one answer per connection."""
    server, ended = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def answer(connection):
        with contextlib.suppress(OSError), connection:
            connection.recv(65_536)
            connection.sendall(first)
            while again and not ended.wait(pause):
                connection.sendall(again)
            ended.wait(0 if again or first else 30)

    def accept():
        with contextlib.suppress(OSError):
            for _ in itertools.count():
                threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        ended.set()
        server.close()


def asked(address: str, timeout: float = 0.4) -> tuple[str, float]:
    """(the failure, its seconds)."""
    endpoint = Endpoint(url=address, model="m", timeout=timeout, retries=0)
    start = time.monotonic()
    with pytest.raises(EndpointError) as failed:
        endpoint.ask("s", "u")
    return str(failed.value), time.monotonic() - start


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Import the client, which takes seconds on a busy machine, before any clock starts."""
    with serving(b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n") as address:
        asked(address, timeout=60.0)


@pytest.mark.parametrize("name", DRIPS)
def test_a_drip_does_not_outlast_the_deadline(name):
    with serving(*DRIPS[name]) as address:
        why, seconds = asked(address)
    assert ("HTTP 400" if "error" in name else "no answer within 0.4 s") in why
    assert seconds < 2


@pytest.mark.parametrize("name", ["a header", "headers", "continue", "chunks"])
def test_a_flood_ends_as_well(name):
    first, again = DRIPS[name]
    with serving(first, again * 1000, pause=0.0) as address:
        _, seconds = asked(address)
    assert seconds < 3


def test_an_answer_without_end_is_not_read():
    with serving(OK + b"\r\n", b" " * 2**18, pause=0.0) as address:
        why, _ = asked(address, timeout=20.0)
    assert "the answer is longer than 4194304 bytes" in why


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 302 Found\r\nLocation: http://[::1\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 308 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 999999999999999999999 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
        b"HTTP/1.1 429 Wait\r\nRetry-After: nan\r\nContent-Length: 0\r\n\r\n",
        b"\xff\xfe\x00",
        CHUNKED + b"-1\r\n\r\n",
        CHUNKED + b"zz\r\n\r\n",
    ],
)
def test_whatever_is_answered_is_that_answers_failure(answer):
    with serving(answer) as address:
        why, seconds = asked(address, timeout=5.0)
    assert seconds < 5 and "\n" not in why
