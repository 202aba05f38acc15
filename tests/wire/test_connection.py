"""What `RelayProtocol` takes over from uvicorn, which knows nothing of a relayed request.

Each on a real socket: order, 100-continue, HTTP/1.0, trailers, framing both ways, date and server,
limits in number and time, faults of our own. Shutdown is in `tests/test_drain.py`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from router import frontend
from router.config import load_settings
from router.frontend import RelayProtocol
from router.receiving import MAX_AHEAD
from tests.scripted_backend import STREAM_HEAD, Call, chunk, event, response
from tests.stack import Stack, until
from tests.wire.stage import Client, Exploding, Stage, explode, staged, statuses, talk

BODY = b'{"messages":[]}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n" + BODY
GET = b"GET /v1/nothing HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /v1/nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def plain() -> Iterator[Stage]:
    """A router as it comes."""
    with staged() as stage:
        yield stage


@pytest.fixture(scope="module")
def keyed() -> Iterator[Stage]:
    """A router that wants a key and takes bodies of 1 KiB."""
    with staged(api_keys="k", max_body="1KiB") as stage:
        yield stage


@pytest.fixture(scope="module")
def hasty() -> Iterator[Stage]:
    """A router that waits 0.3 s for a head or a next request and 0.8 s within a body."""
    limits: dict[str, Any] = {
        "header_timeout": "300ms",
        "keep_alive": "300ms",
        "body_timeout": "800ms",
    }
    with staged(**limits, max_body=4096) as stage:
        yield stage


# ---------------------------------------------------------------------- one after another


def test_nothing_overtakes_the_answer_under_way(plain: Stage) -> None:
    """An ordinary answer, a refusal and bytes that are no request wait for the relayed one."""
    release = asyncio.Event()

    async def answer(call: Call) -> None:
        await release.wait()
        await call.send(response())

    async def work() -> None:
        for behind, wanted in (
            (LAST, [200, 404]),
            (POST.replace(b"HTTP/1.1", b"HTTP/2.0"), [200, 505]),
            (b"\x00garbage\r\n\r\n", [200, 400]),
            (GET + b"\x00garbage\r\n\r\n", [200, 404, 400]),
        ):
            release.clear()
            client = await Client.of(plain)
            client.writer.write(POST + behind)
            await until(lambda: plain.spec.in_flight == 1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.reader.read(1), 0.02)
            release.set()
            got = await client.rest()
            assert statuses(got) == wanted
            last = json.loads(got.rpartition(b"\r\n\r\n")[2])
            assert last["error"]["type"] == "invalid_request_error"

    plain.run(work, answer)


def test_a_100_waits_for_its_turn_too(plain: Stage) -> None:
    """A request that expects a 100 behind a running one gets it after the first answer's end."""
    release = asyncio.Event()

    async def answer(call: Call) -> None:
        if len(plain.spec.calls) == 1:
            await release.wait()
        await call.send(response(b'{"n":%d}' % len(call.body)))

    async def work() -> None:
        client = await Client.of(plain)
        client.writer.write(POST + POST.replace(b"host", b"expect: 100-continue\r\nhost")[:-15])
        await until(lambda: plain.spec.in_flight == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.02)
        release.set()
        assert await client.answer() == b'{"n":15}'
        assert await client.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(BODY)
        assert await client.answer() == b'{"n":15}'
        client.writer.close()

    plain.run(work, answer)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"content-length: 99999\r\nauthorization: Bearer k\r\n", 413),
        (b"content-length: 15\r\n", 401),
        (b"content-length: 15\r\nhost: y\r\nauthorization: Bearer k\r\n", 400),
    ],
)
def test_no_100_for_a_body_that_is_not_wanted(keyed: Stage, lines: bytes, status: int) -> None:
    """Guard, limits and keys come first: the refusal is sent instead, the body never asked for."""

    async def work() -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        assert statuses(await talk(keyed, head + lines + b"\r\n")) == [status]
        assert keyed.spec.calls == []

    keyed.run(work)


