"""Cases of errors and status codes: what went wrong is said as it was, or as it is."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
from collections.abc import AsyncIterator

import pytest

from router.breaker import BreakerState
from router.load import Role
from router.metrics import Outcome, Rejection, Retry
from router.policy import FixedPolicy, LeastInFlightPolicy
from tests.cases.common import (
    DONE,
    TOKEN,
    Pair,
    body,
    every,
    fails,
    pair,
    says,
    silent,
    streams,
)
from tests.raw_client import CHAT, COMPLETIONS, Reply, ask, chunked, post
from tests.scripted_backend import (
    QUEUE_FULL_EVENT,
    Call,
    response,
)
from tests.stack import run, until

TEXT = b'{"error":{"message":"as it was","type":"t","param":null,"code":null}}'
STATUSES = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 502, 503, 504, 529)


def test_E1_error_before_the_answer_keeps_its_status() -> None:
    """A refusal, a failed connect and silence are an error of that kind, never a 200 that streams."""

    async def work() -> None:
        async with pair(first_byte_timeout="400ms", retry_budget=1) as both:
            for role, path, stream in every():
                for status, extra in (
                    ("400 Bad Request", b""),
                    ("429 Too Many Requests", b"retry-after: 7\r\n"),
                    ("503 Service Unavailable", b"retry-after: 9\r\n"),
                ):
                    refuse = fails(status, extra, TEXT)
                    both.on(role, refuse, refuse)  # both, else the other one may answer
                    reply = await both.ask(body(stream=stream), path)
                    assert (reply.status, reply.whole) == (int(status[:3]), True)
                    assert (reply.body, reply.header("content-type")) == (TEXT, "application/json")
                    after = extra.decode().strip().partition(": ")[2] or None
                    assert reply.header("retry-after") == after

            async def times_out(role: Role, path: str, *, stream: bool) -> Reply:
                return await both.ask(body(stream=stream), path)

            for role in Role:
                both.on(role, silent, silent)
                variants = [(p, s) for r, p, s in every() if r is role]
                for reply in await asyncio.gather(
                    *(times_out(role, path, stream=stream) for path, stream in variants)
                ):
                    assert (reply.status, reply.error["code"]) == (504, "first_byte_timeout")
                    assert reply.header("content-type") == "application/json"
            await both.spec.leave()
            await both.base.leave()
            for role, path, stream in every():
                both.relay.policy = FixedPolicy(role)
                reply = await both.ask(body(stream=stream), path)
                assert (reply.status, reply.error["code"]) == (502, "backend_connect_failed")
                assert reply.header("content-type") == "application/json"

    run(work, 30)


def test_E6_refusals_within_a_200_are_no_answers() -> None:
    """20 streams that begin with an error: back-pressure that is seen, failed over within budget."""
    good = streams(TOKEN % b"a", DONE)

    async def work() -> None:
        for role in Role:
            async with pair(breaker_failures=5) as both:
                chosen, spare = both.on(role, streams(QUEUE_FULL_EVENT, DONE), good)
                for _ in range(20):
                    reply = await both.ask(body(stream=True))
                    assert (reply.status, reply.whole) == (200, True)
                # The budget (10, and a fifth of each request) bounds how often it is tried again.
                moved = both.retries(Retry.REFUSED)
                assert 10 <= moved == len(spare.calls) == both.count(Outcome.OK) <= 14
                assert both.retries(Retry.BUDGET_EXHAUSTED) == 20 - moved
                assert both.count(Outcome.REFUSED) == 20 - moved
                assert len(chosen.calls) == 20
                assert both.relay.health.status(role).breaker is BreakerState.CLOSED

                # A policy that may choose avoids the backend for the cool-down instead.
                both.on(role, streams(QUEUE_FULL_EVENT, DONE), good)
                assert both.relay.tracker.of(role).contended_until > both.relay.clock()
                both.relay.policy = LeastInFlightPolicy()
                for _ in range(20):
                    assert (await both.ask(body(stream=True))).body == TOKEN % b"a" + DONE
                assert len(chosen.calls) <= 1

                _, spare = both.on(role, streams(TOKEN % b"a", QUEUE_FULL_EVENT, DONE), good)
                for _ in range(20):
                    await both.ask(body(stream=True))
                assert spare.calls == []  # bytes had been relayed

    run(work, 20)


def test_E2_every_status_passes_as_it_came() -> None:
    """Fifteen statuses with their JSON bodies pass unchanged, from both backends and both ways."""

    async def work() -> None:
        async with pair(retry_budget=1) as both:
            for role, path, stream in every():
                for status in STATUSES:
                    text = b'{"error":{"code":%d}}' % status
                    answer = says(response(text, f"{status} Reason", b"x-odd: 1\r\n"))
                    both.on(role, answer, answer)
                    reply = await both.ask(body(stream=stream), path)
                    assert (reply.status, reply.whole, reply.body) == (status, True, text)
                    assert reply.header("content-type") == "application/json"
                    assert reply.header("x-odd") == "1"

    run(work, 30)


UNPARSABLE = (b"", b"{", b"[]", b"null", b'"x"', b"1", b"\xff\xfe", b"[" * 100_000)


def test_E4_bodies_that_are_no_object_are_400() -> None:
    """Empty, cut, scalar, binary and deep bodies are 400 in OpenAI's shape and reach no backend."""
    deep = b'{"model":' + b"[" * 100_000

    async def work() -> None:
        async with pair() as both:
            for role, path in itertools.product(Role, (CHAT, COMPLETIONS)):
                chosen, spare = both.on(role, fails("400 Bad Request", b"", TEXT))
                for bad in (*UNPARSABLE, deep):
                    reply = await both.ask(bad, path)
                    assert reply.status == 400, bad[:20]
                    assert reply.error["type"] == "invalid_request_error"
                assert chosen.calls + spare.calls == []
                # What is an object is for the engine to judge.
                reply = await both.ask(b'{"model":5}', path)
                assert (reply.status, reply.body) == (400, TEXT)
                reply = await both.ask(b'{"model":5}', path, "content-type: text/plain")
                assert (reply.status, reply.body) == (400, TEXT)
                assert [call.body for call in chosen.calls] == [b'{"model":5}'] * 2
                assert chosen.calls[1].headers[b"content-type"] == b"text/plain"
            assert both.relay.metrics.rejections[Rejection("invalid_body")] == 4 * 9

    run(work, 20)


