"""What the tests of the simulated server share: a loop around a test, and a client of plain bytes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ParamSpec

from loadtest.engine import RunningEngine

P = ParamSpec("P")
LIMIT_S = 30.0


def looped(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in an event loop of its own, with a limit."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S))

    return run


class ManualClock:
    """Time that passes only when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """The time that the test has set."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until the test has moved the time this far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    def advance(self, seconds: float) -> None:
        """Move the time and wake, in order, those whose time has come."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)


@dataclass
class Answer:
    """A response, taken apart."""

    status: str
    headers: dict[str, str]
    body: bytes  # with the chunks' framing taken off
    chunks: list[bytes]  # HTTP chunks; none if the length was given
    complete: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of the SSE events; `[DONE]` as it is."""
        data = [
            line.removeprefix("data: ")
            for line in self.body.decode().split("\n")
            if line.startswith("data: ")
        ]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


def take_apart(raw: bytes, *, head: bool = False) -> Answer:
    """Read a response that ended with its connection; one to HEAD has no body."""
    top, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    if headers.get("transfer-encoding") != "chunked":
        length = 0 if head else int(headers.get("content-length", 0))
        return Answer(status, headers, rest, [], len(rest) == length)
    chunks: list[bytes] = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            return Answer(status, headers, b"".join(chunks), chunks, complete=True)
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return Answer(status, headers, b"".join(chunks), chunks, complete=False)


def request(
    path: str, body: object = None, *, method: str | None = None, headers: str = ""
) -> bytes:
    """The bytes of a request whose connection closes after the answer."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    if body is not None and "content-type" not in headers:
        headers += "content-type: application/json\r\n"
    head = f"{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{headers}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@contextlib.asynccontextmanager
async def connection(
    engine: RunningEngine, raw: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, Callable[[], None]]]:
    """A connection on which these bytes were sent: its reader, and a way to close it early."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    try:
        writer.write(raw)
        yield reader, writer.close
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def exchange_bytes(engine: RunningEngine, raw: bytes) -> bytes:
    """Send these bytes and read until the connection ends, however it ends."""
    async with connection(engine, raw) as (reader, _):
        received = []
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                received.append(data)
        return b"".join(received)


async def ask(engine: RunningEngine, path: str, body: object = None, **more: Any) -> Answer:
    """Send one request and read its answer."""
    return take_apart(await exchange_bytes(engine, request(path, body, **more)))