def test_what_is_sent_ahead_is_bounded(plain: Stage) -> None:
    """A client that pipelines more than 64 KiB during an answer is cut off, and its count given back."""

    async def answer(call: Call) -> None:
        await call.peer_closed.wait()

    async def work() -> None:
        client = await Client.of(plain)
        client.writer.write(POST)
        await until(lambda: plain.spec.in_flight == 1)
        client.writer.write(GET * (MAX_AHEAD // len(GET)))
        await asyncio.sleep(0.02)
        assert plain.stack.in_flight() == (1, 0)
        client.writer.write(GET * 2)
        assert await client.rest() == b""
        await until(lambda: plain.stack.in_flight() == (0, 0) and plain.spec.in_flight == 0)
        assert plain.stack.relay.buffered == 0

    plain.run(work, answer)


# ---------------------------------------------------------------------- versions and framing


@pytest.mark.parametrize("extra", [b"", b"connection: keep-alive\r\n"])
@pytest.mark.parametrize(("raw", "status"), [(POST, 200), (GET, 404)])
def test_http_1_0_is_one_request_a_connection(
    plain: Stage, raw: bytes, status: int, extra: bytes
) -> None:
    """Relayed or ordinary, keep-alive or not: answered, then closed, what is behind is not read."""

    async def work() -> None:
        old = raw.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n" + extra)
        got = await talk(plain, old + old)
        assert statuses(got) == [status]
        assert b"connection: close\r\n" in got
        assert b"transfer-encoding" not in got
        assert len(plain.spec.calls) == (status == 200)
        no_host = await talk(plain, old.replace(b"host: x\r\n", b""))
        assert statuses(no_host) == [status]

    plain.run(work)


CLOSED = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"
PIECES = [b"one ", b"two ", b"three"]


@pytest.mark.parametrize("head", [CLOSED, CLOSED.replace(b"1.1", b"1.0")])
def test_an_answer_that_ends_with_its_connection_is_chunked_again(
    plain: Stage, head: bytes
) -> None:
    """To HTTP/1.1 in chunks and the connection goes on, to HTTP/1.0 as it is and closed."""

    async def answer(call: Call) -> None:
        await call.send(head)
        for piece in PIECES:
            await call.send(piece)
            await asyncio.sleep(0.005)
        call.close()

    async def work() -> None:
        got = await talk(plain, POST + LAST)
        first, _, rest = got.partition(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in first
        assert b"connection: close" not in first
        assert rest.startswith(b"".join(chunk(piece) for piece in PIECES) + b"0\r\n\r\nHTTP")
        assert statuses(got) == [200, 404]
        old = await talk(plain, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        first, _, rest = old.partition(b"\r\n\r\n")
        assert rest == b"one two three"
        assert b"transfer-encoding" not in first
        assert b"connection: close" in first

    plain.run(work, answer)


def test_trailers_go_neither_way(keyed: Stage) -> None:
    """What follows the last chunk is dropped, of a request and of an answer, and says nothing."""

    async def answer(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\ntrailer: x-sum\r\ntransfer-encoding: chunked\r\n\r\n"
        await call.send(head + chunk(b"body") + b"0\r\nx-sum: canary\r\nset-cookie: canary\r\n\r\n")

    async def work() -> None:
        head = POST.replace(b"content-length: 15", b"transfer-encoding: chunked")[:-15]
        key = b"authorization: Bearer k\r\n"
        trailer = b"0\r\nx-role: admin\r\nx-crossover-backend: baseline\r\n\r\n"
        body = chunk(BODY) + trailer
        got = await talk(keyed, head.replace(b"host", key + b"host") + body + LAST)
        assert statuses(got) == [200, 401]
        assert b"canary" not in got
        assert b"x-sum" not in got
        assert keyed.spec.calls[0].body == BODY
        assert b"admin" not in keyed.spec.calls[0].head
        # A key in a trailer comes too late to be one.
        late = await talk(keyed, head + body.replace(b"x-role: admin\r\n", key))
        assert statuses(late) == [401]
        assert len(keyed.spec.calls) == 1

    keyed.run(work, answer)


def test_interim_answers_are_swallowed(plain: Stage) -> None:
    """100, 102 and 103 of a backend are not the answer, and the client sees none of them."""

    async def answer(call: Call) -> None:
        for line in (b"100 Continue", b"102 Processing", b"103 Early Hints\r\nlink: </x>"):
            await call.send(b"HTTP/1.1 " + line + b"\r\n\r\n")
            await asyncio.sleep(0.002)
        await call.send(response())

    async def work() -> None:
        got = await talk(plain, POST + POST + LAST)
        assert statuses(got) == [200, 200, 404]
        assert b"link" not in got
        assert len(plain.spec.calls) == 2

    plain.run(work, answer)


def test_every_answer_has_one_date_and_one_server(plain: Stage) -> None:
    """Relayed, streamed, ordinary, refused, unreadable: once each, and the router's own."""

    async def answer(call: Call) -> None:
        theirs = b"date: yesterday\r\ndate: today\r\nserver: uvicorn\r\nserver: x\r\n"
        if b"stream" in call.body:
            head = STREAM_HEAD.replace(b"\r\n", b"\r\n" + theirs, 1)
            await call.send(head + event("a") + b"0\r\n\r\n")
        else:
            await call.send(response(extra=theirs))

    async def work() -> None:
        asked = [
            POST.replace(b"messages", b"streamed"),
            POST,
            GET,
            GET.replace(b"/v1/nothing", b"/health"),
            GET.replace(b"/v1/nothing", b"/v1/completions"),
            POST.replace(BODY, b"no JSON at all,"),
            b"garbage\r\n\r\n",
        ]
        for raw in asked:
            client = await Client.of(plain)
            client.writer.write(raw)
            head = (await client.head()).lower()
            client.writer.close()
            assert len(re.findall(rb"\r\ndate: \w{3}, \d\d \w{3} \d{4} ", head)) == 1
            assert head.count(b"\r\ndate:") == 1
            assert re.findall(rb"\r\nserver: (.*)\r\n", head) == [b"crossover"]

    plain.run(work, answer)


# ---------------------------------------------------------------------- clients that leave


def test_nothing_is_written_to_a_client_that_is_gone(
    plain: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A reset in the middle of a stream ends it: no write after it, no warning, no count."""

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD)
        while not call.peer_closed.is_set():
            try:
                await call.send(event("x") * 50)
            except RuntimeError:  # uvloop's, when the router was first to close
                return
            await asyncio.sleep(0.001)

    async def work() -> None:
        for _ in range(20):
            client = await Client.of(plain)
            client.writer.write(POST)
            await client.reader.readuntil(b"x")
            sock = client.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.writer.transport.abort()
        await until(lambda: plain.stack.in_flight() == (0, 0))
        await until(lambda: plain.spec.in_flight == plain.base.in_flight == 0)
        await until(lambda: not plain.stack.relay.connections)

    with caplog.at_level(logging.WARNING):
        plain.run(work, answer)
    assert [record.getMessage() for record in caplog.records] == []


def test_an_upload_after_its_refusal_is_read_for_a_bounded_time(
    keyed: Stage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that goes on sending after a 413 can read it, and is cut when the time is over."""
    monkeypatch.setattr(frontend, "LINGER", 0.3)

    async def work() -> None:
        client = await Client.of(keyed)
        client.writer.write(POST.replace(b"15", b"1000000000"))
        assert statuses(await client.head()) == [413]
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(5):
                while True:
                    client.writer.write(b"x" * 10_000)
                    await client.writer.drain()
                    await asyncio.sleep(0.005)
        assert not keyed.stack.relay.connections
        assert (keyed.stack.relay.buffered, keyed.spec.calls) == (0, [])

    keyed.run(work)


# ---------------------------------------------------------------------- limits


def test_connections_are_counted_and_the_next_one_is_told() -> None:
    """Beyond the limit a client gets a 503 in JSON with Retry-After; a place that is free is used."""
    with staged(max_connections=3) as stage:

        async def work() -> None:
            open_ones = stage.stack.relay.connections
            held = [await Client.of(stage) for _ in range(3)]
            await until(lambda: len(open_ones) == 3)
            got = await talk(stage, POST)
            assert statuses(got) == [503]
            error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "too_many_connections"
            assert b"\r\nretry-after: 1\r\n" in got
            held.pop().writer.close()
            await until(lambda: len(open_ones) == 2)
            assert statuses(await talk(stage, POST + LAST)) == [200, 404]
            for client in held:
                client.writer.close()
            assert len(stage.spec.calls) == 1

        stage.run(work)


def test_a_refused_body_is_given_back_at_once(keyed: Stage) -> None:
    """What came of a body that is refused is not counted while its client lingers."""

    async def work() -> None:
        client = await Client.of(keyed)
        head = POST.replace(b"host", b"authorization: Bearer k\r\nhost")
        chunks = head.replace(b"content-length: 15", b"transfer-encoding: chunked")[:-15]
        client.writer.write(chunks + chunk(b"x" * 1000))
        await until(lambda: keyed.stack.relay.buffered == 1000)
        client.writer.write(chunk(b"x" * 1000))
        assert statuses(await client.head()) == [413]
        assert len(keyed.stack.relay.connections) == 1  # it may still read its answer
        assert keyed.stack.relay.buffered == 0
        client.writer.close()

    keyed.run(work)


def test_an_idle_connection_is_closed_after_its_time(hasty: Stage) -> None:
    """Keep-alive is armed by every answer, relayed or ordinary, and ends without a word."""

    async def work() -> None:
        for raw, status in ((POST, 200), (GET, 404)):
            assert statuses(await talk(hasty, raw)) == [status]
        assert len(hasty.spec.calls) == 1

    hasty.run(work)


@pytest.mark.parametrize(
    ("before", "slow"),
    [
        (b"", POST[:60]),  # the first head
        (GET, POST[:60]),  # the next one
        (b"", b"\r\n" * 30),  # empty lines are no head
    ],
)
def test_a_head_that_trickles_in_is_given_up(hasty: Stage, before: bytes, slow: bytes) -> None:
    """The time for a head is for all of it: a byte now and then does not lengthen it."""

    async def work() -> None:
        client = await Client.of(hasty)
        client.writer.write(before)
        got = asyncio.ensure_future(client.rest())
        for byte in slow:
            if got.done():
                break
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0.03)
        assert got.done()
        found = statuses(got.result())
        assert found[bool(before) :] == ([408] if slow[:1] == b"P" else [])
        assert hasty.spec.calls == []

    hasty.run(work)


def test_a_body_may_be_slow_but_not_silent(hasty: Stage) -> None:
    """A byte within the time keeps an upload alive, a pause beyond it is a 408, chunked too."""

    async def work() -> None:
        chunks = POST.replace(b"content-length: 15", b"transfer-encoding: chunked")[:-15]

        async def trickle(head: bytes, body: bytes) -> bytes:
            client = await Client.of(hasty)
            client.writer.write(head)
            for at in range(0, len(body), 3):
                client.writer.write(body[at : at + 3])
                await asyncio.sleep(0.2)
            return await client.rest()

        got = await asyncio.gather(
            trickle(POST[:-15].replace(b"host", b"connection: close\r\nhost"), BODY),
            trickle(chunks.replace(b"host", b"connection: close\r\nhost"),
                    chunk(BODY) + b"0\r\n\r\n"),
            trickle(POST[:-15], BODY[:9]),
            trickle(chunks, chunk(BODY)[:9]),
            trickle(chunks, chunk(BODY)),
        )  # fmt: skip
        assert [statuses(answer) for answer in got] == [[200], [200], [408], [408], [408]]
        assert [call.body for call in hasty.spec.calls] == [BODY, BODY]
        assert hasty.stack.relay.buffered == 0

    hasty.run(work)


def test_the_body_limit_counts_bodies_not_framing(hasty: Stage) -> None:
    """N bytes pass in one piece, in one chunk and in chunks of one byte; N + 1 do not."""
    limit = 4096

    async def work() -> None:
        line = POST[:-15].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        for size, wanted in ((limit, 200), (limit + 1, 413)):
            body = BODY[:-1] + b" " * (size - len(BODY)) + b"}"
            whole = line.replace(b"length: 15", b"length: %d" % size) + body
            head = line.replace(b"content-length: 15", b"transfer-encoding: chunked")
            small = head + b"".join(chunk(body[i : i + 1]) for i in range(size)) + b"0\r\n\r\n"
            for raw in (whole, head + chunk(body) + b"0\r\n\r\n", small):
                assert (size, statuses(await talk(hasty, raw))) == (size, [wanted])
        assert {len(call.body) for call in hasty.spec.calls} == {limit}
        await until(lambda: hasty.stack.relay.buffered == 0)

    hasty.run(work)


def test_the_limits_that_hold_unless_others_are_set() -> None:
    """A body of 64 MiB, a head of 32 KiB and 100 lines, a target of 8 KiB, 10 s for the head."""
    pair = {"speculative": "http://127.0.0.1:1", "baseline": "http://127.0.0.1:2", "threshold": 1}
    settings = load_settings(pair, environ={})
    assert settings.max_body == 64 * 1024 * 1024
    assert (settings.max_header_bytes, settings.max_headers) == (32_768, 100)
    assert settings.max_url_bytes == 8192
    assert (settings.header_timeout, settings.body_timeout, settings.write_timeout) == (10, 30, 60)


# ---------------------------------------------------------------------- faults of our own


def break_the_keys(stack: Stack) -> None:
    stack.relay.keys = Exploding()  # type: ignore[assignment]


def break_the_policy(stack: Stack) -> None:
    stack.relay.policy = Exploding()  # type: ignore[assignment]


def break_the_pools(stack: Stack) -> None:
    broken = {role: copy.copy(pool) for role, pool in stack.relay.pools.items()}
    for pool in broken.values():
        pool.take = explode  # type: ignore[assignment, method-assign]
    stack.relay.pools = broken


@pytest.mark.parametrize("harm", [break_the_keys, break_the_policy, break_the_pools])
def test_a_fault_of_our_own_is_a_500_and_leaves_nothing(
    keyed: Stage, harm: Callable[[Stack], None], caplog: pytest.LogCaptureFixture
) -> None:
    """In a callback of the parser or behind it: 500 in JSON, logged, closed, and every count back."""

    async def work() -> None:
        relay = keyed.stack.relay
        keys, policy, pools = relay.keys, relay.policy, relay.pools
        raw = POST.replace(b"host", b"authorization: Bearer k\r\nhost")
        harm(keyed.stack)
        got = await talk(keyed, raw + raw)
        assert statuses(got) == [500]
        assert relay.buffered == 0
        error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
        assert (error["code"], "planted" in error["message"]) == ("internal_error", False)
        relay.keys, relay.policy, relay.pools = keys, policy, pools
        await until(lambda: not relay.connections)
        assert (keyed.stack.in_flight(), relay.buffered, relay.waiting) == ((0, 0), 0, 0)
        assert statuses(await talk(keyed, raw + LAST)) == [200, 401]
        assert len(keyed.spec.calls) == 1

    with caplog.at_level(logging.ERROR):
        keyed.run(work)
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].exc_info[0] is ZeroDivisionError


def test_the_protocol_is_what_listens(plain: Stage) -> None:
    """The tests above meet the class that they are about."""

    async def work() -> None:
        client = await Client.of(plain)
        await until(lambda: bool(plain.stack.relay.connections))
        assert type(next(iter(plain.stack.relay.connections))) is RelayProtocol
        client.writer.close()

    plain.run(work)
