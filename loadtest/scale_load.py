"""The clients of `loadtest scale`: streams that never end, slow readers, large bodies, plain GETs.

As in the bench they read no more of an answer than they must, since they have less than a core; the slow
readers and the large bodies are read by httptools, for those are to be checked byte for byte.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, cast

import httptools
import msgspec

from loadtest.bench_load import OK, request
from loadtest.scale_backend import FLOOD, event

ENDLESS: Final = 100_000_000  # tokens of a stream that outlasts its measurement
CONNECT_TOGETHER: Final = 16
READ_PAUSE_S: Final = 0.05  # of a slow reader, after each read that gave this or more:
READ_BYTES: Final = 64 * 1024
STALLED_GAPS: Final = 20  # intervals without a chunk: at the end that stream counts as stalled
STALLED_MIN_S: Final = 2.0


class Streams:
    """Streams that are all open at once, and what came of them. Times are monotonic seconds."""

    def __init__(self, interval_ms: int) -> None:
        """`interval_ms`: between two chunks of a stream."""
        self.data = request(ENDLESS, interval_ms)
        self.interval = interval_ms / 1000
        self.chunks = 0
        self.gaps: list[float] = []  # between two reads of a stream, since `begin`
        self.errors: Counter[str] = Counter()
        self.stalled = 0
        self.open: list[Stream] = []
        self.stopped = False

    async def start(self, ports: Sequence[int], number: int, ramp: float) -> None:
        """Open so many, evenly over `ramp` seconds, so that they are not in step."""
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        for at in range(0, number, CONNECT_TOGETHER):
            some = range(at, min(at + CONNECT_TOGETHER, number))
            made = await asyncio.gather(
                *(
                    loop.create_connection(
                        lambda: Stream(self), "127.0.0.1", ports[each % len(ports)]
                    )
                    for each in some
                ),
                return_exceptions=True,
            )
            for one in made:
                if isinstance(one, BaseException):
                    self.errors[f"cannot connect: {one}"] += 1
                else:
                    self.open.append(one[1])
            await asyncio.sleep(began + ramp * some.stop / number - time.monotonic())

    def begin(self) -> None:
        """Measure from now on."""
        self.chunks = 0
        self.gaps = []

    def stop(self) -> None:
        """Hang up, after a look at which have stopped by themselves."""
        limit = time.monotonic() - max(STALLED_MIN_S, STALLED_GAPS * self.interval)
        self.stalled = sum(each.alive and each.last < limit for each in self.open)
        self.stopped = True
        for each in self.open:
            each.close()


class Stream(asyncio.Protocol):
    """One of them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.alive = True
        self.last = 0.0
        self._began = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self.last = time.monotonic()
        self._transport.write(self._streams.data)

    def data_received(self, data: bytes) -> None:
        """Count chunks, and note how long none came."""
        now = time.monotonic()
        streams = self._streams
        if self._began:
            streams.gaps.append(now - self.last)
        elif data.startswith(OK):
            self._began = True
        else:
            self._fail(data.split(b"\r\n", 1)[0].decode("latin-1"))
            return
        self.last = now
        streams.chunks += data.count(b"\n\n")

    def connection_lost(self, _: Exception | None) -> None:
        """Nobody but us may close one."""
        self._fail("connection lost")

    def _fail(self, why: str) -> None:
        if self.alive and not self._streams.stopped:
            self._streams.errors[why] += 1
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.alive = False
        self._transport.close()


class Whole(asyncio.Protocol):
    """One request whose answer is read to its end and checked; `slow` ones pause after reads."""

    def __init__(self, data: bytes, *, slow: bool = False) -> None:
        self._data = data
        self._slow = slow
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._read = 0
        self._hash = hashlib.sha256()
        self._transport: asyncio.Transport
        self.size = 0
        self.done: asyncio.Future[tuple[int, str]] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        """Read on, later if slow."""
        self._parser.feed_data(data)
        self._read += len(data)
        if self._slow and self._read >= READ_BYTES and not self.done.done():
            self._read = 0
            self._transport.pause_reading()
            self._loop.call_later(READ_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of the answer."""
        self.size += len(body)
        self._hash.update(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if not self.done.done():
            self.done.set_result((self._parser.get_status_code(), self._hash.hexdigest()))
        self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        """The answer may have been cut."""
        if not self.done.done():
            self.done.set_result((0, self._hash.hexdigest()))


def _post(body: dict[str, object]) -> bytes:
    data = msgspec.json.encode(body)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: scale\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
    )


def flood_request(events: int) -> bytes:
    """Ask for a stream of so many KiB, as fast as it is read."""
    return _post({"model": "scale", "stream": True, "max_tokens": events, "user": FLOOD})


def flood_digest(events: int) -> str:
    """SHA-256 of the body that such a request gets."""
    whole = hashlib.sha256()
    for number in range(events):
        whole.update(f"data: {event(number)}\n\n".encode())
    whole.update(b"data: [DONE]\n\n")
    return whole.hexdigest()


def large_request(size: int) -> bytes:
    """A chat request, not streamed, with a body of so many bytes and a few."""
    text = "lorem ipsum dolor sit amet " * (size // 27)
    messages = [{"role": "user", "content": text}]
    return _post({"model": "scale", "messages": messages, "max_tokens": 16})


async def whole_answers(port: int, data: bytes, number: int, *, slow: bool) -> list[Whole]:
    """Send a request so many times at once, and wait until each is answered or cut."""
    loop = asyncio.get_running_loop()
    made = await asyncio.gather(
        *(
            loop.create_connection(lambda: Whole(data, slow=slow), "127.0.0.1", port)
            for _ in range(number)
        )
    )
    clients = [client for _, client in made]
    await asyncio.gather(*(client.done for client in clients))
    return clients


async def get(port: int, path: str) -> tuple[int, bytes, float]:
    """Status, body and seconds of one GET on a connection of its own. Raises OSError."""
    began = time.monotonic()
    data = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        answer = await reader.read()
    finally:
        writer.close()
    took = time.monotonic() - began
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    return int(words[1]) if len(words) > 1 else 0, body, took
