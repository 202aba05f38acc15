"""The crossing of two fitted curves: its interval, the verdict, and what changes neither."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.crossing import Crossing, cross
from loadtest.robust import Fitted, Sample, fit_curve
from tests.planted_sweeps import BASE, PLANTED, draw


def fitted(*pairs: tuple[float, float]) -> Fitted:
    return fit_curve([Sample(math.log(n), math.log(y)) for n, y in pairs], 1.0)


def crossing(
    speculative: tuple[tuple[float, float], ...], baseline: tuple[tuple[float, float], ...]
) -> Crossing:
    return cross(fitted(*speculative), fitted(*baseline), replicates=200)


THREE = ((1, 92.7), (70, 773), (250, 773))


def test_behind_at_every_level_is_never() -> None:
    """The published parallel benchmark: speculation loses at 1, at 70 and at 250."""
    found = crossing(((1, 80.9), (70, 354), (250, 354)), THREE)
    assert (found.verdict, found.cut) == ("never", 0.0)


def test_ahead_at_one_request_only() -> None:
    """The published single-stream run: K is 1, and up to 70 nothing excludes much more."""
    found = crossing(((1, 96.1), (70, 354), (250, 354)), THREE)
    assert (found.verdict, math.floor(found.cut)) == ("at", 1)
    assert found.low == 0.0
    assert 10 < found.high < 70
    assert found.gap is not None
    assert list(found.gap) == pytest.approx([1, 70])


def test_the_gap_between_two_levels_widens_the_interval() -> None:
    """The same two curves, with the levels around the crossing taken out, are known less well."""
    planted = PLANTED["middle"]
    dense = (1, 2, 4, 8, 16, 32, 40, 48, 56, 64, 128, 256)
    sparse = (1, 2, 4, 8, 16, 128, 256)
    widths = []
    for levels in (dense, sparse):
        one, other = (
            fitted(*((n, curve.tok_s(n)) for n in levels))
            for curve in (planted.speculative, planted.baseline)
        )
        found = cross(one, other, replicates=200)
        assert found.low <= planted.crossover <= found.high
        widths.append(math.log(found.high / found.low))
    assert widths[1] > 1.4 * widths[0]


def test_ahead_again_is_said() -> None:
    """A server that wins, loses and wins again has one cut, and the second lead is not hidden."""
    passes = 3  # so that the dent is the server's and not noise
    found = crossing(
        ((1, 200), (2, 390), (4, 700), (16, 900), (64, 1500), (256, 3000)) * passes,
        ((1, 100), (2, 199), (4, 395), (16, 1500), (64, 1500), (256, 1500)) * passes,
    )
    assert 4 < found.cut < 16
    assert found.again == pytest.approx(64, rel=0.5)


def test_one_level_in_common_is_compared() -> None:
    """A single common level can say always or never."""
    assert crossing(((8, 300),), ((8, 100),)).verdict == "always"
    assert crossing(((8, 100),), ((8, 300),)).verdict == "never"


def test_no_common_range_is_an_error() -> None:
    """Sweeps that do not overlap are refused."""
    with pytest.raises(ValueError, match="no range"):
        crossing(((1, 5), (4, 9)), ((8, 5), (16, 9)))


def drawn(seed: int) -> tuple[list[Sample], list[Sample]]:
    rng = random.Random(seed)
    levels = (1, 4, 8, 16, 32, 64, 128, 256)
    return (
        draw(PLANTED["middle"].speculative, rng, levels=levels),
        draw(BASE, rng, levels=levels),
    )


@given(seed=st.integers(0, 2**32), shuffle=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=10)
def test_the_order_of_measurements_does_not_matter(seed: int, shuffle: random.Random) -> None:
    """Shuffled passes give the same crossing, interval and verdict."""
    spec, base = drawn(seed)
    one = cross(fit_curve(spec, 1.0), fit_curve(base, 1.0), replicates=40)
    shuffle.shuffle(spec)
    shuffle.shuffle(base)
    assert cross(fit_curve(spec, 1.0), fit_curve(base, 1.0), replicates=40) == one


@given(seed=st.integers(0, 2**32), unit=st.floats(-3, 3), crowd=st.floats(0, 1))
@settings(deadline=None, max_examples=10)
def test_units_do_not_matter(seed: int, unit: float, crowd: float) -> None:
    """Speeds in another unit change nothing; concurrency in another unit scales the crossing."""
    spec, base = drawn(seed)
    one = cross(fit_curve(spec, 1.0), fit_curve(base, 1.0), replicates=40)
    moved = [[Sample(x + crowd, y + unit) for x, y in sweep] for sweep in (spec, base)]
    other = cross(fit_curve(moved[0], 1.0), fit_curve(moved[1], 1.0), replicates=40)
    assert other.verdict == one.verdict
    assert (other.cut, other.low, other.high) == pytest.approx(
        tuple(math.exp(crowd) * value for value in (one.cut, one.low, one.high)), rel=0.02
    )


@given(seed=st.integers(0, 2**32), better=st.floats(0.02, 0.3))
@settings(deadline=None, max_examples=10)
def test_a_faster_draft_is_used_further(seed: int, better: float) -> None:
    """A speculative server that is faster everywhere by one factor never has an earlier crossing."""
    spec, base = drawn(seed)
    faster = [Sample(x, y + better) for x, y in spec]
    one = cross(fit_curve(spec, 1.0), fit_curve(base, 1.0), replicates=10)
    other = cross(fit_curve(faster, 1.0), fit_curve(base, 1.0), replicates=10)
    assert other.cut >= one.cut


def test_the_answer_is_the_same_every_time() -> None:
    """The bootstrap is seeded: the same sweeps give the same interval."""
    spec, base = drawn(1)
    one, other = (cross(fit_curve(spec, 1.0), fit_curve(base, 1.0)) for _ in range(2))
    assert one == other
