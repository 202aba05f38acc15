"""Faults that a hostile tester found through real sockets, each as its smallest reproduction.

They run on uvloop, as `crossover serve` does: some of them do not show on asyncio's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from router.load import Role
from router.metrics import Outcome
from router.pair_client import PairClient, create_client
from router.telemetry import Source, Unreadable, parse
from tests.scripted_backend import (
    STREAM_HEAD,
    Call,
    chunk,
    event,
    response,
    scripted_backend,
)
from tests.stack import Stack, running_router, until
from tests.stack import run as run_within

BODY = b'{"messages":[]}'
STREAM = b'{"messages":[],"stream":true}'
LIMIT_S = 20.0

run = functools.partial(run_within, limit_s=LIMIT_S)


def post(body: bytes = BODY, extra: bytes = b"", version: bytes = b"1.1") -> bytes:
    """A chat request as bytes."""
    head = b"POST /v1/chat/completions HTTP/%b\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
    return head % (version, extra, len(body)) + body


def statuses(data: bytes) -> list[int]:
    """The status of each answer in a byte stream."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([1-5]\d\d) ", data)]


async def read_all(reader: asyncio.StreamReader, seconds: float = 5.0) -> bytes:
    """All bytes until the end of the connection or of the time."""
    got = bytearray()
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(seconds):
            while data := await reader.read(65_536):
                got += data
    return bytes(got)


def narrow_client(port: int) -> socket.socket:
    """A client whose kernel takes almost nothing for it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


@contextlib.asynccontextmanager
async def raw_backend(
    serve: Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A backend that hands each request head to `serve`, probes included; its base URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while True:
                await serve(await reader.readuntil(b"\r\n\r\n"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            tasks.discard(task)

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------------- what reaches a backend


@pytest.mark.parametrize("target", [b"/api/tags", b"/"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_a_get_is_no_second_request(target: bytes, chunked: bool) -> None:
    """The body of a relayed GET never reaches the backend as a request of its own (H8, X4)."""
    inner = b"POST /flush_cache HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    head = b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" % target
    if chunked:
        raw = head + b"transfer-encoding: chunked\r\n\r\n" + chunk(inner) + b"0\r\n\r\n"
    else:
        raw = head + b"content-length: %d\r\n\r\n" % len(inner) + inner

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
            writer.write(raw)
            await read_all(reader)
            writer.close()
            await asyncio.sleep(0.1)
            assert [call.path for call in spec.calls + base.calls] == [target]

    run(work)


# ---------------------------------------------------------------------- what the client sees


def test_a_cut_answer_without_framing_ends_in_a_reset() -> None:
    """A client of HTTP/1.0 (nginx by default) must not take a cut answer for a whole one (S8)."""

    async def answer(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
        await call.send(head + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"half"))
        await asyncio.sleep(0.1)
        call.close()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
            writer.write(post(version=b"1.0"))
            try:
                with pytest.raises(ConnectionResetError):
                    while await reader.read(65_536):
                        pass
            finally:
                writer.close()

    run(work)


def test_every_waiting_request_is_answered_when_both_backends_go() -> None:
    """A long queue without a backend left is answered, all of it and at once (E7)."""
    release = asyncio.Event()

    async def answer(call: Call) -> None:
        await release.wait()
        await call.send(response())

    async def ask(stack: Stack) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
        writer.write(post(extra=b"connection: close\r\n"))
        got = await read_all(reader, 4)
        writer.close()
        return statuses(got)

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url, max_in_flight=1) as stack,
        ):
            asked = [asyncio.ensure_future(ask(stack)) for _ in range(500)]
            await until(lambda: stack.relay.waiting == 499)
            for role in Role:
                stack.relay.health.drain(role, drained=True, now=stack.relay.clock())
            release.set()
            found = await asyncio.gather(*asked)
            assert found.count([503]) == 499
            assert found.count([200]) == 1
            assert (stack.in_flight(), stack.relay.waiting) == ((0, 0), 0)

    run(work)


def test_a_head_cut_by_a_read_is_not_charged_for_the_body_before_it() -> None:
    """The size of a head that is still arriving is its own, not that of the read it began in."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
            second = post(extra=b"connection: close\r\n")
            writer.write(post(b'{"messages":"' + b"x" * 50_000 + b'"}') + second[:30])
            await asyncio.sleep(0.2)
            with contextlib.suppress(ConnectionError):
                writer.write(second[30:])
            got = await read_all(reader, 2)
            writer.close()
            assert statuses(got) == [200, 200]

    run(work)


