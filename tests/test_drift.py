"""Real traffic against the curves: what counts as a measurement, and when it is a drift."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.drift import BOUND, ENOUGH, CurveDrift, DriftMeter
from router.load import LoadTracker, Role
from router.metrics import Finished, Outcome
from router.report import measure
from router.request import RequestInfo

if TYPE_CHECKING:
    from router.exchange import Exchange

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
POINTS = [(1, 100.0), (4, 300.0), (16, 800.0), (64, 1600.0)]


def meter() -> DriftMeter:
    return DriftMeter({SPEC: POINTS, BASE: [(1, 50.0), (64, 2000.0)]})


def feed(found: DriftMeter, role: Role, level: int, factor: float, times: int = ENOUGH) -> None:
    """So many requests at a level, each so much faster than the curve says."""
    speed = CurveDrift(POINTS).promised(level) * factor
    for _ in range(times):
        found.observe(role, level - 1, level - 1, 200, 200 / speed)


@pytest.mark.parametrize(
    ("level", "speed"),
    [(1, 100.0), (4, 75.0), (16, 50.0), (64, 25.0), (2, math.sqrt(100 * 75)), (500, 25.0)],
)
def test_a_curve_promises_one_request_its_share(level: float, speed: float) -> None:
    """Tokens per second over requests in flight, straight between points on logarithmic scales."""
    assert CurveDrift(POINTS).promised(level) == pytest.approx(speed)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0, 1.3, 2.0])
@pytest.mark.parametrize("level", [1, 3, 16, 50])
def test_a_steady_factor_is_found_at_every_level(factor: float, level: int) -> None:
    """Whatever the load, traffic that is so much faster than the curve shows that ratio."""
    found = meter()
    feed(found, SPEC, level, factor)
    assert found.ratio(SPEC) == pytest.approx(factor, rel=0.02)
    assert found.ratio(BASE) is None
    assert found.drifted == ((SPEC,) if not 1 / BOUND <= factor <= BOUND else ())


def test_a_change_of_load_is_no_drift() -> None:
    """Slower answers because more requests run are what the curve says."""
    found = meter()
    for level in (1, 4, 16, 64, 16, 4, 1):
        feed(found, SPEC, level, 1.0, 20)
    assert found.ratio(SPEC) == pytest.approx(1.0)


def test_too_few_requests_say_nothing() -> None:
    """Below the minimum the ratio is unknown, not one."""
    found = meter()
    feed(found, SPEC, 4, 0.5, ENOUGH - 1)
    assert found.ratio(SPEC) is None
    assert not found.drifted
    feed(found, SPEC, 4, 0.5, 1)
    assert found.ratio(SPEC) == pytest.approx(0.5)


def test_what_cannot_be_compared_is_left_out() -> None:
    """Changing company, unknown tokens, no duration and levels beyond the curve are no measurement."""
    found = meter()
    for _ in range(ENOUGH):
        found.observe(SPEC, 2, 20, 100, 1.0)
        found.observe(SPEC, 20, 2, 100, 1.0)
        found.observe(SPEC, 3, 3, None, 1.0)
        found.observe(SPEC, 3, 3, 0, 1.0)
        found.observe(SPEC, 3, 3, 100, 0.0)
        found.observe(SPEC, 200, 200, 100, 1.0)
    assert found.ratio(SPEC) is None


def test_a_server_that_recovers_is_forgiven() -> None:
    """The smoothing forgets: after some sixty good requests the old ones weigh little."""
    found = meter()
    feed(found, SPEC, 4, 0.4)
    assert found.drifted == (SPEC,)
    feed(found, SPEC, 4, 1.0, 60)
    assert not found.drifted


def test_noise_is_not_a_drift() -> None:
    """Requests that scatter by a third around the curve raise no alarm."""
    dice = random.Random(7)
    found = meter()
    for _ in range(400):
        level = dice.choice([1, 2, 4, 8, 16, 32, 64])
        speed = CurveDrift(POINTS).promised(level) * math.exp(dice.gauss(0.0, 0.3))
        found.observe(SPEC, level - 1, level - 1, 100, 100 / speed)
    ratio = found.ratio(SPEC)
    assert ratio is not None
    assert 0.85 < ratio < 1.15
    assert not found.drifted


@pytest.mark.parametrize(
    "points",
    [[], [(0, 1.0)], [(2, 10.0), (1, 5.0)], [(-1, 5.0)], [(1, 0.0)], [(1, 5.0), (1, 6.0)][::-1]],
)
def test_a_curve_that_is_none_is_refused(points: list[tuple[float, float]]) -> None:
    """A drift needs points of rising, positive concurrency."""
    with pytest.raises(ValueError, match="a curve needs points"):
        CurveDrift(points)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 5000),
                  st.floats(1e-3, 1e3)),
        max_size=200,
    )
)  # fmt: skip
def test_any_traffic_gives_a_positive_ratio_or_none(
    traffic: list[tuple[int, int, int, float]],
) -> None:
    """Whatever is observed, the ratio lies between the extremes of what was measured."""
    found = meter()
    measured = []
    for before, after, tokens, seconds in traffic:
        found.observe(SPEC, before, after, tokens, seconds)
        level = 1 + (before + after) / 2
        if abs(after - before) <= 0.25 * level and level <= 64.5:
            measured.append(tokens / seconds / CurveDrift(POINTS).promised(level))
    ratio = found.ratio(SPEC)
    if ratio is not None:
        assert min(measured) * 0.999 <= ratio <= max(measured) * 1.001


def finished(**changes: Any) -> Finished:
    """A whole answer of 100 tokens in 2 s, as the record of a request that is over."""
    fields: dict[str, Any] = {
        "request_id": "r", "route": "chat_completions", "backend": SPEC, "reason": None, "n": 3,
        "m": 40, "threshold": None, "status": 200, "outcome": Outcome.OK, "stream": True,
        "received_at": 0.0, "decided_at": 5.0, "sent_at": 5.0, "first_byte_at": 5.5,
        "ended_at": 7.0, "queue_wait": 5.0, "bytes_in": 1, "bytes_out": 1, "chunks": 1,
        "prompt_tokens": 1, "output_tokens": 100, "replay": None, "error": None,
    }  # fmt: skip
    return Finished(**(fields | changes))


class Told(DriftMeter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def observe(
        self, role: Role, before: int, after: int, tokens: int | None, seconds: float
    ) -> None:
        self.told.append((role, before, after, tokens, seconds))


def hand_over(done: Finished, choices: int = 1) -> list[tuple[object, ...]]:
    """What the meter hears of a request that is over."""
    tracker, told = LoadTracker(), Told()
    for role, others in ((SPEC, 4), (BASE, 41)):
        for _ in range(others):
            tracker.lease(role, 6.0)
    info = RequestInfo(True, False, False, choices, 10)
    exchange = SimpleNamespace(request=SimpleNamespace(info=info))
    measure(told, cast("Exchange", exchange), done, tracker)
    return told.told


def test_a_whole_answer_is_measured_in_its_own_company() -> None:
    """The concurrency of its own backend at the decision and at the end; without our queue."""
    assert hand_over(finished()) == [(SPEC, 3, 4, 100, 2.0)]
    assert hand_over(finished(backend=BASE)) == [(BASE, 40, 41, 100, 2.0)]


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": Outcome.BACKEND_LOST}, {"outcome": Outcome.CLIENT_GONE}, {"replay": "connect"},
        {"backend": None}, {"sent_at": None},
    ],
)  # fmt: skip
def test_what_is_no_whole_answer_is_not_measured(changes: dict[str, Any]) -> None:
    """Neither a cut one, nor one that was sent twice, nor one that was never sent."""
    assert hand_over(finished(**changes)) == []


def test_an_answer_of_several_choices_is_not_measured() -> None:
    """It is one request in flight with the tokens of two."""
    assert hand_over(finished(), choices=2) == []