def test_E7_own_overflow_is_said_quickly() -> None:
    """Of ten requests at two places and two waiting ones, four are served and six told why at once."""

    async def work() -> None:
        for stream in (True, False):
            release = asyncio.Event()

            async def answer(call: Call, free: asyncio.Event = release) -> None:
                await free.wait()
                await call.send(response())

            async with pair(answer, max_in_flight=2, queue_size=2, policy="round-robin") as both:
                asked = [asyncio.ensure_future(both.ask(body(stream=stream))) for _ in range(10)]
                await until(lambda: both.stack.in_flight() == (1, 1) and both.relay.waiting == 2)
                await until(lambda: sum(task.done() for task in asked) == 6)  # noqa: B023
                for reply in (task.result() for task in asked if task.done()):
                    assert (reply.status, reply.error["code"]) == (429, "queue_full")
                    assert int(reply.header("retry-after") or 0) >= 1
                release.set()
                found = await asyncio.gather(*asked)
                assert [reply.status for reply in found].count(200) == 4

        # One that waits longer than it may is told so, too.
        async with pair(silent, max_in_flight=1, queue_timeout="300ms") as both:
            first = asyncio.ensure_future(both.ask(body()))
            await until(lambda: both.relay.tracker.in_flight == 1)
            reply = await both.ask(body())
            assert (reply.status, reply.error["code"]) == (429, "queue_timeout")
            assert int(reply.header("retry-after") or 0) >= 1
            first.cancel()

    run(work, 20)


def test_E3_error_bodies_of_any_kind_pass_byte_for_byte() -> None:
    """HTML, nothing, plain text, gzip, HTML behind a 200 and half a JSON: the same bytes and status."""
    packed = gzip.compress(TEXT)
    page = b"<html>nginx</html>"
    kinds = [
        (502, "text/html", b"", page),
        (500, "application/json", b"", b""),
        (503, "text/plain", b"", b"busy"),
        (400, "application/json", b"content-encoding: gzip\r\n", packed),
        (200, "text/html", b"", page),
        (200, "application/json", b"", b'{"choices":[{"text":"ha'),
    ]

    async def work() -> None:
        async with pair(retry_budget=1) as both:
            for role, path, stream in every():
                for status, kind, extra, sent in kinds:
                    head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\n" % (status, kind.encode())
                    for framed in (
                        head + extra + b"content-length: %d\r\n\r\n" % len(sent) + sent,
                        head + extra + b"transfer-encoding: chunked\r\n\r\n"
                        + chunked(*[sent] * bool(sent)),
                    ):  # fmt: skip
                        both.on(role, says(framed), says(framed))
                        reply = await both.ask(body(stream=stream), path)
                        assert (reply.status, reply.whole, reply.body) == (status, True, sent)
                        assert reply.header("content-type") == kind
                        coding = "gzip" if extra else None
                        assert reply.header("content-encoding") == coding

    run(work, 30)