def test_an_upload_under_way_at_a_shutdown_is_answered() -> None:
    """A client that is sending its request when the listener closes gets an answer, not silence."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
            writer.write(post()[:-5])
            await until(lambda: len(stack.relay.connections) == 1)
            await asyncio.sleep(0.05)
            stopped = asyncio.ensure_future(stack.router.stop())
            await asyncio.sleep(0.1)
            with contextlib.suppress(ConnectionError):
                writer.write(post()[-5:])
            got = await read_all(reader, 3)
            writer.close()
            await stopped
            assert statuses(got) in ([200], [503])

    run(work)


# ---------------------------------------------------------------------- clients that leave


def test_no_connection_is_held_for_a_client_that_left_while_connecting() -> None:
    """A connect that is cancelled when it has just succeeded leaves nothing in the pool (D7, L1)."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            pool = stack.relay.pools[Role.SPECULATIVE]
            for ticks in range(6):
                for _ in range(5):
                    connecting = asyncio.ensure_future(pool.connect())
                    for _ in range(ticks):
                        await asyncio.sleep(0)
                    connecting.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        (await connecting).drop()
            await asyncio.sleep(0.1)
            assert len(pool.open) == len(pool.idle) == 0

    run(work)


@pytest.mark.parametrize("buffered", [2_000, 66_000])
def test_a_slow_client_that_half_closes_is_gone_at_once(buffered: int) -> None:
    """A half-closed client counts as gone also while bytes wait for it (D2): the backend stops."""

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for _ in range(5_000):
            if call.peer_closed.is_set():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(call.send(event("x" * 2_000)), 0.02)
            await asyncio.sleep(0.001)

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            client = narrow_client(stack.router.port)
            await until(lambda: len(stack.relay.connections) == 1)
            connection = next(iter(stack.relay.connections))
            ours = connection.transport.get_extra_info("socket")
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.send(post(STREAM))
            await until(lambda: connection.transport.get_write_buffer_size() >= buffered)
            client.shutdown(socket.SHUT_WR)
            try:
                await until(lambda: stack.in_flight() == (0, 0) and spec.in_flight == 0, 1)
                counted = stack.relay.metrics.requests
                assert counted[Role.SPECULATIVE, "chat_completions", Outcome.CLIENT_GONE] == 1
            finally:
                client.close()

    run(work)


