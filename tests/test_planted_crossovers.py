"""Planted crossovers are found again: a hundred noisy sweeps each, and what the intervals cover."""

from __future__ import annotations

import math
import random
import statistics
from functools import cache

import pytest

from loadtest.crossing import Crossing, cross
from loadtest.robust import fit_curve
from tests.planted_sweeps import PLANTED, draw

SWEEPS = 100
CLEAR = ("never", "always", "early", "middle", "late", "noisy")
REPLICATES = (60, 120)  # fewer than in use, for time; the interval needs more than a share
CROSSING = ("early", "middle", "late", "noisy")


@cache
def found(name: str) -> tuple[Crossing, ...]:
    planted = PLANTED[name]
    crossings = []
    for seed in range(SWEEPS):
        rng = random.Random(f"{name} {seed}")
        speculative, baseline = (
            fit_curve(draw(curve, rng, passes=planted.passes, noise=planted.noise), 1.0)
            for curve in (planted.speculative, planted.baseline)
        )
        crossings.append(cross(speculative, baseline, REPLICATES[name in CROSSING], seed))
    return tuple(crossings)


@pytest.mark.slow
@pytest.mark.parametrize("name", CROSSING)
def test_a_planted_crossover_is_within_its_interval(name: str) -> None:
    """In at least 95 of 100 sweeps the interval covers the crossover that was planted."""
    truth = PLANTED[name].crossover
    covered = sum(c.verdict == "at" and c.low <= truth <= c.high for c in found(name))
    assert covered >= 95


@pytest.mark.slow
@pytest.mark.parametrize(("name", "truth"), [("never", 0.0), ("always", math.inf)])
def test_a_pair_that_does_not_cross_is_told_so(name: str, truth: float) -> None:
    """In at least 95 of 100 sweeps never is said to be never, and always always."""
    assert PLANTED[name].crossover == truth
    assert sum(c.verdict == name and c.cut == truth for c in found(name)) >= 95


@pytest.mark.slow
def test_two_equal_servers_are_not_told_apart() -> None:
    """In at least 95 of 100 sweeps of twice the same server the verdict is unsure."""
    assert sum(c.verdict == "unsure" for c in found("tie")) >= 95


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAR)
def test_a_clear_case_is_not_unsure(name: str) -> None:
    """In at most 5 of 100 sweeps of a clear case nothing is decided."""
    assert sum(c.verdict == "unsure" for c in found(name)) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", CROSSING)
def test_the_interval_is_narrow_enough_to_act_on(name: str) -> None:
    """Its median width is at most 35 % of the crossover, and the middle is not off by 5 %."""
    truth = PLANTED[name].crossover
    assert statistics.median((c.high - c.low) / truth for c in found(name)) <= 0.35
    assert statistics.median(c.cut for c in found(name)) == pytest.approx(truth, rel=0.05)
