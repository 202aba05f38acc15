"""The scheduler's loop against a clock that a test moves, and the mailbox of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loadtest.batching import Sequence
from loadtest.engine_config import EngineConfig
from loadtest.engine_core import EngineCore
from loadtest.engine_generation import Event, Generation
from loadtest.gpu_share import OwnGpu
from loadtest.service import ServiceCurve
from router.load import Role
from tests.engines import ManualClock, looped
from tests.stack import until

CURVE = ServiceCurve(
    label="test",
    source="made up",
    points=((1, 0.010), (11, 0.020)),
    prefill_s_per_token=0.001,
    kept_share=0.5,
)


class RecordingClock(ManualClock):
    """A clock that passes as fast as it is asked to, and remembers for how long it was."""

    def __init__(self, late: float = 0.0) -> None:
        super().__init__()
        self.slept: list[float] = []
        self.late = late

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(max(0.0, seconds) + self.late)
        await asyncio.sleep(0)


class BusyGpu(OwnGpu):
    """A GPU whose other server runs three requests."""

    def others_running(self, now: float) -> int:
        return 3


def core(clock: ManualClock, **settings: Any) -> EngineCore:
    gpu = settings.pop("gpu", OwnGpu())
    assert isinstance(gpu, OwnGpu)
    mine: dict[str, Any] = {"curve": CURVE, "time_scale": 1.0}
    config = EngineConfig.quick(**(mine | settings))
    return EngineCore(config, clock, gpu)


async def serve_one(engine: EngineCore, output: int) -> Generation:
    """Run the core until one request has all its tokens."""
    generation = engine.submit([20], [output], ["length"], stream=True)
    assert generation is not None
    loop = asyncio.create_task(engine.run())
    while await generation.news():
        pass
    loop.cancel()
    return generation


@pytest.mark.parametrize(
    ("settings", "prefill", "decode"),
    [
        ({}, 0.020, 0.010),
        ({"time_scale": 3.0}, 0.060, 0.030),
        ({"gpu": BusyGpu()}, 0.040, 0.020),
    ],
)
@looped
async def test_step_times(settings: dict[str, Any], prefill: float, decode: float) -> None:
    """A step takes the curve's time, times the scale, over the share that is kept."""
    clock = RecordingClock()
    await serve_one(core(clock, **settings), 4)
    assert clock.slept[:4] == pytest.approx([prefill, decode, decode, decode])


@looped
async def test_late_wakeups_do_not_add_up() -> None:
    """A clock that wakes 2 ms late each time shortens the next sleep by as much."""
    clock = RecordingClock(late=0.002)
    generation = await serve_one(core(clock), 101)
    took = generation.finished_at - generation.queued_at
    assert took == pytest.approx(0.020 + 100 * 0.010 + 0.002)


@looped
async def test_too_slow_a_machine() -> None:
    """A server that falls far behind does not try to catch up: each step takes its whole time."""
    clock = RecordingClock(late=1.0)
    await serve_one(core(clock), 4)
    assert clock.slept[:4] == pytest.approx([0.020, 0.010, 0.010, 0.010])


@looped
async def test_report_lags() -> None:
    """A prefill publishes without its own requests; decoding publishes every 15 steps."""
    engine = core(RecordingClock())
    published = {}
    generation = engine.submit([20], [40], ["length"], stream=True)
    assert generation is not None
    loop = asyncio.create_task(engine.run())
    while events := await generation.news():
        published[events[-1].first] = (engine.report.running, engine.report.at)
    loop.cancel()
    assert published[0][0] == 0
    assert {at for token, (_, at) in published.items() if 2 <= token < 15} == {published[5][1]}
    assert published[5][1] < published[20][1] < published[36][1]
    assert published[20][0] == 1


@looped
async def test_idle_reports_nobody() -> None:
    """When the last request has ended the report is empty at once."""
    engine = core(RecordingClock())
    loop = asyncio.create_task(engine.run())
    generation = engine.submit([1], [5], ["length"], stream=True)
    assert generation is not None
    while await generation.news():
        pass
    await until(lambda: engine.report.running == 0 and engine.batch.idle, what="idle")
    assert engine.load().running == 0
    loop.cancel()


@looped
async def test_pace() -> None:
    """The decode log's pace: tokens per second and accept length of the last 40 steps."""
    engine = core(RecordingClock(), role=Role.SPECULATIVE, accept_length=2.5)
    generation = engine.submit([20], [400], ["length"], stream=True)
    assert generation is not None
    loop = asyncio.create_task(engine.run())
    paces = set()
    while await generation.news():
        paces.add((round(engine.pace.accept_length, 1), round(engine.pace.tokens_s)))
    loop.cancel()
    assert {(0.0, 0), (2.5, 250)} < paces


@looped
async def test_refused_as_a_whole() -> None:
    """If the queue has no room for all choices of a request, it takes none of them."""
    engine = core(ManualClock(), max_running_requests=1, max_queued_requests=1)
    assert engine.submit([1] * 3, [5] * 3, ["length"] * 3, stream=True) is None
    assert engine.waiting == 0
    assert engine.submit([1] * 2, [5] * 2, ["length"] * 2, stream=True) is not None


@looped
async def test_close_wakes_readers() -> None:
    """The end of a server ends the wait of every request."""
    engine = core(ManualClock())
    generation = engine.submit([1], [5], ["length"], stream=True)
    assert generation is not None
    waiting = asyncio.create_task(generation.news())
    await asyncio.sleep(0)
    engine.close()
    assert await waiting == []


def mailbox(*, stream: bool) -> Generation:
    sequences = [Sequence(key, 1, 9, 0.0) for key in (1, 2)]
    return Generation(sequences, ["length", "length"], stream=stream, speculative=False)


def produce(generation: Generation, choice: int, tokens: int, finish: str | None = None) -> None:
    generation.sequences[choice].produced += tokens
    generation.deliver(choice, tokens, finish)


@looped
async def test_news_pile_up() -> None:
    """What came since the last look is one event for each choice."""
    generation = mailbox(stream=True)
    produce(generation, 0, 1)
    produce(generation, 1, 2)
    produce(generation, 0, 3, "length")
    assert await generation.news() == [Event(0, 0, 4, "length"), Event(1, 0, 2, None)]
    produce(generation, 1, 1, "stop")
    assert await generation.news() == [Event(1, 2, 1, "stop")]
    assert await generation.news() == []


@looped
async def test_one_piece_is_woken_once() -> None:
    """A request that does not stream hears nothing before all its choices have ended."""
    generation = mailbox(stream=False)
    reader = asyncio.create_task(generation.news())
    produce(generation, 0, 5, "length")
    await asyncio.sleep(0)
    assert not reader.done()
    produce(generation, 1, 5, "length")
    assert await reader == []
    assert generation.done
    assert generation.produced == 10
