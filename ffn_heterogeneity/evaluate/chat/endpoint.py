"""Client of an OpenAI-compatible chat endpoint, with the `openai` package (extra `judge`)."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
import urllib.parse
from typing import Any

from ffn_heterogeneity.io.read import parse_json
from ffn_heterogeneity.wording import check_numbers, extra

LONGEST_BODY = 2**22  # bytes
# Request headers that are sent; those that the client takes from the environment are not.
SENT = ("host", "accept", "accept-encoding", "connection", "content-type", "content-length")
SHOWN = 2000  # characters of an error's body that are reported


class EndpointError(Exception):
    """A call that returned no text: the reason (one line), and the response's body, if any."""

    def __init__(self, why: str, body: str = ""):
        super().__init__(why)
        self.body = body


@dataclasses.dataclass(kw_only=True, eq=False)
class Endpoint:
    """A model at `<url>/v1/chat/completions`.

    Args:
      url: http or https; with or without "/v1" or the whole path.
      key: sent as bearer token, and redacted in all responses; "": none.
      temperature, max_tokens: None and 0: not sent.
      timeout: seconds for a whole try, from the connection to the last byte (without the host's
        address look-up, which only the system can end).
      retries: further tries after a time-out, a broken connection or a busy server, by the client's
        rules: waits of 0.5 s, doubled up to 8 s, or the server's Retry-After up to 2 minutes.

    Raises:
      ValueError: an invalid address or key.
      ImportError: the client is not installed.
    """

    url: str
    model: str
    key: str = dataclasses.field(default="", repr=False)  # not in logs
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
                f"url={self.url!r} is not an address: write http://<host>:<port> or https://.."
            )
        if "@" in parts.netloc:
            raise ValueError(f"url of {parts.hostname}: leave out the user; key_env names a key")
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("the key has invalid characters (is it the right variable?)")
        path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        self._query = dict(urllib.parse.parse_qsl(parts.query))  # may contain a secret: never shown
        self.url = parts._replace(path=f"{path}/v1", query="", fragment="").geturl()
        self._body: dict[str, Any] = {"model": self.model}
        if self.temperature is not None:
            self._body["temperature"] = self.temperature
        if self.max_tokens:
            self._body["max_tokens"] = self.max_tokens
        self._stopped, self._calls = threading.Event(), set()
        self._client()  # an invalid proxy ends the run before any work

    def ask(self, system: str, user: str) -> str:
        """Return the text that answers the two messages.

        Raises:
          EndpointError: no text after all tries.
        """
        # Half of a surrogate pair, which a file may contain, cannot be sent.
        system, user = (text.encode("utf-8", "replace").decode() for text in (system, user))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        try:
            return _text_of(self._redacted(asyncio.run(self._answer(messages))))
        except EndpointError as error:
            raise EndpointError(self._redacted(str(error)), error.body) from None
        except asyncio.CancelledError:
            raise EndpointError("not asked: the run was ended") from None

    def stop(self) -> None:
        """Cancel calls that wait for another try."""
        self._stopped.set()
        for loop, task, http in list(self._calls):
            with contextlib.suppress(RuntimeError):  # that call has ended
                loop.call_soon_threadsafe(_end_wait, task, http)

    def _client(self) -> Any:
        return _library()[2](timeout=self.timeout, stopped=self._stopped, key=self.key)

    async def _answer(self, messages: list[dict[str, str]]) -> str:
        """The body of the answer."""
        openai, httpx2, _ = _library()
        http = self._client()
        options = {"api_key": "none", "base_url": self.url, "timeout": self.timeout}
        options |= {"default_query": self._query, "max_retries": self.retries}
        call = (asyncio.get_running_loop(), asyncio.current_task(), http)
        async with openai.AsyncOpenAI(**options, http_client=http) as client:
            self._calls.add(call)
            try:
                create = client.chat.completions.with_raw_response.create
                return (await create(**self._body, messages=messages)).http_response.text
            except openai.APIStatusError as error:
                # Redacted before it is cut, because half a key would not be found.
                body, status = self._redacted(error.response.text), error.response
                why = f"HTTP {status.status_code} {status.reason_phrase} of {self.url}: "
                why += " ".join(body.split())[:200]
            except openai.APITimeoutError:
                why, body = f"no answer within {self.timeout:g} s from {self.url}", ""
                why += ": is it there? (--config.timeout gives it longer)"
            except (openai.OpenAIError, httpx2.HTTPError) as error:
                why, body = f"no connection to {self.url}: {error.__cause__ or error!r}", ""
            finally:
                self._calls.discard(call)
        tries = f" ({http.tries} tries)" if http.tries > 1 else ""
        raise EndpointError(why + tries, body[:SHOWN])

    def _redacted(self, text: str) -> str:
        return text.replace(self.key, "<key>") if self.key else text


