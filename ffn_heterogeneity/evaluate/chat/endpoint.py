"""Calls of an OpenAI-compatible chat endpoint, with time-outs and tries (standard library only)."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from ffn_heterogeneity.io.read import parse_json
from ffn_heterogeneity.wording import check_numbers

# Worth another try: the server is busy, or a gateway before it failed.
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
LONGEST_WAIT = 120.0  # seconds, whatever the server asks for
LONGEST_BODY = 2**22  # bytes
SHOWN = 2000  # characters of an error's body that are kept


class EndpointError(Exception):
    """No text came: why (one line), and the body of the answer where there was one."""

    def __init__(self, why: str, body: str = "", again: bool = False, wait: float = 0.0):
        super().__init__(why)
        self.body, self.again, self.wait = body, again, wait


@dataclasses.dataclass(kw_only=True, eq=False)
class Endpoint:
    """A model at `<url>/v1/chat/completions`.

    Args:
      url: http or https; with or without "/v1" or the whole path.
      key: sent as bearer token, and taken out of all that comes back; "": none.
      temperature, max_tokens: None and 0: not sent.
      timeout: seconds for a whole call, from the connection to the last byte (finding out the
        host's address is the system's own affair).
      retries: further tries after a time-out, a broken connection, a busy server (`TRY_AGAIN`) or a
        body that is no chat completion.
      backoff: seconds before the second try; twice as long before each next one, or as long as the
        server asks for (Retry-After), never above `LONGEST_WAIT`.

    Raises:
      ValueError: the address or the key cannot be one.
    """

    url: str
    model: str
    key: str = dataclasses.field(default="", repr=False)  # no log shows it
    temperature: float | None = 0.0
    max_tokens: int = 0
    timeout: float = 120.0
    retries: int = 5
    backoff: float = 2.0

    def __post_init__(self):
        counts = dict.fromkeys(("retries", "max_tokens"), "[0, inf)")
        check_numbers(self, timeout="(0, inf)", backoff="(0, inf)", **counts)
        url = self.url
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url!r} is no address: write http://<host>:<port> or https://..")
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("the key holds characters that no key has (is it the right variable?)")
        path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        self.url = parts._replace(path=f"{path}/v1/chat/completions", fragment="").geturl()
        self._body: dict[str, Any] = {"model": self.model}
        if self.temperature is not None:
            self._body["temperature"] = self.temperature
        if self.max_tokens:
            self._body["max_tokens"] = self.max_tokens
        self._stopped = threading.Event()

    def ask(self, system: str, user: str) -> str:
        """The text that answers the two messages.

        Raises:
          EndpointError: there is none after all tries.
        """
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        data = json.dumps(self._body | {"messages": messages}).encode()
        for number in range(self.retries + 1):
            if self._stopped.is_set():
                raise EndpointError("not asked: the run was ended")
            try:
                return self._redacted(_text_of(self._call(data)))
            except EndpointError as error:
                why, body = self._redacted(str(error)), self._redacted(error.body)
                if not error.again or number == self.retries:
                    tries = f" ({number + 1} tries)" if number else ""
                    raise EndpointError(why + tries, body) from None
                wait = error.wait or self.backoff * 2**number
            self._stopped.wait(min(wait, LONGEST_WAIT))
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Calls that wait for another try give up."""
        self._stopped.set()

    def _call(self, data: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url, data, headers, method="POST")
        with _Deadline(self.timeout) as deadline:
            try:
                with deadline.opener.open(request, timeout=self.timeout) as response:
                    text = _read(response)
            except urllib.error.HTTPError as error:
                # Redacted before anything is cut: half a key would not be found any more.
                body = ""
                with contextlib.suppress(OSError, http.client.HTTPException, EndpointError):
                    body = self._redacted(_read(error))
                why = f"HTTP {error.code} {error.reason}: {' '.join(body.split())[:200]}"
                wait = _seconds(error.headers.get("Retry-After"))
                raise EndpointError(why, body[:SHOWN], error.code in TRY_AGAIN, wait) from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = getattr(error, "reason", error)
                why = f"no connection: {reason!r}"
                if deadline.over.is_set() or isinstance(reason, TimeoutError):
                    why = self._late()
                raise EndpointError(why, again=True) from None
            if deadline.over.is_set():  # what was read may be its beginning
                raise EndpointError(self._late(), again=True)
            return self._redacted(text)

    def _late(self) -> str:
        return f"no answer within {self.timeout:g} s"

    def _redacted(self, text: str) -> str:
        return text.replace(self.key, "<key>") if self.key else text


class _Deadline:
    """A wall clock over a call: when it has run out, the call's connections are shut down, whatever
    they wait for. A time-out of a socket would begin anew with every byte.

    Attributes:
      opener: of urllib; its connections are watched, and no redirect takes the key elsewhere.
      over: set when the time is.
    """

    def __init__(self, seconds: float):
        self.over, self._watched = threading.Event(), []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self.opener = urllib.request.build_opener(
            _NoRedirects, _handler("http", self._connect), _handler("https", self._connect)
        )

    def _connect(self, *address: Any, **options: Any) -> socket.socket:
        made = socket.create_connection(*address, **options)
        self._watched.append(made.dup())  # TLS takes the first one away
        if self.over.is_set():
            self._end()
        return made

    def _end(self) -> None:
        self.over.set()
        for one in self._watched:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._timer.cancel()
        for one in self._watched:
            one.close()


def _handler(scheme: str, connect: Any) -> urllib.request.BaseHandler:
    """urllib's own for a scheme, but for what makes the sockets."""
    base = {"http": urllib.request.HTTPHandler, "https": urllib.request.HTTPSHandler}[scheme]
    kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[scheme]

    def connection(*given: Any, **options: Any) -> http.client.HTTPConnection:
        made = kind(*given, **options)
        made._create_connection = connect
        return made

    def open_(self: Any, request: urllib.request.Request) -> Any:
        return self.do_open(connection, request)

    return type(f"_{scheme}", (base,), {f"{scheme}_open": open_})()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def _none(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any) -> None:
        return None

    http_error_301 = http_error_302 = http_error_303 = http_error_307 = http_error_308 = _none


def _text_of(body: str) -> str:
    """The content of the first choice."""
    try:
        text = parse_json(body, "", lax=True)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        kind = "no JSON" if isinstance(error, ValueError) else "no chat completion"
        raise EndpointError(f"the answer is {kind}: {body[:100]!r}", body[:SHOWN], True) from None
    if not isinstance(text, str) or not text.strip():
        raise EndpointError("the answer holds no text", body[:SHOWN], True)
    # Half of a surrogate pair ("\ud83d" in JSON) is no character: no file could hold it.
    return text.encode("utf-8", "replace").decode()


def _read(response: Any) -> str:
    """The whole body."""
    parts, size = [], 0
    while part := response.read1(65_536):
        parts.append(part)
        size += len(part)
        if size > LONGEST_BODY:
            raise EndpointError(f"the answer is longer than {LONGEST_BODY} bytes")
    if missing := getattr(response, "length", None):
        raise http.client.IncompleteRead(b"", missing)
    return b"".join(parts).decode("utf-8", "replace")


def _seconds(value: str | None) -> float:
    """A Retry-After in seconds; 0 for dates and nonsense."""
    try:
        seconds = float(value or 0)
    except ValueError:
        return 0.0
    return seconds if 0 < seconds < float("inf") else 0.0
