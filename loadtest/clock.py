"""Where a simulated server gets its time from: the machine's clock, or a test's hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and waiting for some."""

    def now(self) -> float:
        """Monotonic seconds; on one machine the same for all processes."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; not at all if `seconds` is 0 or less, but let others run."""
        ...


class RealClock:
    """The machine's own time."""

    def now(self) -> float:
        """Monotonic seconds since some moment, the same for all processes of this machine."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait this long."""
        await asyncio.sleep(max(0.0, seconds))


class ManualClock:
    """Time that passes only when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """The time that the test has set."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until the test has moved the time this far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    def advance(self, seconds: float) -> None:
        """Move the time and wake, in order, those whose time has come."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
