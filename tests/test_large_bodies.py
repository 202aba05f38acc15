"""Large bodies and answers under attack: whole or refused, sent again as they were, and no trace left."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import mmap
import random
import re
import ssl
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from router import parsing
from router.load import Role
from router.parsing import CLOSING, LARGE_BODY
from router.room import Room
from router.turns import LARGE
from tests.engines import looped
from tests.fake_backend import Taker, connected
from tests.raw_client import Client, chunked, parse, post
from tests.scripted_backend import STREAM_HEAD, Call, chunk, response, scripted_backend
from tests.stack import Stack, running_router, until
from tests.test_asking import certificate  # noqa: F401 (a fixture)
from tests.test_attack_faults import raw_backend
from tests.test_frontend import POST, statuses
from tests.wire.stage import explode

MB = 1_000_000
LIMIT_S = 60.0
LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
each_loop = pytest.mark.parametrize("loop", list(LOOPS))


def run(loop: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run this on uvloop, as it is served, or on asyncio's own loop."""

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


def json_of(size: int, seed: int = 1) -> bytes:
    """A JSON body of exactly so many bytes, no two parts of it alike."""
    front, back = b'{"messages":[],"blob":"', b'"}'
    need = size - len(front) - len(back)
    return front + random.Random(seed).randbytes(need // 2 + 1).hex().encode()[:need] + back


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[mmap.mmap]:
    """The pages of the large bodies that are there now."""
    there: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    class Known(Room):
        __slots__ = ()

        def __init__(self, length: int) -> None:
            super().__init__(length)
            there.add(self._pages)

    monkeypatch.setattr(parsing, "Room", Known)
    return there


async def told_length(call: Call) -> None:
    await call.send(response(b'{"n":%d}' % len(call.body)))


def quiet(stack: Stack) -> bool:
    """Whether nothing is under way and nothing held."""
    return stack.relay.buffered == 0 and stack.in_flight() == (0, 0)


# --------------------------------------------------------------------------- sent again


@pytest.mark.parametrize("why", ["connect", "stale", "refused", "refused early"])
@each_loop
def test_a_large_body_is_sent_again_as_it_was(loop: str, why: str) -> None:
    """Rules (a), (b) and (c): the backend that answers got every byte, in order."""
    body = json_of(5 * MB + 7)

    async def answer(call: Call) -> None:
        if len(call.body) < LARGE_BODY:
            await call.send(response())
        elif why == "stale" and call.reused:
            call.close()
        elif why == "refused":
            await call.send(response(b"{}", "503 Service Unavailable"))
        else:
            await call.send(response())

    async def early(head: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"POST"):
            writer.write(response(b"{}", "503 Service Unavailable"))
            await asyncio.sleep(LIMIT_S)  # it reads no further
        writer.write(response(b"{}"))

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            raw_backend(early) as raw,
        ):
            url = raw if why == "refused early" else spec.url
            async with running_router(
                url, base.url, policy="speculative", replay_window="60s"
            ) as stack:
                if why == "stale":
                    assert (await stack.chat()).status_code == 200
                if why == "connect":
                    await spec.leave()
                client = await Client.open(stack.router.port)
                await client.send(post(body))
                got = await client.reply(30)
                assert (got.status, got.whole) == (200, True)
                last = (spec if why == "stale" else base).calls[-1]
                assert digest(last.body) == digest(body)
                assert sum(stack.relay.metrics.retries.values()) == 1
                await until(lambda: quiet(stack))
                client.close()

    run(loop, work)


# --------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("how", ["half-close", "reset"])
@each_loop
def test_nothing_is_asked_for_a_client_that_left_before_its_turn(loop: str, how: str) -> None:
    """It left after the last byte of a large body and before the turn: no backend hears of it."""
    body = json_of(LARGE_BODY + 1)

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            client = await Client.open(stack.router.port)
            await client.send(post(body)[:-1])
            await until(lambda: stack.relay.buffered == len(body) - 1)
            (connection,) = stack.relay.connections
            asked = stack.relay.turns.ask
            gone: list[bool] = []

            def ask(step: Callable[[], None]) -> None:
                """The body's turn comes as soon as the transport knows that the client left."""
                if step != connection._advance:
                    asked(step)
                elif connection.transport.is_closing():
                    gone.append(True)
                    step()
                else:
                    asyncio.get_running_loop().call_soon(ask, step)

            stack.relay.turns.ask = ask  # type: ignore[method-assign]
            await client.send(body[-1:])
            await until(lambda: stack.relay.buffered == len(body))
            if how == "reset":
                client.abort()
            else:
                client.writer.write_eof()
            await until(lambda: not stack.relay.connections and quiet(stack))
            await until(lambda: gone == [True])
            assert spec.calls == base.calls == []
            assert len(stack.relay.decisions) == 0
            client.close()

    run(loop, work)


