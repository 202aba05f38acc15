"""The proxy that harms what passes: each fault alone, and the switch between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.chaos.fault_proxy import NO_FAULTS, FaultProxy, Faults, fault_proxy
from tests.stack import run, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Echo:
    """A server that sends back what it gets, and notes how its connections end."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
            self.ends.append("fin")
        except ConnectionError:
            self.ends.append("rst")
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def proxied(serve: Serve) -> AsyncIterator[FaultProxy]:
    """A proxy before a server."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        async with fault_proxy(server.sockets[0].getsockname()[1]) as proxy:
            yield proxy
    finally:
        server.close()


@contextlib.asynccontextmanager
async def connected(proxy: FaultProxy) -> AsyncIterator[Streams]:
    """A client's connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(streams: Streams, data: bytes) -> bytes:
    """Send and wait for as many bytes back."""
    reader, writer = streams
    writer.write(data)
    return await reader.readexactly(len(data))


async def nothing_comes(streams: Streams, seconds: float = 0.05) -> bool:
    """Whether the connection stays as it is for so long."""
    try:
        await asyncio.wait_for(streams[0].read(1), seconds)
    except TimeoutError:
        return True
    return False


def test_without_a_fault_every_byte_passes_and_an_end_stays_an_end() -> None:
    """Bytes pass unchanged both ways, a FIN is a FIN, and nothing is left."""
    echo = Echo()

    async def work() -> None:
        async with proxied(echo) as proxy:
            data = bytes(range(256)) * 8000
            async with connected(proxy) as streams:
                assert await ask(streams, data) == data
                streams[1].write_eof()
                assert await streams[0].read() == b""
            await until(lambda: proxy.connections == 0)
            assert echo.ends == ["fin"]
            assert (proxy.opened, proxy.to_router, proxy.to_backend) == (1, len(data), len(data))

    run(work, 10)


def test_latency_delays_and_keeps_the_pace() -> None:
    """Each piece is late by the latency each way; pieces that follow do not add to it."""

    async def work() -> None:
        async with proxied(Echo()) as proxy, connected(proxy) as streams:
            await ask(streams, b"warm")
            await proxy.switch(Faults(latency=0.2))
            began = time.monotonic()
            for _ in range(5):
                streams[1].write(b"x")
                await asyncio.sleep(0.02)
            assert await streams[0].readexactly(5) == b"xxxxx"
            took = time.monotonic() - began
            assert took >= 0.08 + 2 * 0.2 - 0.03
            assert took < 5 * 2 * 0.2  # what it would take if each waited for the one before

    run(work, 10)


def test_bandwidth_bounds_the_rate() -> None:
    """So many bytes take so long, and all of them come."""

    async def work() -> None:
        async with proxied(Echo()) as proxy, connected(proxy) as streams:
            await proxy.switch(Faults(bandwidth=100_000))
            began = time.monotonic()
            assert await ask(streams, b"y" * 20_000) == b"y" * 20_000
            assert time.monotonic() - began >= 0.2  # each way takes that long, side by side

    run(work, 10)


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_reset_comes_after_exactly_so_many_bytes(size: int) -> None:
    """The client gets the bytes that are granted, then a reset; so does the server."""
    echo = Echo()

    async def work() -> None:
        async with proxied(echo) as proxy, connected(proxy) as streams:
            await proxy.switch(Faults(reset_after=size))
            streams[1].write(b"z" * 5000)
            got = b""
            with pytest.raises(ConnectionResetError):
                while data := await streams[0].read(65_536):
                    got += data
            assert len(got) <= size  # a reset may overtake what the kernel has not handed out
            assert proxy.to_router == size
            await until(lambda: bool(echo.ends) and proxy.connections == 0)
            assert echo.ends == ["rst"]

    run(work, 10)


def test_a_half_close_ends_answers_and_lets_requests_pass() -> None:
    """After so many bytes the client sees a FIN, and what it sends still reaches the server."""
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"0123456789")
        while data := await reader.read(100):
            got.extend(data)
        writer.close()

    async def work() -> None:
        async with proxied(serve) as proxy:
            await proxy.switch(Faults(half_close_after=4))
            async with connected(proxy) as (reader, writer):
                assert await reader.read() == b"0123"
                writer.write(b"still here")
                await until(lambda: bytes(got) == b"still here")
            await until(lambda: proxy.connections == 0)

    run(work, 10)


def test_a_black_hole_takes_everything_and_gives_it_back_when_it_is_gone() -> None:
    """Nothing passes, not even an end, until it is switched off; then all of it does."""
    echo = Echo()

    async def work() -> None:
        async with proxied(echo) as proxy, connected(proxy) as old, connected(proxy) as leaving:
            await ask(old, b"warm")
            await ask(leaving, b"warm")
            await proxy.switch(Faults(blackhole=True))
            old[1].write(b"old")
            leaving[1].close()
            async with connected(proxy) as new:  # the kernel accepts it
                new[1].write(b"new")
                assert await nothing_comes(old)
                assert await nothing_comes(new)
                assert echo.ends == []
                await proxy.switch(NO_FAULTS)
                assert await old[0].readexactly(3) == b"old"
                assert await new[0].readexactly(3) == b"new"
            await until(lambda: len(echo.ends) == 2)

    run(work, 10)


def test_refusing_means_that_nobody_listens_and_ends_on_the_same_port() -> None:
    """A new connection is refused, an old one goes on, and the port is the same afterwards."""

    async def work() -> None:
        async with proxied(Echo()) as proxy, connected(proxy) as old:
            port = proxy.port
            await ask(old, b"warm")
            await proxy.switch(Faults(refuse=True))
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            assert await ask(old, b"on") == b"on"
            await proxy.switch(NO_FAULTS)
            assert proxy.port == port
            async with connected(proxy) as new:
                assert await ask(new, b"again") == b"again"

    run(work, 10)


def test_a_switch_counts_anew_on_open_connections() -> None:
    """Bytes that passed before a switch are not charged to the new fault."""

    async def work() -> None:
        async with proxied(Echo()) as proxy, connected(proxy) as streams:
            await ask(streams, b"a" * 900)
            await proxy.switch(Faults(reset_after=1000))
            assert await ask(streams, b"b" * 999) == b"b" * 999
            await proxy.switch(NO_FAULTS)
            assert await ask(streams, b"c" * 999) == b"c" * 999

    run(work, 10)


def test_a_server_that_is_gone_resets_the_client() -> None:
    """When the server cannot be reached the client sees a reset."""

    async def work() -> None:
        async with proxied(Echo()) as proxy:
            proxy.target = 1  # nobody listens there
            async with connected(proxy) as (reader, _):
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            await until(lambda: proxy.connections == 0)

    run(work, 10)


def test_all_open_connections_can_be_reset_at_once() -> None:
    """A reset of all is seen by every client and every server."""
    echo = Echo()

    async def work() -> None:
        async with proxied(echo) as proxy, connected(proxy) as one, connected(proxy) as other:
            await ask(one, b"warm")
            await ask(other, b"warm")
            proxy.reset_all()
            for reader, _ in (one, other):
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            await until(lambda: len(echo.ends) == 2 and proxy.connections == 0)
            assert echo.ends == ["rst", "rst"]

    run(work, 10)
