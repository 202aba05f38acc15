"""The parts of `loadtest scale`, each with a router of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
import timeit
from collections.abc import AsyncIterator, Iterable
from typing import Final

import msgspec

from loadtest.bench_cost import percentile
from loadtest.scale_load import (
    Streams,
    flood_digest,
    flood_request,
    get,
    large_request,
    whole_answers,
)
from loadtest.scale_stage import MB, Router, Stage
from loadtest.scale_table import Admin, Bodies, Crowd, Decided, Gaps, Scale, Slow
from router.frontier import Frontier
from router.load import BASELINE, SPECULATIVE, LoadTracker
from router.policy import FrontierPolicy
from router.request import NOTHING_KNOWN

OPENED_S: Final = 2000.0  # streams opened a second
KEPT_UP: Final = 0.95  # of the chunks asked for: with fewer some streams must wait
BESIDE: Final = (10, 20)  # ordinary streams beside slow readers and bodies, and their interval, ms
SCRAPE_S: Final = 0.1
ROUNDS: Final = 7
FEW: Final = 10
MANY: Final = 5000


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    levels: tuple[tuple[int, int], ...] = (
        (500, 50),
        (1000, 50),
        (2000, 50),
        (5000, 400),
        (5000, 50),
    )
    seconds: float = 4.0  # of each level
    settle_seconds: float = 1.5  # before it
    readers: int = 50
    reader_kb: int = 5120
    bodies: int = 20
    body_mb: int = 10
    beside_seconds: float = 3.0  # streams alone
    admin_streams: int = 5000
    admin_interval_ms: int = 400
    admin_turns: int = 3  # with and without scrapes
    gets: int = 20
    decisions: int = 2000

    @property
    def most(self) -> int:
        """Streams at once."""
        return max(self.admin_streams, *(streams for streams, _ in self.levels))


async def measure_crowds(plan: Plan, stage: Stage, router: Router, scale: Scale) -> None:
    """Streams at once."""
    for number, interval_ms in plan.levels:
        streams = Streams(interval_ms)
        async with _open(streams, [router.port], number, stage):
            await asyncio.sleep(plan.settle_seconds)
            scale.crowds.append(await _crowd(plan.seconds, stage, router, streams))
        last = msgspec.structs.replace(
            scale.crowds[-1], broken=sum(streams.errors.values()), stalled=streams.stalled
        )
        scale.crowds[-1] = last
        if last.delivered_s > KEPT_UP * last.asked_s:  # else the level is more than can be carried
            stage.count("stalled", last.stalled)


async def _crowd(seconds: float, stage: Stage, router: Router, streams: Streams) -> Crowd:
    number, interval = len(streams.open), streams.interval
    sent = (await stage.sent()).sent
    used, servers, own = router.session.usage(), stage.servers.usage(), time.process_time()
    streams.begin()
    began = time.monotonic()
    await asyncio.sleep(seconds)
    chunks, took = streams.chunks, time.monotonic() - began
    used, servers = router.session.usage() - used, stage.servers.usage() - servers
    own = time.process_time() - own
    gaps = streams.gaps
    sent = (await stage.sent()).sent - sent
    memory = router.session.memory_mb()
    return Crowd(
        streams=number,
        interval_ms=round(interval * 1000),
        asked_s=round(number / interval, 1),
        sent_s=round(sent / took, 1),
        delivered_s=round(chunks / took, 1),
        core=round(used.total / took, 3),
        load_core=round((servers.total + own) / took, 3),
        waited=round(used.waited / took, 3),
        gaps=_gaps(gaps),
        memory_mb=round(memory, 1),
        per_stream_kb=round((memory - router.rest_mb) * 1024 / max(1, number), 1),
        broken=0,
        stalled=0,
    )


async def measure_slow(plan: Plan, stage: Stage, router: Router, scale: Scale) -> None:
    """Slow readers."""
    data = flood_request(plan.reader_kb)
    wanted = (200, flood_digest(plan.reader_kb))
    direct, _, _ = await _beside(stage, stage.ports[1], data, plan.readers, slow=True)
    alone = Streams(BESIDE[1])
    async with _open(alone, [router.port], BESIDE[0], stage):
        alone.begin()
        await asyncio.sleep(plan.beside_seconds)
    async with router.peak() as peak:
        beside, answers, took = await _beside(stage, router.port, data, plan.readers, slow=True)
    lost = sum(answer != wanted for answer in answers)
    stage.count("answer of a slow reader is not whole", lost)
    scale.slow = Slow(
        readers=plan.readers,
        total_mb=round(plan.readers * plan.reader_kb / 1024, 1),
        seconds=round(took, 2),
        lost=lost,
        above_rest_mb=round(peak[0], 1),
        alone=_gaps(alone.gaps),
        beside=beside,
        direct=direct,
    )


async def measure_bodies(plan: Plan, stage: Stage, router: Router, scale: Scale) -> None:
    """Large request bodies."""
    data = large_request(plan.body_mb * MB)
    total = plan.bodies * len(data) / MB
    direct, _, _ = await _beside(stage, stage.ports[1], data, plan.bodies, slow=False)
    async with router.peak() as peak:
        beside, answers, took = await _beside(stage, router.port, data, plan.bodies, slow=False)
    answered = sum(status == 200 for status, _ in answers)
    stage.count("large body not answered", plan.bodies - answered)
    scale.bodies = Bodies(
        bodies=plan.bodies,
        total_mb=round(total, 1),
        seconds=round(took, 2),
        answered=answered,
        above_rest_mb=round(peak[0], 1),
        ratio=round(peak[0] / total, 3),
        beside=beside,
        direct=direct,
    )


async def _beside(
    stage: Stage, port: int, data: bytes, number: int, *, slow: bool
) -> tuple[Gaps, list[tuple[int, str]], float]:
    """Requests at once with ordinary streams beside them, both at one port."""
    streams = Streams(BESIDE[1])
    async with _open(streams, [port], BESIDE[0], stage):
        await asyncio.sleep(3 * streams.interval)
        streams.begin()
        began = time.monotonic()
        answers = await whole_answers(port, data, number, slow=slow)
        took = time.monotonic() - began
    return _gaps(streams.gaps), [answer.done.result() for answer in answers], took


async def measure_admin(plan: Plan, stage: Stage, router: Router, scale: Scale) -> None:
    """The admin listener while streams are open."""
    streams = Streams(plan.admin_interval_ms)
    async with _open(streams, [router.port], plan.admin_streams, stage):
        await asyncio.sleep(plan.settle_seconds)
        quiet: list[float] = []
        scraped: list[float] = []
        used, lasted = 0.0, 0.0
        for _ in range(plan.admin_turns):
            before, began = router.session.usage(), time.monotonic()
            streams.begin()
            await asyncio.sleep(plan.seconds)
            quiet += streams.gaps
            used += (router.session.usage() - before).total
            lasted += time.monotonic() - began
            streams.begin()
            await _scrape(stage, router, plan.seconds)
            scraped += streams.gaps
        metrics = await _times(stage, router, "/metrics", plan.gets)
        status = await _times(stage, router, "/status", plan.gets)
    scale.admin = Admin(
        streams=plan.admin_streams,
        interval_ms=plan.admin_interval_ms,
        core=round(used / lasted, 3),
        metrics_p50=percentile(metrics, 0.5),
        metrics_max=percentile(metrics, 1.0),
        status_p50=percentile(status, 0.5),
        status_max=percentile(status, 1.0),
        quiet=_gaps(quiet),
        scraped=_gaps(scraped),
    )


async def _scrape(stage: Stage, router: Router, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while (now := time.monotonic()) < limit:
        await _times(stage, router, "/metrics", 1)
        await asyncio.sleep(now + SCRAPE_S - time.monotonic())


async def _times(stage: Stage, router: Router, path: str, number: int) -> list[float]:
    """Milliseconds of each of so many GETs."""
    found = []
    for _ in range(number):
        status, _, took = await get(router.admin_port, path)
        stage.count(f"{path} was not answered", int(status != 200))
        found.append(round(took * 1e3, 2))
        await asyncio.sleep(took)  # not in step with anything
    return found


@contextlib.asynccontextmanager
async def _open(
    streams: Streams, ports: list[int], number: int, stage: Stage
) -> AsyncIterator[None]:
    """Streams that are open as long as the block runs; their errors are counted."""
    try:
        await streams.start(ports, number, max(streams.interval, number / OPENED_S))
        yield
    finally:
        streams.stop()
        for why, broken in streams.errors.items():
            stage.count(why, broken)


def measure_decision(plan: Plan) -> Decided:
    """A look at the load and a decision, with few and with many in flight, in turns."""
    policy = FrontierPolicy(Frontier.total(32))
    trackers = {FEW: LoadTracker(), MANY: LoadTracker()}
    for number, tracker in trackers.items():
        for at in range(number):
            tracker.lease((SPECULATIVE, BASELINE)[at % 2], 1.0)
    best: dict[int, float] = {}
    for _ in range(ROUNDS):
        for number, tracker in trackers.items():
            took = timeit.timeit(
                lambda tracker=tracker: policy.decide(tracker.snapshot(1.0), NOTHING_KNOWN),  # type: ignore[misc]
                number=plan.decisions,
            )
            best[number] = min(best.get(number, took), took)
    few, many = (round(best[number] / plan.decisions * 1e6, 3) for number in (FEW, MANY))
    return Decided(few=FEW, few_us=few, many=MANY, many_us=many)


def _gaps(seconds: Iterable[float]) -> Gaps:
    known = list(seconds)
    found = (percentile(known, share) for share in (0.5, 0.99, 1.0))
    return Gaps(*(None if each is None else round(each * 1e3, 2) for each in found))
