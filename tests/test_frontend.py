"""The client's side through raw sockets: framing, order, limits, timers, slow readers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import re
from collections import deque

import httpx
import pytest

from router.driver import Driver
from tests.scripted_backend import STREAM_HEAD, Call, chunk, event, response, scripted_backend
from tests.stack import Stack, run, running_router, until
from tests.wire.stage import Exploding, explode

BODY = b'{"messages":[]}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n" + BODY


async def talk(stack: Stack, *pieces: bytes, end: bool = False, port: int | None = None) -> bytes:
    """Send pieces on a new connection, to the public port, and read until the router closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port or stack.router.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01 if len(pieces) > 1 else 0)
        if end:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


def statuses(data: bytes) -> list[int]:
    """The status of each answer in a byte stream (bodies hold no status line)."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([1-5]\d\d) ", data)]


def test_pipelined_requests_are_answered_in_order() -> None:
    """Relayed and ordinary requests, and an error at the end, are answered in the order asked."""

    async def answer(call: Call) -> None:
        await asyncio.sleep(0.02)
        await call.send(response(b'{"n":%d}' % len(call.body)))

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url) as stack,
        ):
            get = b"GET /nope HTTP/1.1\r\nhost: x\r\n\r\n"
            got = await talk(stack, POST + get + POST + get + b"GET / HTTP/2.0\r\nhost: x\r\n\r\n")
            assert statuses(got) == [200, 404, 200, 404, 505]
            assert len(spec.calls) == 2

    run(work)


def test_a_pipelined_request_is_decided_when_its_turn_comes() -> None:
    """Not at the time of the read that brought it: its time does not begin with the answer ahead."""
    free = asyncio.Event()

    async def answer(call: Call) -> None:
        await free.wait()
        await call.send(response())

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url) as stack,
        ):
            last = POST.replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n")
            answers = asyncio.ensure_future(talk(stack, POST + last))
            await until(lambda: len(spec.calls) == 1)
            await asyncio.sleep(0.3)
            free.set()
            assert statuses(await answers) == [200, 200]
            await until(lambda: len(requests_in(stack)) == 2)
            one, other = requests_in(stack)
            assert one["duration_ms"] > 250
            assert other["duration_ms"] < one["duration_ms"]

    run(work)


def requests_in(stack: Stack) -> list[dict[str, float]]:
    """The access log's lines of requests so far."""
    lines = [json.loads(line) for line in b"".join(stack.lines).splitlines()]
    return [line for line in lines if line.get("event") == "request"]


def test_nothing_after_a_bad_request_is_answered() -> None:
    """What is pipelined behind a request that cannot be framed is not read as a request."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            both = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
            got = await talk(
                stack, both + b"content-length: 5\r\n\r\nabcdGET /health HTTP/1.1\r\n\r\n"
            )
            assert statuses(got) == [400]
            assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["type"]
            assert spec.calls == []

    run(work)


def test_chunked_uploads_arrive_byte_for_byte() -> None:
    """A slow chunked body with every byte value reaches the backend unchanged, with its length."""
    dice = random.Random(7)
    text = bytes(dice.randrange(256) for _ in range(60_000)).hex()
    body = json.dumps({"messages": [], "blob": text}).encode()

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):

            async def pieces() -> object:
                at = 0
                while at < len(body):
                    size = dice.randrange(1, 9000)
                    yield body[at : at + size]
                    at += size
                    await asyncio.sleep(0)

            got = await stack.client.post("/v1/chat/completions", content=pieces())  # type: ignore[arg-type]
            assert got.status_code == 200
            call = spec.calls[0]
            assert hashlib.sha256(call.body).digest() == hashlib.sha256(body).digest()
            assert b"transfer-encoding" not in call.headers
            assert call.headers[b"content-length"] == str(len(body)).encode()

    run(work)


@pytest.mark.parametrize("chunked", [False, True])
def test_the_body_limit_is_exact(chunked: bool) -> None:
    """A body of the limit passes, one byte more is a 413 that the client can read."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, max_body="2KiB", max_buffered="1MiB") as stack,
        ):

            async def send(size: int) -> httpx.Response:
                body = b'{"a":"' + b"x" * (size - 8) + b'"}'

                async def pieces() -> object:
                    yield body[:100]
                    yield body[100:]

                content = pieces() if chunked else body
                return await stack.client.post("/v1/completions", content=content)  # type: ignore[arg-type]

            assert (await send(2048)).status_code == 200
            refused = await send(2049)
            assert refused.status_code == 413
            assert refused.json()["error"]["code"] == "body_too_large"
            assert len(spec.calls) == 1
            await until(lambda: stack.relay.buffered == 0)

    run(work)


