"""One router between raw clients and two recording backends, shared by the tests of a module.

Starting and stopping a router takes half a second; what one test leaves behind the next one would
meet, so `run` looks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Never

import uvloop

from tests.scripted_backend import Answer, ScriptedBackend, answer_ok
from tests.stack import Stack, running_router, until

LIMIT_S = 20.0


class RecordingBackend(ScriptedBackend):
    """Keeps every byte that comes in, of probes too."""

    def __init__(self) -> None:
        super().__init__(answer_ok)
        self.seen = bytearray()

    def protocol(self) -> asyncio.StreamReaderProtocol:
        """For one connection."""
        seen = self.seen

        class Tap(asyncio.StreamReader):
            def feed_data(self, data: Any) -> None:
                seen.extend(data)
                super().feed_data(data)

        return asyncio.StreamReaderProtocol(Tap(), self.serve)


@contextlib.asynccontextmanager
async def recording_backend(
    kind: type[RecordingBackend] = RecordingBackend,
) -> AsyncIterator[RecordingBackend]:
    """A recording backend for as long as the block runs."""
    backend = kind()
    server = await asyncio.get_running_loop().create_server(backend.protocol, "127.0.0.1", 0)
    backend.port = server.sockets[0].getsockname()[1]
    try:
        yield backend
    finally:
        server.close()
        await backend.close()


class Stage:
    """The router, its backends and the loop that they live in."""

    stack: Stack
    spec: RecordingBackend
    base: RecordingBackend

    def __init__(
        self, runner: asyncio.Runner, kind: type[RecordingBackend] = RecordingBackend
    ) -> None:
        self._runner = runner
        self._kind = kind
        self.clients: list[Client] = []
        self.started = b""  # what the speculative backend got before this test
        self._things = contextlib.AsyncExitStack()

    async def start(self, settings: dict[str, Any]) -> None:
        """Start all of it."""
        enter = self._things.enter_async_context
        self.spec = await enter(recording_backend(self._kind))
        self.base = await enter(recording_backend(self._kind))
        self.stack = await enter(running_router(self.spec.url, self.base.url, **settings))

    async def stop(self) -> None:
        """End all of it."""
        await self._things.aclose()

    def run(self, work: Callable[[], Awaitable[None]], answer: Answer = answer_ok) -> None:
        """One test: `answer` is what both backends do. Afterwards no count and no byte is left."""
        self.started += bytes(self.spec.seen)
        for backend in (self.spec, self.base):
            backend.answer = answer
            backend.calls.clear()
            backend.seen.clear()

        async def main() -> None:
            async with asyncio.timeout(LIMIT_S):
                await work()
                relay = self.stack.relay
                await until(lambda: not relay.connections)
                assert (relay.tracker.in_flight, relay.buffered, relay.waiting) == (0, 0, 0)
                await until(lambda: self.spec.in_flight == self.base.in_flight == 0)

        try:
            self._runner.run(main())
        finally:  # also of a test that failed: the next one and the loop's end are not about it
            while self.clients:
                self.clients.pop().writer.transport.abort()

    @property
    def reached(self) -> list[tuple[bytes, bytes]]:
        """Path and body of what the backends were asked, probes aside."""
        return [(call.path, call.body) for call in self.spec.calls + self.base.calls]


@contextlib.contextmanager
def staged(kind: type[RecordingBackend] = RecordingBackend, **settings: Any) -> Iterator[Stage]:
    """A stage for as long as the block runs; on uvloop, as it is served."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stage = Stage(runner, kind)
        runner.run(stage.start(settings))
        try:
            yield stage
        finally:
            runner.run(stage.stop())


class Client:
    """One connection, as bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, stage: Stage) -> Client:
        """Connect to the public listener."""
        client = cls(*await asyncio.open_connection("127.0.0.1", stage.stack.router.port))
        stage.clients.append(client)
        return client

    async def rest(self) -> bytes:
        """All that comes until the router closes."""
        got = bytearray()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                while piece := await self.reader.read(65_536):
                    got += piece
        self.writer.close()
        return bytes(got)

    async def head(self) -> bytes:
        """The next head."""
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)

    async def answer(self) -> bytes:
        """The next answer of known length: its body."""
        found = re.search(rb"content-length: (\d+)", await self.head())
        assert found is not None
        return await asyncio.wait_for(self.reader.readexactly(int(found[1])), 5)


async def talk(stage: Stage, data: bytes) -> bytes:
    """Send these bytes and read until the router closes."""
    client = await Client.of(stage)
    client.writer.write(data)
    return await client.rest()


def statuses(data: bytes) -> list[int]:
    """The status of each answer in a byte stream."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([1-5]\d\d) ", data)]


def explode(*_: object) -> Never:
    """What no code of ours does, one hopes."""
    raise ZeroDivisionError("planted")


class Exploding:
    """Fails whatever is asked of it."""

    __getattr__ = __getitem__ = explode
