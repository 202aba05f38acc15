"""What was measured of both servers, and where their curves cross.

Pure values: a calibration file holds them, a calibrator fills them, and the router can ask again
where the line is when the accept length is no longer what it was.

A curve is straight between its points on logarithmic axes, since both axes of a sweep span two
orders of magnitude and a server's throughput follows power laws piece by piece.

The crossover of two curves. Their lead d is the logarithm of speculative over baseline; below a
cut every request goes to the speculative server and above it to the baseline, so a cut at c gains

    G(c) = integral of d over log concurrency, from the lowest common level to c

over never speculating. The crossover is the cut with the largest G. Where the curves cross once,
that is the crossing; where noise makes them cross three times, it is the crossing that matters;
0 means never and infinity always.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import msgspec

Number = float | Literal["always", "never", "infinity"]
Verdict = Literal["at", "always", "never", "unsure"]


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One measured level of one server; what a sweep did not say is absent."""

    concurrency: float
    tokens_per_second: float  # of all requests together, smoothed
    low: float | None = None  # band of tokens_per_second
    high: float | None = None
    # Both factors of the speed of a server that speculates: tokens/s = accept length x steps/s.
    accept_length: float | None = None  # tokens per verify step
    steps_per_second: float | None = None  # verify steps of all requests together
    time_per_token: float | None = None  # seconds, median over requests, without the first token
    ttft: float | None = None  # seconds to the first token, median over requests
    measured: tuple[float, ...] = ()  # tokens/s of each pass that went into the point


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one server did over the levels of its sweeps."""

    points: tuple[Point, ...]
    noise: float | None = None  # relative, of one measurement
    deviation: float | None = None  # relative, of single levels from the smooth curve
    cap: int | None = None  # the server's effective max_running_requests
    left_out: tuple[tuple[float, float], ...] = ()  # concurrency, tokens/s: outliers

    def tokens_per_second(self, concurrency: float) -> float:
        """All requests together. Constant beyond the ends.

        Raises ValueError for a curve without points, or with one that is not above 0.
        """
        if not self.points or min(min(_pair(point)) for point in self.points) <= 0:
            msg = "a curve needs points, each with a concurrency and a speed above 0"
            raise ValueError(msg)
        logs = sorted((math.log(n), math.log(speed)) for n, speed in map(_pair, self.points))
        return math.exp(straight([x for x, _ in logs], [y for _, y in logs], math.log(concurrency)))


class Curves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Both servers."""

    speculative: Curve
    baseline: Curve

    def crossover(self, speedup: float = 1.0) -> float:
        """The concurrency up to which to speculate: 0 never, infinity always.

        `speedup` multiplies the speculative curve; the live accept length over the calibrated one
        is what it is for. Raises ValueError when the curves have no level in common.
        """
        grid = common_levels(
            [point.concurrency for point in self.speculative.points],
            [point.concurrency for point in self.baseline.points],
        )
        lead = [
            math.log(self.speculative.tokens_per_second(level) * speedup)
            - math.log(self.baseline.tokens_per_second(level))
            for level in grid
        ]
        return best_cut([math.log(level) for level in grid], lead)


class Crossover(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the two servers are equal in one respect, and how sure that is."""

    verdict: Verdict
    crossover: Number  # requests; the best single answer, whatever the verdict
    interval: tuple[Number, Number] | None = None  # where it is with probability `confidence`
    confidence: float | None = None
    again: float | None = None  # above the crossover, speculative is ahead again from here on
    settle: str | None = None  # what would make an unsure verdict sure
    holds_up_to: dict[str, float] | None = None  # role -> last level that meets the objective


def _pair(point: Point) -> tuple[float, float]:
    return point.concurrency, point.tokens_per_second


def common_levels(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Every level of either sweep inside the range of both. Raises ValueError if there is none."""
    if one and other:
        low, high = max(min(one), min(other)), min(max(one), max(other))
        if low <= high:
            return sorted({level for level in (*one, *other) if low <= level <= high})
    msg = "the two sweeps have no range of concurrency in common"
    raise ValueError(msg)


def straight(levels: Sequence[float], values: Sequence[float], level: float) -> float:
    """Straight between the points, constant beyond the ends."""
    at = bisect.bisect_right(levels, level)
    if at == 0:
        return values[0]
    if at == len(levels):
        return values[-1]
    low, high = levels[at - 1], levels[at]
    return values[at - 1] + (values[at] - values[at - 1]) * (level - low) / (high - low)


def best_cut(levels: Sequence[float], lead: Sequence[float]) -> float:
    """The cut with the largest gain (see the module's head), as a concurrency.

    `levels` are logarithms of concurrency, rising; `lead` is straight between them. Equal gains
    give the lowest cut: what speculation does not win, it need not have. With one level only there
    is no area, and the sign of the lead decides.
    """
    if len(levels) == 1:
        return math.inf if lead[0] > 0 else 0.0
    best, cut, gain = 0.0, 0.0, 0.0
    for (low, high), (before, after) in zip(
        itertools.pairwise(levels), itertools.pairwise(lead), strict=True
    ):
        if before > 0 >= after:
            root = low + (high - low) * before / (before - after)
            if gain + (root - low) * before / 2 > best:
                best, cut = gain + (root - low) * before / 2, math.exp(root)
        gain += (high - low) * (before + after) / 2
    return math.inf if gain > best and lead[-1] > 0 else cut
