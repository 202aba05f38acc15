"""The load of the soak: short requests as fast as they are answered, and no two of them alike.

Each has an id, a user, a model, a query string, a host and a header name of its own, so that
whatever the router remembers of any of them shows as growth. Most are answered from a backend, in
one piece or as a stream; some are refused, some go to paths that there are not, and now and then a
client leaves in the middle.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from typing import Final, cast

from loadtest.bench_answers import LAST_EVENTS

LENGTH: Final = re.compile(rb"\ncontent-length: *(\d+)", re.IGNORECASE)
LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
TOKENS: Final = 4
RETRY_S: Final = 0.05
ROUTES: Final = (b"/v1/chat/completions", b"/v1/completions", b"/generate", b"/v1/embeddings")
# What a hundred requests are: the rest is answered in one piece.
STREAMS, REFUSED, UNKNOWN, LEAVING, FAR = 15, 3, 2, 1, 100


class Kind:
    """What is asked, and what must come."""

    PIECE, STREAM, REFUSED, UNKNOWN, LEAVING = range(5)
    STATUS: Final = {PIECE: b"200", STREAM: b"200", REFUSED: b"400", UNKNOWN: b"404"}


def kind_of(number: int) -> int:
    """In a fixed mixture."""
    place = number * 37 % FAR  # 37 and 100 have no divisor in common
    for kind, share in (
        (Kind.STREAM, STREAMS),
        (Kind.REFUSED, REFUSED),
        (Kind.UNKNOWN, UNKNOWN),
        (Kind.LEAVING, LEAVING),
    ):
        if place < share:
            return kind
        place -= share
    return Kind.PIECE


def request(number: int, kind: int) -> bytes:
    """The bytes of one request."""
    if kind == Kind.UNKNOWN:
        return b"GET /v1/unique-%d HTTP/1.1\r\nhost: h%d\r\nx-request-id: u-%d\r\n\r\n" % (
            number,
            number,
            number,
        )
    body = b"[%d]" % number
    if kind == Kind.PIECE:
        body = b'{"model":"m-%d","user":"u-%d","messages":[{"role":"user","content":"%d"}]}' % (
            number,
            number,
            number,
        )
    elif kind in {Kind.STREAM, Kind.LEAVING}:
        # The servers of the bench read the milliseconds between two tokens from `user`.
        user = b"0.%d" % number if kind == Kind.STREAM else b"50.%d" % number
        body = b'{"model":"m-%d","user":"%b","messages":[],"stream":true,"max_tokens":%d}' % (
            number,
            user,
            TOKENS,
        )
    route = ROUTES[0] if kind != Kind.PIECE else ROUTES[number % len(ROUTES)]
    return (
        b"POST %b?n=%d HTTP/1.1\r\nhost: h%d\r\nx-request-id: s-%d\r\nx-name-%d: %d\r\n"
        b"origin: app://o%d\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (route, number, number, number, number, number, number, len(body), body)
    )


class Load:
    """All connections."""

    def __init__(self, port: int, connections: int, rate: float = 0.0) -> None:
        """`rate`: at most so many requests a second; 0 is as many as there can be."""
        self.answered = 0
        self.left = 0
        self.sent = 0
        self.unknown = 0  # of these, to paths that there are not
        self.errors: Counter[str] = Counter()
        self.stopped = False
        self._port = port
        self.connections = connections
        self._pause = connections / rate if rate else 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.open: set[Connection] = set()

    async def start(self) -> None:
        """Open all connections; each then sends one request after another."""
        for _ in range(self.connections):
            await self._connect()

    async def stop(self) -> None:
        """Send nothing more, let what runs end, and hang up."""
        self.stopped = True
        limit = time.monotonic() + 5
        while any(connection.busy for connection in self.open) and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        for connection in list(self.open):
            if connection.busy:
                self.errors["no answer"] += 1
            connection.hang_up()
        for task in list(self._tasks):
            task.cancel()

    def again(self) -> None:
        """One connection is gone: open another."""
        if not self.stopped:
            task = asyncio.get_running_loop().create_task(self._connect())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def when_next(self, sent: float) -> float:
        """Seconds to wait before the next request of a connection."""
        return max(0.0, sent + self._pause - time.monotonic()) if self._pause else 0.0

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.stopped:
            try:
                await loop.create_connection(lambda: Connection(self), "127.0.0.1", self._port)
            except OSError as error:
                self.errors[f"cannot connect: {error.strerror}"] += 1
                await asyncio.sleep(RETRY_S)
            else:
                return


class Connection(asyncio.Protocol):
    """One connection, with one request open at a time."""

    def __init__(self, load: Load) -> None:
        self.busy = False
        self._load = load
        self._kind = Kind.PIECE
        self._buffer = b""
        self._whole = 0  # bytes of the answer, once known
        self._sent = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._load.open.add(self)
        self._next()

    def _next(self) -> None:
        load = self._load
        if load.stopped or self._transport.is_closing():
            return
        number = load.sent
        load.sent += 1
        self._kind = kind_of(number)
        load.unknown += self._kind == Kind.UNKNOWN
        self._buffer, self._whole, self.busy = b"", 0, True
        self._sent = time.monotonic()
        self._transport.write(request(number, self._kind))

    def data_received(self, data: bytes) -> None:
        self._buffer = buffer = self._buffer + data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        if self._kind == Kind.LEAVING:
            self._load.left += 1
            self.hang_up()
            self._load.again()
            return
        if self._kind == Kind.STREAM:
            if buffer.endswith(LAST_CHUNK):
                right = buffer.count(b"\n\n") == TOKENS + LAST_EVENTS
                self._answered(right=right and b"data: [DONE]\n\n" in buffer)
            return
        if not self._whole:
            found = LENGTH.search(buffer, 0, end + 2)
            self._whole = end + 4 + (int(found[1]) if found else 0)
        if len(buffer) >= self._whole:
            self._answered(right=len(buffer) == self._whole)

    def _answered(self, *, right: bool) -> None:
        self.busy = False
        load = self._load
        if right and self._buffer[9:12] == Kind.STATUS[self._kind]:
            load.answered += 1
        else:
            load.errors[self._buffer.split(b"\r\n", 1)[0].decode("latin-1")] += 1
        wait = load.when_next(self._sent)
        if wait:
            asyncio.get_running_loop().call_later(wait, self._next)
        else:
            self._next()

    def hang_up(self) -> None:
        """Leave."""
        self.busy = False
        self._load.open.discard(self)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._load.open:  # it was not us
            self._load.open.discard(self)
            self._load.errors["connection lost" if self.busy else "closed while idle"] += 1
            self.busy = False
            self._load.again()
