"""The measurements of `loadtest bench`: rounds in which the targets take turns.

It knows targets and loads, and nothing of what they are or of how they were started.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from loadtest.bench_cost import Cost, Level, Row, Usage, percentile
from loadtest.bench_load import Load, Window, request, run_load, time_hang_up
from loadtest.bench_stage import Control, Target

LONG: Final = 10_000  # tokens of a stream that outlasts its measurement

Show = Callable[[int, int, str], None]  # this step, of so many, and what it is


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. Times are seconds."""

    rounds: int = 1  # of all that follows
    seconds: float = 5.0  # for each figure
    warm_seconds: float = 0.3  # before each
    tokens: int = 64  # of each streamed answer
    interval_ms: int = 20  # between two of them
    requests: int = 32  # at once, not streamed
    levels: tuple[int, ...] = (64, 250)  # streams at once
    crowd: int = 1000  # streams at once when memory is read
    crowd_interval_ms: int = 200
    crowd_seconds: float = 2.0
    idle_seconds: float = 3.0
    hang_ups: int = 20


QUICK: Final = Plan(seconds=1.5, tokens=32, crowd_seconds=0.5, idle_seconds=1.5, hang_ups=5)


class Bench:
    """Measures; the targets take turns, so that a slower minute is one for all."""

    def __init__(self, plan: Plan, targets: list[Target], control: Control, show: Show) -> None:
        """`show` is told what comes next; the first of the targets is the one without a proxy."""
        self._plan = plan
        self._targets = targets
        self._proxies = [target for target in targets if target.session]
        self._control = control
        self._tell = show
        self._step = 0
        once = 1 + len(plan.levels) * len(targets) + 3 * len(self._proxies)
        self._steps = plan.rounds * once

    async def rounds(self) -> list[list[Row]]:
        """Measure as many rounds as planned; another proxy is first in each."""
        found = []
        direct, *proxies = self._targets
        for number in range(self._plan.rounds):
            for target in self._targets:
                target.row = target.row.fresh()
            at = number % max(1, len(proxies))
            turned = proxies[at:] + proxies[:at]
            self._targets, self._proxies = [direct, *turned], turned
            await self._round()
            found.append([target.row for target in (direct, *proxies)])
        return found

    async def _round(self) -> None:
        """Measure everything once. Targets take turns at each measure."""
        plan = self._plan
        for target in self._targets:
            target.row.connections, target.row.crowd = plan.requests, plan.crowd
        await self._idle()
        for target in self._proxies:
            self._show(f"{plan.requests} requests at once: {target.row.name}")
            await self._requests(target)
        for streams in plan.levels:
            for target in self._targets:
                self._show(f"{streams} streams at once: {target.row.name}")
                await self._streams(target, streams)
        for target in self._proxies:
            self._show(f"{plan.crowd} streams at once: {target.row.name}")
            await self._crowd(target)
        for target in self._proxies:
            self._show(f"{plan.hang_ups} hang-ups: {target.row.name}")
            await self._hang_ups(target)

    async def _idle(self) -> None:
        """All at once, since they do nothing."""
        self._show("nothing to do")
        before = [target.usage() for target in self._proxies]
        began = time.monotonic()
        await asyncio.sleep(self._plan.idle_seconds)
        took = time.monotonic() - began
        for target, used in zip(self._proxies, before, strict=True):
            target.row.idle_ms_s = round((target.usage() - used).total / took * 1e3, 1)
            target.row.idle_mb = target.memory_mb()

    async def _requests(self, target: Target) -> None:
        load = Load(request(16, stream=False))
        window = await self._load(target, load, self._plan.requests, 0.1, self._plan.seconds)
        target.row.request = Cost.of(window.used, window.answers)
        target.row.requests_s = round(window.answers / window.seconds, 1)

    async def _streams(self, target: Target, streams: int) -> None:
        plan = self._plan
        interval = plan.interval_ms / 1000
        load = Load(request(plan.tokens, plan.interval_ms), plan.tokens, interval)
        ramp = (plan.tokens + 1) * interval
        window = await self._load(target, load, streams, ramp, plan.seconds)
        p50, p99 = (percentile(window.first, share) for share in (0.5, 0.99))
        level = Level(
            streams=streams,
            interval_ms=plan.interval_ms,
            chunk=Cost.of(window.used, window.chunks) if target.session else None,
            chunks_s=round(window.chunks / window.seconds, 1),
            answers=window.answers,
            waited=round(window.used.waited / window.seconds, 3),
            first_p50_us=_us(p50),
            first_p99_us=_us(p99),
            later_p50_us=_us(percentile(window.later, 0.5)),
        )
        if target.session:
            direct = self._targets[0].row.levels[len(target.row.levels)]
            level = msgspec.structs.replace(
                level,
                added_p50_us=_added(level.first_p50_us, direct.first_p50_us),
                added_p99_us=_added(level.first_p99_us, direct.first_p99_us),
                later_added_p50_us=_added(level.later_p50_us, direct.later_p50_us),
            )
        target.row.levels = [*target.row.levels, level]

    async def _crowd(self, target: Target) -> None:
        """Long streams, so that all are open when memory is read, which is at the end."""
        plan, row = self._plan, target.row

        def look() -> Usage:
            row.crowd_mb = target.memory_mb()
            return Usage()

        load = Load(request(LONG, plan.crowd_interval_ms), LONG)
        await self._load(target, load, plan.crowd, plan.crowd / 1000, plan.crowd_seconds, look)

    async def _hang_ups(self, target: Target) -> None:
        port = target.ports[0]
        times = [await time_hang_up(port, self._control.counts) for _ in range(self._plan.hang_ups)]
        seen = [round(seconds * 1e3, 2) for seconds in times if seconds is not None]
        target.row.hang_up_ms = percentile(seen, 0.5)
        target.row.hang_up_max_ms = percentile(seen, 1.0)
        target.count({"hang-up not seen": len(times) - len(seen)})

    def _show(self, text: str) -> None:
        self._tell(self._step, self._steps, text)
        self._step += 1

    async def _load(
        self,
        target: Target,
        load: Load,
        connections: int,
        ramp: float,
        seconds: float,
        usage: Callable[[], Usage] | None = None,
    ) -> Window:
        window = await run_load(
            load,
            target.ports,
            connections=connections,
            ramp=ramp,
            warm=self._plan.warm_seconds,
            seconds=seconds,
            usage=usage or target.usage,
        )
        target.count(window.errors)
        target.count({"stream left open": await self._control.left()})
        return window


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 1)


def _added(through: float | None, direct: float | None) -> float | None:
    return None if through is None or direct is None else round(through - direct, 1)
