"""The relay's own HTTP/1.1 client: one connection to a backend.

A connection hands what it reads to the driver of the exchange it serves, from within
`data_received`: no task, no future and no queue per chunk. It is used again only when its answer
ended properly and it has been idle for less than the backend's keep-alive (uvicorn under SGLang
closes after 5 s), so that a reused connection is seldom a dead one. `pool_client` polls over the
same connections, with a reader of its own in the driver's place.

It may not decide by an answer, nor try again: what a break means is the exchange's to say.

Why no stock client: `httpx` leaks pool slots when a request is cancelled while connecting, and
none of them lets bytes be written within the read.
"""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Final, Protocol, cast

from router.framing import MAX_HEAD, ChunkedReader, FramingError, ResponseHead, parse_head
from router.turns import LARGE

if TYPE_CHECKING:
    from router.flow import Flow
    from router.pool import BackendPool
    from router.request import Body


SMALL: Final = 65_536  # bytes of a body that are cheaper to copy than to hand over apart


class _Part(enum.Enum):
    """Which part of an answer comes next."""

    HEAD = enum.auto()
    LENGTH = enum.auto()  # a body of known length
    CHUNKED = enum.auto()
    CLOSE = enum.auto()  # a body that ends with the connection


HEAD, LENGTH, CHUNKED, CLOSE = _Part  # an enum's members are slow to look up


class AnswerReader(Protocol):
    """Who is told of an answer. `now` is the moment of the read, monotonic seconds."""

    def backend_begin(self, head: ResponseHead, now: float) -> None:
        """The head is there."""
        ...

    def backend_payload(self, payload: bytes, framed: bytes, count: int, now: float) -> Flow | None:
        """Body bytes; `framed` is the same in whole chunks as they came, or empty.

        The answer is the way that plain reads may take from now on, if there is one.
        """
        ...

    def backend_whole(self, head: ResponseHead, body: bytes, now: float, *, reusable: bool) -> None:
        """The whole answer came at once: its head, its body and its end."""
        ...

    def backend_rest(self, payload: bytes, count: int, now: float, *, reusable: bool) -> None:
        """The last body bytes came, of so many chunks, and with them the end."""
        ...

    def backend_read(self) -> None:
        """The read that brought the head of a stream is worked off."""
        ...

    def backend_end(self, now: float, *, reusable: bool) -> None:
        """The answer is complete."""
        ...

    def backend_lost(self, *, answered: bool, invalid: bool = False) -> None:
        """The connection is gone, or what came is `invalid`; `answered`: a byte had come."""
        ...