def test_headers_have_a_limit_in_number_and_size() -> None:
    """One header more than allowed, or one byte more, is a 431."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, max_headers=10, max_header_bytes="1KiB") as stack,
        ):
            line = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            tail = b"content-length: 15\r\n\r\n" + BODY
            many = b"".join(b"x-%d: 1\r\n" % i for i in range(7))
            assert statuses(await talk(stack, line + many + tail)) == [200]
            more = many + b"x-7: 1\r\n"
            assert statuses(await talk(stack, line + more + tail)) == [431]
            large = b"x-large: %b\r\n" % (b"a" * 1100)
            assert statuses(await talk(stack, line + large + tail)) == [431]
            endless = line + b"x-endless: " + b"a" * 100_000
            assert statuses(await talk(stack, endless)) == [431]
            # Unfinished, and a byte more than a head may be with its target: not waited for.
            total = 1024 + 8192 + 64
            assert statuses(await talk(stack, endless[: total + 1])) == [431]

    run(work)


def test_the_framing_of_one_request_is_not_held_against_the_next() -> None:
    """A body in tiny chunks, and in the same read the beginning of another request: both are served."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, max_header_bytes="1KiB") as stack,
        ):
            head = (
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
            )
            body = b'{"messages":[],"pad":"' + b"a" * 3000 + b'"}'
            tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
            assert len(tiny) > 1024 + 8192 + 64
            last = head + b"connection: close\r\n\r\n" + b'f\r\n{"mess'
            got = await talk(stack, head + b"\r\n" + tiny + last, b'ages":[]}\r\n0\r\n\r\n')
            assert statuses(got) == [200, 200]
            assert [call.body for call in spec.calls] == [body, BODY]
            # Framing alone, read by read, is still an attack.
            endless = [head + b"\r\n", *(b"1;%b\r\na\r\n" % (b"x" * 4000) for _ in range(8))]
            assert statuses(await talk(stack, *endless)) == [431]

    run(work)


