"""Asking a backend: what both ways, over our own connections and over httpx, promise alike."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.asking import BODY_LIMIT, Ask, NoReply, Reply, asking, probe_client
from router.config import BackendUrl
from router.load import Role
from router.pool import BackendPool
from router.pool_client import PoolClient
from tests.scripted_backend import (
    STREAM_HEAD,
    Answer,
    Call,
    ScriptedBackend,
    chunk,
    response,
    scripted_backend,
)
from tests.stack import run, until

WITHIN = 5.0


def pool_for(url: str, **more: Any) -> BackendPool:
    """A pool such as each watcher has."""
    settings = {"key": None, "keep_alive": 4.0, "connect_timeout": 1.0, "clock": time.monotonic}
    return BackendPool(Role.BASELINE, BackendUrl.parse(url), **(settings | more))


@asynccontextmanager
async def over(way: str, url: str, key: str | None = None) -> AsyncIterator[Ask]:
    """What asks a backend, over our own connections or over httpx."""
    if way == "httpx":
        async with probe_client(url, key=key, timeout=WITHIN) as client:
            yield asking(client, time.monotonic)
    else:
        ours = PoolClient(pool_for(url, key=key))
        yield ours.ask
        ours.close()


@asynccontextmanager
async def asked(way: str, answer: Answer, key: str | None = None) -> AsyncIterator[Ask]:
    """The same for a backend that answers so."""
    async with (
        scripted_backend(answer, probes=False) as backend,
        over(way, backend.url, key) as ask,
    ):
        yield ask


both_ways = pytest.mark.parametrize("way", ["pool", "httpx"])


@both_ways
@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [
        (response(b'{"a":1}'), 200, b'{"a":1}'),
        (response(b""), 200, b""),
        (response(b"no", "401 Unauthorized"), 401, b"no"),
        (response(b"", "503 Service Unavailable"), 503, b""),
        (response(b"", "307 Temporary Redirect", b"location: /x\r\n"), 307, b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + response(b"ab"), 200, b"ab"),
        (response(b"ab", extra=b"content-encoding: identity\r\n"), 200, b"ab"),
        (STREAM_HEAD + chunk(b"ab") + chunk(b"cd") + b"0\r\n\r\n", 200, b"abcd"),
        (STREAM_HEAD + b"2;x=y\r\nab\r\n0\r\ntrailer: 1\r\n\r\n", 200, b"ab"),
    ],
)
def test_whole_answers(way: str, sent: bytes, status: int, body: bytes) -> None:
    """Whatever its framing and its status, a whole answer is a reply; redirects are not followed."""

    async def answer(call: Call) -> None:
        await call.cut(sent, 40)

    async def work() -> None:
        async with asked(way, answer) as ask:
            before = time.monotonic()
            for _ in range(2):
                reply = await ask("v1/loads?include=core,spec", WITHIN)
                assert isinstance(reply, Reply), reply
                assert (reply.status, reply.body) == (status, body)
                assert before <= reply.sent_at <= reply.read_at <= time.monotonic()

    run(work)


@both_ways
def test_the_end_of_the_connection_may_end_an_answer(way: str) -> None:
    """An answer without a length ends with its connection, and the next ask makes a new one."""

    async def answer(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
        call.close()

    async def work() -> None:
        async with asked(way, answer) as ask:
            for _ in range(2):
                reply = await ask("metrics", WITHIN)
                assert isinstance(reply, Reply), reply
                assert reply.body == b"abc"

    run(work)


BAD = [
    b"",
    b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n123",
    b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
]
BAD += [b"SSH-2.0-x\r\n\r\n", STREAM_HEAD + b"zz\r\n", STREAM_HEAD + chunk(b"ab")]


@both_ways
@pytest.mark.parametrize("sent", BAD)
def test_what_is_not_a_whole_answer_is_none(way: str, sent: bytes) -> None:
    """Nothing, a part and nonsense are no reply, from a backend that is there; the next ask works."""
    sound = False

    async def answer(call: Call) -> None:
        if sound:
            await call.send(response(b"ok"))
            return
        if sent:
            await call.send(sent)
        call.close()

    async def work() -> None:
        nonlocal sound
        async with asked(way, answer) as ask:
            reply = await ask("metrics", WITHIN)
            assert isinstance(reply, NoReply), reply
            assert reply.connected
            sound = True
            again = await ask("metrics", WITHIN)
            assert isinstance(again, Reply), again

    run(work)


@both_ways
def test_what_is_compressed_unasked_is_none(way: str) -> None:
    """A compressed body is not read: a bound on its bytes would be none on what they unfold to."""

    async def answer(call: Call) -> None:
        assert call.headers[b"accept-encoding"] == b"identity"
        await call.send(response(gzip.compress(b"{}" * 999), extra=b"content-encoding: GZip\r\n"))

    async def work() -> None:
        async with asked(way, answer) as ask:
            assert await ask("v1/loads", WITHIN) == NoReply("compressed though not asked for")

    run(work)


@both_ways
@pytest.mark.parametrize("framing", ["length", "chunks", "close"])
def test_a_flood_is_cut_off(way: str, framing: str) -> None:
    """Of an endless body no more than the limit is held, and the connection is closed."""
    head, piece = {
        "length": (b"content-length: 999999999999\r\n", b"x" * 65536),
        "chunks": (b"transfer-encoding: chunked\r\n", chunk(b"x" * 65536)),
        "close": (b"", b"x" * 65536),
    }[framing]
    calls: list[Call] = []
    ended = asyncio.Event()

    async def answer(call: Call) -> None:
        calls.append(call)
        await call.send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")
        try:
            await call.flood(100 * BODY_LIMIT, piece)
        finally:
            ended.set()

    async def work() -> None:
        async with asked(way, answer) as ask:
            assert await ask("metrics", WITHIN) == NoReply(
                f"longer than {BODY_LIMIT} bytes", size=BODY_LIMIT
            )
            await until(ended.is_set)
            assert len(calls) == 1
            assert calls[0].taken < 4 * BODY_LIMIT

    run(work)


@both_ways
def test_a_page_of_the_largest_size_is_whole(way: str) -> None:
    """What is just within the limit is read."""

    async def answer(call: Call) -> None:
        await call.send(response(b"x" * BODY_LIMIT))

    async def work() -> None:
        async with asked(way, answer) as ask:
            reply = await ask("metrics", WITHIN)
            assert isinstance(reply, Reply), reply
            assert reply.body == b"x" * BODY_LIMIT

    run(work)


@both_ways
@pytest.mark.parametrize("begun", [True, False])
def test_slowness_is_cut_off(way: str, *, begun: bool) -> None:
    """Silence, and a body that comes byte by byte, end at the bound in all, and so does the call."""
    ended = asyncio.Event()

    async def answer(call: Call) -> None:
        try:
            if begun:
                await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n")
                await call.cut(b"x" * 99999, 1, 0.002)
            await call.peer_closed.wait()
        finally:
            ended.set()

    async def work() -> None:
        async with asked(way, answer) as ask:
            assert await ask("health", 0.05) == NoReply("no complete answer within 0.05 s")
            await until(ended.is_set)

    run(work)


@both_ways
def test_nobody_there_is_told_apart(way: str) -> None:
    """A refused connection is not `connected`: there is no point in asking for another path."""

    async def work() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{unused.getsockname()[1]}"
            async with over(way, url) as ask:
                reply = await ask("metrics", WITHIN)
                assert isinstance(reply, NoReply)
                assert not reply.connected

    run(work)


@both_ways
@pytest.mark.parametrize("prefix", ["", "/", "/spec", "/spec/"])
def test_where_and_what_is_asked(way: str, prefix: str) -> None:
    """A path before the routes is kept, the query too, and the backend's own key is sent."""
    seen: list[Call] = []

    async def answer(call: Call) -> None:
        seen.append(call)
        await call.send(response(b"ok"))

    async def work() -> None:
        async with scripted_backend(answer, probes=False) as backend:
            async with over(way, backend.url + prefix, "secret") as ask:
                assert isinstance(await ask("v1/loads?include=core,spec", WITHIN), Reply)
            host = backend.url.removeprefix("http://").encode()
        (call,) = seen
        assert call.head.startswith(b"GET ")
        assert call.path == prefix.rstrip("/").encode() + b"/v1/loads?include=core,spec"
        assert call.headers[b"authorization"] == b"Bearer secret"
        assert call.headers[b"host"] == host
        assert b"content-length" not in call.headers
        assert call.body == b""

    run(work)


