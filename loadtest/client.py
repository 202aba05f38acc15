"""One streaming chat request over HTTP/1.1 becomes one `RequestRecord`.

A load test on a small machine shares its cores with what it measures, so this client is bare: an
asyncio protocol, httptools, and the router's own scanner for usage, `[DONE]` and error events. It
costs some ten microseconds a chunk, where httpx costs several hundred.

A request never raises for what a server or a network did: that is in the record's `error`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from loadtest.record import RequestRecord, as_threshold
from router.load import Role
from router.sse import SseScanner

# A server may close an idle connection just as we use it; SGLang does so after 5 seconds.
REUSE_SECONDS: Final = 2.0
# Of a refusal only the message is wanted.
MAX_ERROR_BODY: Final = 16_384
MAX_ERROR: Final = 200  # characters of a record's error


def chat_body(
    model: str, prompt: str, max_tokens: int, *, ignore_eos: bool = True, **more: object
) -> bytes:
    """The body of a streaming chat request that asks for usage. `ignore_eos` is SGLang's."""
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body | more)


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.idle_since = 0.0
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self.status: int | None = None
        self.headers: dict[bytes, bytes] = {}
        self.first_chunk: float | None = None
        self.scanner = SseScanner()
        self.refusal = b""
        self._parser = httptools.HttpResponseParser(self)

    @property
    def usable(self) -> bool:
        """Whether another request may be sent here."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._clock() - self.idle_since < REUSE_SECONDS
        )

    async def request(self, data: bytes) -> None:
        """Send a request and wait for the end of its answer. Raises ConnectionError."""
        self._begin()
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            await self._answered
        except BaseException:
            self.close()  # also when cancelled: closing is what stops the server
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionError(f"no HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (asyncio's signature)
        self._end(ConnectionResetError("the connection was closed within the answer"))

    # The parser calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.first_chunk is None:
            self.first_chunk = self._clock()
        if self.status == 200:
            self.scanner.feed(body)
        elif len(self.refusal) < MAX_ERROR_BODY:
            self.refusal += body

    def on_message_complete(self) -> None:
        if self.status is not None and self.status < 200:
            return
        self.idle_since = self._clock()
        if not self._parser.should_keep_alive():
            self.close()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._answered is None or self._answered.done():
            return
        if error is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(error)


class ChatClient:
    """Sends chat requests to one server, over connections that it keeps."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`url` is a base URL, with or without `/v1`; `timeout` is for a whole request."""
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"a server's URL looks like http://127.0.0.1:8000, got {url!r}")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        lines = [
            f"POST {prefix}/v1/chat/completions HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
            "content-type: application/json",
            "accept: text/event-stream",
        ]
        if api_key is not None:
            lines.append(f"authorization: Bearer {api_key}")
        self._head = "\r\n".join(lines).encode() + b"\r\ncontent-length: "
        self._timeout = timeout
        self._clock = clock
        self._idle: list[_Connection] = []
        self._ids = itertools.count(1)

    async def chat(
        self, body: bytes, *, run: str = "", level: int | None = None, began: float = 0.0
    ) -> RequestRecord:
        """Send one request (`chat_body`) and follow its answer to the end.

        `began` is when the run began, by this client's clock: the record's times count from there.
        """
        number = next(self._ids)
        started = self._clock()
        connection = _Connection(self._clock)
        fault: str | None = None
        try:
            async with asyncio.timeout(self._timeout):
                connection = await self._connect()
                await connection.request(self._head + b"%d\r\n\r\n" % len(body) + body)
        except TimeoutError:
            fault = f"no complete answer within {self._timeout:g} s"
        except OSError as error:
            fault = error.strerror or str(error) or type(error).__name__
        ended = self._clock()
        fault = fault or _fault(connection)
        if connection.usable:
            self._idle.append(connection)
        prompt, output = connection.scanner.usage
        first = connection.first_chunk
        said = _said(connection.headers)
        return RequestRecord(
            id=said.pop("id", f"{run or 'request'}-{number}"),
            run=run,
            level=level,
            started=started - began,
            first_chunk=None if first is None else first - began,
            ended=ended - began,
            status=connection.status,
            prompt_tokens=prompt,
            output_tokens=output,
            error=None if fault is None else fault[:MAX_ERROR],
            **said,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._clock), self._host, self._port, ssl=self._ssl
        )
        return connection


def _fault(connection: _Connection) -> str | None:
    """What is wrong with an answer that came to its end."""
    if connection.status != 200:
        return f"status {connection.status}: {_message(connection.refusal)}"
    if connection.scanner.error is not None:
        return f"error event {connection.scanner.error} in the stream"
    return None if connection.scanner.done else "the stream ended without [DONE]"


def _message(body: bytes) -> str:
    """The message in a refusal, whichever of SGLang's and OpenAI's shapes it has."""
    try:
        decoded: Any = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        decoded = None
    if isinstance(decoded, dict):
        inner = decoded.get("error")
        found = inner.get("message") if isinstance(inner, dict) else decoded.get("message")
        if isinstance(found, str):
            return found
    return body.decode("utf-8", "replace").strip() or "(no body)"


def _said(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """What a router says of its decision, in the record's fields; empty without a router."""
    fields: dict[str, Any] = {}
    if request_id := headers.get(b"x-request-id"):
        fields["id"] = request_id.decode("latin-1")
    backend = headers.get(b"x-crossover-backend", b"").decode("latin-1")
    if backend in set(Role):
        fields["backend"] = Role(backend)
    if reason := headers.get(b"x-crossover-reason"):
        fields["reason"] = reason.decode("latin-1")
    n, slash, m = headers.get(b"x-crossover-concurrency", b"").partition(b"/")
    if slash and n.isdigit() and m.isdigit():
        fields |= {"n": int(n), "m": int(m)}
    with contextlib.suppress(KeyError, ValueError):
        fields["threshold"] = as_threshold(float(headers[b"x-crossover-threshold"]))
    return fields
