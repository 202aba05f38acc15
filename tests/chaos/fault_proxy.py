"""A TCP proxy between router and backend that harms what passes, switched at run time.

    async with fault_proxy(backend.port) as proxy:
        await proxy.switch(Faults(latency=0.05))
        await proxy.switch(Faults(reset_after=100))

It knows nothing of HTTP. One connection of the router is one connection to the backend, and what
one side does with it (its bytes, FIN, RST) the other side sees, but for the faults in force. A
switch holds for open connections too, from their next bytes on; counted bytes start anew with it.

The ways of a network that loses packets for good (SYNs without an answer) cannot be had on
loopback: `refuse` is a port on which nobody listens, `blackhole` a peer that has stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Final

import msgspec

NO_LINGER: Final = struct.pack("ii", 1, 0)  # closing sends RST, not FIN
READ: Final = 65_536  # bytes at a time
PIECES: Final = 64  # read pieces that may be on their way, each way of each connection
SLICE_S: Final = 0.02  # of a limited bandwidth, what goes out at once


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong now. The default is nothing. Counted bytes are those of answers."""

    latency: float = 0.0  # seconds that each piece is late, each way; the pace stays
    bandwidth: float | None = None  # bytes a second, each way of each connection
    reset_after: int | None = None  # so many bytes of answers are passed on, then RST both ways
    half_close_after: int | None = None  # so many, then FIN to the router; its bytes still pass
    blackhole: bool = False  # nothing passes, not even an end, until it is switched off
    refuse: bool = False  # nobody listens; open connections go on


NO_FAULTS: Final = Faults()


class _Way:
    """One direction of one connection."""

    def __init__(
        self,
        link: _Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        answers: bool,
    ) -> None:
        self._link = link
        self._proxy = link.proxy
        self._reader = reader
        self._writer = writer
        self._answers = answers
        self._under = link.proxy.faults  # those that `_passed` was counted under
        self._passed = 0
        self._cut = False
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES)

    async def read(self) -> None:
        """Take pieces, each with the moment when it is due; an empty one is the end."""
        clock = asyncio.get_running_loop().time
        while True:
            data = await self._reader.read(READ)
            await self._queue.put((clock() + self._proxy.faults.latency, data))
            if not data:
                return

    async def write(self) -> None:
        """Pass pieces on when they are due, as the faults in force let them."""
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await self._queue.get()
            if due > clock():
                await asyncio.sleep(due - clock())
            await self._proxy.open_air.wait()
            if not data:
                self._half_close()
                return
            if not self._cut:  # else it is thrown away, so that the sender's end is seen
                await self._pass(data)

    async def _pass(self, data: bytes) -> None:
        """Pass one piece on."""
        faults = self._proxy.faults
        if faults is not self._under:
            self._under, self._passed = faults, 0
        limits = (faults.reset_after, faults.half_close_after) if self._answers else (None, None)
        left = min((n for n in limits if n is not None), default=None)
        if left is not None:
            data = data[: max(0, left - self._passed)]
        self._passed += len(data)
        self._count(len(data))
        await self._send(data, faults.bandwidth)
        if left is None or self._passed < left:
            return
        self._cut = True
        if faults.reset_after == left:
            self._link.reset()
        else:
            self._half_close()

    async def _send(self, data: bytes, bandwidth: float | None) -> None:
        size = len(data) if bandwidth is None else max(1, int(bandwidth * SLICE_S))
        for at in range(0, len(data), size or 1):
            piece = data[at : at + size]
            if bandwidth is not None:
                await asyncio.sleep(len(piece) / bandwidth)
            if self._writer.is_closing():
                return
            self._writer.write(piece)
            await self._writer.drain()

    def _count(self, size: int) -> None:
        if self._answers:
            self._proxy.to_router += size
        else:
            self._proxy.to_backend += size

    def _half_close(self) -> None:
        if self._writer.can_write_eof() and not self._writer.is_closing():
            self._writer.write_eof()


class _Link:
    """One connection of the router, and the one to the backend that belongs to it."""

    def __init__(self, proxy: FaultProxy, router: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self._writers = [router]

    async def run(self, from_router: asyncio.StreamReader) -> None:
        """Both directions, until both have ended or one breaks."""
        await self.proxy.open_air.wait()
        try:
            from_backend, to_backend = await asyncio.open_connection("127.0.0.1", self.proxy.target)
        except OSError:
            self.reset()
            return
        self._writers.append(to_backend)
        ways = (
            _Way(self, from_router, to_backend, answers=False),
            _Way(self, from_backend, self._writers[0], answers=True),
        )
        try:
            async with asyncio.TaskGroup() as group:
                for way in ways:
                    group.create_task(way.read())
                    group.create_task(way.write())
        except* OSError:  # one side reset it
            await self.proxy.open_air.wait()
            self.reset()

    def reset(self) -> None:
        """RST to both sides."""
        for writer in self._writers:
            sock = writer.get_extra_info("socket")
            if sock is None:  # it has ended
                continue
            with contextlib.suppress(OSError, ValueError):  # it ends; uvloop says the latter
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            writer.transport.abort()

    def close(self) -> None:
        """The end of it."""
        for writer in self._writers:
            writer.close()


class FaultProxy:
    """Listens on one port of loopback, the same for its whole life."""

    def __init__(self, target: int) -> None:
        """`target`: the backend's port."""
        self.target = target
        self.port = 0
        self.faults = NO_FAULTS
        self.open_air = asyncio.Event()  # not set: a black hole
        self.open_air.set()
        self.opened = 0  # connections that the router made
        self.to_router = 0  # bytes that were passed on
        self.to_backend = 0
        self._links: dict[asyncio.Task[None], _Link] = {}
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Open ones."""
        return len(self._links)

    async def switch(self, faults: Faults) -> None:
        """From now on this is wrong and nothing else."""
        self.faults = faults
        if faults.blackhole:
            self.open_air.clear()
        else:
            self.open_air.set()
        if faults.refuse and self._server is not None:
            self._server.close()
            self._server = None
        elif not faults.refuse and self._server is None:
            await self.listen()

    async def listen(self) -> None:
        """Accept connections, on the port that was taken first."""
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, backlog=1024, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def reset_all(self) -> None:
        """RST on every open connection."""
        for link in list(self._links.values()):
            link.reset()

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._links)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            msg = "a connection is served by a task"
            raise RuntimeError(msg)
        link = self._links[task] = _Link(self, writer)
        self.opened += 1
        # Cancelled: the proxy is being closed, and asyncio would log the task's end.
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await link.run(reader)
            finally:
                link.close()
                del self._links[task]


@contextlib.asynccontextmanager
async def fault_proxy(target: int) -> AsyncIterator[FaultProxy]:
    """A proxy before this port of loopback, for as long as the block runs."""
    proxy = FaultProxy(target)
    await proxy.listen()
    try:
        yield proxy
    finally:
        await proxy.close()
