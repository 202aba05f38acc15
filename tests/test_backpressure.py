"""A client that reads nothing costs the router little, and other clients nothing."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import statistics
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.process import RouterProcess, router_process
from tests.stack import run, until

MB = 1_000_000
PIECE = b"data: " + b"x" * 65_528 + b"\n\n"  # 64 KiB
CHUNK = b"%x\r\n%b\r\n" % (len(PIECE), PIECE)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SEGMENT = 1400  # bytes, as on a network: the kernel's buffers grow with it
PACE_S = 0.005  # between the chunks of a normal answer
CHUNKS = 150


class Pusher:
    """A backend that pushes as many bytes as the body's `push` says, or a paced stream."""

    def __init__(self) -> None:
        self.port = 0
        self.taken = 0  # bytes that were taken from it
        self.busy = 0  # answers under way

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # what was taken is gone from here
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                body = await reader.readexactly(int(length[1]) if length else 0)
                if not head.startswith(b"POST"):
                    ok = b"200 OK" if b" /ready " in head or b" /health " in head else b"404 No"
                    writer.write(b"HTTP/1.1 " + ok + b"\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.busy += 1
                try:
                    await self._answer(writer, body)
                finally:
                    self.busy -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(HEAD)
        push = re.search(rb'"push":(\d+)', body)
        for _ in range(int(push[1]) // len(PIECE) if push else 0):
            writer.write(CHUNK)
            await writer.drain()
            self.taken += len(CHUNK)
        for i in range(0 if push else CHUNKS):
            await asyncio.sleep(PACE_S)
            writer.write(b"10\r\ndata: %08d\n\n\r\n" % i)
            await writer.drain()
        writer.write(b"0\r\n\r\n")


@contextlib.asynccontextmanager
async def pusher() -> AsyncIterator[Pusher]:
    """A pushing backend for as long as the block runs."""
    backend = Pusher()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await backend.serve(reader, writer)

    # Small buffers in the kernel, so that it is the router's that count.
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(serve, sock=listener)
    backend.port = server.sockets[0].getsockname()[1]
    try:
        yield backend
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def request(push: int | None = None) -> bytes:
    """A chat request."""
    body = b"{}" if push is None else b'{"push":%d}' % push
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def deaf_client(router: RouterProcess, push: int) -> socket.socket:
    """A client that asks and then reads nothing."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", router.port))
    await loop.sock_sendall(sock, request(push))
    return sock


async def settled(backend: Pusher) -> int:
    """The bytes taken from a backend once no more are."""
    before = -1
    while before != backend.taken or not backend.taken:
        before = backend.taken
        await asyncio.sleep(0.3)
    return before


async def in_flight(router: RouterProcess) -> tuple[int, int]:
    """The requests on both backends and the clients' connections, as the router says."""
    async with httpx.AsyncClient(trust_env=False) as client:
        status = (await client.get(router.admin_url + "/status")).json()
    return sum(b["in_flight"] for b in status["backends"]), status["client_connections"]


async def nobody_left(router: RouterProcess) -> None:
    """Wait until every count is back."""
    async with asyncio.timeout(10):
        while await in_flight(router) != (0, 0):
            await asyncio.sleep(0.05)


async def gaps(router: RouterProcess) -> list[float]:
    """Seconds between the chunks that a client gets that reads as one should."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    writer.write(request())
    found = []
    before = None
    for _ in range(CHUNKS):
        await reader.readuntil(b"data: ")
        now = time.perf_counter()
        if before is not None:
            found.append(now - before)
        before = now
    await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return found


@pytest.mark.slow
def test_a_client_that_reads_nothing_costs_little_memory() -> None:
    """Of 200 MB pushed at it the router holds less than 20; a client that reads gets all of it."""
    whole = 40 * MB

    async def work() -> None:
        async with pusher() as spec, pusher() as base:
            with router_process(spec.url, base.url, "--write-timeout", "2s") as router:
                await nobody_left(router)
                before = router.memory()
                client = await deaf_client(router, 200 * MB)
                taken = await settled(spec)
                assert await in_flight(router) == (1, 1)
                assert 0 < taken < 20 * MB  # most of it in the kernel's buffers
                # It is given up after the write timeout, and its backend is let go.
                await nobody_left(router)
                await until(lambda: spec.busy == 0)
                client.close()
                assert router.memory("VmHWM") - before < 20 * MB

                spec.taken = 0
                reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
                writer.write(request(whole))
                await reader.readuntil(b"\r\n\r\n")
                got = 0
                while piece := await reader.read(1 << 20):
                    got += piece.count(b"x")
                writer.close()
                assert got == whole // len(PIECE) * PIECE.count(b"x")
                assert router.memory("VmHWM") - before < 20 * MB

    run(work, 40)


@pytest.mark.slow
def test_many_clients_that_read_nothing_do_not_starve_one_that_reads() -> None:
    """With 100 of them a normal client's chunks come as before; all are ended and counted back."""
    deaf = 100

    async def work() -> None:
        async with pusher() as spec, pusher() as base:
            with router_process(spec.url, base.url, "--write-timeout", "4s") as router:
                await gaps(router)  # warm
                alone = await gaps(router)
                before = router.memory()
                starting = asyncio.ensure_future(gaps(router))
                clients = [await deaf_client(router, 4 * MB) for _ in range(deaf)]
                taken = await settled(spec)
                beside = await gaps(router)
                begun = await starting
                assert (await in_flight(router))[0] == spec.busy == deaf
                assert spec.taken == taken < deaf * 4 * MB
                # While they all begin they take what they can get, but not everything.
                assert sum(begun) < 10 * sum(alone)
                assert sum(beside) < 3 * sum(alone)
                assert statistics.median(beside) < 2 * statistics.median(alone)
                await nobody_left(router)
                await until(lambda: spec.busy == 0)
                assert router.memory("VmHWM") - before < 20 * MB + deaf * 256 * 1024
                for client in clients:
                    client.close()

    run(work, 40)
