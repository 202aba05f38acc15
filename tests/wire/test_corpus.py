"""The corpus against a real router on a real socket, in one piece and byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from router.receiving import ReceivingProtocol
from tests.wire.corpus import CORPUS, Entry
from tests.wire.stage import Stage, staged, statuses

# What is pipelined behind each: it is known by a header, wherever it comes out.
NEXT = b"GET /metrics HTTP/1.1\r\nhost: x\r\nx-smuggled: 1\r\nconnection: close\r\n\r\n"
SHORT = 2_048  # bytes: longer requests are not sent one by one
CASES = {f"{row}: {name}": entry for row, group in CORPUS.items() for name, entry in group.items()}


@pytest.fixture(scope="module")
def reads() -> Iterator[list[int]]:
    """The bytes of each read of the router's."""
    sizes: list[int] = []
    receive = ReceivingProtocol.data_received

    def counted(self: ReceivingProtocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReceivingProtocol, "data_received", counted)
        yield sizes


@pytest.fixture(scope="module")
def stage(reads: list[int]) -> Iterator[Stage]:
    """One router for all entries."""
    with staged() as stage:
        yield stage


async def talk(stage: Stage, data: bytes, step: int) -> bytes:
    """Send `step` bytes at a time, then read until the router closes."""
    loop = asyncio.get_running_loop()
    sock = socket.create_connection(("127.0.0.1", stage.stack.router.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    got = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(data), step):
                await loop.sock_sendall(sock, data[at : at + step])
                await asyncio.sleep(0)  # the router reads what is there
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                while piece := await loop.sock_recv(sock, 65_536):
                    got += piece
    finally:
        sock.close()
    return bytes(got)


def check(stage: Stage, entry: Entry, step: int) -> None:
    """It was one request or none; what is behind it was answered only where that is safe."""

    async def work() -> None:
        got = await talk(stage, entry.raw + NEXT, step)
        wanted = [entry.status] if entry.closes else [entry.status, 404]
        assert [status for status in statuses(got) if status != 100] == wanted
        assert b"crossover_" not in got  # no metric is told on this listener

    stage.run(work)
    assert stage.reached == ([] if entry.body is None else [(entry.path, entry.body)])
    for backend in (stage.spec, stage.base):
        for word in (b"x-smuggled", b"admin", b"evil"):
            assert word not in backend.seen


@pytest.mark.parametrize("name", CASES)
def test_one_request_is_one_or_none(stage: Stage, name: str) -> None:
    """Whatever two servers could read in two ways is refused, and what is sound stays one."""
    check(stage, CASES[name], 65_536)


@pytest.mark.parametrize("name", [n for n, entry in CASES.items() if len(entry.raw) < SHORT])
def test_cuts_change_nothing(stage: Stage, reads: list[int], name: str) -> None:
    """Sent in segments of one byte, each gets the same answer."""
    reads.clear()
    check(stage, CASES[name], 1)
    assert reads.count(1) > 0.8 * len(reads)


def test_only_what_is_large_on_purpose_is_not_cut() -> None:
    """Every other entry is sent byte by byte."""
    left_out = {row for row, group in CORPUS.items() for e in group.values() if len(e.raw) >= SHORT}
    assert left_out == {"a large head", "many headers", "a long target"}
