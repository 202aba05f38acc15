"""In which respect two servers are compared: as a speed, so that more is always better.

Pure. Throughput is one; for the times it is one over the time; for a service level (SLO) it is how
many times faster than its limits a level was, so that 1 is just met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from loadtest.points import Measured
from loadtest.robust import Fitted, Sample, fit_curve

Objective = Literal["throughput", "time_per_token", "ttft", "slo"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("throughput", "time_per_token", "ttft", "slo")
# Slopes of a speed on logarithmic axes: throughput can at most double with the concurrency, one
# request's own speed can at most stay.
STEEPEST: Final[Mapping[Objective, float]] = {
    "throughput": 1.0,
    "time_per_token": 0.0,
    "ttft": 0.0,
    "slo": 0.0,
}


class Slo(msgspec.Struct, frozen=True):
    """What a request may take, in seconds; None: as long as it likes."""

    ttft: float | None = None
    time_per_token: float | None = None

    def speed(self, point: Measured) -> float | None:
        """How many times faster than the limit the level was; None if it was not measured.

        The 99th percentile counts where it is known, else the median.
        """
        found = []
        for limit, tail, median in (
            (self.ttft, point.ttft_tail, point.ttft),
            (self.time_per_token, point.time_per_token_tail, point.time_per_token),
        ):
            if limit is not None:
                value = tail if tail is not None else median
                if value is None:
                    return None
                found.append(limit / value)
        return min(found, default=None)


def speed_of(point: Measured, objective: Objective, slo: Slo) -> float | None:
    """The speed of a level in this respect; None if it was not measured."""
    if objective == "throughput":
        return point.tokens_per_second
    if objective == "slo":
        return slo.speed(point)
    time = point.time_per_token if objective == "time_per_token" else point.ttft
    return None if time is None else 1.0 / time


def fit_objective(points: Sequence[Measured], objective: Objective, slo: Slo) -> Fitted | None:
    """The curve of one server in this respect; None if no level says anything of it."""
    samples = [
        Sample(math.log(point.concurrency), math.log(speed))
        for point in points
        if (speed := speed_of(point, objective, slo)) is not None
    ]
    return fit_curve(samples, STEEPEST[objective]) if samples else None


def holds_up_to(curve: Fitted) -> float:
    """The last level up to which an SLO is met; 0 when it is not at the first."""
    held = 0.0
    for x, y in zip(curve.levels, curve.values, strict=True):
        if y < 0:
            break
        held = round(math.exp(x), 6)
    return held
