"""Reads the backends' telemetry over HTTP, again and again, and hands it to the tracker.

Nothing of this is on a request's path. A poll is bounded in time and size; the next starts after
the last has ended, so polls cannot pile up. Whatever a backend answers, or does not, a poller goes
on: the signal becomes unknown (it goes stale in the tracker, which then counts our own requests
only), and one line says so when that begins and one when it ends.

Each poller, and each probe of `probes`, asks over connections of its own (`router.asking`): one that
hangs delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from router.acceptance import AcceptMeter, parse_accept
from router.asking import Ask, Clock, NoReply, Reply
from router.load import LoadTracker, Role, Telemetry
from router.silence import Silence, nowhere
from router.telemetry import Source, Unreadable, parse

_log = logging.getLogger("crossover")

Sleep = Callable[[float], Awaitable[None]]
Jitter = Callable[[float], float]

# A lesser source is given up after so long (seconds) to see whether a better one is there now.
LOOK_AGAIN: Final = 30.0
# Polls in a row that must fail before a signal that was known is called unknown: one slow answer
# is not a change of state.
LOST_AFTER: Final = 3
# The lesser sources cost the backend more (a log line, or 15 ms): not more often than this.
LESSER_INTERVAL: Final = 1.0
# Of the bound in time of a request: a timer may be early by a grain of its clock.
SLOW: Final = 0.95
# Bytes of bodies that one poller reads of a backend in a second, in the mean: an answer that is
# larger than telemetry is makes polls rarer. At 5 polls a second that begins at 50 KB.
BYTES_A_SECOND: Final = 256 * 1024
# With no source at all, polls become rarer, up to this (seconds).
LOST_INTERVAL: Final = 2.0


def spread(seconds: float) -> float:
    """The same pause give or take a tenth: pollers of one start must not stay in step."""
    return seconds * random.uniform(0.9, 1.1)  # noqa: S311 (no secret)


def pause(interval: float, took: float, size: int = 0) -> float:
    """Seconds to wait after a poll that took so long: in step, but never without a breath.

    `size`: bytes that it has read, in which the pace is bounded too.
    """
    return max(interval - took, interval / 2, size / BYTES_A_SECOND)


def size_of(reply: Reply | NoReply) -> int:
    """Bytes of a body that were read."""
    return reply.size if isinstance(reply, NoReply) else len(reply.body)


class AcceptPoller:
    """Live acceptance of one backend, from `/metrics`."""

    def __init__(
        self,
        ask: Ask,
        *,
        interval: float = 5.0,
        within: float = 3.0,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        jitter: Jitter = spread,
    ) -> None:
        """`interval` and `within` (a poll's bound) are seconds; a page costs the backend 15 ms."""
        self._ask = ask
        self._interval = interval
        self._within = within
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._meter = AcceptMeter()
        self._value: float | None = None
        self._read_at = float("-inf")
        self._size = 0  # bytes that the last poll has read

    def value(self, now: float) -> float | None:
        """Tokens per verify step of late; None when unknown or older than three polls."""
        return self._value if now - self._read_at <= 3.0 * self._interval else None

    async def poll(self) -> None:
        """Read once. A failure leaves the last value to grow old."""
        reply = await self._ask(Source.METRICS.path, self._within)
        self._size = size_of(reply)
        if isinstance(reply, NoReply) or reply.status != 200:
            return
        sample = parse_accept(reply.body)
        if not isinstance(sample, Unreadable):
            self._value = self._meter.update(sample)
            self._read_at = reply.read_at

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            started = self._clock()
            await self.poll()
            took = self._clock() - started
            await self._sleep(self._jitter(pause(self._interval, took, self._size)))


class TelemetryPoller:
    """Load of one backend, from the best source that it has; see `Source`."""

    def __init__(
        self,
        role: Role,
        ask: Ask,
        tracker: LoadTracker,
        *,
        interval: float = 0.2,
        within: float = 1.5,
        accept: Callable[[float], float | None] = lambda _now: None,
        silence: Silence | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        jitter: Jitter = spread,
    ) -> None:
        """`within` bounds one request, in seconds; `accept` is `AcceptPoller.value`; `silence` is told
        of answers that do not come.
        """
        self.role = role
        self.source: Source | None = None
        self.known: bool | None = None
        """None before the first poll has ended."""
        self.polls = 0
        self.failures = 0
        self._ask = ask
        self._tracker = tracker
        self._interval = interval
        self._within = within
        self._accept = accept
        self._silence = silence or nowhere()
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._named: Source | None = None  # the source that the log named last
        self._missed = 0
        self._size = 0  # bytes that the last poll has read
        self._look_again_at = float("-inf")

    @property
    def interval(self) -> float:
        """Seconds from one poll to the next as things stand."""
        if self.source is Source.LOADS:
            return self._interval
        if self.source is not None:
            return max(self._interval, LESSER_INTERVAL)
        return max(self._interval, min(self._interval * 2.0 ** min(self._missed, 8), LOST_INTERVAL))

    async def run(self) -> None:
        """Poll until cancelled, the first time at once."""
        while True:
            started = self._clock()
            try:
                await self.poll()
            except Exception:  # noqa: BLE001 (whatever a backend said once, it is asked again)
                _log.exception("telemetry of %s", self.role.value)
            took = self._clock() - started
            await self._sleep(self._jitter(pause(self.interval, took, self._size)))

    async def poll(self) -> None:
        """Read once: the known source, or, when there is none, each in turn."""
        self.polls += 1
        self._size = 0
        source = self.source
        if source is None or (source is not Source.LOADS and self._clock() >= self._look_again_at):
            await self._detect()
            return
        got = await self._read(source)
        if isinstance(got, Telemetry):
            self._take(got)
        else:
            # It may have been restarted as another version: the next poll looks at all of them.
            self.source = None
            self._miss(f"{source.value}: {got.reason}")

    async def _detect(self) -> None:
        reasons = []
        for source in Source:
            got = await self._read(source)
            if isinstance(got, Telemetry):
                self.source = source
                self._look_again_at = self._clock() + LOOK_AGAIN
                self._take(got)
                return
            reasons.append(f"{source.value}: {got.reason}")
            if not got.connected:
                break
        self.source = None
        self._miss("; ".join(reasons))

    async def _read(self, source: Source) -> Telemetry | NoReply:
        sent_at = self._clock()
        reply = await self._ask(source.path, self._within)
        self._size += size_of(reply)
        now = self._clock()
        if isinstance(reply, NoReply) and reply.connected and now - sent_at >= SLOW * self._within:
            self._silence.missed(now, known=self.source is Source.LOADS)
        else:
            self._silence.answered()
        if isinstance(reply, NoReply):
            return reply
        if reply.status != 200:
            return NoReply(f"status {reply.status}")
        told = parse(source, reply.body, reply.sent_at, reply.read_at)
        return NoReply(told.reason) if isinstance(told, Unreadable) else told

    def _take(self, told: Telemetry) -> None:
        accept = self._accept(told.read_at)
        if accept is not None:
            told = msgspec.structs.replace(told, accept_length=accept)
        self._tracker.observe(self.role, told)
        self._missed = 0
        if not self.known or self.source is not self._named:
            self.known = True
            self._named = self.source
            fields = {"backend": self.role.value, "source": told.source}
            _log.info("telemetry of %s from %s", self.role.value, told.source, extra=fields)

    def _miss(self, reason: str) -> None:
        self.failures += 1
        self._missed += 1
        if self.known is False or (self.known and self._missed < LOST_AFTER):
            return
        self.known = False
        fields = {"backend": self.role.value, "reason": reason}
        _log.warning("telemetry of %s is unknown: %s", self.role.value, reason, extra=fields)
