"""From repeated, noisy measurements to one curve, its noise, and the measurements left out.

Pure. In logarithms throughout, so that 0.05 is about 5 %.

1. A first curve that single measurements cannot pull (least absolute deviations, by reweighting).
2. A measurement is left out when it lies further from that curve than `OUTLIER` times the typical
   distance, unless all the passes of its level agree with it (then it is the server that is so),
   or its neighbours on either side are away as well, or there is nothing beside it to judge by.
3. Least squares under the shape on what is left (`smooth.py`).
4. The noise: the scatter about the curve, together with `PRIOR` measurements' worth of
   `TYPICAL_NOISE`. So three lone points do not look exact, and thirty speak for themselves.
5. A real server is not quite of that shape: batch sizes that have a CUDA graph, tiles, a collapse.
   Where the means of the levels lie clearly further from the curve than the passes of a level from
   each other, each level is given a deviation of its own, of the size that explains it, and the
   curve goes as far towards each mean as noise and deviation say (partial pooling: the whole way
   if the deviations are large, not at all if there are none). Without repeated levels noise and
   deviation cannot be told apart, and all but a gross misfit counts as noise.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

from loadtest.smooth import Concave, no_faster

# One measurement of a level, 4 to 6 s long: passes of one H200 differed by 2 to 9 % mostly.
TYPICAL_NOISE: Final = 0.04
PRIOR: Final = 4.0
# In scales: a normal measurement is that far off once in ten thousand.
OUTLIER: Final = 4.0
# Closer than this nothing is left out, however exact its neighbours.
NEVER_OUTLIER: Final = 0.15
# Ratios of variances (misfit over noise) up to which a misfit is put down to chance. A curve of the
# shape exceeds the first about once in fifteen; the second, for levels measured once, hardly ever.
CHANCE: Final = 1.8
CHANCE_ONCE: Final = 8.0
# Whole numbers of requests up to 100 are levels of their own.
SAME_LEVEL: Final = 0.01
_ROUNDS: Final = 12
_SOFT: Final = 0.01  # below this distance, reweighting stops sharpening


class Sample(NamedTuple):
    """One measurement."""

    x: float  # log concurrency
    y: float  # log speed


class Fitted(NamedTuple):
    """A curve, and what is known of its noise."""

    levels: tuple[float, ...]  # log concurrency, rising
    values: tuple[float, ...]  # log speed
    smooth: tuple[float, ...]  # the same without the deviations of single levels
    passes: tuple[int, ...]  # measurements at each level
    noise: float  # relative standard deviation of one measurement
    freedom: float  # degrees of freedom behind `noise`
    deviation: float  # relative standard deviation of a level from the smooth curve
    steepest: float
    outliers: tuple[Sample, ...]
    shape: Concave

    def replicate(self, rng: random.Random) -> list[float]:
        """The curve of another set of sweeps of the same server, as likely as not.

        A parametric bootstrap: the noise is drawn first, since it is not known exactly (scaled
        inverse chi-squared), then one measurement for each there was, then the curve is fitted,
        and then what is still not known of each level's deviation is added.
        """
        noise = self.noise * math.sqrt(self.freedom / rng.gammavariate(self.freedom / 2, 2.0))
        means = [
            value + noise * rng.gauss(0.0, 1.0) / math.sqrt(count)
            for value, count in zip(self.values, self.passes, strict=True)
        ]
        smooth = self.shape.fit(means)
        if self.deviation == 0.0:
            return smooth
        shares = _shares(self.passes, self.noise, self.deviation)
        left = [self.deviation * math.sqrt(1.0 - share) * rng.gauss(0.0, 1.0) for share in shares]
        values = [
            near + share * (mean - near) + rest
            for near, mean, share, rest in zip(smooth, means, shares, left, strict=True)
        ]
        return no_faster(self.levels, values, self.passes, self.steepest)


def fit_curve(samples: Sequence[Sample], steepest: float) -> Fitted:
    """The curve of these measurements. The order of the samples does not matter.

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("no measurements to fit a curve to")
    ordered = _merged(sorted(samples))
    outliers = _outliers(ordered, steepest)
    kept = list(ordered)
    for sample in outliers:
        kept.remove(sample)
    groups = _by_level(kept)
    levels, means, counts = _means(groups)
    shape = Concave(levels, counts, steepest)
    smooth = shape.fit(means)
    found = _noise(groups, means, smooth, shape.freedom(smooth))
    values = smooth
    passes = tuple(map(len, groups.values()))
    if found.deviation > 0.0:
        shares = _shares(passes, found.noise, found.deviation)
        values = no_faster(
            levels,
            [n + s * (m - n) for n, m, s in zip(smooth, means, shares, strict=True)],
            counts,
            steepest,
        )
    return Fitted(
        tuple(levels), tuple(values), tuple(smooth), passes, found.noise, found.freedom,
        found.deviation, steepest, tuple(outliers), shape,
    )  # fmt: skip