def _end_wait(task: Any, http: Any) -> None:
    """Cancel a call that waits for another try; a call in progress ends with its answer."""
    if not http.busy:
        task.cancel()


@functools.cache
def _library() -> tuple[Any, Any, Any]:
    """The `openai` module, its HTTP client's, and a client class with limits on time and length."""
    with extra("judge"):
        import httpx2
        import openai

    class Client(httpx2.AsyncClient):
        """HTTP client that follows no redirects, which could send the key elsewhere."""

        def __init__(self, *, stopped: threading.Event, timeout: float, key: str):
            super().__init__(timeout=timeout)
            self.seconds, self.stopped, self.key = timeout, stopped, key
            self.tries, self.busy = 0, False

        async def send(self, request: Any, **options: Any) -> Any:
            """Send one try; if the run has ended, it is the last (the client retries errors)."""
            if self.stopped.is_set():
                raise asyncio.CancelledError
            self.tries, self.busy = self.tries + 1, True
            try:
                response = await self._whole(request, **options)
            except Exception:
                if self.stopped.is_set():
                    raise asyncio.CancelledError from None
                raise
            finally:
                self.busy = False
            if self.stopped.is_set() and not response.is_success:
                raise asyncio.CancelledError
            return response

        def _sent(self, request: Any) -> Any:
            """The request without headers of the client and the environment."""
            headers = {name: value for name, value in request.headers.items() if name in SENT}
            headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
            fields = {"content": request.content, "extensions": request.extensions}
            return httpx2.Request(request.method, request.url, headers=headers, **fields)

        async def _whole(self, request: Any, **options: Any) -> Any:
            """Read the whole answer here, because httpx's time-outs restart with every byte."""
            response, body = None, bytearray()
            try:
                async with asyncio.timeout(self.seconds):
                    response = await super().send(self._sent(request), **options | {"stream": True})
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > LONGEST_BODY:
                            raise ValueError(f"the answer is longer than {LONGEST_BODY} bytes")
            except TimeoutError:
                if response is None or response.is_success:
                    raise httpx2.ReadTimeout("", request=request) from None
            except (ValueError, LookupError, OSError) as error:  # invalid headers
                raise httpx2.RemoteProtocolError(str(error)[:SHOWN], request=request) from None
            return _rebuilt(httpx2, request, response, bytes(body))

    return openai, httpx2, Client


def _rebuilt(httpx2: Any, request: Any, response: Any, body: bytes) -> Any:
    """The response with an already read body.

    Its content type is removed, so the text is UTF-8: servers may name invalid encodings.
    """
    gone = ("content-encoding", "content-length", "transfer-encoding", "content-type")
    headers = [(name, value) for name, value in response.headers.items() if name not in gone]
    fields = {"request": request, "extensions": response.extensions}
    return httpx2.Response(response.status_code, headers=headers, content=body, **fields)


def _text_of(body: str) -> str:
    """Content of the first choice."""
    try:
        text = parse_json(body, "", lax=True)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        kind = "no JSON" if isinstance(error, ValueError) else "no chat completion"
        raise EndpointError(f"the answer is {kind}: {body[:100]!r}", body[:SHOWN]) from None
    if not isinstance(text, str) or not text.strip():
        raise EndpointError("the answer holds no text", body[:SHOWN])
    # Half of a surrogate pair ("\ud83d" in JSON) cannot be written to a file.
    return text.encode("utf-8", "replace").decode()
