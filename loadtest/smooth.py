"""One smooth curve through noisy measurements of one server.

Pure. Both axes are logarithms: x of concurrency, y of a speed (tokens/s, or 1 / seconds). The law
of this file is the shape that the curve is given, and where that shape comes from:

* Concave, with slopes of at most `steepest`. A step of n requests takes about a + b n seconds, so
  throughput n / (a + b n) rises in proportion to n while the step is bound by memory, then less
  and less, and falls in overload: its elasticity (the slope here) starts at 1 at most and only
  goes down. The same holds for 1 / (time per token), whose slope is smaller by one (Little's law),
  and, more roughly, for 1 / (time to the first token). It rises, bends and may fall, so it is not
  assumed to be monotone.
* What holds even where a server is not like that (`robust.py` lets single levels deviate): more
  requests do not make a request faster, that is, slopes are at most `steepest` (`no_faster`).

The fit is weighted least squares under the shape, exact: the curve is a constant minus hinges with
non-negative weights, which is a non-negative least-squares problem (Lawson and Hanson 1974, chapter
23). For given hinges the curve is straight between them, so its values there follow from a
tridiagonal system, and a fit costs some dozen microseconds; a bootstrap makes many hundred.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

_TINY: Final = 1e-10


class Concave:
    """Concave with slopes of at most `steepest`, at rising `levels` with positive `weights`.

    Inside, `steepest` times x is taken off, so that the curve is flat or falls; a knot is a level
    at which the slope changes, the first level included.
    """

    def __init__(self, levels: Sequence[float], weights: Sequence[float], steepest: float) -> None:
        """Prepare what fits of these levels share."""
        self._levels, self._weights = list(levels), list(weights)
        self._tilt = [steepest * x for x in levels]
        self._steepest = steepest
        self._sums: dict[tuple[int, int], tuple[float, float, float]] = {}
        self._last: list[int] = []

    def fit(self, values: Sequence[float]) -> list[float]:
        """The closest concave values (weighted least squares).

        It starts from the knots of the fit before, which are mostly right for the next replicate;
        the answer is unique and does not depend on that.
        """
        target = [y - tilt for y, tilt in zip(values, self._tilt, strict=True)]
        load = _Load(self._levels, self._weights, target)
        knots = self._last
        found, nodes = self._ideal(knots, load)
        while knots and min(found) <= 0:
            knots = [k for k, weight in zip(knots, found, strict=True) if weight > 0]
            found, nodes = self._ideal(knots, load)
        fitted = self._drawn(knots, nodes)
        for _ in range(10 * len(target) + 10):  # never reached: each round lowers the error
            knot = self._wanted(knots, target, fitted, load.tolerance)
            if knot is None:
                break
            knots, found, nodes = self._feasible(knots, found, knot, load)
            fitted = self._drawn(knots, nodes)
        self._last = knots
        return [y + tilt for y, tilt in zip(fitted, self._tilt, strict=True)]

    def freedom(self, fitted: Sequence[float]) -> int:
        """The constant, and each level where the slope changes."""
        slopes = [self._steepest, *_slopes(self._levels, fitted)]
        return 1 + sum(a - b > 1e-7 for a, b in itertools.pairwise(slopes))

    def _wanted(
        self, knots: list[int], target: list[float], fitted: list[float], tolerance: float
    ) -> int | None:
        """The knot that would lower the error most at once; None when none would."""
        best, steepest = None, tolerance
        mass = moment = 0.0
        x = self._levels
        for i in range(len(x) - 1, 0, -1):
            pull = self._weights[i] * (target[i] - fitted[i])
            mass += pull
            moment += pull * x[i]
            gradient = x[i - 1] * mass - moment
            if gradient > steepest and i - 1 not in knots:
                best, steepest = i - 1, gradient
        return best

    def _feasible(
        self, knots: list[int], found: list[float], knot: int, load: _Load
    ) -> tuple[list[int], list[float], list[float]]:
        """The knots with this one, less those whose weight would have to be negative.

        And their weights and values, as `_ideal` has them.
        """
        weights = dict(zip(knots, found, strict=True)) | {knot: 0.0}
        while True:
            knots = sorted(weights)
            ideal, nodes = self._ideal(knots, load)
            if not knots or min(ideal) > 0:
                return knots, ideal, nodes
            wanted = dict(zip(knots, ideal, strict=True))
            shares = {
                k: weights[k] / (weights[k] - w) if weights[k] > 0 else 0.0
                for k, w in wanted.items()
                if w <= 0
            }
            first = min(shares, key=shares.__getitem__)
            weights = {
                k: weight + shares[first] * (wanted[k] - weight)
                for k, weight in weights.items()
                if k != first
            }

    def _ideal(self, knots: list[int], load: _Load) -> tuple[list[float], list[float]]:
        """The least-squares weights of these knots, of either sign, and the values there.

        The last value is that at the last level. One more value than knots.
        """
        if not knots:
            return [], [load.moment[-1][0] / load.mass[-1]]
        nodes = [*knots, len(self._levels) - 1]
        first = knots[0] + 1
        diagonal, beside, right = [load.mass[first]], [], [load.moment[first][0]]
        for p, q in itertools.pairwise(nodes):
            near, both, far = self._segment(p, q)
            start, width = self._levels[p], self._levels[q] - self._levels[p]
            pull = load.moment[q + 1][0] - load.moment[p + 1][0]
            to_far = (load.moment[q + 1][1] - load.moment[p + 1][1] - start * pull) / width
            diagonal[-1] += near
            right[-1] += pull - to_far
            beside.append(both)
            diagonal.append(far)
            right.append(to_far)
        values = _tridiagonal(diagonal, beside, right)
        slopes = [0.0] + [
            (values[i + 1] - values[i]) / (self._levels[q] - self._levels[p])
            for i, (p, q) in enumerate(itertools.pairwise(nodes))
        ]
        return [before - after for before, after in itertools.pairwise(slopes)], values

    def _segment(self, p: int, q: int) -> tuple[float, float, float]:
        """Weighted sums of (1-t)^2, t(1-t) and t^2 over the levels after p up to q."""
        found = self._sums.get((p, q))
        if found is None:
            start, width = self._levels[p], self._levels[q] - self._levels[p]
            near = both = far = 0.0
            for x, w in zip(self._levels[p + 1 : q + 1], self._weights[p + 1 : q + 1], strict=True):
                t = (x - start) / width
                near += w * (1 - t) ** 2
                both += w * t * (1 - t)
                far += w * t * t
            found = self._sums[p, q] = near, both, far
        return found

    def _drawn(self, knots: list[int], values: list[float]) -> list[float]:
        """The curve with these values at its knots and at the last level, at every level."""
        if not knots:
            return [values[0]] * len(self._levels)
        drawn = [values[0]] * (knots[0] + 1)
        for i, (p, q) in enumerate(itertools.pairwise([*knots, len(self._levels) - 1])):
            start, slope = (
                self._levels[p],
                (values[i + 1] - values[i]) / (self._levels[q] - self._levels[p]),
            )
            drawn += [values[i] + slope * (x - start) for x in self._levels[p + 1 : q + 1]]
        return drawn


class _Load:
    """Running sums of one set of values over the levels, from the left."""

    def __init__(
        self, levels: Sequence[float], weights: Sequence[float], values: Sequence[float]
    ) -> None:
        pulls = [w * y for w, y in zip(weights, values, strict=True)]
        self.mass = list(itertools.accumulate(weights, initial=0.0))
        self.moment = list(
            zip(
                itertools.accumulate(pulls, initial=0.0),
                itertools.accumulate(
                    (p * x for p, x in zip(pulls, levels, strict=True)), initial=0.0
                ),
                strict=True,
            )
        )
        self.tolerance = _TINY * (1.0 + sum(map(abs, pulls)))


def no_faster(
    levels: Sequence[float], values: Sequence[float], weights: Sequence[float], steepest: float
) -> list[float]:
    """The closest values with slopes of at most `steepest` (pooling the time of a request)."""
    times = [steepest * x - y for x, y in zip(levels, values, strict=True)]
    pooled = rising(times, weights)
    return [steepest * x - time for x, time in zip(levels, pooled, strict=True)]


def rising(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The closest non-decreasing sequence, weighted least squares (pool adjacent violators)."""
    weights = weights or [1.0] * len(values)
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, size
    for value, weight in zip(values, weights, strict=True):
        total, mass, size = value * weight, weight, 1
        while pools and pools[-1][0] * mass > total * pools[-1][1]:
            before = pools.pop()
            total, mass, size = total + before[0], mass + before[1], size + before[2]
        pools.append((total, mass, size))
    return [total / mass for total, mass, size in pools for _ in range(size)]


def _slopes(levels: Sequence[float], values: Sequence[float]) -> list[float]:
    return [
        (later - value) / (high - low)
        for (low, high), (value, later) in zip(
            itertools.pairwise(levels), itertools.pairwise(values), strict=True
        )
    ]


def _tridiagonal(diagonal: list[float], beside: list[float], right: list[float]) -> list[float]:
    """Solve a symmetric tridiagonal system whose matrix is positive definite."""
    diagonal, right = list(diagonal), list(right)
    for i, off in enumerate(beside):
        factor = off / diagonal[i]
        diagonal[i + 1] -= factor * off
        right[i + 1] -= factor * right[i]
    values = [right[-1] / diagonal[-1]]
    for i in range(len(beside) - 1, -1, -1):
        values.append((right[i] - beside[i] * values[-1]) / diagonal[i])
    return values[::-1]
