"""How much of its speed each of two servers keeps while the other one works too.

The law of this file: values only. Two servers on one GPU time-slice; a `Contention` says what was
measured of that, at pairs of running requests, and answers for every other pair.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import msgspec


class Overlap(NamedTuple):
    """One measured pair: requests running on each server, and the share of its speed each kept."""

    speculative: int
    baseline: int
    speculative_share: float
    baseline_share: float


class Contention(msgspec.Struct, frozen=True):
    """What an overlap costs. No points: servers that share nothing (two GPUs).

    Between the measured pairs the shares are means, weighted by the inverse square of the distance
    on a doubly logarithmic scale (Shepard's method): it is exact at a measured pair, never leaves
    the measured range, and asks nothing of how the pairs lie. Beyond the grid that is a guess.
    """

    points: tuple[Overlap, ...] = ()

    def __post_init__(self) -> None:
        """Refuse shares that no server can have."""
        for point in self.points:
            if min(point[:2]) < 1 or not all(0 < share <= 1 for share in point[2:]):
                raise ValueError(
                    "an overlap has at least 1 request on either server and shares above 0, at"
                    f" most 1, got {tuple(point)}"
                )

    @classmethod
    def constant(cls, speculative: float, baseline: float) -> Contention:
        """The same shares whatever runs."""
        return cls((Overlap(1, 1, speculative, baseline),))

    def shares(self, speculative: int, baseline: int) -> tuple[float, float]:
        """The share of its speed that each keeps with so many requests running."""
        if not self.points or speculative <= 0 or baseline <= 0:
            return 1.0, 1.0
        total = kept_speculative = kept_baseline = 0.0
        for n, m, share, other_share in self.points:
            distance = math.log2(speculative / n) ** 2 + math.log2(baseline / m) ** 2
            if distance == 0.0:
                return share, other_share
            total += 1.0 / distance
            kept_speculative += share / distance
            kept_baseline += other_share / distance
        return kept_speculative / total, kept_baseline / total


# Two servers (EAGLE-3 topk 1 at simulated acceptance 2.8, and a baseline) on one H200 with SGLang
# 0.5.17: tokens/s of each by those of the same server alone at the same concurrency (two passes'
# mean where there are two). Only this pair was measured; other arms borrow it.
H200: Final = Contention(
    (
        Overlap(8, 8, 0.530, 0.482),
        Overlap(16, 16, 0.589, 0.491),
        Overlap(32, 32, 0.680, 0.601),
        Overlap(48, 16, 0.627, 0.517),
        Overlap(16, 48, 0.676, 0.553),
        Overlap(32, 96, 0.786, 0.653),
        Overlap(64, 64, 0.654, 0.659),
        Overlap(32, 224, 0.686, 0.561),
        Overlap(128, 128, 0.506, 0.586),
    )
)
SEPARATE: Final = Contention()