class BackendConnection(asyncio.Protocol):
    """One connection to a backend; serves one exchange, or one poll, at a time."""

    __slots__ = ("_buffer", "_clock", "_dropped", "_flow", "_left", "_now", "_part", "_paused", "_reader", "_reusable", "answered",
                 "driver", "idle_since", "pool", "transport")  # fmt: skip

    def __init__(self, pool: BackendPool) -> None:
        self.pool = pool
        self.transport: asyncio.Transport | None = None
        self.driver: AnswerReader | None = None
        self.idle_since = 0.0
        self.answered = False  # whether a byte of the current answer came
        self._clock = pool.clock
        self._now = 0.0  # of the current read
        self._flow: Flow | None = None  # the way that plain reads of this answer take
        self._paused = False
        self._dropped = False
        self._part = HEAD
        self._buffer = b""  # of a head that is not whole yet
        self._left = 0  # bytes to come of a body of known length
        self._reader = ChunkedReader()
        self._reusable = True  # as far as the current answer goes

    # ------------------------------------------------------------------ used by the driver

    def send(self, driver: AnswerReader, head: bytes, body: Body) -> None:
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

    @property
    def closing(self) -> bool:
        """Whether nothing can be sent on it any more."""
        return self.transport is None or self.transport.is_closing()

    def pause(self) -> None:
        """Stop reading: the client is slow."""
        if self.transport is not None and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self.transport is not None and not self.transport.is_closing():
            self._paused = False
            self.pool.turns.ask(self._read_on)

    def keep(self, now: float) -> None:
        """The exchange is over; the connection may serve another."""
        self.driver = None
        transport = self.transport
        if (
            self._reusable
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # a request that was not taken in whole
        ):
            if self._paused:
                self.resume()
            self.idle_since = now
            self.pool.idle.append(self)
        else:
            self.drop()

    def drop(self) -> None:
        """Close at once: that is what aborts the request inside SGLang."""
        self._dropped = True
        self.driver = self._flow = None
        if self.transport is not None:
            self.transport.abort()

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one but in name
        if self._dropped:  # given up while it was being made
            self.transport.abort()
        else:
            self.pool.made(self)

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
        flow = self._flow
        if flow is not None:
            now = self._clock()
            sink = flow.sink
            if sink is not None and flow.passes(data, now):
                if not sink.is_closing():
                    sink.write(data)
                return
        driver = self.driver
        if driver is None:
            self.drop()  # nothing was asked: not a connection to trust with a request
            return
        self.answered = True
        self._now = self._clock()
        if len(data) >= LARGE and not self._paused and self.transport is not None:
            self.transport.pause_reading()
            self.pool.turns.ask(self._read_on)
        try:
            if self._part is CHUNKED:
                self._chunked(driver, data)
            elif self._part is HEAD:
                self._head(driver, data)
            else:
                self._unframed(driver, data)
        except FramingError:
            self.drop()
            driver.backend_lost(answered=True, invalid=True)

    def _read_on(self) -> None:
        """The next large read may come."""
        if not self._paused and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    # ------------------------------------------------------------------ parts of an answer

    def _head(self, driver: AnswerReader, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        end = data.find(b"\r\n\r\n")
        if end > MAX_HEAD or (end < 0 and len(data) > MAX_HEAD):
            raise FramingError("head too large")
        if end < 0:
            self._buffer = data
            return
        self._buffer = b""
        head = self.pool.known_answers.read(data, end)
        while head.status < 200:  # interim answers are not relayed (RFC 9110 section 15.2)
            if head.status == 101:
                raise FramingError("nobody asked for another protocol")
            start = end + 4
            end = data.find(b"\r\n\r\n", start)
            if end < 0:
                self._buffer = data[start:]
                return
            head = parse_head(data[start:end])
        rest = data[end + 4 :]
        if head.framing == "length" and len(rest) == head.length and rest:
            self._reusable = head.keep_alive
            driver.backend_whole(head, rest, self._now, reusable=head.keep_alive)
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
                self._unframed(driver, rest)
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

    def _chunked(self, driver: AnswerReader, data: bytes) -> None:
        """Read body bytes in chunks; say by `flow` whether the next ones may go the plain way."""
        reader = self._reader
        payloads = reader.feed(data)
        self._flow = None
        if payloads:
            payload = payloads[0] if len(payloads) == 1 else b"".join(payloads)
            if reader.done:
                reusable = self._reusable = self._reusable and not reader.rest
                driver.backend_rest(payload, len(payloads), self._now, reusable=reusable)
                return
            framed = data if reader.plain else b""
            flow = driver.backend_payload(payload, framed, len(payloads), self._now)
            self._flow = flow if reader.between_chunks and self.driver is driver else None
        elif reader.done:
            self._end(driver, reader.rest)

    def _unframed(self, driver: AnswerReader, data: bytes) -> None:
        """Read body bytes that have no framing: up to their length, or to the close."""
        if self._part is CLOSE:
            driver.backend_payload(data, b"", 1, self._now)
            return
        left = self._left
        self._left = left - len(data)
        driver.backend_payload(data if self._left >= 0 else data[:left], b"", 1, self._now)
        if self._left <= 0 and self.driver is driver:
            self._end(driver, data[left:])

    def _end(self, driver: AnswerReader, rest: bytes) -> None:
        """The answer is whole. Bytes beyond it are nobody's: such a connection is not reused."""
        self._flow = None
        if rest:
            self._reusable = False
        driver.backend_end(self._now, reusable=self._reusable)