def test_a_connection_is_used_again() -> None:
    """Polls keep one connection, and closing the client closes it."""

    async def work() -> None:
        async with scripted_backend(
            lambda call: call.send(response(b"ok")), probes=False
        ) as backend:
            pool = pool_for(backend.url)
            client = PoolClient(pool)
            for _ in range(3):
                assert isinstance(await client.ask("ready", WITHIN), Reply)
            assert [call.reused for call in backend.calls] == [0, 1, 2]
            assert len(pool.open) == 1
            client.close()
            await until(lambda: not pool.open)

    run(work)


def test_an_answer_that_closes_is_not_kept() -> None:
    """After `connection: close` the next ask makes a connection of its own."""

    async def answer(call: Call) -> None:
        await call.send(response(b"ok", extra=b"connection: close\r\n"))

    async def work() -> None:
        async with scripted_backend(answer, probes=False) as backend:
            client = PoolClient(pool_for(backend.url))
            for _ in range(2):
                assert isinstance(await client.ask("ready", WITHIN), Reply)
            assert [call.reused for call in backend.calls] == [0, 0]

    run(work)


def test_a_dead_idle_connection_is_replaced_unseen() -> None:
    """A connection that the backend closed while it lay idle costs one more connection only."""

    async def answer(call: Call) -> None:
        if call.reused:
            call.close()
        else:
            await call.send(response())

    async def work() -> None:
        async with scripted_backend(answer, probes=False) as backend:
            client = PoolClient(pool_for(backend.url))
            for _ in range(2):
                assert isinstance(await client.ask("ready", WITHIN), Reply)
            assert [call.reused for call in backend.calls] == [0, 1, 0]
            client.close()

    run(work)