def test_slow_heads_and_bodies_are_408() -> None:
    """A head or a body that does not arrive in time is answered and closed; silence is closed."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(
                spec.url, base.url, header_timeout="200ms", body_timeout="200ms"
            ) as stack,
        ):
            assert statuses(await talk(stack, POST[:40])) == [408]
            assert statuses(await talk(stack, POST[:-3])) == [408]
            assert await talk(stack, b"") == b""
            assert spec.calls == []

    run(work)


def test_expect_100_continue_is_answered_only_when_the_request_is_welcome() -> None:
    """A sound head gets 100 and then its answer, a refused one its final status at once."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, api_keys="sk-client") as stack,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            key = b"authorization: Bearer sk-client\r\n"
            writer.write(head + key + b"content-length: 15\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(BODY)
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()
            refused = await talk(stack, head + b"content-length: 15\r\n\r\n", end=False)
            assert statuses(refused) == [401]
            assert b"100 Continue" not in refused

    run(work)


def test_http_1_0_clients_get_an_answer_that_ends_with_the_connection() -> None:
    """A stream is de-chunked and closed for a client of HTTP/1.0, as nginx is by default."""

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url) as stack,
        ):
            got = await talk(stack, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, body = got.partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert body.startswith(b"data: {")
            assert body.endswith(b"data: [DONE]\n\n")

    run(work)


def test_upgrades_are_served_as_http_1_1_and_closed() -> None:
    """An Upgrade is ignored, never forwarded, and the connection ends after the answer."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            upgrade = b"host: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
            asked = POST.replace(b"host: x\r\n", upgrade)
            assert statuses(await talk(stack, asked + POST)) == [200]
            sized = b"content-length: 15\r\n\r\n" + BODY
            pieces = b"transfer-encoding: chunked\r\n\r\n" + chunk(BODY) + b"0\r\n\r\n"
            assert statuses(await talk(stack, asked.replace(sized, pieces))) == [200]
            lone = POST.replace(b"host: x\r\n", b"host: x\r\nupgrade: h2c\r\nconnection: close\r\n")
            assert statuses(await talk(stack, lone)) == [200]
            assert [call.body for call in spec.calls] == [BODY, BODY, BODY]
            assert all(b"upgrade" not in call.headers for call in spec.calls)

    run(work)


def test_what_waits_in_the_queue_is_bounded_in_number_and_time() -> None:
    """With 2 in flight and 2 waiting, the rest is 429 at once; waiting ends in 429 too."""

    async def answer(call: Call) -> None:
        await call.peer_closed.wait()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(
                spec.url, base.url, max_in_flight=2, queue_size=2, queue_timeout="300ms"
            ) as stack,
        ):
            sent = [asyncio.ensure_future(stack.chat()) for _ in range(10)]
            await until(lambda: sum(task.done() for task in sent) == 8)
            codes = sorted(t.result().json()["error"]["code"] for t in sent if t.done())
            assert codes == ["queue_full"] * 6 + ["queue_timeout"] * 2
            for task in sent:
                if task.done():
                    assert task.result().status_code == 429
                    assert int(task.result().headers["retry-after"]) >= 1
                else:
                    task.cancel()
            await until(lambda: stack.in_flight() == (0, 0) and stack.relay.waiting == 0)

    run(work)


class WatchedQueue(deque[Driver]):
    """A queue that counts how often somebody is looked for in it."""

    looks = 0

    def __contains__(self, driver: object) -> bool:
        self.looks += 1
        return super().__contains__(driver)


def test_who_is_turned_away_is_not_looked_for_in_the_queue() -> None:
    """Turning clients away from a full queue costs no walk through it."""

    async def answer(call: Call) -> None:
        await call.peer_closed.wait()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url, max_in_flight=1, queue_size=2) as stack,
        ):
            stack.relay._waiting = queue = WatchedQueue()
            sent = [asyncio.ensure_future(stack.chat()) for _ in range(8)]
            await until(lambda: sum(task.done() for task in sent) == 5)
            assert (len(queue), queue.looks) == (2, 0)
            for task in sent:
                task.cancel()
            await until(lambda: stack.in_flight() == (0, 0) and not queue)

    run(work)


def test_a_fault_of_ours_meets_only_the_one_who_waited(caplog: pytest.LogCaptureFixture) -> None:
    """A policy that fails for who comes out of the queue: a 500 for each, and nothing for others."""
    release = asyncio.Event()

    async def answer(call: Call) -> None:
        await release.wait()
        await call.send(response())

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url, max_in_flight=1, queue_size=2) as stack,
        ):
            sent = [asyncio.ensure_future(stack.chat()) for _ in range(3)]
            await until(lambda: stack.relay.waiting == 2)
            policy, stack.relay.policy = stack.relay.policy, Exploding()  # type: ignore[assignment]
            release.set()
            answers = await asyncio.wait_for(asyncio.gather(*sent), 5)
            assert sorted(each.status_code for each in answers) == [200, 500, 500]
            codes = [each.json()["error"]["code"] for each in answers if each.status_code == 500]
            assert codes == ["internal_error"] * 2
            assert (stack.in_flight(), stack.relay.waiting, stack.relay.buffered) == ((0, 0), 0, 0)
            stack.relay.policy = policy
            assert (await stack.chat()).status_code == 200

    with caplog.at_level(logging.ERROR):
        run(work)
    faults = [each.exc_info[0] for each in caplog.records if each.exc_info]
    assert faults == [ZeroDivisionError] * 2


def test_a_fault_in_one_connections_time_does_not_stop_that_of_others() -> None:
    """One whose limits cannot be looked at is ended, and what is looked at after it has its own."""

    async def answer(call: Call) -> None:
        await call.peer_closed.wait()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url, header_timeout="300ms") as stack,
        ):
            asked = asyncio.ensure_future(stack.chat())
            await until(lambda: sum(stack.in_flight()) == 1)
            (faulty,) = stack.relay.connections
            faulty.tick = explode  # type: ignore[assignment, method-assign]
            assert await talk(stack, b"", port=stack.router.admin_port) == b""  # closed in time
            assert (await asked).json()["error"]["code"] == "internal_error"
            await until(lambda: stack.in_flight() == (0, 0))

    run(work)


def test_browsers_of_a_configured_origin_are_let_in() -> None:
    """A preflight needs no key, answers and errors can be read; without CORS there is no header."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(
                spec.url, base.url, api_keys="sk-client", cors_origin="https://chat.example"
            ) as stack,
        ):
            origin = {"origin": "https://chat.example"}
            preflight = await stack.client.options(
                "/v1/chat/completions",
                headers={
                    **origin,
                    "access-control-request-method": "POST",
                    "access-control-request-headers": "authorization",
                },
            )
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == origin["origin"]
            refused = await stack.client.post("/v1/completions", json={}, headers=origin)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == origin["origin"]
            other = await stack.client.post(
                "/v1/completions",
                json={},
                headers={"origin": "https://evil.example", "authorization": "Bearer sk-client"},
            )
            assert "access-control-allow-origin" not in other.headers
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            plain = await stack.client.post("/v1/completions", json={}, headers=origin)
            assert not [name for name in plain.headers if name.startswith("access-control")]

    run(work)


