"""The threshold through real HTTP, with the default band and dwell."""

from __future__ import annotations

import asyncio

import httpx

from tests.scripted_backend import STREAM_HEAD, Call, event, scripted_backend
from tests.stack import run, running_router, until


def test_a_burst_puts_exactly_k_on_the_speculative_server() -> None:
    """With K = 8 and no telemetry, 50 requests within 20 ms put 8 there; it is used again later."""
    release = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.send(STREAM_HEAD + event("a"))
        await release.wait()
        await call.send(event("b") + b"0\r\n\r\n")

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url, threshold=8) as stack,
        ):
            assert (stack.router.settings.band, stack.router.settings.dwell) == (0.2, 5.0)
            burst = [asyncio.ensure_future(stack.chat(stream=True)) for _ in range(50)]
            await until(lambda: spec.in_flight + base.in_flight == 50)
            assert (spec.in_flight, base.in_flight) == (8, 42)
            assert stack.in_flight() == (8, 42)
            release.set()
            answers = await asyncio.gather(*burst)
            reasons = [found.headers["x-crossover-reason"] for found in answers]
            assert reasons.count("below_threshold") == 8
            assert reasons.count("at_threshold") == 42
            assert stack.in_flight() == (0, 0)

            # The load fell at once; the way back waits for the dwell, and for nothing else.
            held = (await stack.chat()).headers
            assert held["x-crossover-reason"] == "dwell"
            left = stack.relay.tracker.memory.above_at
            await asyncio.sleep(max(0.0, left + 5.0 - stack.relay.clock()))
            back = (await stack.chat()).headers
            assert back["x-crossover-backend"] == "speculative"
            assert back["x-crossover-reason"] == "below_threshold"

    run(work)


def test_the_numbers_in_the_headers_are_those_before_the_request() -> None:
    """The concurrency that a client is told does not count its own request."""

    async def work() -> None:
        async with (
            scripted_backend() as spec,
            scripted_backend() as base,
            running_router(spec.url, base.url, threshold=1) as stack,
        ):
            first = await stack.chat()
            assert first.headers["x-crossover-concurrency"] == "0/0"
            assert first.headers["x-crossover-threshold"] == "1"
            assert first.headers["x-crossover-backend"] == "speculative"

    run(work)


def test_simultaneous_requests_are_decided_one_after_another() -> None:
    """64 requests that arrive together are split as if they had come in a row."""
    release = asyncio.Event()

    async def answer(call: Call) -> None:
        await release.wait()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async def work() -> None:
        async with (
            scripted_backend(answer) as spec,
            scripted_backend(answer) as base,
            running_router(spec.url, base.url, policy="least-in-flight") as stack,
        ):
            sent: list[asyncio.Future[httpx.Response]] = [
                asyncio.ensure_future(stack.chat()) for _ in range(64)
            ]
            await until(lambda: spec.in_flight + base.in_flight == 64)
            assert (spec.in_flight, base.in_flight) == (32, 32)
            release.set()
            await asyncio.gather(*sent)

    run(work)
