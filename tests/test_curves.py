"""Curves in a calibration: reading between the points, and where two of them cross."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.curves import Curve, Curves, Point, best_cut, common_levels, straight


def curve(*pairs: tuple[float, float]) -> Curve:
    return Curve(tuple(Point(concurrency=n, tokens_per_second=speed) for n, speed in pairs))


def test_a_curve_is_straight_on_logarithmic_axes() -> None:
    """Between two points a power law holds, beyond the ends the last value."""
    found = curve((1, 100), (4, 200), (16, 200))
    assert [found.tokens_per_second(n) for n in (0.5, 1, 2, 4, 8, 16, 99)] == pytest.approx(
        [100, 100, 100 * math.sqrt(2), 200, 200, 200, 200]
    )


def test_points_need_not_be_in_order() -> None:
    """A file written by hand in any order reads the same."""
    assert curve((4, 200), (1, 100)).tokens_per_second(2) == pytest.approx(100 * math.sqrt(2))


@pytest.mark.parametrize("points", [(), ((0, 5),), ((4, 0),), ((1, 5), (2, -1))])
def test_a_curve_that_no_server_has(points: tuple[tuple[float, float], ...]) -> None:
    """No points, or one that is not above zero, cannot be read between."""
    with pytest.raises(ValueError, match="a curve needs points"):
        curve(*points).tokens_per_second(3)


def test_the_crossover_of_two_curves() -> None:
    """It is where both are equal; a higher accept length moves it up, a lower one down."""
    pair = Curves(
        speculative=curve((1, 200), (16, 1600), (256, 1600)),
        baseline=curve((1, 100), (16, 1600), (256, 6400)),
    )
    assert pair.crossover() == pytest.approx(16)
    assert pair.crossover(speedup=2.0) == pytest.approx(64)
    assert pair.crossover(speedup=0.5) == 0.0
    assert pair.crossover(speedup=5.0) == math.inf


def test_curves_without_a_common_range() -> None:
    """Sweeps of different ranges cannot be compared."""
    with pytest.raises(ValueError, match="no range"):
        Curves(curve((1, 5), (4, 9)), curve((8, 5), (16, 9))).crossover()
    with pytest.raises(ValueError, match="no range"):
        common_levels([], [1.0])


def test_the_common_levels_are_those_inside_both_ranges() -> None:
    """Levels of either sweep count where both have measured around them."""
    assert common_levels([1, 4, 8], [2, 4, 16]) == [2, 4, 8]


@pytest.mark.parametrize(
    ("lead", "cut"),
    [
        ([0.5, 0.2, 0.1, 0.3], math.inf),
        ([-0.5, -0.2, -0.1, -0.3], 0.0),
        ([0.0, 0.0, 0.0, 0.0], 0.0),
        ([1.0, -1.0, -1.0, -1.0], math.exp(0.5)),
        ([1.0, 1.0, 0.0, -1.0], math.exp(2)),
        # A touch of the baseline on the way does not end it; a long stretch does.
        ([1.0, -0.1, 1.0, -1.0], math.exp(2.5)),
        ([0.1, -1.0, 0.1, -0.1], math.exp(0.1 / 1.1)),
        # Behind at first, ahead for long: the best single cut is the far one.
        ([-0.1, 1.0, 1.0, -1.0], math.exp(2.5)),
        ([-1.0, -1.0, 0.1, 0.1], 0.0),
    ],
)
def test_the_best_cut(lead: list[float], cut: float) -> None:
    """The cut with the largest gain is taken, never and always among them."""
    assert best_cut([0.0, 1.0, 2.0, 3.0], lead) == pytest.approx(cut)


def test_the_cut_of_one_level() -> None:
    """One level has no area: its sign decides."""
    assert (best_cut([1.0], [0.1]), best_cut([1.0], [-0.1])) == (math.inf, 0.0)


@given(
    lead=st.lists(st.floats(-2, 2, allow_subnormal=False), min_size=2, max_size=9),
    other=st.floats(0, 8),
)
@settings(deadline=None)
def test_no_other_cut_gains_more(lead: list[float], other: float) -> None:
    """Whatever cut somebody else proposes, it gains no more than the one that is found."""
    levels = [float(i) for i in range(len(lead))]
    other = min(other, levels[-1])

    def gain(x: float) -> float:
        total = 0.0
        for (low, high), (before, after) in zip(
            itertools.pairwise(levels), itertools.pairwise(lead), strict=True
        ):
            end = min(x, high)
            if end > low:
                total += (end - low) * (before + straight(levels, lead, end)) / 2
            if x <= high:
                break
            del after
        return total

    cut = best_cut(levels, lead)
    at = levels[-1] if math.isinf(cut) else math.log(cut) if cut else 0.0
    assert gain(at) >= gain(other) - 1e-9
    assert gain(at) >= -1e-12
