"""Calls of an OpenAI-compatible chat endpoint, by the `openai` client (extra `judge`)."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import urllib.parse
from typing import Any

from ffn_heterogeneity.io.read import parse_json
from ffn_heterogeneity.wording import check_numbers, extra

LONGEST_BODY = 2**22  # bytes
SHOWN = 2000  # characters of an error's body that are reported


class EndpointError(Exception):
    """A call without a text: why (one line), and the body of the answer if there was one."""

    def __init__(self, why: str, body: str = ""):
        super().__init__(why)
        self.body = body


@dataclasses.dataclass(kw_only=True, eq=False)
class Endpoint:
    """A model at `<url>/v1/chat/completions`.

    Args:
      url: http or https; with or without "/v1" or the whole path.
      key: sent as bearer token, and replaced in everything that comes back; "": none.
      temperature, max_tokens: None and 0: not sent.
      timeout: seconds for a whole try, from the connection to the last byte (except the look-up of
        the host's address, which the system alone can end).
      retries: further tries after a time-out, a broken connection or a busy server, by the client's
        own rules: waits of 0.5 s, doubled up to 8 s, or the server's Retry-After up to 2 minutes.

    Raises:
      ValueError: an unusable address or key.
      ImportError: the client is not installed.
    """

    url: str
    model: str
    key: str = dataclasses.field(default="", repr=False)  # no log shows it
    temperature: float | None = 0.0
    max_tokens: int = 0
    timeout: float = 120.0
    retries: int = 5

    def __post_init__(self):
        counts = dict.fromkeys(("retries", "max_tokens"), "[0, inf)")
        check_numbers(self, timeout="(0, inf)", **counts)
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"url={self.url!r} is no address: write http://<host>:<port> or https://.."
            )
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("the key holds characters that no key has (is it the right variable?)")
        path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        self.url = parts._replace(path=f"{path}/v1", fragment="").geturl()
        self._body: dict[str, Any] = {"model": self.model}
        if self.temperature is not None:
            self._body["temperature"] = self.temperature
        if self.max_tokens:
            self._body["max_tokens"] = self.max_tokens
        self._stopped = threading.Event()
        _library()

    def ask(self, system: str, user: str) -> str:
        """The text that answers the two messages.

        Raises:
          EndpointError: there is none after all tries.
        """
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        try:
            return _text_of(self._redacted(asyncio.run(self._answer(messages))))
        except EndpointError as error:
            raise EndpointError(self._redacted(str(error)), error.body) from None

    def stop(self) -> None:
        """Make calls that wait for another try give up."""
        self._stopped.set()

    async def _answer(self, messages: list[dict[str, str]]) -> str:
        """The body of the answer."""
        openai, httpx2, http_client = _library()
        http = http_client(timeout=self.timeout, stopped=self._stopped)
        # Without a key nothing is sent in its place, not even another one of the environment.
        headers = {} if self.key else {"Authorization": openai.Omit()}
        own = {"api_key": self.key or "none", "base_url": self.url, "timeout": self.timeout}
        client = openai.AsyncOpenAI(**own, max_retries=self.retries, http_client=http)
        async with client:
            try:
                create = client.chat.completions.with_raw_response.create
                body = self._body | {"messages": messages, "extra_headers": headers}
                return (await create(**body)).http_response.text
            except openai.APIStatusError as error:
                # Redacted before anything is cut: half a key would not be found any more.
                body, status = self._redacted(error.response.text), error.response
                why = f"HTTP {status.status_code} {status.reason_phrase} of {self.url}: "
                why += " ".join(body.split())[:200]
            except openai.APITimeoutError:
                why, body = f"no answer within {self.timeout:g} s from {self.url}", ""
                why += ": is it there? (--config.timeout gives it longer)"
            except (openai.OpenAIError, httpx2.HTTPError) as error:
                why, body = f"no connection to {self.url}: {error.__cause__ or error!r}", ""
        tries = f" ({http.tries} tries)" if http.tries > 1 else ""
        raise EndpointError(why + tries, body[:SHOWN])

    def _redacted(self, text: str) -> str:
        return text.replace(self.key, "<key>") if self.key else text


@functools.cache
def _library() -> tuple[Any, Any, Any]:
    """The `openai` module, its HTTP client's, and a class of these with a wall clock and a longest
    answer."""
    with extra("judge"):
        import httpx2
        import openai

    class Client(httpx2.AsyncClient):
        """Follows no redirect, which could take the key elsewhere."""

        def __init__(self, *, stopped: threading.Event, timeout: float):
            super().__init__(timeout=timeout)
            self.seconds, self.stopped, self.tries = timeout, stopped, 0

        async def send(self, request: Any, **options: Any) -> Any:
            """One try: the whole answer, read here: httpx's time-outs restart with every byte."""
            if self.stopped.is_set():
                raise openai.OpenAIError("not asked: the run was ended")
            self.tries += 1
            response, body = None, bytearray()
            try:
                async with asyncio.timeout(self.seconds):
                    response = await super().send(request, **options | {"stream": True})
                    async for part in response.aiter_bytes():
                        body += part
                        if len(body) > LONGEST_BODY:
                            raise ValueError(f"the answer is longer than {LONGEST_BODY} bytes")
            except TimeoutError:
                if response is None or response.is_success:
                    raise httpx2.ReadTimeout("", request=request) from None
            except (ValueError, LookupError, OSError) as error:  # headers that no parser expects
                raise httpx2.RemoteProtocolError(str(error)[:SHOWN], request=request) from None
            framing = ("content-encoding", "content-length", "transfer-encoding")
            headers = [(k, v) for k, v in response.headers.items() if k not in framing]
            return httpx2.Response(
                response.status_code,
                headers=headers,
                content=bytes(body),
                request=request,
                extensions=response.extensions,
            )

    return openai, httpx2, Client


def _text_of(body: str) -> str:
    """The content of the first choice."""
    try:
        text = parse_json(body, "", lax=True)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        kind = "no JSON" if isinstance(error, ValueError) else "no chat completion"
        raise EndpointError(f"the answer is {kind}: {body[:100]!r}", body[:SHOWN]) from None
    if not isinstance(text, str) or not text.strip():
        raise EndpointError("the answer holds no text", body[:SHOWN])
    # Half of a surrogate pair ("\ud83d" in JSON) is no character: no file could hold it.
    return text.encode("utf-8", "replace").decode()
