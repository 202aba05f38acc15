"""When a level is warm, measured and over: rules as tables, without a clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import Level
from loadtest.sweep_phases import OPEN_ANSWERS, Meeting, Phase, Phases
from loadtest.sweep_schema import Pace

PACE = Pace(warm_up_s=2, most_warm_up_s=20, window_s=10, most_window_s=60, per_slot=3)


def started(slots: int = 2) -> Phases:
    phases = Phases(slots, PACE)
    for number in range(slots):
        phases.sent(number)
    return phases


def answered(phases: Phases, first: int, count: int) -> None:
    for number in range(first, first + count):
        phases.ended(number)
        phases.sent(number + 100)


def test_warm_up_lasts_until_each_slot_has_had_an_answer() -> None:
    """Neither the time alone nor the answers alone make a level warm."""
    phases = started()
    phases.ended(0)
    assert phases.advance(3.0) is Phase.WARM_UP
    phases.ended(1)
    assert phases.advance(3.5) is Phase.WINDOW
    assert (phases.window_start, phases.unwarmed) == (3.5, 0)
    quick = started()
    answered(quick, 0, 2)
    assert quick.advance(1.9) is Phase.WARM_UP
    assert quick.advance(2.0) is Phase.WINDOW


def test_warm_up_is_bounded() -> None:
    """After its longest time the window begins, and says how many slots are cold."""
    phases = started(3)
    phases.ended(1)
    assert phases.advance(19.9) is Phase.WARM_UP
    assert phases.advance(20.0) is Phase.WINDOW
    assert phases.unwarmed == 2


def window(slots: int = 2) -> Phases:
    phases = started(slots)
    answered(phases, 0, slots)
    assert phases.advance(2.0) is Phase.WINDOW
    return phases


def test_runs_that_meet_open_their_windows_together() -> None:
    """The one that is warm first waits under load, however long the other's answers take."""
    meeting = Meeting(2)
    quick, slow = (Phases(1, PACE, meeting) for _ in range(2))
    for phases in (quick, slow):
        phases.sent(0)
    quick.ended(0)
    assert quick.advance(9.0) is Phase.WARM_UP
    slow.ended(0)
    assert slow.advance(9.5) is Phase.WINDOW
    assert quick.advance(9.55) is Phase.WINDOW
    assert (quick.window_start, slow.window_start) == (9.55, 9.5)
    alone = Phases(1, PACE, Meeting(2))
    alone.sent(0)
    alone.ended(0)
    assert [alone.advance(at) for at in (19.9, 20.0)] == [Phase.WARM_UP, Phase.WINDOW]


def test_window_lasts_until_answers_are_enough() -> None:
    """The window is as long as asked, longer while answers are few, and never beyond its bound."""
    phases = window()
    answered(phases, 100, 6)
    assert phases.advance(11.9) is Phase.WINDOW
    assert phases.advance(12.0) is Phase.TAIL
    assert phases.window_end == 12.0
    few = window()
    answered(few, 100, 2)
    assert few.advance(30.0) is Phase.WINDOW
    assert few.advance(62.0) is Phase.TAIL
    assert few.answers == 2


def test_tail_lasts_until_what_was_open_has_ended() -> None:
    """Requests that began after the window are not waited for."""
    phases = window()
    answered(phases, 100, 6)
    phases.advance(12.0)
    open_then = [205, 204, 203, 202, 201, 200]
    phases.sent(900)
    for number in open_then:
        assert phases.advance(13.0) is Phase.TAIL
        phases.ended(number)
    assert phases.advance(13.0) is Phase.OVER
    assert phases.level_at(14.0) is None


def test_changes_are_told_when_they_happen() -> None:
    """Each phase is told once, in order."""
    phases = started()
    told: list[Phase] = []
    phases.on_change = told.append
    answered(phases, 0, 2)
    for at in range(3, 200):
        phases.advance(float(at))
        for number in (100, 101):
            phases.ended(number)
    assert told == [Phase.WINDOW, Phase.TAIL, Phase.OVER]


def test_an_open_loop_is_warm_after_its_first_answer() -> None:
    """Without slots the first answer makes it warm, and thirty make its window whole."""
    phases = Phases(None, PACE)
    phases.sent(0)
    assert phases.advance(5.0) is Phase.WARM_UP
    phases.ended(0)
    assert phases.advance(5.0) is Phase.WINDOW
    for number in range(1, OPEN_ANSWERS):
        phases.ended(number)
    assert phases.advance(16.0) is Phase.WINDOW
    phases.ended(OPEN_ANSWERS)
    assert phases.advance(16.0) is Phase.TAIL


def test_as_a_load() -> None:
    """A closed run asks for the level again after a tick."""
    phases = started(5)
    level = phases.level_at(1.0)
    assert level is not None
    assert (level.concurrency, level.start) == (5, 0.0)
    assert level.end == pytest.approx(1.05)
    assert phases.levels == (Level(5, 0.0, math.inf),)
    assert phases.seconds == 80


@given(st.lists(st.floats(0.01, 3), min_size=5, max_size=80), st.integers(1, 6))
def test_share_never_falls(steps: list[float], slots: int) -> None:
    """However a run goes, the bar moves one way and ends at its end."""
    phases, elapsed, before = started(slots), 0.0, 0.0
    for at, step in enumerate(steps):
        elapsed += step
        phases.ended(at)
        phases.advance(elapsed)
        share = phases.share(elapsed)
        assert before <= share <= 1.0
        before = share
    if phases.phase in {Phase.TAIL, Phase.OVER}:
        assert before == 1.0


def test_a_window_that_waits_for_no_answers_has_a_share_too() -> None:
    """Without a number of answers to wait for, time alone says how far a window is."""
    phases = Phases(1, Pace(warm_up_s=0, window_s=10, most_window_s=10, per_slot=0))
    phases.sent(0)
    phases.ended(0)
    assert phases.advance(0.0) is Phase.WINDOW
    assert phases.share(5.0) == pytest.approx(0.5)
