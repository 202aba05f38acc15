"""The smoother: the shapes that it promises, and that nothing of that shape is closer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.smooth import Concave, no_faster, rising

values = st.floats(-4, 4, allow_subnormal=False)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[float], list[float]]:
    """Rising levels, positive weights, values."""
    gaps = draw(st.lists(st.floats(0.05, 2.0), min_size=1, max_size=11))
    levels = list(itertools.accumulate(gaps, initial=0.0))
    size = len(levels)
    weights = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 0.5]), min_size=size, max_size=size))
    return levels, weights, draw(st.lists(values, min_size=size, max_size=size))


def slopes(levels: Sequence[float], fitted: Sequence[float]) -> list[float]:
    return [
        (b - a) / (y - x)
        for (x, y), (a, b) in zip(
            itertools.pairwise(levels), itertools.pairwise(fitted), strict=True
        )
    ]


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def error(weights: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(w * (a - b) ** 2 for w, a, b in zip(weights, one, other, strict=True))


@given(problems(), st.sampled_from([0.0, 1.0]))
@settings(deadline=None)
def test_a_concave_fit_is_concave_and_not_too_steep(
    problem: tuple[list[float], list[float], list[float]], steepest: float
) -> None:
    """Its slopes start at the bound or below, and never rise."""
    levels, weights, measured = problem
    found = slopes(levels, Concave(levels, weights, steepest).fit(measured))
    assert found[0] <= steepest + 1e-6
    assert all(b <= a + 1e-6 for a, b in itertools.pairwise(found))


@given(problems(), st.sampled_from([0.0, 1.0]), st.data())
@settings(deadline=None)
def test_no_other_concave_curve_is_closer(
    problem: tuple[list[float], list[float], list[float]], steepest: float, data: st.DataObject
) -> None:
    """A step from the fit towards any curve of the shape brings it no nearer to the measurements."""
    levels, weights, measured = problem
    size = len(levels)
    steps = data.draw(st.lists(st.floats(0, 2), min_size=size - 1, max_size=size - 1))
    slope = itertools.accumulate(steps, lambda before, step: before - step, initial=steepest)
    other = list(
        itertools.accumulate(
            ((b - a) * s for (a, b), s in zip(itertools.pairwise(levels), slope, strict=False)),
            initial=data.draw(values),
        )
    )
    fitted = Concave(levels, weights, steepest).fit(measured)
    for share in (1.0, 0.1, 0.001):
        moved = [f + share * (o - f) for f, o in zip(fitted, other, strict=True)]
        assert error(weights, fitted, measured) <= error(weights, moved, measured) + 1e-7


@given(problems(), values)
@settings(deadline=None)
def test_a_fit_moves_with_its_values_and_keeps_what_fits(
    problem: tuple[list[float], list[float], list[float]], lift: float
) -> None:
    """Another unit shifts the fit and changes nothing else; a fit of a fit is the fit."""
    levels, weights, measured = problem
    shape = Concave(levels, weights, 1.0)
    fitted = shape.fit(measured)
    assert shape.fit([y + lift for y in measured]) == pytest.approx(
        [y + lift for y in fitted], abs=1e-6
    )
    assert shape.fit(fitted) == pytest.approx(fitted, abs=1e-6)
    assert 1 <= shape.freedom(fitted) <= len(levels)


@given(problems(), st.data())
@settings(deadline=None)
def test_a_fit_does_not_depend_on_the_one_before(
    problem: tuple[list[float], list[float], list[float]], data: st.DataObject
) -> None:
    """Starting from the knots of other values gives the same curve as starting from none."""
    levels, weights, measured = problem
    size = len(levels)
    other = data.draw(st.lists(values, min_size=size, max_size=size))
    used = Concave(levels, weights, 1.0)
    used.fit(other)
    assert used.fit(measured) == pytest.approx(
        Concave(levels, weights, 1.0).fit(measured), abs=1e-6
    )


@given(problems())
@settings(deadline=None)
def test_more_requests_never_make_a_request_faster(
    problem: tuple[list[float], list[float], list[float]],
) -> None:
    """Pooled, no slope is above the bound, and what was within it stays as it is."""
    levels, weights, measured = problem
    fitted = no_faster(levels, measured, weights, 1.0)
    assert all(slope <= 1.0 + 1e-6 for slope in slopes(levels, fitted))
    assert no_faster(levels, fitted, weights, 1.0) == pytest.approx(fitted, abs=1e-9)


@given(st.lists(st.tuples(values, st.floats(0.1, 5)), min_size=1, max_size=12))
def test_pooling_rises_and_keeps_the_mean(pairs: list[tuple[float, float]]) -> None:
    """Pooled values never fall, and their weighted mean is that of the values."""
    measured, weights = [y for y, _ in pairs], [w for _, w in pairs]
    fitted = rising(measured, weights)
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(fitted))
    assert dot(weights, fitted) == pytest.approx(dot(weights, measured), abs=1e-7)


def test_pooling_by_hand() -> None:
    """Two values in the wrong order become their weighted mean."""
    assert rising([1.0, 3.0, 2.0, 5.0], [1.0, 1.0, 3.0, 1.0]) == [1.0, 2.25, 2.25, 5.0]


def test_a_concave_fit_by_hand() -> None:
    """A dent is filled by the straight line that is nearest; one that bends is left as it is."""
    shape = Concave([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], 1.0)
    assert shape.fit([0.0, 0.0, 1.0]) == pytest.approx([-1 / 6, 1 / 3, 5 / 6])
    assert shape.fit([0.0, 0.9, 1.0]) == pytest.approx([0.0, 0.9, 1.0])
    assert shape.freedom([0.0, 0.9, 1.0]) == 3
    assert shape.fit([0.0, 2.0, 4.0]) == pytest.approx([1.0, 2.0, 3.0])  # slope 2 is too steep
    assert shape.freedom([1.0, 2.0, 3.0]) == 1


def test_levels_that_nearly_coincide_do_no_harm() -> None:
    """Levels a billionth apart, which make the equations singular, still give a finite fit."""
    levels = [0.0, 1.0, 1.0 + 1e-9, 1.0 + 2e-9, 2.0]
    fitted = Concave(levels, [1.0] * 5, 1.0).fit([0.0, 1.2, 0.7, 1.1, 1.4])
    assert all(math.isfinite(y) for y in fitted)
    assert max(abs(y) for y in fitted) < 3
