"""The rules of replay through real sockets, and what a client sees when a backend fails."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from router.load import Role
from router.metrics import Outcome, Retry
from tests.ports import free_port
from tests.scripted_backend import (
    QUEUE_FULL_EVENT,
    STREAM_HEAD,
    Call,
    answer_ok,
    chunk,
    event,
    response,
    scripted_backend,
)
from tests.stack import run, running_router, until

REFUSAL = b'{"object":"error","message":"The request queue is full.","type":"503","param":null,"code":503}'


async def refuse(call: Call) -> None:
    await call.send(response(REFUSAL, "503 Service Unavailable", b"x-from: first\r\n"))


async def refuse_stream(call: Call) -> None:
    await call.send(
        STREAM_HEAD + chunk(QUEUE_FULL_EVENT) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    )


def test_an_unreachable_backend_is_replaced_by_the_other() -> None:
    """Nothing was sent to a backend that cannot be connected to, so the other one answers."""

    async def work() -> None:
        dead = f"http://127.0.0.1:{free_port()}"
        async with scripted_backend() as base, running_router(dead, base.url) as stack:
            answer = await stack.chat()
            assert answer.status_code == 200
            assert answer.headers["x-crossover-backend"] == "baseline"
            assert answer.headers["x-crossover-reason"] == "replay_connect"
            assert len(base.calls) == 1
            assert stack.in_flight() == (0, 0)

    run(work)


def test_two_unreachable_backends_give_502() -> None:
    """When no backend can be connected to, the client gets a 502 that names the class of failure."""

    async def work() -> None:
        dead = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        async with running_router(*dead) as stack:
            answer = await stack.chat()
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "backend_connect_failed"
            assert "127.0.0.1" not in answer.text
            assert stack.in_flight() == (0, 0)

    run(work)


def test_a_dead_reused_connection_is_replayed_on_a_fresh_one() -> None:
    """A reused connection that breaks at once without an answer costs the client nothing."""

    async def answer(call: Call) -> None:
        if call.reused:
            call.close()
        else:
            await call.send(response())

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            assert [(await stack.chat()).status_code for _ in range(3)] == [200, 200, 200]
            # Each later request was read twice: once on the dying connection, once on a fresh one.
            assert [call.reused for call in spec.calls] == [0, 1, 0, 1, 0]
            assert base.calls == []
            assert stack.relay.metrics.retries[Retry.STALE] == 2

    run(work)


def test_an_unanswered_request_is_never_sent_to_the_other_backend() -> None:
    """A fresh connection that breaks without an answer is a 502: the request may be what broke it."""

    async def answer(call: Call) -> None:
        call.reset()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            answer_ = await stack.chat()
            assert answer_.status_code == 502
            assert answer_.json()["error"]["code"] == "backend_lost"
            assert len(spec.calls) == 1
            assert base.calls == []

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_tried_once_on_the_other_backend(stream: bool) -> None:
    """A backend that refuses before working is replaced by the other, streaming or not."""

    async def work() -> None:
        async with (
            scripted_backend(refuse_stream if stream else refuse) as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            answer = await stack.chat(stream=stream)
            assert answer.status_code == 200
            assert answer.headers["x-crossover-reason"] == "replay_refused"
            assert (len(spec.calls), len(base.calls)) == (1, 1)
            assert spec.calls[0].body == base.calls[0].body
            assert stack.in_flight() == (0, 0)

    run(work)


@pytest.mark.parametrize("second", [refuse, refuse_stream])
def test_when_both_refuse_the_first_refusal_is_given_unchanged(second: object) -> None:
    """The client gets the status, headers and bytes of the first refusal."""

    async def answer(call: Call) -> None:
        await (refuse if second is refuse else refuse_stream)(call)

    async def work() -> None:
        async with (
            scripted_backend(refuse) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url) as stack,
        ):
            got = await stack.chat(stream=True)
            assert got.status_code == 503
            assert got.content == REFUSAL
            assert got.headers["x-from"] == "first"
            assert got.headers["x-crossover-backend"] == "speculative"
            assert (len(spec.calls), len(base.calls)) == (1, 1)

    run(work)


def test_a_refused_stream_without_another_backend_is_passed_on_as_it_came() -> None:
    """The 200 and the error event reach the client byte for byte when nothing better is to be had."""

    async def work() -> None:
        async with (
            scripted_backend(refuse_stream) as spec,
            scripted_backend(refuse_stream) as base,
            running_router(spec.url, base.url, retry_budget=0) as stack,
        ):
            got = await stack.chat(stream=True)
            assert got.status_code == 200
            assert got.content == QUEUE_FULL_EVENT + b"data: [DONE]\n\n"
            assert base.calls == []
            assert stack.relay.metrics.retries[Retry.BUDGET_EXHAUSTED] == 1

    run(work)


def test_a_stream_cut_in_the_middle_is_not_a_clean_end() -> None:
    """The client sees an error event and a transfer without its end, never a made-up [DONE]."""

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a") + event("b"))
        call.close()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            got = bytearray()
            with pytest.raises(httpx.RemoteProtocolError):
                async with stack.client.stream(
                    "POST", "/v1/completions", json={"prompt": "x", "stream": True}
                ) as answer_:
                    async for piece in answer_.aiter_raw():
                        got += piece
            assert b'"code":"backend_lost"' in got
            assert b"[DONE]" not in got
            assert base.calls == []

    run(work)


def test_a_short_answer_that_is_cut_becomes_502() -> None:
    """An answer of known length is sent when it is whole, so a cut one is an error, not half a body."""

    async def answer(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + b"x" * 40)
        call.close()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url) as stack,
        ):
            got = await stack.chat()
            assert got.status_code == 502
            assert got.json()["error"]["code"] == "backend_lost"

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_work_at_once(stream: bool) -> None:
    """The backend's connection is closed while it has not answered and while it streams."""

    async def answer(call: Call) -> None:
        if stream:
            await call.send(STREAM_HEAD + event("a"))
        await call.peer_closed.wait()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer_ok) as base,
            running_router(spec.url, base.url) as stack,
        ):
            request = asyncio.ensure_future(stack.chat(stream=stream))
            await until(lambda: len(spec.calls) == 1 and stack.in_flight() == (1, 0))
            request.cancel()
            await until(lambda: spec.in_flight == 0 and stack.in_flight() == (0, 0))
            counted = stack.relay.metrics.requests
            assert counted[Role.SPECULATIVE, "chat_completions", Outcome.CLIENT_GONE] == 1

    run(work)


def test_silent_backends_end_in_504() -> None:
    """A backend that never answers costs the client the first-byte timeout, then a 504."""

    async def answer(call: Call) -> None:
        await call.peer_closed.wait()

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend() as base,
            running_router(
                spec.url, base.url, first_byte_timeout="300ms", replay_window="100ms"
            ) as stack,
        ):
            got = await stack.chat()
            assert got.status_code == 504
            assert got.json()["error"]["code"] == "first_byte_timeout"
            assert base.calls == []
            await until(lambda: spec.in_flight == 0)

    run(work)
