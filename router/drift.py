"""How far real traffic is from what the calibration promised, per backend.

Each whole answer is a measurement: so many tokens in so many seconds, with so many requests in
flight. By Little's law a server that makes X tokens per second for C requests in flight gives each
of them X / C, which is what a curve of a sweep says at C; so the two can be compared. Requests whose
company changed by more than a quarter while they ran say nothing about any one level.

Levels are kept apart (the curve's own points, nearest on a logarithmic scale), so that a change of
load is not taken for a drift, and smoothed, so that a handful of odd requests does not raise an
alarm. Prompts or answers of another length than those of the calibration show as a drift too: the
line was measured for other traffic. Pure: counts, and looks at nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

from router.curves import Curves
from router.load import Role

SMOOTHING: Final = 0.05  # weight of the newest measurement: a memory of some twenty requests
ENOUGH: Final = 50  # measurements of a backend before anything is said
BOUND: Final = 1.33  # a ratio beyond this, either way, means that the line should be measured again
SAME_COMPANY: Final = 0.25  # share by which the level may change during one request
CurvePoints = Sequence[tuple[float, float]]  # (requests in flight, output tokens per second)


class _Level:
    """What was measured near one point of a curve: the logarithm of measured over promised."""

    __slots__ = ("count", "log_ratio")

    def __init__(self) -> None:
        self.count = 0
        self.log_ratio = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(SMOOTHING, 1.0 / self.count)
        self.log_ratio += weight * (value - self.log_ratio)


class CurveDrift:
    """One backend against its curve."""

    def __init__(self, points: CurvePoints) -> None:
        """`points` with rising, positive concurrency. Raises ValueError for others, or for none."""
        usable = [(c, x) for c, x in points if x > 0]
        if not usable or any(c <= 0 for c, _ in usable) or usable != sorted(set(usable)):
            raise ValueError("a curve needs points of rising, positive concurrency")
        self._at = [math.log(c) for c, _ in usable]
        self._speed = [math.log(x / c) for c, x in usable]  # of one request
        self._levels = [_Level() for _ in usable]
        self.count = 0

    def promised(self, level: float) -> float:
        """Tokens per second that the curve gives one request at this level.

        Straight between the points on logarithmic scales, and level beyond the ends.
        """
        at = math.log(level)
        right = bisect_left(self._at, at)
        if right == 0:
            return math.exp(self._speed[0])
        if right == len(self._at):
            return math.exp(self._speed[-1])
        left = right - 1
        share = (at - self._at[left]) / (self._at[right] - self._at[left])
        return math.exp(self._speed[left] + share * (self._speed[right] - self._speed[left]))

    def observe(self, level: float, tokens: int, seconds: float) -> None:
        """One request that ran in such company. Levels beyond the curve are not compared."""
        at = math.log(level)
        if not self._at[0] - 0.01 <= at <= self._at[-1] + 0.01:
            return
        right = min(bisect_left(self._at, at), len(self._at) - 1)
        left = max(right - 1, 0)
        near = left if at - self._at[left] < self._at[right] - at else right
        self._levels[near].add(math.log(tokens / seconds / self.promised(level)))
        self.count += 1

    @property
    def ratio(self) -> float | None:
        """Measured speed over promised speed; None while too little was measured.

        Every level that was seen counts with what was seen there, up to the smoothing's memory.
        """
        if self.count < ENOUGH:
            return None
        most = round(1.0 / SMOOTHING)
        weights = [min(level.count, most) for level in self._levels]
        total = sum(
            w * level.log_ratio for w, level in zip(weights, self._levels, strict=True) if w
        )
        return math.exp(total / sum(weights))


def drift_points(curves: Curves) -> dict[Role, list[tuple[float, float]]]:
    """The points of both curves as a `DriftMeter` wants them; of a level there twice, the last."""
    return {
        role: sorted({p.concurrency: p.tokens_per_second for p in curve.points}.items())
        for role, curve in (
            (Role.SPECULATIVE, curves.speculative),
            (Role.BASELINE, curves.baseline),
        )
    }


class DriftMeter:
    """Both backends against the curves of the calibration."""

    def __init__(self, curves: Mapping[Role, CurvePoints]) -> None:
        """Raises ValueError as `CurveDrift` does."""
        self._drifts = {role: CurveDrift(points) for role, points in curves.items()}

    def observe(
        self, role: Role, before: int, after: int, tokens: int | None, seconds: float
    ) -> None:
        """One whole answer: requests in flight beside it when it was decided and when it ended."""
        drift = self._drifts.get(role)
        if drift is None or not tokens or seconds <= 0.0:
            return
        level = 1.0 + 0.5 * (before + after)
        if abs(after - before) <= SAME_COMPANY * level:
            drift.observe(level, tokens, seconds)

    def ratio(self, role: Role) -> float | None:
        """Measured speed over promised speed of one backend; None when it is not known."""
        drift = self._drifts.get(role)
        return None if drift is None else drift.ratio

    @property
    def drifted(self) -> tuple[Role, ...]:
        """The backends that are so far from their curve that the line should be measured again."""
        ratios = {role: drift.ratio for role, drift in self._drifts.items()}
        return tuple(
            role for role, r in ratios.items() if r is not None and not 1 / BOUND <= r <= BOUND
        )
