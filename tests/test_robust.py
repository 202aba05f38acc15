"""From noisy measurements to a curve: what is left out, what noise is said, what is taken as one."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.robust import TYPICAL_NOISE, Fitted, Sample, fit_curve
from tests.planted_sweeps import BASE, LEVELS, draw


def samples(values: Mapping[int, list[float]] | Mapping[float, list[float]]) -> list[Sample]:
    return [Sample(math.log(n), math.log(y)) for n, ys in values.items() for y in ys]


def exact(passes: int = 1) -> dict[int, list[float]]:
    return {n: [BASE.tok_s(n)] * passes for n in LEVELS}


def left_out(fitted: Fitted) -> list[tuple[int, int]]:
    return [(round(math.exp(s.x)), round(math.exp(s.y))) for s in fitted.outliers]


def test_one_stalled_measurement_is_left_out_and_named() -> None:
    """Half the speed in one of two passes is left out, and the curve is that of the other."""
    values = exact(2)
    values[48][0] /= 2
    fitted = fit_curve(samples(values), 1.0)
    assert left_out(fitted) == [(48, round(BASE.tok_s(48) / 2))]
    assert [math.exp(y) for y in fitted.values] == pytest.approx(
        [BASE.tok_s(n) for n in LEVELS], rel=1e-3
    )


def test_a_lone_measurement_is_left_out_when_both_neighbours_speak_against_it() -> None:
    """A level measured once, far below the straight line of its neighbours, does not decide."""
    values = exact()
    values[48][0] /= 2
    assert left_out(fit_curve(samples(values), 1.0)) == [(48, round(BASE.tok_s(48) / 2))]


def test_what_every_pass_says_is_the_server() -> None:
    """A level at which both passes are low is kept: the shape gives way, not the measurement."""
    values = exact(2)
    for n in (192, 256):
        values[n] = [y * 0.6 for y in values[n]]
    values[256] = [y * 1.3 for y in values[256]]
    fitted = fit_curve(samples(values), 1.0)
    assert fitted.outliers == ()
    assert fitted.deviation > 0.05
    assert math.exp(fitted.values[-2]) == pytest.approx(values[192][0], rel=0.1)


def test_a_collapse_is_not_smoothed_away() -> None:
    """A server that falls to a third and stays there is followed, though it bends the wrong way."""
    values = {n: [BASE.tok_s(n) * (1 if n < 96 else 0.33)] * 2 for n in LEVELS}
    fitted = fit_curve(samples(values), 1.0)
    assert fitted.outliers == ()
    assert fitted.deviation > 0.1
    assert [math.exp(y) for y in fitted.values] == pytest.approx(
        [values[n][0] for n in LEVELS], rel=0.05
    )


def test_a_kink_that_every_pass_has_is_kept() -> None:
    """A step of a few percent that twelve passes agree on is the server's, not noise."""
    drawn = [
        Sample(x, y - (0.12 if 40 < math.exp(x) < 70 else 0.0))
        for x, y in draw(BASE, random.Random(3), passes=12, noise=0.02, accidents=0.0)
    ]
    fitted = fit_curve(drawn, 1.0)
    assert 0.02 < fitted.deviation < 0.12
    assert fitted.noise < 0.03
    at = LEVELS.index(48)
    assert fitted.values[at] == pytest.approx(math.log(BASE.tok_s(48)) - 0.12, abs=0.02)


def test_levels_measured_once_do_not_make_a_kink() -> None:
    """Without repeats the same scatter is noise: no level is given a deviation of its own."""
    fitted = fit_curve(draw(BASE, random.Random(4), passes=1, noise=0.06, accidents=0.0), 1.0)
    assert fitted.deviation == 0.0
    assert fitted.noise > TYPICAL_NOISE


def test_overload_needs_no_other_shape() -> None:
    """Throughput that bends and then falls with more load is within the shape."""
    values = {n: [1000 * n / (1 + (n / 40) ** 1.5)] for n in (1, 4, 8, 16, 32, 64, 128, 256)}
    fitted = fit_curve(samples(values), 1.0)
    assert (fitted.deviation, fitted.outliers) == (0.0, ())
    assert max(fitted.values) > fitted.values[-1]


def test_three_lone_points_do_not_look_exact() -> None:
    """Without repeats and without spare levels the noise is what is typical, on few degrees."""
    fitted = fit_curve(samples({1: [90.0], 70: [770.0], 250: [773.0]}), 1.0)
    assert fitted.noise == pytest.approx(TYPICAL_NOISE)
    assert fitted.freedom == pytest.approx(4.0)


@pytest.mark.parametrize("noise", [0.02, 0.04, 0.1])
def test_the_noise_is_measured(noise: float) -> None:
    """With many passes the noise that is said is the noise that there was."""
    drawn = draw(BASE, random.Random(5), passes=12, noise=noise, accidents=0.0)
    assert fit_curve(drawn, 1.0).noise == pytest.approx(noise, rel=0.15)


def test_another_sweep_differs_by_the_noise() -> None:
    """Replicates scatter about the curve as a mean of three measurements does, or less."""
    fitted = fit_curve(draw(BASE, random.Random(6), passes=3, accidents=0.0), 1.0)
    rng = random.Random(0)
    last = [fitted.replicate(rng)[-1] for _ in range(300)]
    spread = statistics.stdev(last)
    assert statistics.fmean(last) == pytest.approx(fitted.values[-1], abs=0.02)
    assert 0.3 * fitted.noise / math.sqrt(3) < spread < 1.3 * fitted.noise / math.sqrt(3)


@given(seed=st.integers(0, 2**32), shuffle=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_the_order_of_passes_does_not_matter(seed: int, shuffle: random.Random) -> None:
    """The same measurements in another order give the same curve, to the last bit."""
    drawn = draw(BASE, random.Random(seed), accidents=0.1)
    mixed = list(drawn)
    shuffle.shuffle(mixed)
    one, other = fit_curve(drawn, 1.0), fit_curve(mixed, 1.0)
    assert one[:9] == other[:9]


@given(seed=st.integers(0, 2**32), unit=st.floats(-3, 3), crowd=st.floats(-1, 1))
@settings(deadline=None, max_examples=25)
def test_units_do_not_matter(seed: int, unit: float, crowd: float) -> None:
    """Other units of speed or of concurrency move the curve and change neither noise nor choice."""
    drawn = draw(BASE, random.Random(seed), accidents=0.05)
    # A shift of x alone is a shift of y as well where slopes are measured against one.
    moved = [Sample(x + crowd, y + unit) for x, y in drawn]
    one, other = fit_curve(drawn, 1.0), fit_curve(moved, 1.0)
    assert other.values == pytest.approx([y + unit for y in one.values], abs=1e-6)
    assert other.noise == pytest.approx(one.noise, rel=1e-5)
    assert len(other.outliers) == len(one.outliers)


def test_levels_that_are_about_equal_are_one() -> None:
    """Mean concurrencies of 28.42 and 28.45 are two passes of one level; 99 and 100 are two."""
    fitted = fit_curve(samples({28.42: [500.0], 28.45: [510.0], 99: [900.0], 100: [905.0]}), 1.0)
    assert [round(math.exp(x), 2) for x in fitted.levels] == [28.43, 99.0, 100.0]
    assert fitted.passes == (2, 1, 1)


def test_nothing_cannot_be_fitted() -> None:
    """Without a measurement there is no curve."""
    with pytest.raises(ValueError, match="no measurements"):
        fit_curve([], 1.0)