def test_E5_retry_after_and_rate_limit_headers_pass() -> None:
    """The backend's headers of a 429 pass unchanged, and our own refusals say when to come again."""
    extra = (
        b"retry-after: 30\r\nretry-after-ms: 29500\r\nx-ratelimit-limit-requests: 60\r\n"
        b"X-RateLimit-Remaining-Tokens: 0\r\n"
    )

    async def work() -> None:
        async with pair(retry_budget=1) as both:
            for role, path, stream in every():
                refuse = fails("429 Too Many Requests", extra)
                both.on(role, refuse, refuse)
                reply = await both.ask(body(stream=stream), path)
                assert reply.status == 429
                assert reply.header("retry-after") == "30"
                assert reply.header("retry-after-ms") == "29500"
                assert reply.header("x-ratelimit-limit-requests") == "60"
                assert reply.header("x-ratelimit-remaining-tokens") == "0"
        async with pair(silent, max_in_flight=1, queue_size=0) as both:
            first = asyncio.ensure_future(both.ask(body()))
            await until(lambda: both.relay.tracker.in_flight == 1)
            for stream in (True, False):
                reply = await both.ask(body(stream=stream))
                assert (reply.status, reply.error["code"]) == (429, "queue_full")
                assert int(reply.header("retry-after") or 0) >= 1
            first.cancel()

    run(work, 20)


@contextlib.asynccontextmanager
async def plain_speaker() -> AsyncIterator[int]:
    """The port of a server without TLS, that says what it thinks of a handshake and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(response(b"plain HTTP only", "400 Bad Request"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def test_E8_transport_failures_are_told_and_logged() -> None:
    """Nobody there, TLS towards a plain port and RST before the head: 502 in JSON and one log line."""

    async def resets(call: Call) -> None:
        call.reset()

    async def check(both: Pair, code: str, *, stream: bool) -> None:
        both.stack.lines.clear()
        reply = await both.ask(body(stream=stream), CHAT, "x-request-id: it-is-me")
        assert (reply.status, reply.error["code"]) == (502, code)
        assert b"127.0.0.1" not in reply.body
        assert str(both.spec.port).encode() not in reply.body
        both.relay.access_log.flush()
        await until(lambda: bool(both.stack.lines))
        (line,) = [text for text in b"".join(both.stack.lines).splitlines() if text]
        logged = json.loads(line)
        assert (logged["request_id"], logged["status"], logged["error"]) == ("it-is-me", 502, code)
        assert logged["outcome"] == "backend_lost"

    async def work() -> None:
        async with pair(resets) as both:
            for role, stream in itertools.product(Role, (True, False)):
                both.on(role, resets)
                await check(both, "backend_lost", stream=stream)
            await both.spec.leave()
            await both.base.leave()
            for role, stream in itertools.product(Role, (True, False)):
                both.relay.policy = FixedPolicy(role)
                await check(both, "backend_connect_failed", stream=stream)
        async with (
            plain_speaker() as one,
            plain_speaker() as two,
            pair(
                speculative=f"https://127.0.0.1:{one}", baseline=f"https://127.0.0.1:{two}"
            ) as tls,
        ):
            for stream in (True, False):
                await check(tls, "backend_connect_failed", stream=stream)

    run(work, 20)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings", "/generate"])
def test_E9_malformed_multipart_is_400(path: str) -> None:
    """Multipart that is none is a 400 on every route, and not a 500."""

    async def work() -> None:
        async with pair() as both:
            reply = await both.ask(
                b"not-multipart", path, "content-type: multipart/form-data; boundary=nope"
            )
            assert (reply.status, reply.error["code"]) == (400, "invalid_body")
            assert both.spec.calls + both.base.calls == []
            assert (await ask(both.port, post(b"{}", path))).status == 200

    run(work, 10)