def test_a_client_that_never_reads_an_ordinary_answer_is_given_up() -> None:
    """The write timeout holds for what the router answers itself, too (X5)."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, write_timeout="500ms", keep_alive="500ms") as stack,
        ):
            for _ in range(1000):
                stack.relay.decisions.event(0.0, "x", "y" * 500)
            client = narrow_client(stack.router.admin_port)
            client.send(b"GET /decisions?limit=1000 HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20)
            await until(lambda: len(stack.relay.admin_connections) == 1)
            try:
                await until(lambda: not stack.relay.admin_connections, 4)
            finally:
                client.close()

    run(work)


def test_an_endless_trailer_is_cut_off() -> None:
    """Trailers are dropped, but not before they were bounded: they must not fill memory (H8)."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY))
            writer.write(b"0\r\nx-endless: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(32):
                    writer.write(b"a" * 65_536)
                    await writer.drain()
            got = await read_all(reader, 1)
            writer.close()
            assert statuses(got) in ([400], [431])

    run(work)


# ---------------------------------------------------------------------- backends that misbehave


def test_a_connection_with_an_unsent_request_is_not_used_again() -> None:
    """A backend that answers before it took the request in must not get the next one behind it."""

    async def serve(head: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not head.startswith(b"POST"):
            writer.write(response(b"{}"))
            return
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        if int(length[1]) > 1_000_000:
            writer.write(response(b"{}", "413 Content Too Large"))
            await asyncio.sleep(30)  # it reads no further
        writer.write(response())

    async def work() -> None:
        async with (
            raw_backend(serve) as spec,
            scripted_backend() as base,
            running_router(spec, base.url, policy="speculative") as stack,
        ):
            big = b'{"messages":"' + b"x" * 20_000_000 + b'"}'
            got = await stack.client.post("/v1/chat/completions", content=big)
            assert got.status_code == 413
            async with asyncio.timeout(3):
                assert (await stack.chat()).status_code == 200

    run(work)


@pytest.mark.parametrize("field", ["gen_throughput", "timestamp", "num_running_reqs"])
def test_no_number_is_too_long_for_telemetry(field: str) -> None:
    """An integer that fits no float is unreadable, or one fact less, and never an exception (L8)."""
    fields = {"num_running_reqs": "0", "num_waiting_reqs": "0", field: "9" * 400}
    rank = ",".join(f'"{name}":{value}' for name, value in fields.items())
    told = parse(Source.LOADS, f'{{"loads":[{{{rank}}}]}}'.encode(), 1.0, 1.1)
    if not isinstance(told, Unreadable):
        assert told.running == 0
        assert told.gen_throughput is None


def test_one_bad_answer_does_not_end_the_polls() -> None:
    """Whatever a backend says of its load once, it is asked again (L8)."""
    polls = 0

    async def serve(head: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal polls
        speed = b"1"
        if b" /v1/loads" in head:
            polls += 1
            speed = b"9" * 400 if polls == 2 else b"1"
        loads = b'{"loads":[{"num_running_reqs":0,"num_waiting_reqs":0,"gen_throughput":%b}]}'
        writer.write(response(loads % speed))

    async def work() -> None:
        async with (
            raw_backend(serve) as spec,
            scripted_backend() as base,
            running_router(spec, base.url, telemetry_interval="20ms") as stack,
        ):
            await until(lambda: polls >= 5, 3)
            assert not any(task.done() for task in stack.router._tasks)

    run(work)


def test_our_own_lack_of_files_is_not_a_backends_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of file descriptors, the router says that it is overloaded and blames no backend (D8)."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):

            async def connect() -> None:
                raise OSError(errno.EMFILE, "Too many open files")

            for pool in stack.relay.pools.values():
                monkeypatch.setattr(pool, "connect", connect)
            found = [(await stack.chat()).status_code for _ in range(6)]
            monkeypatch.undo()
            states = {stack.relay.health.status(role).breaker.name for role in Role}
            assert states == {"CLOSED"}
            assert set(found) == {503}

    run(work)


@pytest.mark.parametrize("policy", ["least-in-flight", "round-robin"])
def test_a_backend_that_refuses_at_once_does_not_attract_the_load(policy: str) -> None:
    """A quick 429 looks like an idle backend: whatever the policy, the other is preferred (L9)."""

    async def refuse(call: Call) -> None:
        await call.send(response(b"{}", "429 Too Many Requests"))

    async def slow(call: Call) -> None:
        await asyncio.sleep(0.05)
        await call.send(response())

    async def work() -> None:
        async with (
            scripted_backend(refuse) as spec,
            scripted_backend(slow) as base,
            running_router(spec.url, base.url, policy=policy) as stack,
        ):
            found: list[int] = []

            async def ask_in_turn() -> None:
                for _ in range(8):
                    found.append((await stack.chat()).status_code)  # noqa: PERF401

            await asyncio.gather(*(ask_in_turn() for _ in range(20)))
            assert found.count(429) <= 10

    run(work)


def test_the_limit_of_an_answers_head_does_not_hang_on_the_cuts() -> None:
    """A head beyond the limit is refused in one read as it is in several."""
    head = b"HTTP/1.1 200 OK\r\nx-large: " + b"a" * 100_000 + b"\r\ncontent-length: 2\r\n\r\n{}"

    async def answer(call: Call) -> None:
        step = 10_000 if b"cut" in call.body else len(head)
        for at in range(0, len(head), step):
            await call.send(head[at : at + step])
            await asyncio.sleep(0.01)

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url) as stack,
        ):
            found = {(await stack.chat(user=user)).status_code for user in ("whole", "cut") * 3}
            assert len(found) == 1

    run(work)


def test_a_list_of_models_that_trickles_in_is_given_up() -> None:
    """The limit for a whole answer holds for its head too, so nobody waits behind it (D11)."""

    async def serve(head: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b" /v1/models" in head:
            for byte in b"HTTP/1.1 200 OK\r\nx-slow: " + b"a" * 100:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.1)
        writer.write(response(b"{}"))

    async def work() -> None:
        async with (
            raw_backend(serve) as spec,
            scripted_backend() as base,
            running_router(spec, base.url) as stack,
            create_client() as client,
        ):
            asked = PairClient(stack.relay, client).ask(Role.SPECULATIVE, ("/v1/models",), 0.3)
            async with asyncio.timeout(2):
                assert (await asked)[1] is None

    run(work)
