"""The load client against a simulated server, and against bytes that no good server sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loadtest.arrivals import ClosedLoop, Ramp
from loadtest.client import ChatClient, chat_body
from loadtest.closed_loop import ClosedRun
from loadtest.engine import EngineConfig, running_engine
from loadtest.record import RequestRecord
from router.load import Role
from tests.engines import looped
from tests.stack import until

BODY = chat_body("sim-llama-8b", "one two three", 12)
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"


def answer(*events: bytes, status: str = "200 OK", headers: bytes = b"") -> bytes:
    body = b"".join(events)
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (
        status.encode(),
        headers,
        len(body),
        body,
    )


@contextlib.asynccontextmanager
async def serving(data: bytes, *, close: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every request with these bytes; yields its URL and what it was sent."""
    heads: list[bytes] = []
    handlers: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                heads.append(head + await reader.readexactly(length))
                writer.write(data)
                await writer.drain()
                if close:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads
    await asyncio.gather(*handlers)


async def ask(data: bytes, *, close: bool = False, **options: Any) -> RequestRecord:
    async with serving(data, close=close) as (url, _), ChatClient(url, **options) as client:
        return await client.chat(BODY)


@looped
async def test_one_request() -> None:
    """A record holds what the server reported, and its times are in order."""
    async with running_engine(EngineConfig.quick()) as engine, ChatClient(engine.url) as client:
        began = time.monotonic()
        record = await client.chat(BODY, run="here", level=2, began=began)
    assert record.error is None
    assert (record.status, record.prompt_tokens, record.output_tokens) == (200, 16, 12)
    assert (record.id, record.run, record.level) == ("here-1", "here", 2)
    assert record.first_chunk is not None
    assert 0 <= record.started < record.first_chunk < record.ended <= time.monotonic() - began
    assert (record.backend, record.reason, record.n, record.threshold) == (None, None, None, None)


@looped
async def test_connections_are_kept() -> None:
    """Requests one after the other share a connection; those at the same time do not."""
    async with running_engine(EngineConfig.quick()) as engine, ChatClient(engine.url) as client:
        for _ in range(3):
            assert (await client.chat(BODY)).ok
        assert engine.connections == 1
        assert all(one.ok for one in await asyncio.gather(*(client.chat(BODY) for _ in range(4))))
        assert engine.connections == 4
        client.close()
        await until(lambda: engine.connections == 0, what="the connections are closed")


@looped
async def test_an_old_connection_is_not_used() -> None:
    """After some seconds a server may be about to close, so a new connection is made."""
    now = 100.0
    async with running_engine(EngineConfig.quick()) as engine:
        client = ChatClient(engine.url, clock=lambda: now)
        await client.chat(BODY)
        now += 3
        assert (await client.chat(BODY)).ok
        await until(lambda: engine.connections == 1, what="the old one is closed")
        client.close()


@looped
async def test_what_the_router_says() -> None:
    """The router's headers are in the record."""
    said = (
        b"X-Crossover-Backend: baseline\r\nx-crossover-reason: band\r\n"
        b"x-crossover-concurrency: 2/9\r\nx-crossover-threshold: 12\r\nx-request-id: abc-1\r\n"
    )
    record = await ask(answer(EVENT, USAGE, DONE, headers=said))
    assert (record.id, record.backend, record.reason) == ("abc-1", Role.BASELINE, "band")
    assert (record.n, record.m, record.threshold) == (2, 9, 12.0)


@looped
async def test_what_makes_no_sense_is_unknown() -> None:
    """A header that cannot be read is as one that is not there."""
    said = (
        b"x-crossover-backend: none\r\nx-crossover-concurrency: a/b\r\n"
        b"x-crossover-threshold: many\r\n"
    )
    record = await ask(answer(EVENT, USAGE, DONE, headers=said))
    assert (record.backend, record.n, record.m, record.threshold) == (None, None, None, None)
    record = await ask(answer(EVENT, USAGE, DONE, headers=b"x-crossover-threshold: inf\r\n"))
    assert record.threshold == "infinity"


@pytest.mark.parametrize(
    ("data", "status", "error"),
    [
        (answer(EVENT), 200, "the stream ended without [DONE]"),
        (
            answer(b'data: {"error":{"message":"full","code":503}}\n\n', DONE),
            200,
            "error event 503 in the stream",
        ),
        (
            answer(b'{"error":{"message":"no room"}}', status="429 Too Many Requests"),
            429,
            "status 429: no room",
        ),
        (
            answer(b'{"object":"error","message":"bad"}', status="400 Bad Request"),
            400,
            "status 400: bad",
        ),
        (answer(b"[1]", status="500 Internal Server Error"), 500, "status 500: [1]"),
        (answer(status="502 Bad Gateway"), 502, "status 502: (no body)"),
        (answer(b"x" * 9000, status="500 Oops"), 500, ("status 500: " + "x" * 200)[:200]),
        (b"SSH-2.0\r\n", None, "no HTTP"),
        (
            b"HTTP/1.1 100 Continue\r\n\r\n" + answer(EVENT, USAGE, DONE),
            200,
            None,
        ),
    ],
)
def test_faults(data: bytes, status: int | None, error: str | None) -> None:
    """Whatever comes back is a record that says in a few words what was wrong."""
    record = asyncio.run(ask(data, timeout=5))
    assert record.status == status
    assert error == record.error or (error and record.error and record.error.startswith(error))


