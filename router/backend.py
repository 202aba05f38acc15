"""The relay's own HTTP/1.1 client: connections to one backend, and their pool.

A connection hands what it reads to the driver of the exchange it serves, from within
`data_received`: no task, no future and no queue per chunk. It is used again only when its answer
ended properly and it has been idle for less than the backend's keep-alive (uvicorn under SGLang
closes after 5 s), so that a reused connection is seldom a dead one.

Why no stock client: `httpx` leaks pool slots when a request is cancelled while connecting, and
none of them lets bytes be written within the read.
"""

from __future__ import annotations

import asyncio
import enum
import ssl
from typing import TYPE_CHECKING, Final, cast

from router.framing import MAX_HEAD, ChunkedReader, FramingError, ResponseHead, parse_head

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.config import BackendUrl
    from router.driver import Driver
    from router.load import Role
    from router.routes import Route


SMALL: Final = 65_536  # bytes of a body that are cheaper to copy than to hand over apart


class _Part(enum.Enum):
    """Which part of an answer comes next."""

    HEAD = enum.auto()
    LENGTH = enum.auto()
    CHUNKED = enum.auto()
    CLOSE = enum.auto()


HEAD, LENGTH, CHUNKED, CLOSE = _Part


class BackendConnection(asyncio.Protocol):
    """One connection to a backend; serves one exchange at a time."""

    __slots__ = ("_buffer", "_left", "_now", "_part", "_paused", "_reader", "_reusable", "answered",
                 "driver", "head_request", "idle_since", "pool", "transport")  # fmt: skip

    def __init__(self, pool: BackendPool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport | None = None
        self.driver: Driver | None = None
        self.idle_since = 0.0
        self.answered = False  # whether a byte of the current answer came
        self._now = 0.0  # of the current read
        self._paused = False
        self._part = HEAD
        self._buffer = b""
        self._left = 0
        self._reader = ChunkedReader()
        self._reusable = True

    # ------------------------------------------------------------------ used by the driver

    def send(self, driver: Driver, head: bytes, body: bytes) -> None:
        """Send one request; the answer goes to the driver."""
        self.driver = driver
        self.answered = False
        self._part = HEAD
        self._buffer = b""
        transport = self.transport
        if transport is not None:
            if len(body) <= SMALL:
                transport.write(head + body)
            else:
                transport.writelines((head, body))

    def pause(self) -> None:
        """Stop reading: the client is slow."""
        if self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def keep(self, now: float) -> None:
        """The exchange is over; the connection may serve another."""
        self.driver = None
        if self._reusable and self.transport is not None and not self.transport.is_closing():
            if self._paused:
                self.resume()
            self.idle_since = now
            self.pool.idle.append(self)
        else:
            self.drop()

    def drop(self) -> None:
        """Close at once: that is what aborts the request inside SGLang."""
        self.driver = None
        if self.transport is not None:
            self.transport.abort()

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one but in name
        self.pool.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended: the end of a close-delimited answer, or a break."""
        self.pool.forget(self)
        driver, self.driver = self.driver, None
        if driver is None:
            return
        if self._part is CLOSE and exc is None:
            driver.backend_end(self.pool.clock(), reusable=False)
        else:
            driver.backend_lost(answered=self.answered)

    def data_received(self, data: bytes) -> None:
        """Take the next bytes of the answer."""
        driver = self.driver
        if driver is None:
            self.drop()  # nothing was asked: not a connection to trust with a request
            return
        self.answered = True
        self._now = self.pool.clock()
        try:
            if self._part is CHUNKED:
                self._chunked(driver, data)
            elif self._part is HEAD:
                self._head(driver, data)
            else:
                self._plain(driver, data)
        except FramingError:
            self.drop()
            driver.backend_lost(answered=True, invalid=True)

    # ------------------------------------------------------------------ parts of an answer

    def _head(self, driver: Driver, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD:
                msg = "head too large"
                raise FramingError(msg)
            self._buffer = data
            return
        self._buffer = b""
        head = parse_head(data[:end], head_request=False)
        rest = data[end + 4 :]
        if head.status < 200:  # interim answers are not relayed (RFC 9110 section 15.2)
            if head.status == 101:
                msg = "nobody asked for another protocol"
                raise FramingError(msg)
            if rest:
                self._head(driver, rest)
            return
        self._begin_body(head)
        driver.backend_begin(head, self._now)
        if self.driver is not driver:  # the exchange ended on its head
            return
        if head.framing == "none" or (head.framing == "length" and not head.length):
            self._end(driver, rest)
        elif rest:
            if self._part is CHUNKED:
                self._chunked(driver, rest)
            else:
                self._plain(driver, rest)
        if head.event_stream:
            driver.backend_read()

    def _begin_body(self, head: ResponseHead) -> None:
        self._reusable = head.keep_alive
        if head.framing == "chunked":
            self._part = CHUNKED
            self._reader = ChunkedReader()
        elif head.framing == "close":
            self._part = CLOSE
        else:
            self._part = LENGTH
            self._left = head.length

    def _chunked(self, driver: Driver, data: bytes) -> None:
        reader = self._reader
        payloads = reader.feed(data)
        if payloads:
            framed = data if reader.plain and not reader.done else b""
            payload = payloads[0] if len(payloads) == 1 else b"".join(payloads)
            driver.backend_payload(payload, framed, len(payloads), self._now)
        if reader.done and self.driver is driver:
            self._end(driver, reader.rest)

    def _plain(self, driver: Driver, data: bytes) -> None:
        if self._part is CLOSE:
            driver.backend_payload(data, b"", 1, self._now)
            return
        left = self._left
        self._left = left - len(data)
        driver.backend_payload(data if self._left >= 0 else data[:left], b"", 1, self._now)
        if self._left <= 0 and self.driver is driver:
            self._end(driver, data[left:])

    def _end(self, driver: Driver, rest: bytes) -> None:
        """The answer is whole. Bytes beyond it are nobody's: such a connection is not reused."""
        if rest:
            self._reusable = False
        driver.backend_end(self._now, reusable=self._reusable)


class BackendPool:
    """Connections to one backend: idle ones to take, new ones to make."""

    def __init__(
        self,
        role: Role,
        url: BackendUrl,
        *,
        key: str | None,
        keep_alive: float,
        connect_timeout: float,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`keep_alive` and `connect_timeout` in seconds; `key` is the backend's own API key."""
        self.role = role
        self.url = url
        self.keep_alive = keep_alive
        self.connect_timeout = connect_timeout
        self.idle: list[BackendConnection] = []
        self.open: set[BackendConnection] = set()
        self._key = f"authorization: Bearer {key}\r\n".encode() if key else b""
        self._tls = (
            tls if tls is not None or url.scheme != "https" else ssl.create_default_context()
        )
        self.clock = clock
        self._heads: dict[Route, bytes] = {}

    def head_for(self, route: Route) -> bytes:
        """The constant beginning of a request for this route: request line, Host, key."""
        head = self._heads.get(route)
        if head is None:
            target = self.url.prefix.encode() + route.path
            head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" % (
                route.method,
                target,
                self.url.authority,
                self._key,
            )
            self._heads[route] = head
        return head

    def take(self, now: float) -> BackendConnection | None:
        """The idle connection used last, if one is young enough."""
        while self.idle:
            connection = self.idle.pop()
            transport = connection.transport
            if (
                now - connection.idle_since < self.keep_alive
                and transport is not None
                and not transport.is_closing()
            ):
                return connection
            connection.drop()
        return None

    async def connect(self) -> BackendConnection:
        """A new connection. Raises OSError, or TimeoutError after `connect_timeout`.

        Names are looked up each time, so a backend that moved is found without a restart.
        """
        connection = BackendConnection(self)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_timeout):
                await loop.create_connection(
                    lambda: connection, self.url.host, self.url.port, ssl=self._tls
                )
        except BaseException:
            connection.drop()  # cancelled between the handshake and our waking up
            raise
        return connection

    def forget(self, connection: BackendConnection) -> None:
        """A connection is gone."""
        self.open.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Close connections that have been idle too long."""
        while self.idle and now - self.idle[0].idle_since >= self.keep_alive:
            self.idle.pop(0).drop()

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.open):
            connection.drop()
