"""A router in front of two backends, in one event loop: what the tests of the whole use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import uvloop

from router.app import Router
from router.config import load_settings
from router.logs import LineWriter


class Stack:
    """The running router and how to reach it."""

    def __init__(self, router: Router, lines: list[bytes]) -> None:
        self.router = router
        self.relay = router.relay
        self.url = f"http://127.0.0.1:{router.port}"
        self.admin_url = f"http://127.0.0.1:{router.admin_port}"
        self.lines = lines  # the access log, as its thread has written it
        self.client = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=20.0)

    def in_flight(self) -> tuple[int, int]:
        """What the router counts on the speculative and on the baseline backend."""
        tracker = self.relay.tracker
        return tracker.speculative.in_flight, tracker.baseline.in_flight

    async def chat(self, **fields: Any) -> httpx.Response:
        """One chat request."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)


@contextlib.asynccontextmanager
async def running_router(speculative: str, baseline: str, **settings: Any) -> AsyncIterator[Stack]:
    """A router on free ports for as long as the block runs; `settings` as on the command line."""
    values: dict[str, object] = {
        "speculative": speculative,
        "baseline": baseline,
        "port": 0,
        "admin_port": 0,
        "drain_delay": 0,
        "drain_timeout": 2,
        **settings,
    }
    if "policy" not in values and "calibration" not in values:
        values.setdefault("threshold", 1000)
    lines: list[bytes] = []
    writer = LineWriter(lines.append)
    router = Router(load_settings(values, environ={}), writer=writer)
    await router.start()
    stack = Stack(router, lines)
    try:
        yield stack
    finally:
        await stack.client.aclose()
        await router.stop()
        await asyncio.to_thread(writer.close)


async def until(
    check: Callable[[], bool], seconds: float = 10.0, *, what: str = "what was waited for"
) -> None:
    """Wait until something holds; AssertionError that names it when it does not within the time."""
    end = asyncio.get_running_loop().time() + seconds
    while not check():
        if asyncio.get_running_loop().time() > end:
            raise AssertionError(f"not in time: {what}")
        await asyncio.sleep(0.005)


def run(work: Callable[[], Awaitable[None]], limit_s: float | None = None) -> None:
    """Run one asynchronous test, within so many seconds."""

    async def main() -> None:
        async with asyncio.timeout(limit_s):
            await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as it is served
        runner.run(main())