def test_only_silence_is_asked_again() -> None:
    """An answer on a reused connection that is cut or too long is not asked for a second time."""

    async def answer(call: Call) -> None:
        if not call.reused:
            await call.send(response(b"x"))
        elif call.path == b"/long":
            await call.send(response(b"x" * 2000))
        else:
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n123")
            call.close()

    async def work() -> None:
        async with scripted_backend(answer, probes=False) as backend:
            client = PoolClient(pool_for(backend.url), limit=1000)
            for path, reason, size in (
                ("long", "longer than 1000 bytes", 1000),
                ("cut", "the answer is cut short", 0),
            ):
                assert isinstance(await client.ask("ready", WITHIN), Reply)
                assert await client.ask(path, WITHIN) == NoReply(reason, size=size)
            assert [call.reused for call in backend.calls] == [0, 1, 0, 1]

    run(work)


def test_a_connection_that_is_not_made_in_time_is_nobody() -> None:
    """The pool's own limit for a connection comes before the bound in all, and holds nothing."""

    async def work() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            port = full.getsockname()[1]
            fill = [socket.socket() for _ in range(3)]
            for sock in fill:
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
            pool = pool_for(f"http://127.0.0.1:{port}", connect_timeout=0.1)
            reply = await PoolClient(pool).ask("ready", WITHIN)
            assert reply == NoReply("no connection: TimeoutError", connected=False)
            assert not pool.open
            assert await PoolClient(pool).ask("ready", 0.05) == NoReply(
                "no complete answer within 0.05 s"
            )
            assert not pool.open
            assert not pool.connecting
            for sock in fill:
                sock.close()

    run(work)


