"""Loads as functions of time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import ClosedLoop, Level, Ramp, up_and_down


def test_ramp() -> None:
    """One level follows the other without a gap, each for equally long."""
    ramp = Ramp((1, 4, 2), 1.5)
    assert ramp.levels == (Level(1, 0.0, 1.5), Level(4, 1.5, 3.0), Level(2, 3.0, 4.5))
    assert ramp.seconds == 4.5
    assert ramp.peak == 4


@pytest.mark.parametrize(
    ("elapsed", "concurrency"),
    [(-1, 1), (0, 1), (1.4, 1), (1.5, 4), (2.999, 4), (3.0, 2), (4.499, 2), (4.5, None), (9, None)],
)
def test_level_at(elapsed: float, concurrency: int | None) -> None:
    """A level holds from its start to just before its end; after the last there is none."""
    level = Ramp((1, 4, 2), 1.5).level_at(elapsed)
    assert (level and level.concurrency) == concurrency


@given(st.floats(0.001, 100), st.integers(1, 40), st.floats(0, 1))
def test_the_level_holds_the_moment(seconds: float, count: int, share: float) -> None:
    """Whatever the rounding, the level that is found is the one whose bounds hold the moment."""
    ramp = Ramp(range(1, count + 1), seconds)
    for elapsed in (share * ramp.seconds, *(level.start for level in ramp.levels)):
        level = ramp.level_at(elapsed)
        if level is None:
            assert elapsed >= ramp.seconds
        else:
            assert level.start <= elapsed < level.end
    assert all(a.end == b.start for a, b in itertools.pairwise(ramp.levels))


def test_closed_loop() -> None:
    """A closed loop is one level for some time."""
    loop = ClosedLoop(8, 2.0)
    assert loop.levels == (Level(8, 0.0, 2.0),)
    assert loop.level_at(1.9) == loop.levels[0]
    assert loop.level_at(2.0) is None


@pytest.mark.parametrize("levels", [(), (1, 0), (-1,)])
def test_no_load(levels: tuple[int, ...]) -> None:
    """A load without requests is refused."""
    with pytest.raises(ValueError, match="at least 1 request"):
        Ramp(levels, 1)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_no_time(seconds: float) -> None:
    """A level lasts for some time, and comes to an end."""
    with pytest.raises(ValueError, match="more than 0 seconds"):
        Ramp((1,), seconds)


def test_up_and_down() -> None:
    """The way back has the same levels, the peak once."""
    assert up_and_down((1, 2, 4)) == (1, 2, 4, 2, 1)
    assert up_and_down((3,)) == (3,)
