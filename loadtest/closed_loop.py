"""Keeps as many requests in flight as a closed load says, and collects their records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from loadtest.arrivals import Closed
from loadtest.record import RequestRecord

# Sends one request: its number in the run, from 0, and the level it is sent for.
Send = Callable[[int, int], Awaitable[RequestRecord]]


class ClosedRun:
    """One run of a load. Its fields may be read while it goes on."""

    def __init__(
        self, load: Closed, send: Send, clock: Callable[[], float], began: float | None = None
    ) -> None:
        """`clock` gives monotonic seconds; the load begins at `began`, or when `run` is called."""
        self.load = load
        self.records: list[RequestRecord] = []
        self.began = began
        self._send = send
        self._clock = clock
        self._running: set[asyncio.Future[RequestRecord]] = set()
        self._sent = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the load began; 0 before."""
        return 0.0 if self.began is None else self._clock() - self.began

    @property
    def in_flight(self) -> int:
        """Requests that are running."""
        return len(self._running)

    async def run(self) -> list[RequestRecord]:
        """Run the load and wait for the last answers. When cancelled, so are its requests."""
        if self.began is None:
            self.began = self._clock()
        try:
            while (level := self.load.level_at(self.elapsed)) is not None:
                for _ in range(level.concurrency - len(self._running)):
                    self._start(level.concurrency)
                await self._collect(level.end - self.elapsed)
            while self._running:
                await self._collect(None)
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            self._running.clear()
        return self.records

    def _start(self, level: int) -> None:
        self._running.add(asyncio.ensure_future(self._send(self._sent, level)))
        self._sent += 1

    async def _collect(self, seconds: float | None) -> None:
        """Wait for an answer, or until the level ends."""
        done, self._running = await asyncio.wait(
            self._running,
            timeout=None if seconds is None else max(0.0, seconds),
            return_when=asyncio.FIRST_COMPLETED,
        )
        self.records.extend(task.result() for task in done)
