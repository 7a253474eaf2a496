"""Fixtures that several test files share."""

import socket

import pytest
from judge_server import KEY, Server


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def server(monkeypatch):
    """A chat endpoint, and the key of its judge in the environment."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", KEY)
    made = Server()
    yield made
    made.close()