@looped
async def test_cut_within_the_answer() -> None:
    """A connection that closes within an answer is a failure, not a short answer."""
    cut = answer(EVENT, USAGE, DONE)[:-20]
    record = await ask(cut, close=True)
    assert record.error == "the connection was closed within the answer"
    assert record.status == 200


@looped
async def test_nobody_listens() -> None:
    """A refused connection is a record without a status."""
    async with serving(b"") as (url, _):
        pass
    async with ChatClient(url) as client:
        record = await client.chat(BODY)
    assert record.status is None
    assert record.error is not None
    assert record.error.startswith("Connect")


@looped
async def test_too_slow() -> None:
    """A request has a limit; at it the connection is closed, which stops the server."""
    config = EngineConfig.quick(time_scale=100)
    async with running_engine(config) as engine, ChatClient(engine.url, timeout=0.1) as client:
        record = await client.chat(BODY)
        assert record.error == "no complete answer within 0.1 s"
        await until(lambda: engine.in_flight == 0, what="the server has stopped")


@looped
async def test_cancelled() -> None:
    """A cancelled request closes its connection too."""
    config = EngineConfig.quick(time_scale=100)
    async with running_engine(config) as engine, ChatClient(engine.url) as client:
        task = asyncio.create_task(client.chat(BODY))
        await until(lambda: engine.in_flight == 1, what="the server works")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await until(lambda: engine.in_flight == 0, what="the server has stopped")


@looped
async def test_a_server_that_closes_after_each_answer() -> None:
    """`connection: close` is obeyed, and the next request gets a connection of its own."""
    data = answer(EVENT, USAGE, DONE, headers=b"connection: close\r\n")
    async with serving(data, close=True) as (url, heads), ChatClient(url) as client:
        assert [(await client.chat(BODY)).error for _ in range(2)] == [None, None]
    assert len(heads) == 2


@pytest.mark.parametrize(
    ("suffix", "path"),
    [("", "/v1"), ("/", "/v1"), ("/v1", "/v1"), ("/v1/", "/v1"), ("/llm/v1", "/llm/v1")],
)
def test_base_urls(suffix: str, path: str) -> None:
    """A base URL may end with /v1, with a slash, or with a prefix before either."""

    async def sent() -> bytes:
        data = answer(EVENT, USAGE, DONE)
        async with serving(data) as (url, heads), ChatClient(url + suffix, api_key="k") as client:
            await client.chat(BODY)
            return heads[0]

    head = asyncio.run(sent())
    assert head.startswith(b"POST %s/chat/completions HTTP/1.1\r\n" % path.encode())
    assert b"authorization: Bearer k\r\n" in head


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_no_url(url: str) -> None:
    """What is no URL of a server is refused with an example of one."""
    with pytest.raises(ValueError, match="looks like http"):
        ChatClient(url)


def test_chat_body() -> None:
    """The body asks for a stream with usage, and may hold more."""
    body = json.loads(chat_body("m", "hi", 5, temperature=0))
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }
    assert "ignore_eos" not in json.loads(chat_body("m", "hi", 5, ignore_eos=False))


@looped
async def test_a_closed_run_keeps_its_level() -> None:
    """As many requests as the level says are in flight, and what falls away is not replaced."""
    ends: list[asyncio.Future[None]] = []
    now = 0.0

    async def send(number: int, level: int) -> RequestRecord:
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ends.append(end)
        await end
        return RequestRecord(id=str(number), level=level, started=0.0, ended=now)

    run = ClosedRun(Ramp((2, 1), 1000.0), send, lambda: now)
    assert run.elapsed == 0
    task = asyncio.create_task(run.run())
    await until(lambda: len(ends) == 2, what="the first level is full")
    ends[0].set_result(None)
    await until(lambda: len(ends) == 3, what="what ended is replaced")
    now = 1500.0
    ends[1].set_result(None)
    await until(lambda: len(run.records) == 2, what="one is left")
    assert (run.in_flight, len(ends)) == (1, 3)
    ends[2].set_result(None)
    await until(lambda: len(ends) == 4, what="the second level is full")
    now = 2500.0
    ends[3].set_result(None)
    records = await task
    assert [(one.id, one.level) for one in records] == [("0", 2), ("1", 2), ("2", 2), ("3", 1)]
    assert run.in_flight == 0


@looped
async def test_a_closed_run_that_is_cancelled() -> None:
    """Cancelling a run cancels its requests."""
    cancelled = []

    async def send(number: int, level: int) -> RequestRecord:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        raise AssertionError

    run = ClosedRun(ClosedLoop(3, 1000.0), send, time.monotonic)
    task = asyncio.create_task(run.run())
    await until(lambda: run.in_flight == 3, what="all run")
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sorted(cancelled) == [0, 1, 2]


@looped
async def test_a_closed_run_gives_up() -> None:
    """A server that refuses at once is not asked for ever."""

    async def send(number: int, level: int) -> RequestRecord:
        return RequestRecord(id=str(number), started=0.0, ended=0.0, error="refused")

    run = ClosedRun(ClosedLoop(2, 1000.0), send, time.monotonic, most_failures=10)
    assert len(await run.run()) == 10
    assert run.gave_up