@each_loop
def test_a_client_that_closes_and_does_not_read_is_given_up(loop: str) -> None:
    """What is left in the queue of a connection that is being closed does not keep it from its limit."""

    async def work() -> None:
        async with (
            scripted_backend(told_length) as spec,
            scripted_backend(told_length) as base,
            running_router(spec.url, base.url, write_timeout="300ms") as stack,
        ):
            client = await Client.open(stack.router.port)
            await until(lambda: len(stack.relay.connections) == 1)
            (connection,) = stack.relay.connections
            connection.transport.set_write_buffer_limits(high=64 * MB)  # never told to pause
            connection.transport.write(b"x" * (16 * MB))  # more than the kernel takes
            last = POST.replace(b"1.1\r\n", b"1.0\r\nconnection: keep-alive\r\n")
            await client.send(last + POST)
            await until(lambda: connection.phase is CLOSING)
            assert connection.queue, "what came behind the last request"
            await until(lambda: not stack.relay.connections)
            client.close()

    run(loop, work)


@each_loop
def test_a_fault_of_ours_in_an_answer_without_framing_ends_in_a_reset(loop: str) -> None:
    """A client of HTTP/1.0 must not take what it got until then for the whole answer."""

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + chunk(b"data: {}\n\n"))
        await call.peer_closed.wait()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url) as stack,
        ):
            client = await Client.open(stack.router.port)
            await client.send(POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
            await client.saw(b"data: {}")
            (connection,) = stack.relay.connections
            connection.tick = explode  # type: ignore[assignment, method-assign]
            connection.quiet_until = 0.0
            assert await client.closed()
            assert client.reset
            await until(lambda: quiet(stack))
            client.close()

    run(loop, work)


@pytest.mark.parametrize("how", ["half-close", "reset"])
def test_a_client_that_leaves_while_the_backend_takes_its_body_in(
    how: str, rooms: weakref.WeakSet[mmap.mmap]
) -> None:
    """The backend's connection is cut at once, and the memory of what was still to be sent is free."""
    lost = asyncio.Event()

    async def slow(head: bytes, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        if not head.startswith(b"POST"):
            raise ConnectionResetError
        await reader.readexactly(100_000)
        while not lost.is_set():
            await asyncio.sleep(0.01)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(20 * MB)
        lost.clear()
        raise ConnectionResetError

    async def work() -> None:
        async with (
            raw_backend(slow) as spec,
            scripted_backend() as base,
            running_router(spec, base.url, policy="speculative") as stack,
        ):
            client = await Client.open(stack.router.port)
            await client.send(post(json_of(20 * MB)))
            await until(lambda: sum(stack.in_flight()) == 1)
            assert len(rooms) == 1
            if how == "reset":
                client.abort()
            else:
                client.writer.write_eof()
            await until(lambda: quiet(stack) and not rooms)
            lost.set()
            await until(lambda: not lost.is_set())
            assert base.calls == []
            client.close()

    run("uvloop", work)


# --------------------------------------------------------------------------- limits


@pytest.mark.parametrize("limit", ["max_body", "max_buffered"])
@pytest.mark.parametrize("framed", ["length", "chunked"])
def test_a_limit_in_the_middle_of_a_large_body(
    limit: str, framed: str, rooms: weakref.WeakSet[mmap.mmap]
) -> None:
    """It is refused as such, and its memory is given back while the client still sends."""
    body = json_of(6 * MB)
    pieces = [body[at : at + 100_000] for at in range(0, len(body), 100_000)]
    sent = post(body)
    if framed == "chunked":
        sent = post(chunked(*pieces), framing=b"transfer-encoding: chunked")
    limits = {"max_body": 3 * MB, "max_buffered": 64 * MB}
    if limit == "max_buffered":
        limits = {"max_body": 8 * MB, "max_buffered": 8 * MB}

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, **limits) as stack,
        ):
            other = await Client.open(stack.router.port)
            if limit == "max_buffered":  # takes 7 of the 8 MB
                await other.send(post(json_of(7 * MB))[:-1])
                await until(lambda: stack.relay.buffered == 7 * MB - 1)
            client = await Client.open(stack.router.port)
            await client.send(sent)
            got = await client.reply()
            assert got.status == (413 if limit == "max_body" else 503)
            assert got.error["code"] == ("body_too_large" if limit == "max_body" else "overloaded")
            held = 7 * MB - 1 if limit == "max_buffered" else 0
            await until(lambda: stack.relay.buffered == held)
            if limit == "max_buffered":
                await other.send(b"}")
                assert (await other.reply()).status == 200
            await until(lambda: quiet(stack))
            assert spec.calls == [] or base.calls == []
            client.close()
            other.close()
            await until(lambda: not rooms)

    run("uvloop", work)


