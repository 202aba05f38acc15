"""What a proxy is measured against: two light servers behind it, and other proxies beside it.

    python -m loadtest.bench_backend servers              two servers in one process
    python -m loadtest.bench_backend relay PORT PORT      bytes from here to there, unseen
    python -m loadtest.bench_backend become FILE ARGUMENT...     another program

The first two print `listening on PORT` with the ports that it has. The servers know of SGLang what the
router asks for, and answer from canned bytes: the longer their own work takes, the less of the
proxy's can be seen. `max_tokens` says how many tokens an answer streams, `user` how many
milliseconds lie between two.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Final, cast

import msgspec
import uvloop

from loadtest.bench_answers import (
    ANSWER,
    CHUNK,
    DATE,
    STAMPED,
    STREAM_HEAD,
    TOLD,
    ending,
    stamped,
)

BACKLOG: Final = 4096
LENGTH: Final = re.compile(rb"\ncontent-length: *(\d+)", re.IGNORECASE)


class Wanted(msgspec.Struct):
    """What a request's body asks for."""

    stream: bool = False
    max_tokens: int = 16
    user: str = "0"


class Counts(msgspec.Struct):
    """What both servers have seen. Times are of the clock that all processes share."""

    requests: int = 0
    streaming: int = 0
    hang_ups: int = 0
    last_hang_up: float = 0.0


@functools.lru_cache
def wanted(body: bytes) -> Wanted:
    """A body that comes again is not read again."""
    return msgspec.json.decode(body, type=Wanted)


class Server(asyncio.Protocol):
    """One connection to a server."""

    def __init__(self, counts: Counts) -> None:
        """`counts` are shared by all connections."""
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._left = self._tokens = 0
        self._interval = self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = LENGTH.search(self._buffer, 0, end)
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < size:
                return
            request, self._buffer = self._buffer[:size], self._buffer[size:]
            if request.startswith(b"POST"):
                self._counts.requests += 1
                self._generate(wanted(request[end + 4 :]))
            else:
                self._tell(request.split(b" ", 2)[1].partition(b"?")[0])

    def connection_lost(self, _: Exception | None) -> None:
        """Note a hang-up in the middle of an answer."""
        if self._timer is not None:
            self._timer.cancel()
            self._counts.last_hang_up = time.monotonic()
            self._counts.hang_ups += 1
            self._counts.streaming -= 1

    def _tell(self, path: bytes) -> None:
        if path == b"/bench":
            self._answer(b"200 OK", msgspec.json.encode(self._counts))
        elif path in TOLD:
            self._answer(b"200 OK", TOLD[path])
        elif path == b"/v1/loads":
            running = self._counts.streaming
            load = {"timestamp": time.time(), "dp_rank": 0, "num_running_reqs": running // 2}
            load |= {"num_waiting_reqs": 0, "token_usage": 0.1, "max_running_requests": 4096}
            body = {"timestamp": "2026-11-29T00:00:00+00:00", "version": "0.5.17", "loads": [load]}
            self._answer(b"200 OK", msgspec.json.encode(body))
        else:
            self._answer(b"404 Not Found", b'{"detail":"Not Found"}')

    def _answer(self, status: bytes, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 %s\r\n%scontent-length: %d\r\ncontent-type: application/json\r\n\r\n%s"
            % (status, DATE, len(body), body)
        )

    def _generate(self, asked: Wanted) -> None:
        """As SGLang does it, the head comes with the first token; here that is at once."""
        if not asked.stream:
            self._answer(b"200 OK", ANSWER)
            return
        self._counts.streaming += 1
        self._transport.write(STREAM_HEAD + CHUNK)
        self._tokens = asked.max_tokens
        self._left = self._tokens - 1
        self._interval = float(asked.user) / 1000
        self._due = self._loop.time()
        self._wait()

    def _wait(self) -> None:
        """From a fixed start: a late timer delays none after it."""
        self._due += self._interval
        self._timer = self._loop.call_at(self._due, self._next)

    def _next(self) -> None:
        if self._left:
            self._left -= 1
            self._transport.write(CHUNK if self._left % STAMPED else stamped(time.monotonic()))
            self._wait()
        else:
            self._timer = None
            self._counts.streaming -= 1
            self._transport.write(ending(self._tokens))


class Side(asyncio.Protocol):
    """One end of a bare relay: what comes here is written there."""

    def __init__(self, port: int | None = None, there: Side | None = None) -> None:
        """`port`: where the other end is to be opened; without it this is the other end."""
        self._port = port
        self._there = there
        self._early = b""
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._opening: asyncio.Task[object] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the other end, or pass on what came before this one was open."""
        self._transport = cast("asyncio.Transport", transport)
        if self._port is not None:
            there = self._there = Side(there=self)
            loop = asyncio.get_running_loop()
            connecting = loop.create_connection(lambda: there, "127.0.0.1", self._port)
            self._opening = loop.create_task(connecting)
        elif self._closed:
            self._transport.close()
        elif self._early:
            self._transport.write(self._early)

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self._there is not None:
            self._there.write(data)

    def connection_lost(self, _: Exception | None) -> None:
        """Close the other end too."""
        if self._there is not None:
            self._there.close()

    def write(self, data: bytes) -> None:
        """Write, or keep it until there is something to write to."""
        if self._transport is None:
            self._early += data
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close, or do so as soon as it is open."""
        self._closed = True
        if self._transport is not None:
            self._transport.close()


async def serve(*makers: Callable[[], asyncio.Protocol]) -> None:
    """Listen with each on a free port, and say which; until killed."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(make, "127.0.0.1", 0, backlog=BACKLOG) for make in makers]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    gc.freeze()
    print("listening on", *ports, flush=True)
    await loop.create_future()


def become(program: str, arguments: list[str]) -> None:
    """Turn this process into another program, which keeps its id, session and core.

    It sees neither our modules nor a web proxy that would stand between it and the servers.
    """
    for name in list(os.environ):
        if name == "PYTHONPATH" or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.execv(program, [program, *arguments])  # noqa: S606


def main(words: list[str]) -> None:
    """Be what the first argument says."""
    match words:
        case ["servers"]:
            counts = Counts()
            uvloop.run(serve(*[functools.partial(Server, counts)] * 2))
        case ["relay", *ports]:
            turns = 0

            def side() -> Side:
                nonlocal turns
                turns += 1
                return Side(int(ports[turns % len(ports)]))

            uvloop.run(serve(side))
        case ["become", program, *arguments]:
            become(program, arguments)
        case _:
            sys.exit(f"bench_backend: what is {' '.join(words)}?")


if __name__ == "__main__":
    main(sys.argv[1:])
