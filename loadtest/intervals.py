"""Intervals of confidence, all of 95 %: which kind for which figure, and why.

    output tok/s, 3 passes or more   Student's t over the passes' means. Two measurements of the
                                     same point differ by more than either can know of itself (2 to
                                     9 %, once 19 %, measured on one H200), so only passes far apart
                                     in time tell how sure a figure is
    output tok/s, 1 or 2 passes      Student's t over batches of the window (batch means), of all
                                     passes together. Requests that run side by side share their
                                     steps, so that single ones are not independent; batches that
                                     last as long as a request or longer nearly are. It holds what
                                     changed within the window and, with two passes, the distance
                                     between them, but it is narrower than the truth
    a percentile                     between two of the measured values, by the binomial
                                     distribution of how many lie below it: holds for any shape of
                                     the distribution, and says with null that so few values give
                                     no bound (a p99 needs 368 for an upper one)

A pass alone has the interval of batches. This module is pure.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Final

from loadtest.sweep_schema import Figure

TAIL: Final = 0.025  # probability left out on each side
# 97.5 % quantiles of Student's t, from 1 degree of freedom up (any table of the distribution).
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z: Final = statistics.NormalDist().inv_cdf(1 - TAIL)


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t with so many degrees of freedom, at least 1.

    Above the table the expansion of Abramowitz and Stegun, 26.7.5.
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    z, v = _Z, float(freedom)
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v * v)


def mean_figure(values: Sequence[float]) -> Figure:
    """The mean of at least one value, with the interval of Student's t if there are two or more."""
    value = statistics.fmean(values)
    if len(values) < 2:
        return Figure(value)
    half = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Figure(value, value - half, value + half)


def percentile(ordered: Sequence[float], share: float) -> Figure | None:
    """The value that this share of them does not exceed (nearest rank), and its interval.

    `ordered` rises.
    """
    if not ordered:
        return None
    low, high = order_bounds(len(ordered), share)
    return Figure(
        ordered[max(0, math.ceil(share * len(ordered)) - 1)],
        None if low is None else ordered[low - 1],
        None if high is None else ordered[high - 1],
    )


@functools.lru_cache(maxsize=4096)
def order_bounds(count: int, share: float) -> tuple[int | None, int | None]:
    """Ranks, from 1, of the values that bound a quantile with 95 % confidence; None: no bound.

    With B binomial of `count` and `share`: the low rank is the largest l with P(B < l) <= 2.5 %,
    the high rank the smallest h with P(B >= h) <= 2.5 %.
    """
    below, low = 0.0, None
    # Ten standard deviations below the mean nothing is left to add up.
    first = math.floor(count * share - 10 * math.sqrt(count * share * (1 - share)))
    for successes in range(max(0, first), count + 1):
        # Here `below` is P(B < successes).
        if below <= TAIL and successes:
            low = successes
        if 1.0 - below <= TAIL and successes:
            return low, successes
        below += math.exp(_log_binomial(count, successes, share))
    return low, None


def _log_binomial(count: int, successes: int, share: float) -> float:
    ways = math.lgamma(count + 1) - math.lgamma(successes + 1)
    ways -= math.lgamma(count - successes + 1)
    return ways + successes * math.log(share) + (count - successes) * math.log1p(-share)
