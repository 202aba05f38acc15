"""Keeps as many requests in flight as a closed load says, and collects their records.

What a request is, and how it becomes a record, is `send`'s; nothing is summed up here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from loadtest.arrivals import Closed
from loadtest.record import RequestRecord

MOST_FAILURES: Final = 50

# Sends one request: its number in the run, from 0, and the level it is sent for.
Send = Callable[[int, int], Awaitable[RequestRecord]]


class ClosedRun:
    """One run of a load. Its fields may be read while it goes on."""

    def __init__(
        self,
        load: Closed,
        send: Send,
        clock: Callable[[], float],
        *,
        most_failures: int = MOST_FAILURES,
    ) -> None:
        """`clock` gives monotonic seconds; the load begins when `run` is called.

        With `most_failures` failed requests the run gives up: a server that refuses at once would
        be asked again as fast as the machine can.
        """
        self.load = load
        self.records: list[RequestRecord] = []
        self.failures = 0
        self.began: float | None = None
        self._most_failures = most_failures
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

    @property
    def gave_up(self) -> bool:
        """Whether so many requests failed that no more are sent."""
        return self.failures >= self._most_failures

    async def run(self) -> list[RequestRecord]:
        """Run the load and wait for the last answers. When cancelled, so are its requests."""
        self.began = self._clock()
        try:
            while not self.gave_up and (level := self.load.level_at(self.elapsed)) is not None:
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
        for task in done:
            record = task.result()
            self.records.append(record)
            self.failures += not record.ok
