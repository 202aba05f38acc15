"""httpx over our own connections: answers, errors, dead connections, cancellation."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest

from router.config import BackendUrl
from router.load import Role
from router.pool import BackendPool
from router.pool_transport import PoolTransport
from tests.scripted_backend import STREAM_HEAD, Call, chunk, response, scripted_backend
from tests.stack import run, until


def client_for(url: str, **settings: float) -> tuple[httpx.AsyncClient, BackendPool]:
    """A client for one backend, and the pool under it."""
    pool = BackendPool(
        Role.BASELINE,
        BackendUrl.parse(url),
        key=None,
        keep_alive=4.0,
        connect_timeout=settings.get("connect_timeout", 1.0),
        clock=time.monotonic,
    )
    limit = int(settings.get("limit", 1000))
    return httpx.AsyncClient(base_url=url, transport=PoolTransport(pool, limit=limit)), pool


def test_answers_of_every_framing_are_whole() -> None:
    """Length and chunks are read to the end, and the connection is used again."""

    async def answer(call: Call) -> None:
        if call.path == b"/chunks":
            await call.send(STREAM_HEAD + chunk(b"ab") + chunk(b"cd") + b"0\r\n\r\n")
        else:
            await call.send(response(b'{"a":1}', "200 OK", b"x-one: 1\r\nx-one: 2\r\n"))

    async def work() -> None:
        async with scripted_backend(answer) as backend:
            client, pool = client_for(backend.url)
            async with client:
                plain = await client.get("/plain?a=b", headers={"x-mine": "1"})
                assert (plain.status_code, plain.json()) == (200, {"a": 1})
                assert plain.headers.get_list("x-one") == ["1", "2"]
                assert (await client.get("/chunks")).content == b"abcd"
                assert [call.reused for call in backend.calls] == [0, 1]
                assert backend.calls[0].path == b"/plain?a=b"
                assert backend.calls[0].headers[b"x-mine"] == b"1"
                assert len(pool.open) == 1
            await until(lambda: not pool.open)

    run(work)


def test_a_dead_idle_connection_is_replaced_unseen() -> None:
    """A connection that the backend closed while it lay idle costs one more connection only."""

    async def answer(call: Call) -> None:
        if call.reused:
            call.close()
        else:
            await call.send(response())

    async def work() -> None:
        async with scripted_backend(answer) as backend:
            client, _ = client_for(backend.url)
            async with client:
                assert [(await client.get("/")).status_code for _ in range(2)] == [200, 200]
                assert [call.reused for call in backend.calls] == [0, 1, 0]

    run(work)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", httpx.ReadError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n123", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n", httpx.RemoteProtocolError),
        (response(b"x" * 1001), httpx.ReadError),
    ],
)
def test_what_is_not_a_whole_answer_is_an_error(sent: bytes, error: type[Exception]) -> None:
    """Nothing, a part, nonsense and too much are httpx's own errors, and no connection is kept."""

    async def answer(call: Call) -> None:
        if sent:
            await call.send(sent)
        call.close()

    async def work() -> None:
        async with scripted_backend(answer) as backend:
            client, pool = client_for(backend.url)
            async with client:
                with pytest.raises(error):
                    await client.get("/")
                await until(lambda: not pool.open)

    run(work)


def test_connecting_has_its_own_errors() -> None:
    """A refused connection and one that is not accepted in time are told apart."""

    async def work() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            client, _ = client_for(url)
            async with client:
                with pytest.raises(httpx.ConnectError):
                    await client.get("/")
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            port = full.getsockname()[1]
            fill = [socket.socket() for _ in range(3)]
            for sock in fill:
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
            client, pool = client_for(f"http://127.0.0.1:{port}", connect_timeout=0.1)
            async with client:
                with pytest.raises(httpx.ConnectTimeout):
                    await client.get("/")
                assert not pool.open
            for sock in fill:
                sock.close()

    run(work)


def test_a_cancelled_request_holds_nothing() -> None:
    """After a hundred cancelled requests the backend has seen them go and the pool is empty."""

    async def answer(call: Call) -> None:
        await call.peer_closed.wait()

    async def work() -> None:
        async with scripted_backend(answer) as backend:
            client, pool = client_for(backend.url)
            async with client:
                asked = [asyncio.ensure_future(client.get("/")) for _ in range(100)]
                await until(lambda: backend.in_flight == 100)
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
                await until(lambda: not pool.open and backend.in_flight == 0)

    run(work)