class _Noise(NamedTuple):
    noise: float
    freedom: float
    deviation: float


def _noise(
    groups: dict[float, list[float]], means: list[float], smooth: list[float], used: int
) -> _Noise:
    """Split what lies off the smooth curve into noise and deviations of levels."""
    scatter = math.fsum(
        (y - mean) ** 2 for group, mean in zip(groups.values(), means, strict=True) for y in group
    )
    sizes = [len(group) for group in groups.values()]
    misfit = math.fsum(
        n * (mean - value) ** 2 for n, mean, value in zip(sizes, means, smooth, strict=True)
    )
    spare, repeats = len(sizes) - used, sum(sizes) - len(sizes)
    prior = PRIOR * TYPICAL_NOISE**2
    freedom = PRIOR + repeats + spare
    together = math.sqrt((scatter + misfit + prior) / freedom)
    pure = (scatter + prior) / (repeats + PRIOR)
    excess = misfit / spare - (CHANCE if repeats else CHANCE_ONCE) * pure if spare else 0.0
    if excess <= 0.0:
        return _Noise(together, freedom, 0.0)
    deviation = math.sqrt(excess / statistics.fmean(sizes))
    if not repeats:  # then only the misfit tells how noisy the server is
        return _Noise(together, freedom, deviation)
    return _Noise(math.sqrt(pure), repeats + PRIOR, deviation)


def _shares(passes: Sequence[int], noise: float, deviation: float) -> list[float]:
    """How far the curve goes from the smooth one towards the mean of each level, 0 to 1."""
    return [deviation**2 / (deviation**2 + noise**2 / count) for count in passes]


def _merged(ordered: Sequence[Sample]) -> list[Sample]:
    """Levels that are closer than `SAME_LEVEL` become one: 28.42 and 28.45 requests on average."""
    groups: list[list[Sample]] = []
    for sample in ordered:
        if groups and sample.x - groups[-1][0].x < SAME_LEVEL:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return sorted(
        Sample(group[0].x if group[0].x == group[-1].x else middle, sample.y)
        for group in groups
        for middle in [statistics.fmean(sample.x for sample in group)]
        for sample in group
    )


def _by_level(samples: Sequence[Sample]) -> dict[float, list[float]]:
    return {
        x: [sample.y for sample in group]
        for x, group in itertools.groupby(samples, key=lambda sample: sample.x)
    }


def _means(groups: dict[float, list[float]]) -> tuple[list[float], list[float], list[float]]:
    return (
        list(groups),
        [statistics.fmean(group) for group in groups.values()],
        [float(len(group)) for group in groups.values()],
    )


def _outliers(samples: Sequence[Sample], steepest: float) -> list[Sample]:
    groups = _by_level(samples)
    if len(groups) < 4:  # with fewer levels a bend and an outlier look the same
        return []
    center = dict(zip(groups, _least_absolute(groups, steepest), strict=True))
    away = {x: [y - center[x] for y in group] for x, group in groups.items()}
    spread = statistics.median(abs(r) for group in away.values() for r in group) * 1.4826
    limit = max(NEVER_OUTLIER, OUTLIER * max(spread, TYPICAL_NOISE / 2))
    far = {x: [abs(r) > limit for r in group] for x, group in away.items()}
    alone = []
    for before, x, after in zip([None, *groups], groups, [*list(groups)[1:], None], strict=False):
        if len(groups[x]) > 1 and all(far[x]):
            continue
        if len(groups[x]) == 1 and (before is None or after is None):
            continue
        if any(side is not None and all(far[side]) for side in (before, after)):
            continue
        alone += [Sample(x, y) for y, out in zip(groups[x], far[x], strict=True) if out]
    return alone


def _least_absolute(groups: dict[float, list[float]], steepest: float) -> list[float]:
    """A concave curve with the least absolute deviations, near enough (reweighted squares)."""
    levels = list(groups)
    values = [statistics.median(group) for group in groups.values()]
    for _ in range(_ROUNDS):
        weights, means = [], []
        for value, group in zip(values, groups.values(), strict=True):
            near = [1.0 / max(_SOFT, abs(y - value)) for y in group]
            weights.append(math.fsum(near))
            means.append(math.fsum(w * y for w, y in zip(near, group, strict=True)) / weights[-1])
        before, values = values, Concave(levels, weights, steepest).fit(means)
        if max(abs(a - b) for a, b in zip(before, values, strict=True)) < _SOFT / 10:
            break
    return values