def test_a_connection_lost_before_it_is_used_is_no_reply() -> None:
    """A backend that closes what it has just accepted is told at once, not at the time limit."""

    class Closed(BackendPool):
        """Loses each connection in the moment in which it is made."""

        async def connect(self) -> Any:
            connection = await super().connect()
            if connection.transport is not None:
                connection.transport.abort()
            return connection

    async def work() -> None:
        async with scripted_backend(lambda call: call.send(response()), probes=False) as backend:
            pool = Closed(
                Role.BASELINE, BackendUrl.parse(backend.url),
                key=None, keep_alive=4.0, connect_timeout=1.0, clock=time.monotonic,
            )  # fmt: skip
            assert await PoolClient(pool).ask("ready", 60.0) == NoReply("the connection broke")

    run(work)


def test_whatever_fails_is_no_reply() -> None:
    """A fault of a library becomes a reason: a watcher must survive it."""

    class Faulty(BackendPool):
        """Fails as nobody expects."""

        async def connect(self) -> Any:
            raise RuntimeError("broken")

    async def work() -> None:
        pool = Faulty(
            Role.BASELINE, BackendUrl.parse("http://127.0.0.1:1"),
            key=None, keep_alive=4.0, connect_timeout=1.0, clock=time.monotonic,
        )  # fmt: skip
        assert await PoolClient(pool).ask("ready", WITHIN) == NoReply("RuntimeError")

    run(work)


def test_a_cancelled_ask_holds_nothing() -> None:
    """After a hundred cancelled asks the backend has seen them go and the pool is empty."""

    async def work() -> None:
        async with scripted_backend(lambda call: call.peer_closed.wait(), probes=False) as backend:  # type: ignore[arg-type,return-value]
            pool = pool_for(backend.url)
            client = PoolClient(pool)
            tasks = [asyncio.ensure_future(client.ask("health", WITHIN)) for _ in range(100)]
            await until(lambda: backend.in_flight == 100)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: not pool.open and backend.in_flight == 0)

    run(work)


def test_httpx_answers_by_a_transport_of_ones_own() -> None:
    """The seam for tests: any transport of httpx may stand for the backend."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=str(request.url).encode())

    async def work() -> None:
        async with probe_client(
            "https://gate/spec/", transport=httpx.MockTransport(answer)
        ) as client:
            reply = await asking(client, lambda: 7.0)("v1/models", WITHIN)
        assert reply == Reply(200, b"https://gate/spec/v1/models", 7.0, 7.0)

    run(work)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("openssl makes the certificate, and is not here")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [tool, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def test_over_tls(certificate: tuple[Path, Path]) -> None:
    """A backend over TLS is asked as any other, if its certificate can be trusted and is its own."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(*certificate)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))

    async def work() -> None:
        backend = ScriptedBackend(lambda call: call.send(response(b"over tls")), probes=False)
        server = await asyncio.start_server(backend.serve, "127.0.0.1", 0, ssl=serving)
        port = server.sockets[0].getsockname()[1]
        trusted = PoolClient(pool_for(f"https://localhost:{port}", tls=trusting))
        for _ in range(2):
            reply = await trusted.ask("ready", WITHIN)
            assert isinstance(reply, Reply), reply
            assert (reply.status, reply.body) == (200, b"over tls")
        assert [call.reused for call in backend.calls] == [0, 1]
        unknown = PoolClient(pool_for(f"https://localhost:{port}"))
        wrong_name = PoolClient(pool_for(f"https://127.0.0.1:{port}", tls=trusting))
        plain = PoolClient(pool_for(f"http://localhost:{port}"))
        for client in (unknown, wrong_name):
            refused = await client.ask("ready", WITHIN)
            assert refused == NoReply("no connection: SSLCertVerificationError", connected=False)
        assert isinstance(await plain.ask("ready", WITHIN), NoReply)
        assert len(backend.calls) == 2
        trusted.close()
        server.close()
        await server.wait_closed()

    run(work)
