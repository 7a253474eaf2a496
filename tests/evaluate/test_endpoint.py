"""The client of a chat endpoint against bad servers, environments and addresses."""

import threading
import time

import pytest
from judge_server import KEY, chat
from tiny_runs import refused

from ffn_heterogeneity.evaluate.chat.endpoint import Endpoint, EndpointError


@pytest.mark.parametrize("kind", ["charset=utf-16", "charset=hex", "charset=idna"])
def test_a_server_that_names_another_encoding(server, kind):
    headers = {"Content-Type": f"application/json; {kind}"}
    server.behave = lambda n, data: (200, headers, chat("8 [[8]]")[2])
    # Half of a surrogate pair, which a file may hold, is sent as a question mark.
    assert Endpoint(url=server.url, model="m").ask("x", "a \ud83d") == "8 [[8]]"


def test_the_environment_adds_nothing(server, monkeypatch):
    """No name, header or key of the environment is sent; the query of an address stays secret."""
    custom = "X-Secret: hidden\nAuthorization: Bearer other"
    for name, value in (("ORG_ID", "o"), ("PROJECT_ID", "p"), ("CUSTOM_HEADERS", custom)):
        monkeypatch.setenv(f"OPENAI_{name}", value)
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    server.behave = lambda n, data: chat("fine") if n < 2 else (400, {}, b"no")
    for key, sent in ((KEY, f"Bearer {KEY}"), ("", None)):
        Endpoint(url=server.url, model="m", key=key).ask("x", "y")
        headers = server.requests[-1][1]
        assert headers.get("authorization") == sent
        assert not [name for name in headers if name.startswith(("openai", "x-"))]
    with pytest.raises(EndpointError) as failed:
        Endpoint(url=f"{server.url}/v1?version=1&token=hidden", model="m").ask("x", "y")
    assert server.requests[-1][0] == "/v1/chat/completions?version=1&token=hidden"
    assert "hidden" not in str(failed.value)
    refused("leave out the user", Endpoint, url="http://me:secret@there/v1", model="m")


def test_a_run_that_ends_does_not_wait(server):
    server.behave = lambda n, data: (503, {"Retry-After": "100"}, b"busy")
    endpoint = Endpoint(url=server.url, model="m")
    threading.Timer(0.5, endpoint.stop).start()
    began = time.monotonic()
    refused("not asked: the run was ended", endpoint.ask, "x", "y", error=EndpointError)
    assert time.monotonic() - began < 10
