"""Whatever happens to a request, it stops being counted exactly once.

10,000 requests: clients that leave at a random moment, backends that answer, refuse, fail, cut,
reset, stay silent or are restarted. At the end the router's counts are zero, and so are the
backends' own.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from router.metrics import Outcome
from tests.scripted_backend import (
    QUEUE_FULL_EVENT,
    STREAM_HEAD,
    Call,
    ScriptedBackend,
    chunk,
    event,
    response,
    scripted_backend,
)
from tests.stack import Stack, run, running_router, until

REQUESTS = 10_000
AT_ONCE = 100
BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}],"stream":%b}'


def scripted_chaos(dice: random.Random) -> object:
    """A backend that behaves in every way a backend can."""

    async def answer(call: Call) -> None:
        what = dice.random()
        if what < 0.30:
            await call.send(response())
        elif what < 0.55:
            await call.send(STREAM_HEAD + event("a"))
            await asyncio.sleep(dice.random() * 0.01)
            await call.send(event("b") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        elif what < 0.62:
            await call.send(response(b"{}", "503 Service Unavailable"))
        elif what < 0.66:
            await call.send(STREAM_HEAD + chunk(QUEUE_FULL_EVENT) + b"0\r\n\r\n")
        elif what < 0.70:
            await call.send(response(b"{}", "400 Bad Request"))
        elif what < 0.72:
            await call.send(response(b"{}", "500 Internal Server Error"))
        elif what < 0.80:
            await call.send(STREAM_HEAD + event("a"))
            call.reset()
        elif what < 0.86:
            call.close()
        elif what < 0.90:
            await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n123")
            call.close()
        elif what < 0.92:
            await call.send(b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n")
        else:
            await asyncio.wait_for(call.peer_closed.wait(), 10)

    return answer


async def one_client(stack: Stack, dice: random.Random) -> None:
    """Send one request, then read to the end or leave at a random moment."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.router.port)
    body = BODY % (b"true" if dice.random() < 0.5 else b"false")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    patience = dice.choice((0.0, 0.001, 0.004, 0.02, 5.0))  # the last sees any answer
    try:
        await asyncio.wait_for(reader.read(), patience)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        if dice.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


async def restarts(backends: list[ScriptedBackend], dice: random.Random) -> None:
    """Every now and then a backend loses all its connections."""
    while True:
        await asyncio.sleep(0.2)
        await dice.choice(backends).close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["least-in-flight", "frontier"])
def test_ten_thousand_requests_of_every_fate_leave_no_count(policy: str) -> None:
    """After random aborts, errors and restarts all gauges are 0 and equal the backends' counts."""
    dice = random.Random(20261129)

    async def work() -> None:
        answer = scripted_chaos(dice)
        async with (
            scripted_backend(answer) as spec,  # type: ignore[arg-type]
            scripted_backend(answer) as base,  # type: ignore[arg-type]
            running_router(
                spec.url,
                base.url,
                policy=policy,
                threshold=20,
                max_in_flight=60,
                queue_size=20,
                breaker_failures=1000,
                first_byte_timeout="500ms",
                replay_window="50ms",
            ) as stack,
        ):
            chaos = asyncio.ensure_future(restarts([spec, base], dice))
            gate = asyncio.Semaphore(AT_ONCE)

            async def limited() -> None:
                async with gate:
                    await one_client(stack, dice)

            await asyncio.gather(*(limited() for _ in range(REQUESTS // 2)))
            chaos.cancel()
            await until(lambda: stack.in_flight() == (0, 0))
            assert stack.relay.waiting == 0
            await until(lambda: spec.in_flight == 0 and base.in_flight == 0)
            await until(lambda: not stack.relay.connections)
            assert stack.relay.buffered == 0
            # Each request that was read whole was counted once, whatever became of it.
            counted = sum(stack.relay.metrics.requests.values())
            assert REQUESTS // 10 < counted <= REQUESTS // 2
            fates = {key[2] for key, n in stack.relay.metrics.requests.items() if n}
            assert fates >= {
                Outcome.OK,
                Outcome.CLIENT_ERROR,
                Outcome.REFUSED,
                Outcome.BACKEND_ERROR,
                Outcome.BACKEND_LOST,
                Outcome.CLIENT_GONE,
            }
            decided = sum(stack.relay.metrics.decisions.values())
            replayed = sum(
                n for kind, n in stack.relay.metrics.retries.items() if kind.value != "replay_stale"
            )
            assert decided <= counted + replayed

    run(work)