def test_a_client_that_reads_nothing_stops_the_backend() -> None:
    """A slow reader pauses the backend instead of filling memory, and is given up in the end."""
    piece = chunk(b"data: " + b"x" * 16_000 + b"\n\n")

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD)
        for _ in range(4000):  # 64 MB
            await call.send(piece)

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url, write_timeout="700ms") as stack,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port, limit=1)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(POST)
            await until(lambda: spec.in_flight == 1)
            connection = next(iter(stack.relay.connections))
            await until(lambda: connection.transport.get_write_buffer_size() > 0)
            await until(lambda: stack.in_flight() == (0, 0))
            assert connection.driver is None
            assert stack.relay.metrics.bytes_out < 20_000_000
            await until(lambda: spec.in_flight == 0)
            writer.transport.abort()

    run(work)


def test_stateful_responses_are_refused_with_the_reason() -> None:
    """What would live in one server's memory only is a 400 that says so."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            for field, value in (("previous_response_id", "resp_1"), ("background", True)):
                got = await stack.client.post("/v1/responses", json={"input": "x", field: value})
                assert got.status_code == 400
                assert got.json()["error"]["param"] == field
                assert "one server only" in got.json()["error"]["message"]
            plain = {"input": "x", "previous_response_id": None, "background": False}
            assert (await stack.client.post("/v1/responses", json=plain)).status_code == 200
            gone = await stack.client.get("/v1/responses/resp_1")
            assert gone.status_code == 404
            assert len(spec.calls) == 1

    run(work)


def test_the_clients_key_never_reaches_a_backend() -> None:
    """The backend sees its own key or none."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(
                spec.url, base.url, api_keys="sk-client", backend_api_key="sk-backend"
            ) as stack,
        ):
            key = {"authorization": "bearer sk-client", "x-api-key": "sk-client", "cookie": "c"}
            got = await stack.client.post("/v1/completions", json={}, headers=key)
            assert got.status_code == 200
            assert spec.calls[0].headers[b"authorization"] == b"Bearer sk-backend"
            assert b"sk-client" not in spec.calls[0].head
            assert b"cookie" not in spec.calls[0].headers
            assert b"x-api-key" not in spec.calls[0].headers
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            await stack.client.post("/v1/completions", json={}, headers=key)
            assert b"authorization" not in spec.calls[0].headers

    run(work)


def test_the_sweep_passes_by_a_stream_that_flows_and_nothing_else() -> None:
    """A stream that flows is looked at again after a while; paused or over, at the next sweep."""
    hold = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a"))
        await hold.wait()
        await call.send(b"0\r\n\r\n")

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url, keep_alive="60s") as stack,
        ):
            relay = stack.relay
            async with stack.client.stream("POST", "/v1/completions", json={"stream": True}) as got:
                (connection,) = relay.connections
                assert connection.driver is not None
                flow = connection.driver.exchange.flow
                assert flow is not None
                connection.tick(flow.last_at + 0.9)
                assert connection.quiet_until == flow.last_at + 0.9 + 0.7
                connection.tick(flow.last_at + 1.0)
                assert connection.quiet_until == flow.last_at + 1.0, "it flows no more"
                connection.pause_writing()
                connection.tick(flow.last_at + 0.5)
                assert connection.quiet_until == flow.last_at + 0.5, "its client is slow"
                connection.resume_writing()
                at = connection.quiet_until
                relay.sweep(at)
                assert connection.quiet_until == at + 0.7
                hold.set()
                await got.aread()
            assert connection.quiet_until == 0.0
            relay.sweep(relay.clock() + 61.0)
            assert connection.transport.is_closing(), "its keep-alive is over"

    run(work)


def test_a_body_is_let_go_of_once_its_answer_streams() -> None:
    """While a stream runs its request's body is neither held nor counted, and it is logged whole."""
    hold = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a"))
        await call.send(event("b"))
        await hold.wait()
        await call.send(b"0\r\n\r\n")

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url) as stack,
        ):
            body = b'{"stream":true,"prompt":"%b"}' % (b"p" * 100_000)
            async with stack.client.stream("POST", "/v1/completions", content=body) as got:
                await until(lambda: stack.relay.buffered == 0)
                (connection,) = stack.relay.connections
                assert connection.driver is not None
                assert connection.driver.exchange.request.body == b""
                hold.set()
                assert len([line async for line in got.aiter_lines() if line]) == 2
            await until(lambda: stack.in_flight() == (0, 0))
            assert stack.relay.metrics.bytes_in == len(body)
            assert spec.calls[0].body == body

    run(work, limit_s=20)
