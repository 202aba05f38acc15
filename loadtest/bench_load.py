"""The load of `loadtest bench`: connections that send one request again and again.

Raw HTTP/1.1 over protocols, since a client library would take longer than the proxy that it is to
measure. It reads no more of an answer than it must to know that it is whole: the status, how many
events it has and how it ends.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, cast

import msgspec

from loadtest.bench_answers import LAST_EVENTS, STAMP, STAMP_SIZE
from loadtest.bench_backend import Counts
from loadtest.bench_cost import Usage

LENGTH: Final = re.compile(rb"\ncontent-length: *(\d+)", re.IGNORECASE)
OK: Final = b"HTTP/1.1 200 "
LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
TAIL: Final = 40  # bytes: [DONE] and the last chunk are in it
PROMPT: Final = "lorem ipsum dolor sit amet " * 38
READY_S: Final = 20.0
ANSWER_S: Final = 5.0
POLL_S: Final = 0.002
RETRY_S: Final = 0.1
SEED: Final = 1
HANG_UP_CHUNKS: Final = 3
HANG_UP_INTERVAL_MS: Final = 20


class NoAnswerError(RuntimeError):
    """Nothing answered as it should."""


def request(tokens: int, interval_ms: int = 0, *, stream: bool = True) -> bytes:
    """A chat request of 1.2 KB."""
    body: dict[str, object] = {
        "model": "bench",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": tokens,
        "temperature": 0.7,
        "user": str(interval_ms),
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    data = msgspec.json.encode(body)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\naccept: */*\r\nuser-agent: bench\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)
    )


class Load:
    """What all connections of one load have counted so far."""

    def __init__(self, data: bytes, tokens: int = 0, pause: float = 0.0) -> None:
        """`data`: the request; `tokens`: how many each answer streams, 0 if it does not stream.

        `pause`: the most seconds that a client waits between a stream's end and its next request.
        """
        self.data = data
        self.events = tokens + LAST_EVENTS if tokens else 0
        self.answers = 0
        self.chunks = 0  # writes of the server: one a token, and one for the end
        self.first: list[tuple[float, float]] = []  # when sent, seconds to the first chunk
        self.later: list[tuple[float, float]] = []  # when a later chunk came, seconds on its way
        self.errors: Counter[str] = Counter()
        self.pause = pause
        self.random = random.Random(SEED)
        self.stopped = False


class Connection(asyncio.Protocol):
    """One connection, with one request open at any time. Without a stream: whole answers."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.open = False
        self.last = 0.0
        self.sent = 0.0
        self.events = 0
        self._buffer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self.open = True
        self.send()

    def send(self) -> None:
        """Send the request, once more."""
        if not self.open:
            return
        self._buffer = b""
        self.events = 0
        self.sent = time.monotonic()
        self._transport.write(self.load.data)

    def data_received(self, data: bytes) -> None:
        """Look whether the answer is complete."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        found = LENGTH.search(self._buffer, 0, end)
        if not self._buffer.startswith(OK) or not found:
            self.fail(self._buffer[:end].split(b"\r\n", 1)[0].decode("latin-1"))
        elif len(self._buffer) == end + 4 + int(found[1]):
            self.last = time.monotonic()
            self.load.answers += 1
            self.send()

    def connection_lost(self, _: Exception | None) -> None:
        """Nobody but the load itself may close one."""
        if self.open:
            self.fail("connection lost")

    def fail(self, why: str) -> None:
        """Count an error; this connection is over."""
        if not self.load.stopped:
            self.load.errors[why] += 1
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.open = False
        self._transport.close()


class Streaming(Connection):
    """The same with answers that are streams."""

    def data_received(self, data: bytes) -> None:
        """Count the events; an event is in one chunk of HTTP, so its two newlines stay together."""
        self.last = now = time.monotonic()
        count = data.count(b"\n\n")
        if data[:1] == b"\n" and self._buffer[-1:] == b"\n":
            count += 1  # unless the network parted them
        load = self.load
        if not self.events:
            if not (self._buffer or OK.startswith(data[: len(OK)])):
                self.fail(data.split(b"\r\n", 1)[0].decode("latin-1"))
                return
            if count:
                load.first.append((self.sent, now - self.sent))
        self.events += count
        load.chunks += count
        stamp = data.find(STAMP)
        if stamp >= 0:
            sent = data[stamp + len(STAMP) :][:STAMP_SIZE]
            if len(sent) == STAMP_SIZE:  # unless the network parted it
                load.later.append((now, now - float(sent)))
        self._buffer = data[-TAIL:] if len(data) >= TAIL else (self._buffer + data)[-TAIL:]
        if self._buffer.endswith(LAST_CHUNK):
            load.chunks -= LAST_EVENTS - 1
            if self.events != load.events or b"data: [DONE]\n\n" not in self._buffer:
                self.fail("answer incomplete")
                return
            load.answers += 1
            if not load.pause:
                self.send()
                return
            # Answers that end together must not begin together: streams would fall into step.
            pause = load.random.uniform(0, load.pause)
            asyncio.get_running_loop().call_later(pause, self.send)


class Window(msgspec.Struct):
    """What happened between the end of the warm-up and the end of the load."""

    seconds: float
    answers: int
    chunks: int
    used: Usage
    first: list[float]  # seconds from a request to its first chunk, in no order
    later: list[float]  # seconds from a later chunk's sending to its coming, of some
    errors: Counter[str]


async def run_load(
    load: Load,
    ports: Sequence[int],
    *,
    connections: int,
    ramp: float,
    warm: float,
    seconds: float,
    usage: Callable[[], Usage],
) -> Window:
    """Open the connections over `ramp` seconds, wait for `warm`, and measure for `seconds`."""
    clients = await _connect(load, ports, connections, ramp)
    try:
        await asyncio.sleep(warm)
        began, used = time.monotonic(), usage()
        answers, chunks = load.answers, load.chunks
        await asyncio.sleep(seconds)
        ended, used = time.monotonic(), usage() - used
        answers, chunks = load.answers - answers, load.chunks - chunks
        stalled = sum(client.open and client.last < began for client in clients)
    finally:
        load.stopped = True
        for client in clients:
            client.close()
    if stalled:
        load.errors["stalled"] += stalled
    first = [took for sent, took in load.first if began <= sent < ended]
    later = [took for came, took in load.later if began <= came < ended]
    return Window(ended - began, answers, chunks, used, first, later, load.errors)


async def _connect(
    load: Load, ports: Sequence[int], connections: int, ramp: float
) -> list[Connection]:
    """Spread evenly, so that streams are not in step with each other."""
    loop = asyncio.get_running_loop()
    kind = Streaming if load.events else Connection
    began = time.monotonic()
    clients: list[Connection] = []
    for number in range(connections):
        port = ports[number % len(ports)]
        try:
            _, client = await loop.create_connection(lambda: kind(load), "127.0.0.1", port)
        except OSError as error:
            load.errors[f"cannot connect: {error.strerror}"] += 1
        else:
            clients.append(client)
        ahead = began + ramp * (number + 1) / connections - time.monotonic()
        if ahead > 0:
            await asyncio.sleep(ahead)
    return clients


async def _until(done: Callable[[], bool]) -> None:
    """Wait for it, but not for ever."""
    for _ in range(int(ANSWER_S / POLL_S)):
        if done():
            break
        await asyncio.sleep(POLL_S)


async def until_ready(port: int, runs: Callable[[], bool] = lambda: True) -> None:
    """Wait until a request is answered, while the program `runs`. Raises NoAnswerError."""
    limit = time.monotonic() + READY_S
    while time.monotonic() < limit:
        if not runs():
            raise NoAnswerError("it ended")
        if await _answers(port):
            return
        await asyncio.sleep(RETRY_S)
    raise NoAnswerError(f"no answer on port {port} within {READY_S:g} s")


async def _answers(port: int) -> bool:
    load = Load(request(1, stream=False))
    for client in await _connect(load, [port], 1, 0):
        await _until(lambda: bool(load.answers or load.errors))
        load.stopped = True
        client.close()
    return load.answers > 0


async def time_hang_up(port: int, counts: Callable[[], Awaitable[Counts]]) -> float | None:
    """Seconds from leaving a stream to the server's seeing it; None if it does not."""
    before = (await counts()).hang_ups
    load = Load(request(1000, HANG_UP_INTERVAL_MS), 1000)
    clients = await _connect(load, [port], 1, 0)
    await _until(lambda: load.chunks >= HANG_UP_CHUNKS or bool(load.errors))
    load.stopped, left = True, time.monotonic()
    for client in clients:
        client.close()
    if load.chunks < HANG_UP_CHUNKS:
        return None
    for _ in range(int(ANSWER_S / POLL_S)):
        await asyncio.sleep(POLL_S)
        now = await counts()
        if now.hang_ups > before:
            return now.last_hang_up - left
    return None
