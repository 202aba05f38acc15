"""One HTTP request to a simulated server, on top of uvicorn's own protocol.

uvicorn parses and frames. What ASGI cannot say is added here: to learn at once that a client is
gone, and to close a connection without an answer, as a server does that dies. What is answered is
the routes' to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from loadtest.clock import Clock

JSON: Final = b"application/json"
SSE: Final = b"text/event-stream; charset=utf-8"
NDJSON: Final = b"application/x-ndjson"
TEXT: Final = b"text/plain; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"
VARY: Final = (b"vary", b"Origin")


class EngineProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which tells the request in progress that its connection is gone."""

    on_gone: Callable[[], None] | None = None

    def on_message_begin(self) -> None:
        """Give the application a way to its connection."""
        super().on_message_begin()
        self.scope["state"]["connection"] = self

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request in progress."""
        super().connection_lost(exc)
        if self.on_gone is not None:
            self.on_gone()


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Any, receive: Any, send: Any, clock: Clock) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.raw_headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.headers: dict[bytes, bytes] = dict(self.raw_headers)
        self.body = b""
        self.status: int | None = None
        self.gone = False
        self.abort: Callable[[], None] | None = None  # called once, when the client is gone
        self._gone = asyncio.Event()
        self._receive = receive
        self._send = send
        self._clock = clock
        self._connection: EngineProtocol = scope["state"]["connection"]
        self._connection.on_gone = self._on_gone

    async def read_body(self) -> None:
        """Read the whole body."""
        parts = []
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                return
            parts.append(message["body"])
            if not message["more_body"]:
                self.body = parts[0] if len(parts) == 1 else b"".join(parts)
                return

    async def reply(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes | None = JSON,
        headers: tuple[tuple[bytes, bytes], ...] = (VARY,),
    ) -> None:
        """Send a whole answer. Headers come in the order in which the real server sends them."""
        head = [(b"content-length", b"%d" % len(body))]
        if content_type is not None:
            head.append((b"content-type", content_type))
        await self._start(status, [*head, *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_json(self, status: int, value: Any) -> None:
        """Send a value as JSON."""
        await self.reply(status, msgspec.json.encode(value))

    async def start_stream(self, content_type: bytes = SSE) -> None:
        """Send the head of a stream."""
        await self._start(200, [(b"content-type", content_type), VARY])

    async def write(self, data: bytes) -> None:
        """Send one chunk; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        """Send the end of a stream."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than the client does."""
        if seconds <= 0 or self.gone:
            return
        sleep = asyncio.ensure_future(self._clock.sleep(seconds))
        gone = asyncio.ensure_future(self._gone.wait())
        await asyncio.wait({sleep, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in (sleep, gone):
            task.cancel()

    async def drop(self) -> None:
        """Close the connection without an answer."""
        self._connection.transport.close()
        await self._gone.wait()

    def finish(self) -> None:
        """The answer is complete, or never will be: forget the connection."""
        self._connection.on_gone = None

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        origin = self.headers.get(b"origin")
        if origin is not None and VARY in headers:
            headers.append((b"access-control-allow-origin", origin))
            headers.append((b"access-control-allow-credentials", b"true"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _on_gone(self) -> None:
        self.gone = True
        self._gone.set()
        if self.abort is not None:
            self.abort()
