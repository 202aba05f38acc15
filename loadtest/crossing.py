"""Where two measured curves cross, how sure that is, and what to say of it.

Pure, and the same answer every time: the random numbers of the bootstrap are seeded.

The crossover is `router.curves.best_cut` of the two fitted curves. Its interval is that of the cuts
of `REPLICATES` pairs of sweeps that might as well have been measured (`robust.Fitted.replicate`):
for each, the whole fit and the cut are made again. Then the interval is stretched by what no
repetition would tell: between two levels next to each other a concave curve is only known to lie
above its chord and below the continuation of its neighbours' chords. So the crossing could be as
early as where the speculative chord meets the baseline as high as it may be, and as late as the
other way round. With dense levels that is next to nothing; with levels at 1 and 70 it is most of
what there is to say.

The verdict, from the interval [a, b] of the cuts before it is stretched:

    never    at least SURE of the replicates never speculate, or b <= FEW and the best cut is none
    always   at least SURE of them always do, up to the last common level
    at       a > 0 and b is finite; or b <= FEW, where "never" and "at 1" are nearly the same thing
    unsure   otherwise
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from loadtest.robust import Fitted
from router.curves import Verdict, best_cut, common_levels, straight

REPLICATES: Final = 400
# The tests measure what this covers in fact.
CONFIDENCE: Final = 0.98
SURE: Final = 0.95
FEW: Final = 4.0
SEED: Final = 2026
_STEPS: Final = 64  # of a search inside one gap between two levels


class Crossing(NamedTuple):
    """The answer for one objective."""

    verdict: Verdict
    cut: float  # requests; 0 never, infinity always
    low: float  # the interval
    high: float
    never: float  # share of the replicates
    always: float
    gap: tuple[float, float] | None  # the levels next to the cut
    again: float | None  # above the cut, the speculative server is surely ahead from here on


class Pair:
    """Two fitted curves on the levels of either that lie in the range of both."""

    def __init__(self, speculative: Fitted, baseline: Fitted) -> None:
        """Raises ValueError when the curves have no range in common."""
        self.speculative, self.baseline = speculative, baseline
        self.grid = common_levels(speculative.levels, baseline.levels)
        self._spec = [_between(speculative.levels, x) for x in self.grid]
        self._base = [_between(baseline.levels, x) for x in self.grid]

    def lead(self, speculative: Sequence[float], baseline: Sequence[float]) -> list[float]:
        """Log of speculative over baseline, on the grid."""
        return [
            speculative[i] + f * (speculative[i + 1] - speculative[i] if f else 0.0)
            - baseline[j] - g * (baseline[j + 1] - baseline[j] if g else 0.0)
            for (i, f), (j, g) in zip(self._spec, self._base, strict=True)
        ]  # fmt: skip


def cross(
    speculative: Fitted, baseline: Fitted, replicates: int = REPLICATES, seed: int = SEED
) -> Crossing:
    """Where these two cross. Raises ValueError when they have no range in common."""
    pair = Pair(speculative, baseline)
    lead = pair.lead(speculative.values, baseline.values)
    cut = best_cut(pair.grid, lead)
    rng = random.Random(seed)
    leads = [
        pair.lead(speculative.replicate(rng), baseline.replicate(rng)) for _ in range(replicates)
    ]
    cuts = sorted(best_cut(pair.grid, each) for each in leads)
    out = int((1.0 - CONFIDENCE) / 2 * replicates)
    low, high = min(cuts[out], cut), max(cuts[-1 - out], cut)
    never, always = cuts.count(0.0) / replicates, cuts.count(math.inf) / replicates
    verdict = _verdict(cut, low, high, never, always)
    gap = None
    if 0 < cut < math.inf:
        at = bisect.bisect_left(pair.grid, math.log(cut) - 1e-12)
        gap = (math.exp(pair.grid[max(at - 1, 0)]), math.exp(pair.grid[at]))
        early, late = _stretch(pair, math.log(gap[0]), math.log(gap[1]), math.log(cut))
        low, high = low * early, high * late
    again = None
    if cut < math.inf and sum(each[-1] > 0 for each in leads) >= SURE * replicates:
        again = _again(pair.grid, lead)
    return Crossing(verdict, cut, low, high, never, always, gap, again)


def _again(grid: Sequence[float], lead: Sequence[float]) -> float | None:
    """Where the lead last turns from not being one into one, in requests."""
    for i in range(len(grid) - 1, 0, -1):
        if lead[i - 1] <= 0 < lead[i]:
            share = lead[i - 1] / (lead[i - 1] - lead[i])
            return math.exp(grid[i - 1] + (grid[i] - grid[i - 1]) * share)
    return None


def _between(levels: Sequence[float], x: float) -> tuple[int, float]:
    """The level at or before x, and how far x is on the way to the next one, 0 to 1."""
    at = min(bisect.bisect_right(levels, x), len(levels)) - 1
    if at + 1 >= len(levels) or levels[at] == x:
        return at, 0.0
    return at, (x - levels[at]) / (levels[at + 1] - levels[at])


def _verdict(cut: float, low: float, high: float, never: float, always: float) -> Verdict:
    if cut == 0 and (never >= SURE or high <= FEW):
        return "never"
    if math.isinf(cut):
        return "always" if always >= SURE else "unsure"
    return "at" if cut > 0 and ((low > 0 and high < math.inf) or high <= FEW) else "unsure"


def _stretch(pair: Pair, low: float, high: float, x: float) -> tuple[float, float]:
    """Factors for the ends of the interval: how much earlier or later between these two levels."""
    steps = [low + (high - low) * i / _STEPS for i in range(_STEPS + 1)]
    spec, base = pair.speculative, pair.baseline
    early = next((s for s in steps if _floor(spec, s) <= _ceiling(base, s)), x)
    late = next((s for s in reversed(steps) if _ceiling(spec, s) >= _floor(base, s)), x)
    return math.exp(min(early - x, 0.0)), math.exp(max(late - x, 0.0))


def _floor(curve: Fitted, x: float) -> float:
    return straight(curve.levels, curve.values, x)


def _ceiling(curve: Fitted, x: float) -> float:
    """As high as the shape lets the curve be at x, given its values at the levels around x."""
    levels, smooth = curve.levels, curve.smooth
    at, share = _between(levels, x)
    floor = _floor(curve, x)
    if share == 0.0:
        return floor
    slope = curve.steepest
    if at > 0:
        slope = (smooth[at] - smooth[at - 1]) / (levels[at] - levels[at - 1])
    highest = smooth[at] + slope * (x - levels[at])
    if at + 2 < len(levels):
        slope = (smooth[at + 2] - smooth[at + 1]) / (levels[at + 2] - levels[at + 1])
        highest = min(highest, smooth[at + 1] + slope * (x - levels[at + 1]))
    # Deviations of single levels are taken to be straight in between.
    return floor + max(0.0, highest - straight(levels, smooth, x))