def test_lengths_that_are_only_announced_leave_nothing(rooms: weakref.WeakSet[mmap.mmap]) -> None:
    """A hundred clients announce 60 MB and send a byte: once they left, no mapping is there."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            head = post(b"", framing=b"content-length: 60000000")
            clients = [await Client.open(stack.router.port) for _ in range(100)]
            for client in clients:
                await client.send(head + b"{")
            await until(lambda: stack.relay.buffered == 100)
            assert len(rooms) == 100
            for at, client in enumerate(clients):
                if at % 2:
                    client.abort()
                else:
                    client.close()
            await until(lambda: not stack.relay.connections and stack.relay.buffered == 0)
            await until(lambda: not rooms)

    run("uvloop", work)


@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize("how", ["known head", "new head", "chunked", "upgrade", "expect"])
def test_a_body_around_the_limit_arrives_as_sent(over: int, how: str) -> None:
    """Just below, at and above the size from which a body has its own room and turn."""
    body = json_of(LARGE_BODY + over)
    head, sent = b"", post(body)
    if how == "chunked":
        sent = post(chunked(body[:70_000], body[70_000:]), framing=b"transfer-encoding: chunked")
    elif how == "upgrade":
        sent = post(body, headers=("connection: upgrade", "upgrade: h2c"))
    elif how == "expect":
        sent = post(body, headers=("expect: 100-continue",))
        head, sent = sent[: -len(body)], body

    async def work() -> None:
        async with (
            scripted_backend(told_length) as spec,
            scripted_backend(told_length) as base,
            running_router(spec.url, base.url) as stack,
        ):
            client = await Client.open(stack.router.port)
            if how == "known head":
                await client.send(post(b"{}"))
                assert (await client.reply()).json() == {"n": 2}
            if head:
                await client.send(head)
                await client.saw(b"100 Continue")
            await client.send(sent)
            assert (await client.reply()).json() == {"n": len(body)}
            last = max((*spec.calls, *base.calls), key=lambda call: len(call.body))
            assert digest(last.body) == digest(body)
            await until(lambda: quiet(stack))
            if how == "upgrade":
                assert await client.closed()
            client.close()

    run("uvloop", work)


# --------------------------------------------------------------------------- large answers

ANSWERS = ("length", "chunked", "close", "last chunk in a large read")


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("framed", ANSWERS)
@each_loop
def test_a_large_answer_comes_whole(loop: str, framed: str, slow: bool) -> None:
    """With its end behind it while reading waits for a turn; the connection is then used again."""
    body = random.Random(2).randbytes(5 * MB)

    async def answer(call: Call) -> None:
        if len(call.body) < 20:
            await call.send(response())
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
        if framed == "length":
            await call.send(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        elif framed == "close":
            await call.send(head + b"connection: close\r\n\r\n" + body)
            call.close()
        elif framed == "chunked":
            await call.send(head + b"transfer-encoding: chunked\r\n\r\n")
            for at in range(0, len(body), 90_000):
                await call.send(chunk(body[at : at + 90_000]))
            await call.send(b"0\r\n\r\n")
        else:
            await call.send(
                head + b"transfer-encoding: chunked\r\n\r\n" + chunk(body) + b"0\r\n\r\n"
            )

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url, policy="speculative") as stack,
        ):
            client = await Client.open(stack.router.port)
            await client.send(post(b'{"messages":[],"large":1}'))
            await until(lambda: len(spec.calls) == 1)
            if slow:
                (connection,) = stack.relay.connections
                await until(lambda: connection.flow.write_paused)
            got = await client.reply(30)
            assert got.whole
            assert digest(got.body) == digest(body)
            await until(lambda: quiet(stack))
            for _ in range(2):  # at once, and on a connection that was idle
                await client.send(POST)
                assert (await client.reply()).status == 200
            assert [call.reused for call in spec.calls] == (
                [0, 0, 1] if framed == "close" else [0, 1, 2]
            )
            client.close()

    run(loop, work)


@pytest.mark.parametrize("framed", ["length", "chunked", "close"])
@each_loop
def test_a_backend_that_resets_in_a_large_answer_is_seen(loop: str, framed: str) -> None:
    """While reading waits for its turn too: what came is the beginning, and it does not pass for all."""
    body = random.Random(3).randbytes(6 * MB)
    head = {
        "length": b"content-length: %d" % len(body),
        "chunked": b"transfer-encoding: chunked",
        "close": b"connection: close",
    }[framed]

    async def answer(call: Call) -> None:
        sent = body[: 4 * MB]
        await call.send(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        await call.send(chunk(sent) if framed == "chunked" else sent)
        call.reset()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, policy="speculative") as stack,
        ):
            client = await Client.open(stack.router.port)
            await client.send(POST)
            got = await client.reply(20)
            assert not got.whole
            assert client.ended
            assert body.startswith(got.body)
            assert len(got.body) <= 4 * MB
            await until(lambda: quiet(stack))
            client.close()

    run(loop, work)


@each_loop
def test_large_bodies_and_answers_over_tls(loop: str, certificate: tuple[Path, Path]) -> None:  # noqa: F811
    """Turns pause what is encrypted as they do what is not: bytes whole in both directions."""
    body, back = json_of(4 * MB), random.Random(4).randbytes(4 * MB)

    async def answer(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + back)
        call.close()

    async def work() -> None:
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(*certificate)
        trusting = ssl.create_default_context(cafile=str(certificate[0]))
        async with scripted_backend(answer) as spec, scripted_backend(answer) as base:
            server = await asyncio.start_server(spec.serve, "127.0.0.1", 0, ssl=serving)
            port = server.sockets[0].getsockname()[1]
            cert, key = map(str, certificate)
            async with running_router(
                spec.url, base.url, policy="speculative", ssl_certfile=cert, ssl_keyfile=key
            ) as stack:
                pool = stack.relay.pools[Role.SPECULATIVE]
                pool.url = type(pool.url)("https", "localhost", port)
                pool._tls = trusting
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", stack.router.port, ssl=trusting, server_hostname="localhost"
                )
                writer.write(post(body))
                raw = b""
                while not parse(raw).whole:
                    piece = await reader.read(MB)
                    assert piece, parse(raw).status
                    raw += piece
                assert digest(parse(raw).body) == digest(back)
                assert digest(spec.calls[0].body) == digest(body)
                await until(lambda: quiet(stack))
                writer.close()
            server.close()

    run(loop, work)


# --------------------------------------------------------------------------- turns against everything else


@pytest.mark.parametrize("seed", range(40))
@looped
async def test_no_order_of_events_leaves_a_connection_unread(seed: int) -> None:
    """Large and small reads, a client that pauses at random, turns between or not: all bytes come."""
    dice = random.Random(seed)
    connection, transport = connected()
    for _ in range(4):  # answers on the same connection
        driver = Taker()
        connection.send(cast(Any, driver), b"", b"")
        sizes = [dice.choice((9, LARGE - 20, LARGE, 4 * LARGE)) for _ in range(12)]
        reads = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]
        reads += [chunk(b"x" * size) for size in sizes]
        if dice.random() < 0.5:
            reads[-1] += b"0\r\n\r\n"
        else:
            reads.append(b"0\r\n\r\n")
        paused = False
        for step in itertools.count():
            assert step < 5000, "it is not read any more"
            if driver.ended:
                break
            event = dice.randrange(4)
            if event == 0 and not paused:
                connection.pause()
                paused = True
            elif event == 1 and paused:
                connection.resume()
                paused = False
            elif event == 2:
                await asyncio.sleep(0)
            elif transport.reading:
                assert not paused, "read although the client is slow"
                connection.data_received(reads.pop(0))
        assert driver.taken == sum(sizes)
        connection.keep(0.0)  # whether or not its client is slow, or its turn to come
        assert connection.pool.take(0.0) is connection
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert transport.reading


# --------------------------------------------------------------------------- while a body waits


def hold_turns(stack: Stack) -> list[Callable[[], None]]:
    """Let no more turns come; the steps that were asked for since."""
    held: list[Callable[[], None]] = []
    stack.relay.turns.ask = held.append  # type: ignore[assignment, method-assign]
    return held


@pytest.mark.parametrize("what", ["timers", "shutdown"])
@each_loop
def test_a_body_that_waits_for_its_turn_is_answered(loop: str, what: str) -> None:
    """Neither the limit for bodies, nor that the router ends, meets a request that came whole."""
    body = json_of(LARGE_BODY + 1)

    async def work() -> None:
        async with (
            scripted_backend(told_length) as spec,
            scripted_backend(told_length) as base,
            running_router(
                spec.url, base.url, body_timeout="200ms", header_timeout="200ms", keep_alive="200ms"
            ) as stack,
        ):
            client = await Client.open(stack.router.port)
            await client.send(post(body)[:-1])
            await until(lambda: stack.relay.buffered == len(body) - 1)
            held = hold_turns(stack)
            await client.send(b"}")
            await until(lambda: len(held) == 1)
            (connection,) = stack.relay.connections
            if what == "timers":
                for later in (1.0, 3600.0):
                    stack.relay.sweep(stack.relay.clock() + later)
            else:
                stack.relay.shared.draining = True
                connection.shutdown()
            held[0]()
            got = await client.reply()
            assert (got.status, got.json()) == (200, {"n": len(body)})
            assert got.header("connection") == (None if what == "timers" else "close")
            client.close()
            await until(lambda: quiet(stack))

    run(loop, work)


@each_loop
def test_what_comes_behind_a_large_body_that_waits(loop: str) -> None:
    """Another large one, a small one, and what is no request: answers in order, then the end."""
    body, second = json_of(LARGE_BODY + 1), json_of(LARGE_BODY + 2)

    async def work() -> None:
        async with (
            scripted_backend(told_length) as spec,
            scripted_backend(told_length) as base,
            running_router(spec.url, base.url) as stack,
        ):
            client = await Client.open(stack.router.port)
            await until(lambda: len(stack.relay.connections) == 1)
            (connection,) = stack.relay.connections
            connection.data_received(post(body) + post(second) + POST + b"\x00\r\n\r\n")
            assert await client.closed()
            assert statuses(client.raw) == [200, 200, 200, 400]
            sizes = [int(n) for n in re.findall(rb'"n":(\d+)', client.raw)]
            assert sizes == [len(body), len(second), 15]
            got = [call.body for call in (*spec.calls, *base.calls)]
            assert sorted(map(digest, got)) == sorted(
                map(digest, (body, second, b'{"messages":[]}'))
            )
            await until(lambda: quiet(stack))
            client.close()

    run(loop, work)


@pytest.mark.parametrize("kind", ["sound", "no JSON", "queue full", "answered early"])
def test_the_room_of_a_body_goes_with_its_request(
    kind: str, rooms: weakref.WeakSet[mmap.mmap]
) -> None:
    """However the request ended its mapping is gone while the client's connection stays."""
    body = json_of(5 * MB)
    if kind == "no JSON":
        body = body[:-1] + b"!"

    async def early(head: bytes, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"POST"):
            writer.write(response(b"{}", "413 Content Too Large"))
            await asyncio.sleep(LIMIT_S)  # it reads no further
        writer.write(response(b"{}"))

    wanted = {"sound": 200, "no JSON": 400, "queue full": 429, "answered early": 413}[kind]
    limits: dict[str, Any] = {"queue_size": 0} if kind == "queue full" else {}

    async def work() -> None:
        release = asyncio.Event()

        async def answer(call: Call) -> None:
            if kind == "queue full":
                await release.wait()
            await told_length(call)

        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            raw_backend(early) as raw,
        ):
            url = raw if kind == "answered early" else spec.url
            if kind == "queue full":
                limits["max_in_flight"] = 1
            async with running_router(url, base.url, policy="speculative", **limits) as stack:
                first: asyncio.Future[Any] | None = None
                if kind == "queue full":
                    first = asyncio.ensure_future(stack.chat())
                    await until(lambda: sum(stack.in_flight()) == 1)
                client = await Client.open(stack.router.port)
                await client.send(post(body))
                got = await client.reply(20)
                assert got.status == wanted
                await until(lambda: not rooms and stack.relay.buffered < MB)
                if first is not None:
                    release.set()
                    assert (await first).status_code == 200
                assert not client.ended
                client.close()

    run("uvloop", work)
