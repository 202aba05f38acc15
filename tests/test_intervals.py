"""Intervals: against tables, against a naive computation, and against their own promise."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.intervals import mean_figure, order_bounds, percentile, student_t
from loadtest.sweep_schema import Figure

VALUES = st.lists(st.floats(0.001, 1e4), min_size=1, max_size=80)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706), (2, 4.303), (9, 2.262), (30, 2.042), (40, 2.021), (60, 2.000), (120, 1.980)],
)
def test_student_t(freedom: int, expected: float) -> None:
    """The quantiles are those of the tables, also where they are computed."""
    assert student_t(freedom) == pytest.approx(expected, abs=6e-4)


def test_mean_of_known_values() -> None:
    """The interval of five values is the one of the textbook: mean ± t s / sqrt(n)."""
    figure = mean_figure([10.0, 12.0, 11.0, 13.0, 9.0])
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    bounds = (figure.value, figure.low, figure.high)
    assert bounds == pytest.approx((11.0, 11 - half, 11 + half))


def test_one_value_has_no_interval() -> None:
    """Of one value nothing can be said but itself."""
    assert mean_figure([7.0]) == Figure(7.0)


@given(VALUES, st.sampled_from([0.5, 0.9, 0.99]))
def test_percentile_is_the_naive_one(values: list[float], share: float) -> None:
    """A percentile is the first value, in order, that so large a share does not exceed."""
    figure = percentile(sorted(values), share)
    naive = next(
        value for value in sorted(values) if sum(v <= value for v in values) >= share * len(values)
    )
    assert figure is not None
    assert figure.value == naive


@given(VALUES, st.sampled_from([0.5, 0.9, 0.99]))
def test_percentile_lies_in_its_interval(values: list[float], share: float) -> None:
    """Whatever the values, the bounds are on both sides of the figure."""
    figure = percentile(sorted(values), share)
    assert figure is not None
    assert figure.low is None or figure.low <= figure.value
    assert figure.high is None or figure.high >= figure.value


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_mean_lies_in_its_interval(values: list[float]) -> None:
    """Whatever the values, the mean is between its bounds."""
    figure = mean_figure(values)
    assert figure.low is not None
    assert figure.high is not None
    assert figure.low <= figure.value <= figure.high


@pytest.mark.parametrize(
    ("count", "share", "bounds"),
    [
        # Conover, Practical Nonparametric Statistics: ranks of the binomial, by table.
        (10, 0.5, (2, 9)),
        (20, 0.5, (6, 15)),
        (5, 0.5, (None, None)),
        (6, 0.5, (1, 6)),
        (367, 0.99, (359, None)),
        (368, 0.99, (360, 368)),
    ],
)
def test_ranks(count: int, share: float, bounds: tuple[int | None, int | None]) -> None:
    """The ranks are those of the binomial distribution, and too few values give no bound."""
    assert order_bounds(count, share) == bounds


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [1, 7, 60, 400, 3000])
def test_ranks_are_the_exact_ones(count: int, share: float) -> None:
    """The short way of adding up gives what the plain sum of all probabilities gives."""
    chances = (
        [math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1)]
        if count < 1000
        else None
    )
    low, high = order_bounds(count, share)
    if chances is None:
        middle, wide = count * share, 1.96 * math.sqrt(count * share * (1 - share))
        assert low == pytest.approx(middle - wide, abs=2)
        assert high == pytest.approx(middle + wide + 1, abs=2)
        return
    lows = [rank for rank in range(1, count + 1) if math.fsum(chances[:rank]) <= 0.025]
    highs = [rank for rank in range(1, count + 1) if math.fsum(chances[rank:]) <= 0.025]
    assert low == max(lows, default=None)
    assert high == min(highs, default=None)


def test_intervals_hold_what_they_promise() -> None:
    """In 95 of 100 samples of a skewed distribution the true median is in its interval."""
    chance = random.Random(5)
    truth = math.log(2)
    inside = 0
    for _ in range(600):
        figure = percentile(sorted(chance.expovariate(1.0) for _ in range(50)), 0.5)
        assert figure is not None
        assert figure.low is not None
        assert figure.high is not None
        inside += figure.low <= truth <= figure.high
    assert 0.93 <= inside / 600 <= 0.99


def test_means_hold_what_they_promise() -> None:
    """The same for the mean of five values."""
    chance = random.Random(6)
    figures = [mean_figure([chance.gauss(3.0, 1.0) for _ in range(5)]) for _ in range(800)]
    inside = statistics.fmean((f.low or 0) <= 3.0 <= (f.high or 0) for f in figures)
    assert 0.93 <= inside <= 0.97
