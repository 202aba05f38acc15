"""A backend that does exactly what a test says: raw bytes, cuts, resets and silence.

    async with scripted_backend(answer) as backend: ...

`answer(call)` is awaited for each request that arrived whole; `call` sends bytes and ends the
connection. What the router asks by itself (`/ready`, `/health`, `/v1/loads`, `/server_info`,
`/metrics`) is answered apart and not counted. The backend records every other request as raw bytes, how many there are under way, and
whether the peer closed first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable

OK = b'{"id":"1","object":"chat.completion","choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}'
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
QUEUE_FULL_EVENT = (
    b'data: {"error": {"object": "error", "message": "The request queue is full.", '
    b'"type": "SERVICE_UNAVAILABLE", "param": null, "code": 503}}\n\n'
)
PROBES = {
    *(b"/ready", b"/health", b"/v1/loads", b"/metrics", b"/get_load"),
    *(b"/server_info", b"/get_server_info"),
}


def response(body: bytes = OK, status: str = "200 OK", extra: bytes = b"") -> bytes:
    """A whole answer of known length."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + extra + b"\r\n" + body


def chunk(payload: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(text: str) -> bytes:
    """One chunk with one event."""
    return chunk(b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode())


class Call:
    """One request that arrived, and the means to answer it."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter, reused: int) -> None:
        self.head = head
        self.body = body
        self.reused = reused  # requests that this connection served before
        self.arrived = time.monotonic()
        self.peer_closed = asyncio.Event()
        self._writer = writer

    @property
    def path(self) -> bytes:
        """The request target."""
        return self.head.split(b" ", 2)[1]

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The last value of each header, names in lower case."""
        lines = self.head.split(b"\r\n")[1:]
        pairs = (line.partition(b":") for line in lines if line)
        return {name.lower(): value.strip() for name, _, value in pairs}

    async def send(self, data: bytes) -> None:
        """Send bytes now."""
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        """End the connection with FIN."""
        self._writer.close()

    def reset(self) -> None:
        """End the connection with RST."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Answer = Callable[[Call], Awaitable[None]]


async def answer_ok(call: Call) -> None:
    """A sound answer without a stream."""
    await call.send(response())


class ScriptedBackend:
    """Listens on a free port of loopback."""

    def __init__(self, answer: Answer, *, probes: bool = True) -> None:
        """Without `probes` everything is answered by `answer` and counted."""
        self.answer = answer
        self._apart = PROBES if probes else set()
        self.calls: list[Call] = []
        self.in_flight = 0
        self.connections = 0
        self.ready = True
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        served = 0
        self.connections += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                call = Call(head, b"", writer, served)
                call.body = await reader.readexactly(int(call.headers.get(b"content-length", 0)))
                if call.path.partition(b"?")[0] in self._apart:
                    await call.send(self._probe(call.path))
                    continue
                await self._answer(call, reader)
                served += 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # cancelled: the test is over, and asyncio would log the task's end
        finally:
            self.connections -= 1
            writer.close()
            if task is not None:
                self._tasks.discard(task)

    def _probe(self, path: bytes) -> bytes:
        if path in {b"/ready", b"/health"}:
            status = "200 OK" if self.ready else "503 Service Unavailable"
            return f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode()
        return b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"

    async def _answer(self, call: Call, reader: asyncio.StreamReader) -> None:
        self.calls.append(call)
        self.in_flight += 1
        watch = asyncio.ensure_future(self._watch(call, reader))
        try:
            await self.answer(call)
        finally:
            self.in_flight -= 1
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(self, call: Call, reader: asyncio.StreamReader) -> None:
        """See the peer's close while a request is being answered."""
        while not reader.at_eof() and reader.exception() is None:
            await asyncio.sleep(0.001)
        call.peer_closed.set()

    async def close(self) -> None:
        """End every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def scripted_backend(
    answer: Answer = answer_ok, *, probes: bool = True
) -> AsyncIterator[ScriptedBackend]:
    """A scripted backend for as long as the block runs."""
    backend = ScriptedBackend(answer, probes=probes)
    server = await asyncio.start_server(backend.serve, "127.0.0.1", 0, backlog=1024)
    backend.port = server.sockets[0].getsockname()[1]
    try:
        yield backend
    finally:
        server.close()
        await backend.close()
