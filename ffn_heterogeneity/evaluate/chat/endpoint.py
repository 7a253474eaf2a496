"""Calls of an OpenAI-compatible chat endpoint, with time-outs and tries (standard library only)."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

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
      timeout: seconds for a whole call.
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
        # A redirect would take the key to another host.
        self._opener = urllib.request.build_opener(_NoRedirects)

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
        deadline = time.monotonic() + self.timeout
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                return self._redacted(_read(response, deadline))
        except urllib.error.HTTPError as error:
            # Redacted before anything is cut: half a key would not be found any more.
            body = ""
            with contextlib.suppress(OSError, http.client.HTTPException, EndpointError):
                body = self._redacted(_read(error, deadline))
            why = f"HTTP {error.code} {error.reason}: {' '.join(body.split())[:200]}"
            wait = _seconds(error.headers.get("Retry-After"))
            raise EndpointError(why, body[:SHOWN], error.code in TRY_AGAIN, wait) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            late = isinstance(reason, TimeoutError)
            why = f"no answer within {self.timeout:g} s" if late else f"no connection: {reason!r}"
            raise EndpointError(why, again=True) from None

    def _redacted(self, text: str) -> str:
        return text.replace(self.key, "<key>") if self.key else text


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _text_of(body: str) -> str:
    """The content of the first choice."""
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        kind = "no JSON" if isinstance(error, ValueError) else "no chat completion"
        raise EndpointError(f"the answer is {kind}: {body[:100]!r}", body[:SHOWN], True) from None
    if not isinstance(text, str) or not text.strip():
        raise EndpointError("the answer holds no text", body[:SHOWN], True)
    # Half of a surrogate pair ("\ud83d" in JSON) is no character: no file could hold it.
    return text.encode("utf-8", "replace").decode()


def _read(response: Any, deadline: float) -> str:
    """The whole body; a server that sends a byte now and then does not outlast the deadline."""
    parts, size = [], 0
    while part := response.read1(65_536):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError
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
