"""A backend that does exactly what a test says: raw bytes, cuts, resets and silence.

    async with scripted_backend(answer) as backend: ...

`answer(call)` is awaited for each request that arrived whole; `call` sends bytes and ends the
connection. What the router asks by itself (`/ready`, `/health`, `/v1/loads`, `/server_info`,
`/metrics`) is answered apart and not counted, unless `backend.probe` says what it gets or
`probes=False` makes these requests like any other. The backend records every other request as raw
bytes with the moment of its arrival, how many there are under way, and when and how (FIN or RST)
the peer closed first. Connections may be limited in idle seconds and in requests, the backend may
leave its port and come back (`leave`, `come_back`), and `full_backlog` is one that never accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

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
# What a server is, which these backends never say: what is asked next would be counted.
INFO = {b"/server_info", b"/get_server_info"}


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
        self.closed_at: float | None = None  # monotonic seconds, when the peer closed first
        self.closed_by: str | None = None  # "fin" or "rst"
        self.taken = 0  # bytes of a flood that the socket took
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
        """Send bytes now. Raises ConnectionError when the peer is gone."""
        try:
            self._writer.write(data)
        except RuntimeError as error:  # how uvloop says that the transport is closed
            raise ConnectionResetError(str(error)) from error
        await self._writer.drain()

    async def cut(self, data: bytes, size: int, pause_s: float = 0.0) -> None:
        """Send in segments of so many bytes, with a pause after each (TCP_NODELAY is on)."""
        for at in range(0, len(data), size):
            await self.send(data[at : at + size])
            await asyncio.sleep(pause_s)

    async def flood(self, total: int, piece: bytes) -> None:
        """Send `piece` again and again until `total` bytes were taken; `taken` says how many."""
        while self.taken < total:
            await self.send(piece)
            self.taken += len(piece)

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
        self.probe: Callable[[bytes], Awaitable[bytes]] | None = None  # path to whole answer
        self.keep_alive_s: float | None = None  # seconds that an idle connection is kept
        self.most_requests: int | None = None  # per connection
        self.watch_s = 0.001  # how often each call looks whether its peer closed
        self.port = 0
        self._host = "127.0.0.1"
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Take a port: any free one, or this one."""
        self._server = await asyncio.start_server(self.serve, host, port, backlog=1024)
        self._host, self.port = host, self._server.sockets[0].getsockname()[1]

    async def leave(self) -> None:
        """Listen no longer, and end every connection, as a server that stops does."""
        if self._server is not None:
            self._server.close()
        await self.close()

    async def come_back(self) -> None:
        """Listen on the port that was left."""
        await self.listen(self._host, self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        served = 0
        self.connections += 1
        try:
            while not writer.is_closing():
                async with asyncio.timeout(self.keep_alive_s if served else None):
                    head = await reader.readuntil(b"\r\n\r\n")
                call = Call(head, b"", writer, served)
                call.body = await _read_body(call, reader)
                path = call.path.partition(b"?")[0]
                if path in self._apart:
                    asked = None if path in INFO else self.probe
                    await call.send(self._probe(path) if asked is None else await asked(path))
                    continue
                await self._answer(call, reader)
                served += 1
                if served == self.most_requests:
                    break
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
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
            await asyncio.sleep(self.watch_s)
        call.closed_at = time.monotonic()
        call.closed_by = "fin" if reader.exception() is None else "rst"
        call.peer_closed.set()

    async def close(self) -> None:
        """End every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _read_body(call: Call, reader: asyncio.StreamReader) -> bytes:
    """The body, however it is framed; without the framing."""
    if call.headers.get(b"transfer-encoding") != b"chunked":
        return await reader.readexactly(int(call.headers.get(b"content-length", 0)))
    body = b""
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        body += (await reader.readexactly(size + 2))[:-2]
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
    return body


@contextlib.asynccontextmanager
async def scripted_backend(
    answer: Answer = answer_ok, *, host: str = "127.0.0.1", port: int = 0, probes: bool = True
) -> AsyncIterator[ScriptedBackend]:
    """A scripted backend for as long as the block runs."""
    backend = ScriptedBackend(answer, probes=probes)
    await backend.listen(host, port)
    try:
        yield backend
    finally:
        await backend.leave()


@contextlib.contextmanager
def full_backlog(port: int = 0) -> Iterator[int]:
    """The port of a listener that answers no SYN any more: nobody accepts, and its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield listener.getsockname()[1]
