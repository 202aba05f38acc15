"""Requests at given times: the process they come from, and the run that sends them."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Iterator

import pytest

from loadtest.open_loop import OpenRun, poisson
from loadtest.record import RequestRecord
from tests.sweeps import record
from tests.virtual_time import now, run


def test_poisson_has_its_rate_and_shape() -> None:
    """Gaps have the mean 1/rate and, being exponential, the same standard deviation."""
    times = list(itertools.islice(poisson(4.0, seed=1), 20_000))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)
    assert min(gaps) >= 0


def test_poisson_is_seeded() -> None:
    """One seed gives one load, another another."""
    first, again, other = (list(itertools.islice(poisson(4.0, seed), 9)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_no_rate(rate: float) -> None:
    """A rate that is none is refused at once."""
    with pytest.raises(ValueError, match="above 0 requests a second"):
        poisson(rate, 0)


def open_run(
    arrivals: Iterator[float], seconds: float, until: float, *, fails: bool = False, **more: int
) -> OpenRun:
    """A run whose requests take so long, until a moment of virtual time."""

    async def send(number: int) -> RequestRecord:
        began = now()
        await asyncio.sleep(seconds)
        return record(began, now(), id=str(number), error="no" if fails else None)

    return OpenRun(arrivals, send, lambda elapsed: elapsed < until, now, tick=0.05, **more)


def test_requests_start_when_they_are_due() -> None:
    """A slow server changes nothing about when requests are sent, and what is open at the end is cut."""

    async def work() -> tuple[float, OpenRun]:
        load = open_run(iter((0.5, 1.0, 1.25, 9.0, 99.0)), 2.0, 10.0)
        began = now()
        await load.run()
        return began, load

    began, load = run(work())
    starts = [one.started - began for one in load.records]
    assert starts == pytest.approx([0.5, 1.0, 1.25])
    assert (load.in_flight, load.failures, load.gave_up) == (0, 0, False)


def test_too_many_open() -> None:
    """A server that does not keep up ends the run before the machine does."""

    async def work() -> tuple[OpenRun, float]:
        load = open_run(poisson(100.0, 0), 60.0, 50.0, most_open=30)
        await load.run()
        return load, load.elapsed

    load, elapsed = run(work())
    assert load.gave_up
    assert load.records == []
    assert 0.2 < elapsed < 2


def test_too_many_failures() -> None:
    """A server that fails is not asked for ever."""
    load = open_run(poisson(100.0, 0), 0.01, 50.0, fails=True, most_failures=20)
    run(load.run())
    assert load.gave_up
    assert 20 <= load.failures < 30


def test_cancelled() -> None:
    """A cancelled run leaves no request behind."""

    async def work() -> OpenRun:
        load = open_run(poisson(10.0, 0), 60.0, 1e9)
        task = asyncio.ensure_future(load.run())
        await asyncio.sleep(3.0)
        assert load.in_flight > 10
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return load

    load = run(work())
    assert load.in_flight == 0
    assert load.records == []
