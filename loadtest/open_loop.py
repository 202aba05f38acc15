"""Sends requests at given times, however many are in flight then: users, who do not wait in turn.

What a request is, and how it becomes a record, is `send`'s; nothing is summed up here.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from loadtest.record import RequestRecord

# More open requests than a server that keeps up with its load ever has.
MOST_OPEN: Final = 4096
MOST_FAILURES: Final = 50

# Sends one request, by its number in the run, from 0.
SendOne = Callable[[int], Awaitable[RequestRecord]]


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Start times, in seconds, of requests that come independently, `rate` a second on average.

    The gaps of such a process have an exponential distribution. Raises ValueError for no rate.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate is above 0 requests a second, got {rate}")
    gaps = random.Random(seed)
    return itertools.accumulate(gaps.expovariate(rate) for _ in itertools.count())


class OpenRun:
    """One run of an open load. Its fields may be read while it goes on."""

    def __init__(
        self,
        arrivals: Iterator[float],
        send: SendOne,
        goes_on: Callable[[float], bool],
        clock: Callable[[], float],
        *,
        tick: float,
        most_open: int = MOST_OPEN,
        most_failures: int = MOST_FAILURES,
    ) -> None:
        """`goes_on` is asked with the seconds since the start, at least every `tick` seconds.

        With `most_failures` failures, or `most_open` requests open, the run gives up.
        """
        self.records: list[RequestRecord] = []
        self.failures = 0
        self.began: float | None = None
        self.gave_up = False
        self._arrivals = arrivals
        self._send = send
        self._goes_on = goes_on
        self._clock = clock
        self._tick = tick
        self._most_open = most_open
        self._most_failures = most_failures
        self._running: set[asyncio.Future[RequestRecord]] = set()

    @property
    def elapsed(self) -> float:
        """Seconds since the load began; 0 before."""
        return 0.0 if self.began is None else self._clock() - self.began

    @property
    def in_flight(self) -> int:
        """Requests that are running."""
        return len(self._running)

    async def run(self) -> list[RequestRecord]:
        """Run until told to stop; what is open then is cut, as when cancelled, and not recorded."""
        self.began = self._clock()
        try:
            due = next(self._arrivals)
            for number in itertools.count():
                while (wait := due - self.elapsed) > 0 and self._may_go_on():
                    await self._pause(min(wait, self._tick))
                if not self._may_go_on():
                    break
                self._running.add(asyncio.ensure_future(self._send(number)))
                due = next(self._arrivals)
                self._collect()
        finally:
            self._collect()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            self._running.clear()
        return self.records

    def _may_go_on(self) -> bool:
        self.gave_up = (
            self.gave_up
            or self.failures >= self._most_failures
            or len(self._running) >= self._most_open
        )
        return not self.gave_up and self._goes_on(self.elapsed)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._collect()

    def _collect(self) -> None:
        for task in [task for task in self._running if task.done() and not task.cancelled()]:
            self._running.discard(task)
            record = task.result()
            self.records.append(record)
            self.failures += not record.ok
